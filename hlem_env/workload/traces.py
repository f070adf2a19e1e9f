"""Recorded requests: the Trace, synthetic base histories for it, and the workload that replays it.

Files of public formats become traces in `trace_readers`. Real histories are often short, so each
user may be given a synthetic base history; the trace's metadata then says so.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hlem_env.errors import require
from hlem_env.workload.requests import Catalogue, Requests

COUNT_MEAN, COUNT_MEDIAN = 1226.0, 747.0
"""Interactions a user in 31 days, Taobao mobile set; they fit the lognormal of `counts=None`."""
COUNT_SIGMA = math.sqrt(2.0 * math.log(COUNT_MEAN / COUNT_MEDIAN))
TOKENS_PER_INTERACTION = 12.5
"""Of synthetic base histories, at a maximum of 15,000 tokens."""

Longs = NDArray[np.int64]


def top_share(counts: NDArray[Any], share: float) -> float:
    """Share of the total that the largest `share` of `counts` [n] holds; 0 when the total is 0."""
    if not counts.size or not counts.sum():
        return 0.0
    most = max(1, round(share * counts.size))
    return float(
        np.partition(counts, counts.size - most)[counts.size - most :].sum() / counts.sum()
    )


def zipf_exponent(counts: NDArray[Any]) -> float:
    """Maximum-likelihood exponent s, in [0, 3], of p(rank) ~ rank^-s over the ranks 1 to n.

    Args:
        counts: [n] occurrences of each item, any order, n >= 1.
    """
    require(counts.size >= 1, "counts", counts.size, "at least one item")
    log_rank = np.log(np.arange(1, counts.size + 1))
    observed = float(np.sort(counts)[::-1] @ log_rank / counts.sum())
    low, high = 0.0, 3.0
    for _ in range(24):
        middle = (low + high) / 2
        weight = np.exp(-middle * log_rank)
        if weight @ log_rank / weight.sum() > observed:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def visits_before(user: Longs) -> Longs:
    """How many earlier requests [n] each request's user has, for users [n] in order of arrival."""
    by_user = np.argsort(user, kind="stable")
    ordered = user[by_user]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    sizes = np.diff(starts, append=user.size)
    visits = np.empty(user.size, np.int64)
    visits[by_user] = np.arange(user.size) - np.repeat(starts, sizes)
    return visits


def _tokens(name: str, values: ArrayLike) -> NDArray[np.int32]:
    """A copy of whole numbers of any type as int32."""
    given = np.asarray(values)
    within = bool(((given >= 0) & (given < 2**31) & (given == np.floor(given))).all())
    require(within, name, "the array", "whole numbers from 0 to 2^31 - 1")
    return given.astype(np.int32)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests as they were recorded, in order of arrival, one entry each.

    `from_arrays` makes one from any arrays; the constructor takes them only as described here.

    Raises:
        ArgumentError: naming the array and what is allowed.
    """

    arrival_s: NDArray[np.float64]
    """[n] seconds since the first request, ascending from 0."""
    user: NDArray[np.int64]
    """[n] ids 0 to users - 1, numbered in order of first appearance."""
    history_length: NDArray[np.int32]
    """[n] tokens of history, the new items included; at least 1."""
    new_items: NDArray[np.int32]
    """[n] of those, appended since the user's last request; all of them at a user's first."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Plain values: format, file, lines skipped, notes on what was drawn and not recorded."""

    def __post_init__(self) -> None:
        n = self.arrival_s.size
        require(n >= 1, "arrival_s", n, "at least one request")
        for name in ("user", "history_length", "new_items"):
            shape = getattr(self, name).shape
            require(shape == (n,), name, shape, f"the shape of arrival_s, ({n},)")
        ascending = bool((np.diff(self.arrival_s) >= 0).all()) and self.arrival_s[0] == 0
        finite = math.isfinite(self.arrival_s[-1])
        require(ascending and finite, "arrival_s", "the array", "finite, ascending from 0")
        newest = np.maximum.accumulate(self.user)
        dense = self.user[0] == 0 and self.user.min() == 0 and bool((np.diff(newest) <= 1).all())
        require(dense, "user", "the array", "ids from 0, numbered in order of first appearance")
        shortest = int(self.history_length.min())
        require(shortest >= 1, "history_length", shortest, "1 or more tokens")
        within = (self.new_items >= 0) & (self.new_items <= self.history_length)
        require(bool(within.all()), "new_items", "the array", "0 to history_length")

    @classmethod
    def from_arrays(
        cls,
        arrival_s: ArrayLike,
        user: ArrayLike,
        history_length: ArrayLike,
        new_items: ArrayLike,
        metadata: dict[str, Any] | None = None,
    ) -> Trace:
        """A trace from arrays [n] in any order, with any user ids and any start.

        Requests are sorted by arrival, ties in the given order; a note in the metadata says when
        that changed anything.

        Raises:
            ArgumentError: shapes differ, or a value is outside what the fields allow.
        """
        arrival = np.asarray(arrival_s, np.float64)
        users = np.asarray(user, np.int64)
        lengths = _tokens("history_length", history_length)
        added = _tokens("new_items", new_items)
        require(arrival.ndim == 1 and arrival.size >= 1, "arrival_s", arrival.shape, "(n,), n >= 1")
        require(users.shape == arrival.shape, "user", users.shape, f"{arrival.shape}")
        require(bool(np.isfinite(arrival).all()), "arrival_s", "the array", "finite seconds")
        for name, array in (("history_length", lengths), ("new_items", added)):
            require(array.shape == arrival.shape, name, array.shape, f"{arrival.shape}")
        metadata = dict(metadata or {})
        if bool((np.diff(arrival) < 0).any()):
            order = np.argsort(arrival, kind="stable")
            arrival, users = arrival[order], users[order]
            lengths, added = lengths[order], added[order]
            note = "the requests were not in order of time: sorted, ties in the given order"
            metadata["notes"] = [*metadata.get("notes", ()), note]
        _, first, inverse = np.unique(users, return_index=True, return_inverse=True)
        number = np.empty(first.size, np.int64)
        number[np.argsort(first)] = np.arange(first.size)
        return cls(arrival - arrival[0], number[inverse], lengths, added, metadata)

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @cached_property
    def users(self) -> int:
        """Number of users."""
        return int(self.user.max()) + 1

    @property
    def duration_s(self) -> float:
        """Seconds covered: to the last arrival and one mean gap more; 1 when all arrive at once."""
        last = float(self.arrival_s[-1])
        return last * len(self) / (len(self) - 1) if last > 0 else 1.0

    @property
    def mean_requests_per_s(self) -> float:
        """Requests over the seconds covered."""
        return len(self) / self.duration_s

    @property
    def skipped(self) -> int:
        """Lines of the file that could not be read and were passed over."""
        return int(self.metadata.get("skipped", 0))

    @property
    def skipped_reasons(self) -> list[str]:
        """Why the first few of those could not be read."""
        return list(self.metadata.get("skipped_reasons", ()))

    def top_users_share(self, share: float = 0.05) -> float:
        """Share of the requests that come from the most active `share` of the users."""
        return top_share(np.bincount(self.user), share)

    @cached_property
    def is_first(self) -> NDArray[np.bool_]:
        """[n] whether the request is its user's first."""
        first: NDArray[np.bool_] = visits_before(self.user) == 0
        return first

    @cached_property
    def histories_grow(self) -> bool:
        """Whether each later history is the user's previous one and the new items.

        It may have lost its oldest quarter. False for prompts that replace each other.
        """
        by_user = np.argsort(self.user, kind="stable")
        length, added = self.history_length[by_user].astype(np.int64), self.new_items[by_user]
        returning = ~self.is_first[by_user]
        grown = np.roll(length, 1)[returning] + added[returning]
        length = length[returning]
        return bool(((length == grown) | (length == grown - grown // 4)).all())

    def digest(self) -> str:
        """Hash of the requests, not of the metadata (16 hex digits)."""
        content = hashlib.sha256()
        for array in (self.arrival_s, self.user, self.history_length, self.new_items):
            content.update(np.ascontiguousarray(array).data)
        return content.hexdigest()[:16]


@numba.njit(cache=True, nogil=True)
def _grow(
    user: Longs,
    added: Longs,
    lengths: Longs,
    longest: int,
    history_length: NDArray[np.int32],
    new_items: NDArray[np.int32],
) -> None:
    """Append `added` [n] to the users' `lengths` [users] (0: not seen yet), request by request.

    A first history is cut to `longest`; one that grows past it loses its oldest quarter at once.
    """
    for i in range(user.size):
        before = lengths[user[i]]
        length = before + added[i]
        if length > longest:
            if before == 0:
                length = longest
            else:
                length = min(length - length // 4, longest)
        lengths[user[i]] = length
        history_length[i] = length
        new_items[i] = min(added[i], length)


def _grown(
    user: Longs, added: Longs, lengths: Longs, longest: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """History lengths and new items [n] of `_grow`; `lengths` is brought up to date."""
    history_length, new_items = np.empty(user.size, np.int32), np.empty(user.size, np.int32)
    _grow(user, added, lengths, longest, history_length, new_items)
    return history_length, new_items


def with_base_histories(
    trace: Trace,
    counts: ArrayLike | None,
    rng: np.random.Generator | int,
    scale: float = TOKENS_PER_INTERACTION,
    max_tokens: int = 15_000,
) -> Trace:
    """The trace with a synthetic base history before each user's first request.

    Its length is one of `counts`, drawn at random, times `scale`. The first history, base and
    recorded items together, is cut to `max_tokens`; one that later grows past it loses its oldest
    quarter at once, as in the synthetic regimes. The metadata says that the histories are
    synthetic and gives the recorded lengths.

    Args:
        trace: recorded requests.
        counts: [m] interactions of real users (`trace_readers.read_user_counts`). None draws from a
            lognormal with the mean (1,226) and median (747) of the public Taobao mobile counts.
        rng: a generator, or the seed of one.
        scale: tokens for each interaction counted.
        max_tokens: the longest history.

    Raises:
        ArgumentError: naming the argument and what is allowed.
    """
    require(0 < scale <= 1e6, "scale", scale, "above 0, at most 1e6")
    require(1 <= max_tokens <= 10**9, "max_tokens", max_tokens, "1 to 10^9")
    source = "lognormal" if counts is None else "given"
    seed = rng if isinstance(rng, int) else None
    rng = np.random.default_rng(rng)
    if counts is None:
        drawn = rng.lognormal(math.log(COUNT_MEDIAN), COUNT_SIGMA, trace.users)
    else:
        pool = np.asarray(counts, np.float64)
        ok = (
            pool.ndim == 1
            and pool.size >= 1
            and bool((pool >= 0).all() and np.isfinite(pool).all())
        )
        require(ok, "counts", f"array {pool.shape}", "(m,), m >= 1, finite and not negative")
        drawn = rng.choice(pool, trace.users)
    base = np.clip(np.rint(drawn * scale), 1, max_tokens).astype(np.int64)
    added = trace.new_items.astype(np.int64)
    first = trace.is_first
    added[first] = base[trace.user[first]] + trace.history_length[first]
    lengths = np.zeros(trace.users, np.int64)
    history_length, new_items = _grown(trace.user, added, lengths, max_tokens)
    synthetic = {
        "counts": source,
        "seed": seed,
        "scale": float(scale),
        "max_tokens": int(max_tokens),
        "mean_tokens": float(history_length.mean()),
        "native_mean_tokens": float(trace.history_length.mean()),
        "native_p95_tokens": float(np.percentile(trace.history_length, 95)),
    }
    note = "histories are synthetic: a drawn base length before each user's recorded items"
    metadata = trace.metadata | {
        "synthetic_histories": synthetic,
        "notes": [*trace.metadata.get("notes", ()), note],
    }
    return replace(trace, history_length=history_length, new_items=new_items, metadata=metadata)


class TraceWorkload:
    """Replays a trace. All its users are persistent.

    The clock's start is the trace's start: with a warm-up of w seconds, time 0 lies w seconds into
    the (scaled) trace. Histories longer than `max_history_tokens` are cut to it; where they grow,
    the oldest quarter goes at once, as in the synthetic regimes.

    With `loop` the trace starts over when it ends, one mean gap after its last request. The same
    users come again. Where histories grow (`Trace.histories_grow`) they go on growing: a user's
    first request in a later pass appends the trace's median number of new items, the others what
    the trace says. Where they do not, lengths and new items repeat. Without `loop` no request comes
    after the end.

    Args:
        trace: what is replayed.
        catalogue: what the tokens look up; `Catalogue()` when None.
        max_history_tokens: no history is longer.
        time_scale: seconds on the clock for each second of the trace; 0.5 plays twice as fast.
        loop: start over at the end.
        jitter_s: `redraw` moves each arrival by up to this many seconds on the clock, either way.
        jitter_at_reset: `reset` does so too, so that episodes differ by seed.

    Raises:
        ArgumentError: naming the argument and what is allowed.
    """

    def __init__(
        self,
        trace: Trace,
        catalogue: Catalogue | None = None,
        max_history_tokens: int = 15_000,
        time_scale: float = 1.0,
        loop: bool = True,
        jitter_s: float = 1.0,
        jitter_at_reset: bool = False,
    ) -> None:
        require(
            1 <= max_history_tokens <= 10_000_000,
            "max_history_tokens",
            max_history_tokens,
            "1 to 10,000,000",
        )
        require(1e-9 <= time_scale <= 1e9, "time_scale", time_scale, "1e-9 to 1e9")
        require(0 <= jitter_s <= 3600, "jitter_s", jitter_s, "0 to 3600 seconds")
        self.trace = trace
        self._catalogue = catalogue or Catalogue()
        self._max_history_tokens = max_history_tokens
        self.time_scale = float(time_scale)
        self.loop = loop
        self.jitter_s = float(jitter_s)
        self.jitter_at_reset = jitter_at_reset
        self._period_s = trace.duration_s * self.time_scale
        self._by_user = np.argsort(trace.user, kind="stable")
        self._first_pass = self._lengths_of_first_pass()
        self._next = 0
        self._restart(None, 0.0)

    @property
    def persistent_users(self) -> int:
        """Number of the trace's users: all may come back."""
        return self.trace.users

    @property
    def max_history_tokens(self) -> int:
        """No history is longer."""
        return self._max_history_tokens

    @property
    def mean_history_tokens(self) -> float:
        """Mean history length over the trace's requests."""
        return float(self._first_pass[0].mean())

    @property
    def catalogue(self) -> Catalogue:
        """What the tokens look up."""
        return self._catalogue

    @property
    def mean_requests_per_s(self) -> float:
        """Mean rate on the clock."""
        return self.trace.mean_requests_per_s / self.time_scale

    def scaled_to(self, requests_per_s: float) -> TraceWorkload:
        """The same trace at this mean rate; its shape over time stays.

        Raises:
            ArgumentError: the rate is not above 0 and at most 1e6.
        """
        require(0 < requests_per_s <= 1e6, "requests_per_s", requests_per_s, "above 0, at most 1e6")
        return TraceWorkload(
            self.trace,
            self._catalogue,
            self._max_history_tokens,
            self.trace.mean_requests_per_s / requests_per_s,
            self.loop,
            self.jitter_s,
            self.jitter_at_reset,
        )

    def reset(self, rng: np.random.Generator, start_s: float) -> None:
        """Start anew at `start_s` with the arrivals as recorded, unless `jitter_at_reset`."""
        self._restart(rng if self.jitter_at_reset else None, start_s)

    def redraw(self, rng: np.random.Generator, start_s: float) -> None:
        """Start anew at `start_s` with each arrival moved by a uniform draw of +-`jitter_s`.

        Arrivals stay within the pass (they are reflected at its ends). A user's requests keep their
        order of histories.
        """
        self._restart(rng, start_s)

    def take(self, until_s: float) -> Requests:
        """Requests that arrive before `until_s`, from where the last call ended."""
        require(math.isfinite(until_s), "until_s", until_s, "finite seconds")
        taken = Requests.empty()
        while True:
            stop = int(np.searchsorted(self._pass.arrival_s, until_s))
            if stop > self._next:
                part = self._pass[self._next : stop]
                taken = taken.then(
                    Requests(
                        part.arrival_s.copy(),
                        part.user.copy(),
                        part.history_length.copy(),
                        part.new_items.copy(),
                    )
                )
                self._next = stop
            ended = self._next == len(self._pass)
            next_start_s = self._start_s + (self._passes + 1) * self._period_s
            if not (self.loop and ended and next_start_s < until_s):
                return taken
            self._passes += 1
            self._begin_pass()

    def to_json(self) -> dict[str, Any]:
        """Plain values: the trace's file, digest and metadata, and how it is replayed."""
        metadata = self.trace.metadata
        return {
            "kind": "trace",
            "format": metadata.get("format"),
            "file": metadata.get("file"),
            "path": metadata.get("path"),
            "digest": self.trace.digest(),
            "time_scale": self.time_scale,
            "loop": self.loop,
            "jitter_s": self.jitter_s,
            "max_history_tokens": self._max_history_tokens,
            "catalogue": asdict(self._catalogue),
            "metadata": metadata,
        }

    def digest(self) -> str:
        """Hash of what the oracle's labels depend on: the requests and how they are replayed.

        Where the file lies does not matter.
        """
        values = self.to_json()
        for name in ("metadata", "path", "file", "format"):
            del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    def _lengths_of_first_pass(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """History lengths and new items [n] as recorded, within `max_history_tokens`."""
        trace, longest = self.trace, self._max_history_tokens
        if int(trace.history_length.max()) <= longest:
            return trace.history_length, trace.new_items
        if trace.histories_grow:
            added = np.where(trace.is_first, trace.history_length, trace.new_items)
            lengths = np.zeros(trace.users, np.int64)
            return _grown(trace.user, added.astype(np.int64), lengths, longest)
        length = np.minimum(trace.history_length, np.int32(longest))
        return length, np.minimum(trace.new_items, length)

    @cached_property
    def _added_later(self) -> Longs:
        """Items [n] that each request appends in a later pass."""
        trace = self.trace
        returning = trace.new_items[~trace.is_first]
        typical = round(float(np.median(returning))) if returning.size else 1
        return np.where(trace.is_first, typical, trace.new_items).astype(np.int64)

    def _restart(self, jitter_rng: np.random.Generator | None, start_s: float) -> None:
        self._jitter_rng = jitter_rng
        self._start_s = start_s
        self._passes = 0
        self._lengths = np.zeros(0, np.int64)
        self._begin_pass()

    def _begin_pass(self) -> None:
        """Lay out the requests of pass number `_passes`, on the clock."""
        user = self.trace.user
        length, added = self._first_pass
        if self._passes and self.trace.histories_grow:
            if not self._lengths.size:
                self._lengths = np.zeros(self.trace.users, np.int64)
                self._lengths[user] = length
            length, added = _grown(user, self._added_later, self._lengths, self._max_history_tokens)
        arrival_s = self.trace.arrival_s * self.time_scale
        if self._jitter_rng is not None and self.jitter_s > 0:
            arrival_s += self._jitter_rng.uniform(-self.jitter_s, self.jitter_s, arrival_s.size)
            end_s = self._period_s
            arrival_s = np.clip(end_s - np.abs(end_s - np.abs(arrival_s)), 0.0, end_s)
            order = np.argsort(arrival_s, kind="stable")
            arrival_s, user = arrival_s[order], user[order]
            by_user = np.argsort(user, kind="stable")
            recorded = (length, added)
            length, added = np.empty_like(length), np.empty_like(added)
            length[by_user] = recorded[0][self._by_user]
            added[by_user] = recorded[1][self._by_user]
        start_s = self._start_s + self._passes * self._period_s
        self._pass = Requests(arrival_s + start_s, user, length, added)
        self._next = 0
