"""Segments of the epoch log: files that only grow, of records that prove themselves.

    segment   magic, record, record, ...            the first record is the run's header, a JSON object
    record    marker, length, CRC-32 of the payload, CRC-32 of these three; payload
    payload   length of the JSON, JSON, arrays one after the other

The JSON's "arrays" names each array with its type and number of entries. A reader that meets bytes
that are no record goes on at the next marker behind which there is one: what was written after a
damaged place is not lost with it.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError

MAGIC = b"HLEMLOG1"
MARKER = b"\xa5EPO"
_HEAD = struct.Struct("<4sIII")
_LENGTH = struct.Struct("<I")
MAX_PAYLOAD = 1 << 28
"""A record is never larger: a longer length is a damaged one."""
_TYPES = {"f4", "f8", "i4", "i8", "b1"}
_NAME = re.compile(r"epochs-(\d{8})\.log")


class Payload(NamedTuple):
    """What one record holds."""

    values: dict[str, Any]
    arrays: dict[str, NDArray[Any]]


class Scan(NamedTuple):
    """What a segment's bytes came to."""

    payloads: list[Payload]
    damaged_bytes: int
    """That belong to no record, the torn end left out."""
    good_end: int
    """Where the last record ends: behind it there is only a torn one, or nothing."""
    torn_bytes: int
    """Behind that."""


def segment_name(number: int) -> str:
    """File name of a segment."""
    return f"epochs-{number:08d}.log"


def segment_number(name: str) -> int | None:
    """Number in a segment's file name; None for other files."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def encode(values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """A whole record.

    Args:
        values: plain JSON values, no NaN.
        arrays: [n] each, of the types f4, f8, i4, i8, b1.
    """
    described, parts = [], []
    for name, array in arrays.items():
        little = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        described.append([name, little.dtype.str[1:], int(little.size)])
        parts.append(little.tobytes())
    text = json.dumps({**values, "arrays": described}, allow_nan=False).encode()
    payload = b"".join([_LENGTH.pack(len(text)), text, *parts])
    head = MARKER + _LENGTH.pack(len(payload)) + _LENGTH.pack(zlib.crc32(payload))
    return head + _LENGTH.pack(zlib.crc32(head)) + payload


def scan(data: bytes) -> Scan:
    """All records of a segment's content."""
    at = len(MAGIC) if data.startswith(MAGIC) else 0
    payloads: list[Payload] = []
    damaged, good_end = 0 if at or not data else len(MAGIC), at
    for start, end, payload in _records(data, at):
        damaged += start - good_end if start > good_end else 0
        good_end = end
        payloads.append(payload)
    return Scan(payloads, damaged, good_end, len(data) - good_end)


def read_segment(path: Path) -> Scan:
    """All records of a file.

    Raises:
        ArtefactError: it cannot be read, or is no segment at all.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    return scan(data)


def _records(data: bytes, at: int) -> Iterator[tuple[int, int, Payload]]:
    """Start, end and content of each sound record from `at` on."""
    while (at := data.find(MARKER, at)) >= 0:
        payload, end = _record(data, at)
        if payload is None:
            at += 1
            continue
        yield at, end, payload
        at = end


def _record(data: bytes, at: int) -> tuple[Payload | None, int]:
    if at + _HEAD.size > len(data):
        return None, at
    _, length, checksum, head_checksum = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size
    if zlib.crc32(data[at : begin - 4]) != head_checksum or length > MAX_PAYLOAD:
        return None, at
    payload = data[begin : begin + length]
    if len(payload) != length or zlib.crc32(payload) != checksum:
        return None, at
    return _decode(payload), begin + length


def _decode(payload: bytes) -> Payload | None:
    """None where the checksum holds and the content is none of ours all the same."""
    try:
        (size,) = _LENGTH.unpack_from(payload)
        values = json.loads(payload[4 : 4 + size])
        described = values.pop("arrays")
        arrays: dict[str, NDArray[Any]] = {}
        at = 4 + size
        for name, kind, count in described:
            if kind not in _TYPES:
                return None
            arrays[str(name)] = np.frombuffer(payload, f"<{kind}", count, at)
            at += arrays[str(name)].nbytes
    except (ValueError, TypeError, KeyError, AttributeError, struct.error, RecursionError):
        return None
    return Payload(values, arrays) if at == len(payload) else None
