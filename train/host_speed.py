"""How fast the host was while batches were timed.

Records of `train.service_times` hold samples of `hlem_env.live.machine_state`, one after each second of the
streams. Seconds in which the host was slow count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.live.machine_state import COLD_HOST, mean_host_ms, undisturbed

STREAM = "stream"
"""The kind of a batch that came as a load makes them."""


def mean_ms(depth: Mapping[str, Any], raw: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How fast the host was beside a depth's streams (`mean_host_ms`): what its times are to be held against.

    `cold_host_ms` is that of all depths, since it depends on none.
    """
    states = depth.get("machine_state", ())
    found = mean_host_ms(states, undisturbed([states])) if states else {}
    return found | ({COLD_HOST: mean_of_streams(raw)} if COLD_HOST in found else {})


def mean_of_streams(raw: Sequence[Mapping[str, Any]]) -> float:
    """`of_samples` on average over the streams' batches of all depths; 0 where it is not known."""
    ms = [
        of_samples(depth)[[sample["kind"] == STREAM for sample in depth["samples"]]]
        for depth in raw
    ]
    known = np.concatenate(ms)
    return float(known[known > 0].mean()) if (known > 0).any() else 0.0


def kept(depth: Mapping[str, Any]) -> NDArray[np.bool_]:
    """Which samples of a depth count, [samples]: those timed by themselves, and those of fast seconds."""
    states = depth.get("machine_state", ())
    found = np.ones(len(depth["samples"]), np.bool_)
    if not states:
        return found
    fastest_ms = min(state["python_ms"] for state in states)
    for begin, end, stream, second in _streams(depth):
        found[stream] = undisturbed([states[begin:end]], fastest_ms)[second]
    return found


def of_samples(depth: Mapping[str, Any]) -> NDArray[np.float64]:
    """What the host took to give the device a batch, around each sample of a depth, milliseconds [samples].

    In a stream the mean of the second, of batches timed by themselves that of all of them; 0 where it is
    not known.
    """
    states = depth.get("machine_state", ())
    ms = np.array([state.get(COLD_HOST, 0.0) for state in states])
    # The first state is of all batches since the start: nearly all are those timed by themselves.
    found = np.full(len(depth["samples"]), ms[0] if states else 0.0)
    for begin, _, stream, second in _streams(depth):
        found[stream] = ms[begin + second]
    return found


def _streams(
    depth: Mapping[str, Any],
) -> Iterator[tuple[int, int, NDArray[np.int64], NDArray[np.int64]]]:
    """Of each stream: its states from where to where, its samples, and in which second each began."""
    samples, states = depth["samples"], depth.get("machine_state", ())
    alpha = np.array([s["alpha"] if s["kind"] == STREAM else np.nan for s in samples], float)
    alphas = list(dict.fromkeys(alpha[~np.isnan(alpha)].tolist()))
    # As many seconds of a stream go before, without samples.
    seconds = len(states) // (2 * len(alphas)) if alphas else 0
    for number, of in enumerate(alphas if seconds else ()):
        begin, stream = (2 * number + 1) * seconds, np.nonzero(alpha == of)[0]
        yield begin, begin + seconds, stream, _second([samples[i] for i in stream], seconds)


def _second(stream: Sequence[Mapping[str, Any]], seconds: int) -> NDArray[np.int64]:
    """In which second each batch of a stream began; what noting it took is shared out evenly."""
    ms = np.array([sample["ms"] for sample in stream])
    # Before the first one the stream went on without notes.
    idle_ms = np.array([0.0, *(sample["idle_ms"] for sample in stream[1:])])
    end = np.cumsum(ms + idle_ms)
    second: NDArray[np.int64] = ((end - ms) / end[-1] * seconds).astype(np.int64)
    return second.clip(0, seconds - 1)
