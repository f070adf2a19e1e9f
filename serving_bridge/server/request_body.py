"""The body of an HTTP request: read as it arrives, held to its limit before and after decompression."""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from starlette.requests import Request

from serving_bridge.scoring import InvalidRequest
from serving_bridge.server.refusals import ClientGone, TooLarge, TooSlow, UnsupportedMedia

READ_SECONDS: Final = 30.0
"""In which a body must have arrived."""
DISCARDED: Final = 8
"""Limits that are read and thrown away behind a body that is too large, so that its client, which is still
sending, gets to read why. More is cut off."""
JSON: Final = "application/json"
RAW: Final = "application/octet-stream"
_WINDOW_BITS: Final = {"gzip": 31, "deflate": 15}


async def read_body(request: Request, limit: int, media: tuple[str, ...] = (JSON, RAW)) -> bytes:
    """The body, decompressed.

    Args:
        request: nothing of whose body was read.
        limit: bytes, as sent and decompressed.
        media: content types that are taken; none at all is taken too.

    Raises:
        TooLarge: over the limit.
        TooSlow: it did not arrive within 30 s.
        UnsupportedMedia: another content type or encoding.
        InvalidRequest: it is not what its encoding says.
        ClientGone: the client closed its connection.
    """
    _check_type(request.headers.get("content-type"), media)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and encoding not in _WINDOW_BITS:
        raise UnsupportedMedia("the body may be encoded as gzip, as deflate, or not at all")
    try:
        async with asyncio.timeout(READ_SECONDS):
            body = await _read(request, limit)
    except TimeoutError:
        raise TooSlow(f"the body must arrive within {READ_SECONDS:g} seconds") from None
    return body if encoding == "identity" else decompress(body, encoding, limit)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """The content of a body in gzip or deflate (zlib), never more than `limit` bytes of memory.

    Raises:
        TooLarge: its content is over the limit.
        InvalidRequest: it is damaged, cut off, or something follows it.
    """
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        content = stream.decompress(body, limit + 1)
    except zlib.error:
        raise InvalidRequest("the body is not what its Content-Encoding says") from None
    if len(content) > limit:
        raise _too_large(limit)
    if not stream.eof or stream.unused_data:
        raise InvalidRequest("the body is not what its Content-Encoding says")
    return content


def _check_type(content_type: str | None, media: tuple[str, ...]) -> None:
    """Take the listed types, with parameters or without; a request without a type is taken."""
    if content_type is None:
        return
    if content_type.partition(";")[0].strip().lower() not in media:
        raise UnsupportedMedia(f"the Content-Type must be {' or '.join(media)}")


async def _read(request: Request, limit: int) -> bytes:
    announced = request.headers.get("content-length", "")
    # A client that waits for "100 Continue" has sent nothing yet.
    if announced.isdigit() and int(announced) > limit:
        if "expect" not in request.headers and int(announced) <= DISCARDED * limit:
            await _discard(request, DISCARDED * limit)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        more = message.get("more_body", False)
        if size > limit:
            chunks.clear()
            if more:
                await _discard(request, DISCARDED * limit)
            raise _too_large(limit)
        chunks.append(chunk)
        if not more:
            return b"".join(chunks)


async def _discard(request: Request, most: int) -> None:
    """Read on without keeping anything, to the end or `most` bytes."""
    size = 0
    while size <= most:
        message = await request.receive()
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body may have at most {limit} bytes, decompressed or not")
