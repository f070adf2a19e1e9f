"""How slow the host was in the epochs of a live run, over how it was in the calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require
from hlem_env.live.host_time import COLD_HOST
from hlem_env.live.machine_state import COLD_HOST_ROW, HOST_INSTRUMENTS, mean_host_ms
from hlem_env.surrogate.hardware import NodeProfile

Floats = NDArray[np.float64]

MOST_SLOWNESS = 5.0
"""Of a host. A batch that takes longer waited for something else, such as a kernel that was compiled: 1.8 s
in the first second of one run on an H200."""


def host_slowness(
    record: Mapping[str, Any], kept: NDArray[np.bool_], profile: NodeProfile, epochs: int
) -> Floats:
    """What the host took in each epoch of a run over what it took in the calibration.

    Args:
        record: of the run.
        kept: bool [measured epochs], which count.
        profile: of the calibration.
        epochs: those before the measured ones, too.

    Returns:
        [epochs]. Where all that is known of an epoch is a moment of it, the mean over those that count,
        for each.
    """
    states = record.get("machine_state", ())
    then = profile.host_ms.get(str(record["run"]["layers"]), {})
    mean = mean_host_ms(states[-len(kept) :], kept) if states else {}
    both = [name for name in HOST_INSTRUMENTS if name in mean and name in then]
    known = "runs, and a profile, that recorded how fast the host was"
    require(bool(both), "--machine-speed", record["run"], known)
    name = both[0]
    if name != COLD_HOST:
        return np.full(epochs, mean[name] / then[name])
    found = np.array([state.get(name, 0.0) for state in states])
    found = np.concatenate([np.zeros(epochs - found.size), found])  # the first may not be known
    row_ms = then.get(COLD_HOST_ROW, 0.0)
    as_fast_ms = then[name] + (row_ms * missed_rows(record) if row_ms else 0.0)
    slowness = np.where(found > 0, found, mean[name]) / as_fast_ms
    return np.minimum(slowness, MOST_SLOWNESS)


def missed_rows(record: Mapping[str, Any]) -> float:
    """Of a request with nothing cached, on average over a run."""
    preset = record["preset"]
    tokens = preset["mean_history_tokens"] + preset["candidates"]
    return float((1.0 - record["live"]["emb_hit"]) * tokens * preset["tables"])
