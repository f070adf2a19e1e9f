"""Keeps the thread that serves on a fast core: `hlem_env.live.core_scout`, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

from hlem_env.live import core_scout

LEAST_CORES = 4
"""Fewer leave nothing to choose."""


class FastCore:
    """Follows the thread that calls `here`, until it is closed.

    Does nothing where the process may use fewer than four cores, or where the system cannot pin threads.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._scout: subprocess.Popen[bytes] | None = None
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        if len(cores) >= LEAST_CORES:
            script = Path(core_scout.__file__)
            self._scout = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), str(os.getpid())],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the node, which then ends the scout
            )

    def here(self) -> None:
        """Follow the calling thread from now on."""
        thread = threading.get_native_id()
        if thread == self._thread or self._scout is None or self._scout.stdin is None:
            return
        self._thread = thread
        with contextlib.suppress(BrokenPipeError):  # without a scout the thread runs where it may
            self._scout.stdin.write(f"{thread}\n".encode())
            self._scout.stdin.flush()

    def close(self) -> None:
        """All threads may run anywhere again. May be called twice."""
        if self._scout is not None:
            self._scout.communicate()
            self._scout = None
