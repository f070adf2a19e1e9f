"""How fast a machine was at a moment, beside a live node that stands still, to hold its epochs against.

A node's epochs can take twice as long for seconds on end. These samples, taken between epochs, tell whether
the host's processor, its link to the device, or the device had become slow, or none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlem_env.live.host_time import COLD_HOST
from hlem_env.live.node import LiveNode

ROWS = 20_000
"""Read from the host tables, sorted: 20 MB where rows have 1 KiB, half a millisecond of an H100's link."""
SIDE = 2048
"""Of the square matrices that are multiplied."""
TURNS = 20_000
SLOW_HOST = 3.3
"""Times its fastest: what `python_ms` is above while the host is slow. Else it was at most 3.0 of that; in
the first spell that was caught, in which a node took several times as long for everything, 3.7 and 5.2."""
COLD_HOST_ROW = "cold_host_row_ms"
"""In a profile: what each missed row adds to `cold_host_ms`."""
COLD_HOST_EVICT = "cold_host_evict_ms"
"""And each KV entry that such a request evicts."""
HOST_INSTRUMENTS = (COLD_HOST, "python_ms")
"""Of the host's speed, the one of more moments first."""
AFTER_EPOCHS = 3
"""Epochs after a slow one in which its queue may still show: so long it did in one record of an H200."""


def undisturbed(
    samples: Sequence[Sequence[Mapping[str, Any]]], fastest_ms: float | None = None
) -> NDArray[np.bool_]:
    """Epochs [n] in which the host was slow in none of the runs, nor shortly before.

    Which they are depends on the host alone, so that leaving the others out favours no run.

    Args:
        samples: of runs over the same n epochs, one after each epoch.
        fastest_ms: the least `python_ms` of the machine; by default of these runs.
    """
    python_ms = np.array([[sample["python_ms"] for sample in run] for run in samples])
    fastest_ms = float(python_ms.min()) if fastest_ms is None else fastest_ms
    slow: NDArray[np.bool_] = python_ms.max(axis=0) > SLOW_HOST * fastest_ms
    return ~with_queue(slow)


def with_queue(slow: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The slow epochs [n] and those right after each, in which its queue may still show."""
    found = slow.copy()
    for later in range(1, AFTER_EPOCHS + 1):
        found[later:] |= slow[:-later]
    return found


def mean_host_ms(states: Sequence[Mapping[str, Any]], kept: NDArray[np.bool_]) -> dict[str, float]:
    """How fast the host was on average, by each of the instruments that these samples have.

    `cold_host_ms` is of all batches of one request with nothing cached, `python_ms` of moments between them.

    Args:
        states: of n epochs.
        kept: bool [n], which of them count.
    """
    found = {}
    for name in HOST_INSTRUMENTS:
        values = np.array([state.get(name, 0.0) for state in states])[kept]
        if (values > 0).any():
            found[name] = float(values[values > 0].mean())
    return found


class MachineState:
    """Samples of one node's machine.

    Args:
        node: whose tables are read; nothing in its caches changes.
    """

    def __init__(self, node: LiveNode) -> None:
        self._node = node
        rows = np.sort(np.random.default_rng(0).integers(node.tables.n_rows, size=ROWS))
        self._rows = torch.from_numpy(rows).to(node.device)
        self._square = torch.ones((SIDE, SIDE), device=node.device, dtype=torch.bfloat16)
        self._before = _system()

    def sample(self) -> dict[str, Any]:
        """Milliseconds of fixed pieces of work now, by the node's time source, and counts since the last."""
        before, self._before = self._before, _system()
        state: dict[str, Any] = {"python_ms": self._timed(_python)}
        if self._node.device.type == "cuda":
            state |= self._node.take_host_ms()
            self._synchronised(self._fetch)  # the first after a pause wakes the device
            state["rows_ms"] = self._synchronised(self._fetch)
            state["matmul_ms"] = self._synchronised(self._multiply)
        return state | {key: self._before[key] - before[key] for key in before}

    def _fetch(self) -> None:
        self._node.embedding._fetch(self._rows)

    def _multiply(self) -> None:
        torch.mm(self._square, self._square)

    def _synchronised(self, work: Callable[[], object]) -> float:
        def whole() -> None:
            work()
            torch.cuda.synchronize(self._node.device)

        return self._timed(whole)

    def _timed(self, work: Callable[[], object]) -> float:
        now = self._node.time_source.now
        start_s = now()
        work()
        return 1000.0 * (now() - start_s)


def _python() -> int:
    return sum(i & 3 for i in range(TURNS))


def _system() -> dict[str, int]:
    """Counts since the start: the machine's stolen ticks, this process's involuntary switches and faults."""
    stolen = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
    status = Path("/proc/self/status").read_text().split("nonvoluntary_ctxt_switches:")[1]
    faults = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return {
        "stolen_ticks": stolen,
        "switches": int(status.split()[0]),
        "page_faults": int(faults[7]) + int(faults[9]),
    }
