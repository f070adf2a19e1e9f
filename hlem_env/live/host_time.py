"""How fast a node's host is: what it takes to give the device a batch of one request."""

from __future__ import annotations

COLD_HOST = "cold_host_ms"
"""Of requests with nothing cached."""
CACHED_HOST = "cached_host_ms"
"""Of requests with something cached."""


class HostTime:
    """Times of batches of one request since they were last taken; on a CPU of whole batches."""

    def __init__(self) -> None:
        self._forget()

    def add(self, cached: bool, seconds: float) -> None:
        """A batch of one request has been given to the device.

        Args:
            cached: whether any of its history was.
            seconds: since the batch began.
        """
        name = CACHED_HOST if cached else COLD_HOST
        self._seconds[name] += seconds
        self._batches[name] += 1

    def take(self) -> dict[str, float]:
        """Means in milliseconds by kind, 0 where there was no such batch; counting begins anew."""
        seconds, batches = self._seconds, self._batches
        self._forget()
        return {name: 1000.0 * seconds[name] / max(batches[name], 1) for name in seconds}

    def _forget(self) -> None:
        self._seconds = {COLD_HOST: 0.0, CACHED_HOST: 0.0}
        self._batches = dict.fromkeys(self._seconds, 0)
