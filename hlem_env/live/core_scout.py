"""Moves a process's busiest thread to whichever core is fast at present: run as a script, beside it.

On a virtual machine a core is at times half as fast as another for seconds on end, since somebody else's work
shares the hardware under it. The scout times a loop on every core but the thread's own, twice a second, and
moves the thread to the fastest of them; the process's other threads keep away from it. It needs nothing of
the process but its number, and ends with it.

    python core_scout.py PID < numbers of threads, a line each, the last one is followed
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Iterable

PERIOD_S = 0.5
TURNS = 4_000
"""Of the loop: 0.1 to 0.3 ms."""


def loop_s(core: int) -> float:
    """What a fixed loop takes on a core, once that is awake."""
    os.sched_setaffinity(0, {core})
    for _ in range(2):
        start_s = time.perf_counter()
        sum(i & 3 for i in range(TURNS))
        taken_s = time.perf_counter() - start_s
    return taken_s


def fastest(cores: Iterable[int]) -> int:
    """The core on which the loop takes least."""
    return min(cores, key=loop_s)


def separate(pid: int, thread: int, core: int, rest: set[int]) -> None:
    """The thread on that core alone, the process's other threads and this one on the rest."""
    os.sched_setaffinity(0, rest)
    for name in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
            os.sched_setaffinity(int(name), {core} if int(name) == thread else rest)


def release(pid: int, cores: set[int]) -> None:
    """All threads may run anywhere again."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(name), cores)


def newest_line(wait_s: float) -> str | None:
    """The last whole line that has come on standard input within a time; "" where none, None at its end."""
    if not select.select([0], [], [], wait_s)[0]:
        return ""
    text = os.read(0, 4096)
    return text.decode().split("\n")[-2] if text else None


def main(pid: int) -> None:
    """Follow until standard input ends or the process does."""
    cores = os.sched_getaffinity(0)
    thread, on = 0, -1
    try:
        while (line := newest_line(PERIOD_S)) is not None and os.getppid() == pid:
            thread = int(line or thread)
            if thread:
                on = fastest(cores - {on})
                separate(pid, thread, on, cores - {on})
    finally:
        release(pid, cores)


if __name__ == "__main__":
    with contextlib.suppress(FileNotFoundError, KeyboardInterrupt):
        main(int(sys.argv[1]))
