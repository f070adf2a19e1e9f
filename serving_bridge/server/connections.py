"""HTTP connections, held to a number and to a time for their first request."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTIONS: Final = 1024
"""Open at once; one more is told so and closed."""
FIRST_REQUEST_SECONDS: Final = 10.0
"""In which a new connection must have sent the head of a request."""
_TEXT: Final = b'{"error":"the node has too many connections"}'
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_TEXT), _TEXT)
)


class _OneWrite:
    """A transport whose writes of one turn of the loop go out together.

    An answer's head and body, which uvicorn writes apart, then cost one call into the kernel and wake the
    client once.

    Args:
        transport: what is written to; everything but writing and closing goes straight to it.
        loop: whose turns count.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._waiting: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep the data until the end of the turn."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        """Write what is kept, and close once it is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        data = b"".join(self._waiting)
        self._waiting.clear()
        if data and not self._transport.is_closing():
            self._transport.write(data)


class LimitedConnection(H11Protocol):
    """One connection of uvicorn's."""

    _silence: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close it at once if there are too many, later if nothing comes."""
        full = len(self.connections) >= CONNECTIONS
        super().connection_made(cast(asyncio.Transport, _OneWrite(transport, self.loop)))
        if full:
            transport.write(_FULL)
            transport.close()
        else:
            self._silence = self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the timer, which would hold the connection's memory until it is due."""
        if self._silence is not None:
            self._silence.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Ignore what comes after the connection was refused."""
        if not self.transport.is_closing():
            super().data_received(data)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
