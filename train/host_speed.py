"""How fast the host was while batches were timed.

Records of `train.service_times` hold the time of a fixed piece of Python after each second of the streams. It
varies by two from second to second, as siblings of a core come and go, and what batches take of the host
varies with its mean. Seconds in which the host was slower than that count nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.live.machine_state import undisturbed

STREAM = "stream"
"""The kind of a batch that came as a load makes them."""


def mean_ms(raw: Sequence[Mapping[str, Any]]) -> float:
    """The fixed piece of work on average over all depths, milliseconds; 0 where it was not timed."""
    times = []
    for depth in raw:
        states = depth.get("machine_state", ())
        if states:
            ms = np.array([state["python_ms"] for state in states])
            times.append(ms[undisturbed([states])])
    return float(np.concatenate(times).mean()) if times else 0.0


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
