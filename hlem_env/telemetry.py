"""EpochStats: what one epoch measured, from either backend, before anything is derived from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
T = TypeVar("T")


_FEW = 32
"""So many largest values are kept in order while the others pass; more are found by selection."""


@numba.njit(cache=True, nogil=True)
def percentile(values: Floats, share: float) -> float:
    """Percentile with linear interpolation between order statistics (numpy's default method).

    Args:
        values: [n], any order, n >= 1.
        share: in [0, 1]; 0.99 gives P99.
    """
    rank = share * (values.size - 1)
    low = int(rank)
    count = values.size - low
    top = _largest(values, count) if count <= _FEW else _from_rank(values, low)
    if count == 1:
        return float(top[0])
    return float(top[0] + (rank - low) * (top[1] - top[0]))


@numba.njit(cache=True, nogil=True)
def _largest(values: Floats, count: int) -> Floats:
    """The `count` largest values, ascending: one pass that most values leave at once."""
    top = np.full(count, -np.inf)
    for value in values:
        if value > top[0]:
            i = 1
            while i < count and top[i] < value:
                top[i - 1] = top[i]
                i += 1
            top[i - 1] = value
    return top


@numba.njit(cache=True, nogil=True)
def _from_rank(values: Floats, rank: int) -> Floats:
    """The values from an ascending rank on, the first two in order, by Hoare's FIND.

    `np.partition` does the same, and numba takes three times as long to compile it as all else here.
    """
    found = values.copy()
    first, last = 0, found.size - 1
    while first < last:
        pivot = found[(first + last) // 2]
        i, j = first, last
        while i <= j:
            while found[i] < pivot:
                i += 1
            while found[j] > pivot:
                j -= 1
            if i <= j:
                found[i], found[j] = found[j], found[i]
                i += 1
                j -= 1
        if rank <= j:
            last = j
        elif rank >= i:
            first = i
        else:
            break
    top = found[rank:]
    for i in range(2, top.size):
        if top[i] < top[1]:
            top[i], top[1] = top[1], top[i]
    return top


class derived(Generic[T]):
    """A property that is computed once: `functools.cached_property` without the lock of Python 3.11."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stats: Any, owner: type) -> T:
        value = stats.__dict__[self._name] = self._compute(stats)
        return value


@dataclass(frozen=True, eq=False)
class EpochStats:
    """Raw measurements of one run of a backend. Two of them merge into one of the joined time.

    A request belongs to the run in which it completes. Arrays concatenate on merge and counts add;
    gauges take the last value or the time-weighted mean, as each field says.
    """

    duration_s: float
    """Length of the run; adds."""

    latency_ms: Floats
    """[n] arrival to completion, in order of completion."""
    service_ms: Floats
    """[n] time on the device."""
    arrival_s: Floats
    """[n] on the workload's clock."""
    is_hot: NDArray[np.bool_]
    """[n] whether the user had at least 3 requests in the trailing 12 epochs, this one included."""

    history_tokens: int
    """History tokens of all requests; adds."""
    reused_tokens: int
    """History tokens whose K and V came from the cache; adds."""
    rows_looked_up: int
    """Embedding rows asked for, repeats within a request counted; adds."""
    rows_hit: float
    """Of those, found in HBM (an expectation in the surrogate); adds."""
    computed_tokens: int
    """Tokens that ran through the model; adds."""
    refill_bytes: float
    """Host to device bytes of background warming; adds."""
    prefetch_bytes: float
    """Host to device bytes fetched ahead for waiting requests; adds."""
    evictions: int
    """KV entries evicted; adds."""

    alpha_target: float
    """Commanded embedding share; last."""
    alpha_resident: float
    """Embedding share of the pool that holds rows; last."""
    embedding_pages: int
    """Pages owned by the embedding cache; last."""
    kv_pages: int
    """Pages owned by KV entries; last."""
    free_pages: int
    """Pages owned by nobody; last."""
    pending_pages: int
    """Pages whose change of owner waits for a running request; last."""
    pool_bytes: int
    """Size of the pool; last."""
    working_set_bytes: float
    """KV bytes that the hot users' histories take or would take; last."""
    backlog: int
    """Requests that arrived and have not completed; last."""
    backlog_age_s: float
    """Age of the oldest of those, 0 without any; last."""
    utilisation: float
    """Share of the run in which the device was busy; time-weighted mean."""

    @classmethod
    def of(cls, **values: Any) -> EpochStats:
        """The stats of these fields, all of them, unchecked: in a seventh of the constructor's time."""
        stats = object.__new__(cls)
        stats.__dict__.update(values)
        return stats

    def merge(self, later: EpochStats) -> EpochStats:
        """Stats of this run and the one right after it, as if they had been one run."""
        total_s = self.duration_s + later.duration_s
        merged: dict[str, object] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(later, field.name)
            if field.name in _CONCATENATE:
                merged[field.name] = np.concatenate((mine, theirs))
            elif field.name in _ADD:
                merged[field.name] = mine + theirs
            elif field.name in _MEAN:
                weighted = mine * self.duration_s + theirs * later.duration_s
                merged[field.name] = weighted / total_s if total_s > 0 else theirs
            else:
                merged[field.name] = theirs
        return EpochStats(**merged)  # type: ignore[arg-type]

    @derived
    def requests(self) -> int:
        """Requests that completed."""
        return int(self.latency_ms.size)

    @derived
    def p99_ms(self) -> float:
        """P99 of latency. Without requests 0; with none completed but a backlog, the backlog's age."""
        if self.requests:
            return float(percentile(self.latency_ms, 0.99))
        return 1000.0 * self.backlog_age_s if self.backlog else 0.0

    def qos(self, slo_ms: float) -> float:
        """Share of requests within the SLO. Without requests 1; with only a backlog 0."""
        if not self.requests:
            return 0.0 if self.backlog else 1.0
        share = self._within_slo.get(slo_ms)
        if share is None:
            share = float(np.count_nonzero(self.latency_ms <= slo_ms)) / self.requests
            self._within_slo[slo_ms] = share
        return share

    @derived
    def _within_slo(self) -> dict[float, float]:
        """Shares by SLO, as they are asked for: state, reward and info ask for the same."""
        return {}

    @derived
    def hot_share(self) -> float:
        """Share of requests from hot users; 0 without requests."""
        return float(np.count_nonzero(self.is_hot)) / self.requests if self.requests else 0.0

    @derived
    def kv_hit(self) -> float:
        """Reused share of history tokens; 0 without any."""
        return self.reused_tokens / self.history_tokens if self.history_tokens else 0.0

    @derived
    def emb_hit(self) -> float:
        """Share of looked-up embedding rows found in HBM; 0 without any."""
        return self.rows_hit / self.rows_looked_up if self.rows_looked_up else 0.0

    @property
    def mean_history_tokens(self) -> float:
        """Mean history length of the requests; 0 without requests."""
        return self.history_tokens / self.requests if self.requests else 0.0

    @derived
    def mean_service_ms(self) -> float:
        """Mean time on the device; 0 without requests."""
        return float(np.add.reduce(self.service_ms)) / self.requests if self.requests else 0.0

    @derived
    def working_set(self) -> float:
        """KV bytes of the hot users over the pool; may exceed 1."""
        return self.working_set_bytes / self.pool_bytes if self.pool_bytes else 0.0


_CONCATENATE = {"latency_ms", "service_ms", "arrival_s", "is_hot"}
_ADD = {
    "duration_s",
    "history_tokens",
    "reused_tokens",
    "rows_looked_up",
    "rows_hit",
    "computed_tokens",
    "refill_bytes",
    "prefetch_bytes",
    "evictions",
}
_MEAN = {"utilisation"}
