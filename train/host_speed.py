"""How fast the host was while batches were timed.

Records of `train.service_times` hold samples of `hlem_env.live.machine_state`, one after each second of the
streams. Seconds in which the host was slow count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.live.host_time import COLD_HOST
from hlem_env.live.machine_state import COLD_HOST_EVICT, COLD_HOST_ROW, mean_host_ms, undisturbed

STREAM = "stream"
"""The kind of a batch that came as a load makes them."""
LEAST_SPREAD = 0.2
"""Of the missed rows over their mean, from which on what each adds is fitted."""


@dataclass(frozen=True)
class ColdHost:
    """What the host takes to give the device a batch of one request with nothing cached, on average.

    It takes longer the more rows are missed, though it does nothing for a row: on an H200 0.2 to 0.3 ms from
    15,000 rows to 48,000. A host is slow only if it takes longer than that.
    """

    ms: float
    """Without a missed row; 0: it is not known."""
    row_ms: float
    """More, for each missed row."""
    evict_ms: float = 0.0
    """And for each KV entry evicted."""

    @classmethod
    def of(cls, raw: Sequence[Mapping[str, Any]], evict_ms: float = 0.0) -> ColdHost:
        """By least squares over the seconds of the streams of all depths.

        Args:
            raw: of all depths.
            evict_ms: of an evicted entry, as batches tell it that came beside others: which stream evicts
                goes with how fast the host was in its seconds.
        """
        seconds = [second for depth in raw for second in _cold_seconds(depth) if second[0] > 0]
        if not seconds:
            return cls(0.0, 0.0)
        ms, rows, evicted = np.array(seconds).T
        ms = ms - evict_ms * evicted
        row_ms = 0.0
        if np.ptp(rows) >= LEAST_SPREAD * rows.mean():  # else it would be the host's ups and downs
            row_ms = max(float(np.polyfit(rows, ms, 1)[0]), 0.0)
        return cls(float((ms - row_ms * rows).mean()), row_ms, evict_ms)

    def slowness(self, depth: Mapping[str, Any]) -> NDArray[np.float64]:
        """What the host took around each sample of a depth over what it takes on average, [samples].

        In a stream that of the second, of batches timed by themselves that of all of them; 0 where it is not
        known.
        """
        samples, states = depth["samples"], depth.get("machine_state", ())
        ms = np.array([state.get(COLD_HOST, 0.0) for state in states])
        # The first state is of all batches since the start: nearly all are those timed by themselves.
        alone = _cold_work([sample for sample in samples if sample["kind"] != STREAM])
        found = np.full(len(samples), ms[0] / self.at(*alone) if states else 0.0)
        for begin, _, stream, second in _streams(depth):
            for number in np.unique(second):
                of = stream[second == number]
                found[of] = ms[begin + number] / self.at(*_cold_work([samples[i] for i in of]))
        return found

    def at(self, missed_rows: float, evicted: float) -> float:
        """Milliseconds, for so many missed rows and evicted entries."""
        return self.ms + self.row_ms * missed_rows + self.evict_ms * evicted


def mean_ms(depth: Mapping[str, Any], cold_host: ColdHost) -> dict[str, float]:
    """How fast the host was beside a depth's streams (`mean_host_ms`): what its times are to be held against.

    `cold_host_ms`, which depends on no depth, is that without a missed row or an evicted entry;
    `cold_host_row_ms` and `cold_host_evict_ms` are those for each.
    """
    states = depth.get("machine_state", ())
    found = mean_host_ms(states, undisturbed([states])) if states else {}
    if COLD_HOST in found:
        found |= {COLD_HOST: cold_host.ms, COLD_HOST_ROW: cold_host.row_ms,
                  COLD_HOST_EVICT: cold_host.evict_ms}  # fmt: skip
    return found


def _cold_seconds(depth: Mapping[str, Any]) -> Iterator[tuple[float, float, float]]:
    """Of each second of a depth's streams: `cold_host_ms`, and `_cold_work`."""
    samples, states = depth["samples"], depth.get("machine_state", ())
    for begin, _, stream, second in _streams(depth):
        for number in np.unique(second):
            rows, evicted = _cold_work([samples[i] for i in stream[second == number]])
            yield float(states[begin + number].get(COLD_HOST, 0.0)), rows, evicted


def _cold_work(samples: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean missed rows and evicted entries of a request alone with nothing cached."""
    work = [(s["missed_rows"], s.get("evicted", 0)) for s in samples if list(s["cached"]) == [0]]
    rows, evicted = np.mean(work, axis=0) if work else (0.0, 0.0)
    return float(rows), float(evicted)


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
