"""HTTP connections, held to a number and to a time for their first request."""

from __future__ import annotations

import asyncio
from typing import Final

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


class LimitedConnection(H11Protocol):
    """One connection of uvicorn's."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close it at once if there are too many, later if nothing comes."""
        full = len(self.connections) >= CONNECTIONS
        super().connection_made(transport)
        if full:
            transport.write(_FULL)
            transport.close()
        else:
            self.loop.call_later(FIRST_REQUEST_SECONDS, self._close_if_silent)

    def data_received(self, data: bytes) -> None:
        """Ignore what comes after the connection was refused."""
        if not self.transport.is_closing():
            super().data_received(data)

    def _close_if_silent(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()
