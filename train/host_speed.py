"""How fast the host was while batches were timed.

Records of `train.service_times` hold samples of `hlem_env.live.machine_state`, one after each second of the
streams. Seconds in which the host was slow count nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.live.machine_state import mean_host_ms, undisturbed

STREAM = "stream"
"""The kind of a batch that came as a load makes them."""


def mean_ms(depth: Mapping[str, Any]) -> dict[str, float]:
    """How fast the host was beside a depth's streams (`mean_host_ms`)."""
    states = depth.get("machine_state", ())
    return mean_host_ms(states, undisturbed([states])) if states else {}


def kept(depth: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which samples of a depth count, [samples]: those timed by themselves, and those of fast seconds."""
    samples, states = depth["samples"], depth.get("machine_state", ())
    alpha = np.array([s["alpha"] if s["kind"] == STREAM else np.nan for s in samples], float)
    alphas = list(dict.fromkeys(alpha[~np.isnan(alpha)].tolist()))
    # As many seconds of a stream go before, without samples.
    seconds = len(states) // (2 * len(alphas)) if alphas else 0
    found = np.ones(len(samples), np.bool_)
    if seconds == 0:
        return found
    fastest_ms = min(state["python_ms"] for state in states)
    for number, of in enumerate(alphas):
        begin = (2 * number + 1) * seconds
        fast = undisturbed([states[begin : begin + seconds]], fastest_ms)
        stream = np.nonzero(alpha == of)[0]
        found[stream] = fast[_second([samples[i] for i in stream], seconds)]
    return found


def _second(stream: Sequence[Mapping[str, Any]], seconds: int) -> NDArray[np.int64]:
    """In which second each batch of a stream began; what noting it took is shared out evenly."""
    ms = np.array([sample["ms"] for sample in stream])
    # Before the first one the stream went on without notes.
    idle_ms = np.array([0.0, *(sample["idle_ms"] for sample in stream[1:])])
    end = np.cumsum(ms + idle_ms)
    second: NDArray[np.int64] = ((end - ms) / end[-1] * seconds).astype(np.int64)
    return second.clip(0, seconds - 1)
