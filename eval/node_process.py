"""A served node as a process of its own: started, waited for, drained, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from hlem_env.errors import BackendError

_ADDRESS: Final = re.compile(r"REST (http://\S+?)[,;\s]")
END_S: Final = 40.0
"""For a node to drain; one that takes longer is killed."""
LAST_LINES: Final = 8


class NodeProcess(NamedTuple):
    """A node that listens."""

    pid: int
    url: str


@contextmanager
def node_process(
    arguments: Sequence[str], log: Path, module: str = "serving_bridge.serve"
) -> Iterator[NodeProcess]:
    """A node, drained when the context is left.

    It is in a session of its own: Ctrl-C on the terminal is for whoever started it, who ends it.

    Args:
        arguments: of the module's command line.
        log: file for what it says.
        module: the program; it prints where it listens as `serving_bridge.serve` does.

    Raises:
        BackendError: it did not start; with the last lines of what it said.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", "-m", module, *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        yield NodeProcess(process.pid, _address(process, log))
    finally:
        _end(process)
        if not process.stdout.closed:
            process.stdout.close()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Where it listens, once it does; what else it prints goes to the log."""
    assert process.stdout is not None
    for line in process.stdout:
        found = _ADDRESS.search(line.decode() + " ")
        if found is not None:
            threading.Thread(target=_copy, args=(process, log), daemon=True).start()
            return found[1]
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    raise BackendError("\n".join([f"the node did not start ({log}):", *lines]))


def _copy(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.stdout is not None
    with log.open("ab") as file, contextlib.suppress(ValueError):  # closed at the end
        for line in process.stdout:
            file.write(line)
            file.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Drain it; a second Ctrl-C meanwhile, or one that does not end, kills it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
