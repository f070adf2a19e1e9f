"""What a live node's clock follows: the time that passes, or the CPU time that its thread has used."""

from __future__ import annotations

import time

LONGEST_SLEEP_S = 0.02
"""An idle server looks up at least this often, so that an interrupt ends it at once."""
SPIN_S = 0.0002
"""The last part of a wait is spun: sleep wakes late by about this much."""


class WallTime:
    """The time that passes, seconds."""

    def now(self) -> float:
        """Seconds from some moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait, waking often enough for an interrupt and exactly enough for an arrival."""
        wake_s = time.perf_counter() + seconds
        while (left_s := wake_s - time.perf_counter()) > 0:
            if left_s > SPIN_S:
                time.sleep(min(left_s - SPIN_S, LONGEST_SLEEP_S))


class CpuTime(WallTime):
    """CPU seconds of the calling thread, waits added without being waited for.

    A node on a CPU takes by this clock what it would take on a core of its own: what else runs on the
    machine does not count. (Shared caches and memory bandwidth still do.) Of one thread alone: torch
    has to run with one.
    """

    def __init__(self) -> None:
        self._slept_s = 0.0

    def now(self) -> float:
        """Seconds from some moment."""
        return time.thread_time() + self._slept_s

    def sleep(self, seconds: float) -> None:
        """Pass over a wait."""
        self._slept_s += max(seconds, 0.0)
