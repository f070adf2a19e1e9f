"""What a live node's clock follows: the time that passes, or the CPU time that its thread has used."""

from __future__ import annotations

import time

CLOCKS = ("wall", "cpu")
"""Names of `make_clock`."""
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


class AwakeTime(WallTime):
    """Wall time whose waits keep the core: for a node on a GPU, which has cores to spare.

    On a virtual machine a thread that sleeps may come back to a core that is cold or shared: a loop of plain
    Python took 1.25 and 1.29 ms after pauses of 2 ms that were slept, and 0.66 and 0.69 in a row (medians of
    3 s, on two machines of 16 cores beside an H200); but 1.09 in a row on the second, some seconds later.
    """

    def sleep(self, seconds: float) -> None:
        """Wait, and let other threads of this process have the interpreter."""
        wake_s = time.perf_counter() + seconds
        while time.perf_counter() < wake_s:
            time.sleep(0)


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


def clock_name(name: str, device: str) -> str:
    """Which of `CLOCKS` a command means by "wall", "cpu" or "auto", which is the CPU time on a CPU."""
    return name if name != "auto" else ("wall", "cpu")[device == "cpu"]


def make_clock(name: str, device: str) -> WallTime:
    """The clock of a node on "cuda" or "cpu".

    Args:
        name: of `CLOCKS`.
        device: of the node.
    """
    if name == "cpu":
        return CpuTime()
    return AwakeTime() if device == "cuda" else WallTime()
