"""How slow the host was in the epochs of live runs: over the others, and over the calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.live.host_time import COLD_HOST
from hlem_env.live.machine_state import (
    COLD_HOST_EVICT,
    COLD_HOST_ROW,
    HOST_INSTRUMENTS,
    mean_host_ms,
)
from hlem_env.surrogate.hardware import NodeProfile

Floats = NDArray[np.float64]

MOST_SLOWNESS = 5.0
"""Of a host. A batch that takes longer waited for something else, such as a kernel that was compiled: 1.8 s
in the first second of one run on an H200."""
SPELL = 1.45
"""Times its median: what `cold_host_ms` is above while the host is slow. On two machines with H200s nine
epochs in ten were below 1.24 and 1.44; in a slow spell of fourteen seconds it was 1.6 to 2.3."""
SPELL_EPOCHS = 3
"""Slow epochs in a row that make a run disturbed: after fourteen of them a node that is busy for 0.85 of the
time took nine more to work off its queue."""
States = Sequence[Mapping[str, Any]]
"""Of a run, one after each epoch: `hlem_env.live.machine_state`."""


class ColdWork(NamedTuple):
    """What the host's time for a request of mean length with nothing cached goes with."""

    missed_rows: float
    evicted: float
    """KV entries; 0 in records that do not tell."""

    @classmethod
    def of(cls, config: LiveConfig, run: Mapping[str, Any]) -> ColdWork:
        """On average over a run, by its hit rates and counts."""
        rows = (config.mean_history_tokens + config.candidates) * config.tables
        cold = max(run["requests"] * (1.0 - run["kv_hit"]), 1.0)
        return cls((1.0 - run["emb_hit"]) * rows, run.get("evictions", 0) / cold)


def typical_host_ms(runs: Sequence[States]) -> float:
    """Median `cold_host_ms` of all epochs of runs; 0 where none has any."""
    found = [state.get(COLD_HOST, 0.0) for run in runs for state in run]
    known = [ms for ms in found if ms > 0]
    return float(np.median(known)) if known else 0.0


def slow_epochs(states: States, typical_ms: float) -> NDArray[np.bool_]:
    """In which epochs of a run [n] the host was slow; none where that is not known."""
    cold_ms = np.array([state.get(COLD_HOST, 0.0) for state in states])
    slow: NDArray[np.bool_] = cold_ms > SPELL * max(typical_ms, np.finfo(float).tiny)
    return slow if typical_ms > 0 else np.zeros_like(slow)


def is_disturbed(slow: NDArray[np.bool_]) -> bool:
    """Whether a run had so long a slow spell that its queue outlasts it; that goes by the host alone."""
    windows = np.lib.stride_tricks.sliding_window_view(slow, min(SPELL_EPOCHS, slow.size))
    return bool(windows.all(axis=1).any())


def host_slowness(
    states: States,
    kept: NDArray[np.bool_],
    profile: NodeProfile,
    layers: int,
    work: ColdWork,
    epochs: int,
) -> Floats:
    """What the host took in each epoch of a run over what it took in the calibration.

    Args:
        states: of the run.
        kept: bool [measured epochs], which count.
        profile: of the calibration.
        layers: of the run's model.
        work: of the run.
        epochs: those before the measured ones, too.

    Returns:
        [epochs]. Where all that is known of an epoch is a moment of it, the mean over those that count,
        for each.
    """
    then = profile.host_ms.get(str(layers), {})
    mean = mean_host_ms(states[-len(kept) :], kept) if states else {}
    both = [name for name in HOST_INSTRUMENTS if name in mean and name in then]
    known = "runs, and a profile, that recorded how fast the host was"
    require(bool(both), "--machine-speed", f"runs of {layers} layers", known)
    name = both[0]
    if name != COLD_HOST:
        return np.full(epochs, mean[name] / then[name])
    found = np.array([state.get(name, 0.0) for state in states])
    found = np.concatenate([np.zeros(epochs - found.size), found])  # the first may not be known
    as_fast_ms = (
        then[name]
        + then.get(COLD_HOST_ROW, 0.0) * work.missed_rows
        + then.get(COLD_HOST_EVICT, 0.0) * work.evicted
    )
    slowness = np.where(found > 0, found, mean[name]) / as_fast_ms
    return np.minimum(slowness, MOST_SLOWNESS)
