"""LARU, HF and FPB behind the protocol: the rule of `hlem_env.eviction.laru` and a predictor."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.borrowed import borrowed
from hlem_env.errors import BackendError, require, require_choice
from hlem_env.eviction import laru, recency_tape
from hlem_env.eviction.predictor import Floats, Predictor
from hlem_env.eviction.protocol import Keys, Times

_INITIAL_KEYS = 1024
REPREDICTED = 64
"""Overdue candidates that are predicted again for one decision, at most."""


class Learned:
    """A policy that ranks candidates by their predicted next request.

    Room that is made for its own sake, without an incoming key, follows recency: a resize begins a
    phase, and its victims do not count as evicted by prediction. So do all victims while the
    predictor is not usable; `fallbacks` counts those decisions.

    `worth`, which says who is forgotten first, is the time of the last access.

    Args:
        name: "laru", "hf" or "fpb".
        predictor: told of every access; closed by `close`.
        repredicted: of the least recent candidates so many that are overdue are predicted again
            before a decision; 0: all are mirrored, which costs the predictor nothing.

    Raises:
        ArgumentError: naming the argument and what is allowed.
    """

    def __init__(self, name: str, predictor: Predictor, repredicted: int = 0) -> None:
        require_choice("policy", name, laru.RULES)
        require(0 <= repredicted <= 4096, "repredicted", repredicted, "0 to 4,096")
        self.name, self.predictor, self.repredicted = name, predictor, repredicted
        self.capacity = 0
        self.fallbacks = 0
        """Decisions by recency because the predictor was not usable."""
        self._now = -math.inf
        self._state = laru.new_state(laru.RULES[name], 2**31)
        self._items = laru.new_items(_INITIAL_KEYS)
        self._tape = recency_tape.new_tape(2 * _INITIAL_KEYS)
        self._offered: Keys = np.empty(0, np.int64)
        self._offer_is_predicted = self._offer_distrusts = False

    @property
    def confidence(self) -> float:
        """Lambda: the share of the cache's items that are candidates."""
        return float(self._state["confidence"][0])

    @property
    def counts(self) -> dict[str, int]:
        """Evictions by prediction and by recency, mispredictions detected, decisions fallen back."""
        names = ("by_prediction", "by_recency", "mispredictions")
        counts = {name: int(self._state[name][0]) for name in names}
        return counts | {"fallbacks": self.fallbacks}

    def admit(self, keys: Keys, now: Times) -> NDArray[np.bool_]:
        """See `EvictionPolicy.admit`: whatever there is a victim for."""
        mask = np.zeros(keys.size, np.bool_)
        mask[: self._evictable()] = True
        return mask

    def describe(self, keys: Keys, sizes: NDArray[np.int64]) -> None:
        """See `EvictionPolicy.describe`."""
        self.predictor.describe(keys, sizes)

    def on_hit(self, keys: Keys, now: Times) -> None:
        """See `EvictionPolicy.on_hit`; hits and misses count alike."""
        if keys.size == 0:
            return
        self._reserve(int(keys.max()) + 1)
        times = np.broadcast_to(np.asarray(now, np.float64), keys.shape)
        if keys.size > 1 and (np.diff(times) < 0).any():
            order = np.argsort(times, kind="stable")
            keys, times = keys[order], times[order]
        self._now = max(self._now, float(times[-1]))
        self._offered = keys[:0]
        gaps = self.predictor.access(keys, times)
        gaps = np.where(np.isnan(gaps), np.inf, np.maximum(gaps, 0.0))
        _access(self._items, *self._tape, self._state, keys, times, gaps)

    on_miss = on_hit

    def on_insert(self, keys: Keys, now: Times) -> None:
        """See `EvictionPolicy.on_insert`."""
        if keys.size == 0:
            return
        self._reserve(int(keys.max()) + 1)
        needed = 2 * (int(self._state["residents"][0]) + keys.size)
        if needed > self._tape[0].size:
            self._lengthen(2 * needed)
        _put(self._items, *self._tape, self._state, keys)

    def on_remove(self, keys: Keys) -> None:
        """See `EvictionPolicy.on_remove`. What was offered as a victim counts as evicted."""
        evicted = np.isin(keys, self._offered)
        if evicted.any() and self._offer_distrusts:
            laru.lose_confidence(self._state[0])
            self._offer_distrusts = False
        _take(self._items, *self._tape, self._state, keys, evicted, self._offer_is_predicted)

    def pick_victims(self, n: int, incoming: Keys, now: Times) -> NDArray[np.int64]:
        """See `EvictionPolicy.pick_victims`."""
        require(n >= 1, "n", n, "1 or more")
        time = max(self._now, float(np.max(now))) if np.size(now) else self._now
        laru.note_full(self._state[0])
        asked = incoming[incoming < self._items.size]
        trusted = asked.size > 0 and self.predictor.usable
        if asked.size and not trusted:
            self.fallbacks += 1
        state = self._state[0]
        distrusted = trusted and any(laru.distrusts(self._items, state, key) for key in asked)
        by_prediction = trusted and not distrusted
        if by_prediction and self.repredicted:
            self._predict_again(time)
        out = np.empty(min(n, self._evictable()), np.int64)
        _pick(self._items, *self._tape, self._state, time, by_prediction, out)
        self._offered = out
        self._offer_is_predicted, self._offer_distrusts = by_prediction, distrusted
        return out

    def pin(self, keys: Keys) -> None:
        """See `EvictionPolicy.pin`."""
        if keys.size:
            self._reserve(int(keys.max()) + 1)
            _pin(self._items, *self._tape, self._state, keys)

    def unpin(self, keys: Keys) -> None:
        """See `EvictionPolicy.unpin`."""
        if keys.size == 0:
            return
        if int(keys.max()) >= self._items.size or (self._items["pins"][keys] == 0).any():
            raise BackendError(f"one of the keys {keys.tolist()} is unpinned but was not pinned")
        _unpin(self._items, *self._tape, self._state, keys)

    def on_resize(self, capacity: int) -> None:
        """See `EvictionPolicy.on_resize`. Another capacity begins a phase."""
        if capacity != self.capacity:
            laru.resize(self._state[0], max(capacity, 1))
        self.capacity = capacity

    def worth(self, keys: Keys, now: Times) -> Floats:
        """See `EvictionPolicy.worth`: times of the last accesses."""
        if keys.size:
            self._reserve(int(keys.max()) + 1)
        last: Floats = self._items["last"][keys]
        return last

    def forget(self, keys: Keys) -> None:
        """See `EvictionPolicy.forget`."""
        known = keys[keys < self._items.size]
        held = (self._items["place"][known] >= 0) | (self._items["pins"][known] > 0)
        if held.any():
            raise BackendError(f"key {known[held][0]} is cached or pinned and cannot be forgotten")
        self._items[known] = laru.new_items(known.size)
        self.predictor.forget(keys)

    def close(self) -> None:
        """Close the predictor."""
        self.predictor.close()

    def _evictable(self) -> int:
        recency_tape.index(*self._tape, self._state[0])
        return int(self._tape[1]["count"][-1])  # of the root

    def _predict_again(self, now: float) -> None:
        """Predict the overdue ones of the least recent candidates anew."""
        keys = np.empty(self.repredicted, np.int64)
        keys = keys[: _overdue(*self._tape, self._state, now, keys)]
        if keys.size:
            gaps = self.predictor.again(keys, now)
            gaps = np.where(np.isnan(gaps), np.inf, gaps)
            _revalue(self._items, *self._tape, self._state, keys, now + gaps)

    def _reserve(self, keys: int) -> None:
        """Make room for keys 0 to `keys` - 1."""
        if keys > self._items.size:
            more = max(keys, 2 * self._items.size) - self._items.size
            self._items = np.concatenate((self._items, laru.new_items(more)))

    def _lengthen(self, places: int) -> None:
        """A tape of at least so many places with the same items on it."""
        old = self._tape[0]
        self._tape = recency_tape.new_tape(places)
        self._tape[0][: old.size] = old
        laru.compact(self._items, *self._tape, self._state[0])


_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def _access(
    items: Any, tape: Any, nodes: Any, levels: Any, states: Any, keys: Any, times: Any, gaps: Any
) -> None:
    items, tape, nodes, levels = borrowed(items), borrowed(tape), borrowed(nodes), borrowed(levels)
    state = states[0]
    for i in range(keys.size):
        key = keys[i]
        laru.arrive(items, state, key)
        items[key].last = max(items[key].last, times[i])
        items[key].next = times[i] + gaps[i]
        if items[key].place >= 0:
            laru.put(items, tape, nodes, levels, state, key)


@_compiled
def _put(items: Any, tape: Any, nodes: Any, levels: Any, states: Any, keys: Any) -> None:
    for i in range(keys.size):
        laru.put(items, tape, nodes, levels, states[0], keys[i])


@_compiled
def _take(
    items: Any,
    tape: Any,
    nodes: Any,
    levels: Any,
    states: Any,
    keys: Any,
    evicted: Any,
    by_prediction: bool,
) -> None:
    for i in range(keys.size):
        laru.take(items, tape, nodes, levels, states[0], keys[i])
        if evicted[i]:
            laru.note_eviction(items, states[0], keys[i], by_prediction)


@_compiled
def _pick(
    items: Any,
    tape: Any,
    nodes: Any,
    levels: Any,
    states: Any,
    now: float,
    by_prediction: bool,
    out: Any,
) -> None:
    """Fill `out` with victims in the order in which they would go, one after the other."""
    for i in range(out.size):
        if by_prediction:
            place = laru.choose(tape, nodes, levels, states[0], now)
        else:
            place = recency_tape.oldest(tape, nodes, levels, states[0])
        out[i] = tape[place].key
        recency_tape.withdraw(tape, nodes, levels, states[0], place)
    for i in range(out.size):
        item = items[out[i]]
        recency_tape.add(tape, nodes, levels, states[0], item.place, item.next)


@_compiled
def _pin(items: Any, tape: Any, nodes: Any, levels: Any, states: Any, keys: Any) -> None:
    for i in range(keys.size):
        item = items[keys[i]]
        if item.pins == 0 and item.place >= 0:
            recency_tape.withdraw(tape, nodes, levels, states[0], item.place)
        item.pins += 1


@_compiled
def _unpin(items: Any, tape: Any, nodes: Any, levels: Any, states: Any, keys: Any) -> None:
    for i in range(keys.size):
        item = items[keys[i]]
        item.pins -= 1
        if item.pins == 0 and item.place >= 0:
            recency_tape.add(tape, nodes, levels, states[0], item.place, item.next)


@_compiled
def _overdue(tape: Any, nodes: Any, levels: Any, states: Any, now: float, out: Any) -> int:
    """Of the first `out.size` candidates in order of recency, those predicted before `now`."""
    state = states[0]
    recency_tape.index(tape, nodes, levels, state)
    looked = found = 0
    n = state.rule if state.rule != laru.LARU else int(np.ceil(state.confidence * state.k))
    n = min(n, out.size)
    place = 0
    while place < state.head and looked < n:
        if place % recency_tape.FAN == 0 and nodes[place >> recency_tape.FAN_BITS].count == 0:
            place += recency_tape.FAN
            continue
        value = tape[place].value
        if value == value:
            looked += 1
            if value < now:
                out[found] = tape[place].key
                found += 1
        place += 1
    return found


@_compiled
def _revalue(
    items: Any, tape: Any, nodes: Any, levels: Any, states: Any, keys: Any, values: Any
) -> None:
    for i in range(keys.size):
        item = items[keys[i]]
        item.next = values[i]
        recency_tape.withdraw(tape, nodes, levels, states[0], item.place)
        recency_tape.add(tape, nodes, levels, states[0], item.place, item.next)
