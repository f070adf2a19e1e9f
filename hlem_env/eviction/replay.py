"""A whole sequence of requests through a cache of unit-size items, compiled: how often it misses.

Time is the request's number. Every miss is inserted, except under the scan-resistant policy, which
keeps out what is worth no more than its victim.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hlem_env.borrowed import borrowed
from hlem_env.errors import require, require_choice
from hlem_env.eviction import laru, recency, recency_tape

Keys = NDArray[np.int64]
Floats = NDArray[np.float64]

POLICIES = ("lru", "scan_resistant", "laru", "hf", "fpb", "belady")
HALF_LIFE_CAPACITIES = 20.0
"""Default half-life of the scan-resistant counts, in requests for each item that fits."""
NOBODY = -1
"""No victim: a hit, or a miss that found room."""
NOT_ADMITTED = -2

_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@dataclass(frozen=True, eq=False)
class Replay:
    """What became of every request."""

    hit: NDArray[np.bool_]
    """[n]"""
    victim: Keys
    """[n] key evicted for it, NOBODY or NOT_ADMITTED."""
    mispredictions: int
    """Detected by LARU."""
    seconds: float
    """CPU time of this thread in the policy, from the first request to the last."""

    @property
    def misses(self) -> int:
        """Requests that did not hit, the first of every key included."""
        return int(self.hit.size - np.count_nonzero(self.hit))

    @property
    def miss_ratio(self) -> float:
        """Misses over requests."""
        return self.misses / self.hit.size


def dense(keys: ArrayLike) -> Keys:
    """The keys [n] renumbered from 0 in order of first appearance."""
    given = np.asarray(keys)
    _, first, inverse = np.unique(given, return_index=True, return_inverse=True)
    number = np.empty(first.size, np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(first.size)
    return number[inverse]


def next_requests(keys: Keys) -> Floats:
    """Of each request [n] the number of its key's next one; infinity when there is none."""
    order = np.argsort(keys, kind="stable")
    following = np.full(keys.size, np.inf)
    same = keys[order][1:] == keys[order][:-1]
    following[order[:-1][same]] = order[1:][same]
    return following


def replay(
    policy: str,
    keys: Keys,
    capacity: int,
    predicted: Floats | None = None,
    half_life: float | None = None,
    mirror: bool = True,
) -> Replay:
    """Serve requests for keys [n] from a cache of `capacity` items that is empty at first.

    Args:
        policy: one of POLICIES; "belady" knows the true next requests.
        keys: whole numbers from 0; memory grows with the largest.
        capacity: items that fit.
        predicted: [n] number of the key's next request as predicted at each request, infinity for
            never. Needed by laru, hf and fpb.
        half_life: of the scan-resistant counts, in requests; by default 20 for each item that fits.
        mirror: read an overdue prediction p at time t as t + (t - p). Without it the largest p goes, as
            in the literature; predictions must not be negative then.

    Raises:
        ArgumentError: naming the argument and what is allowed.
    """
    require_choice("policy", policy, POLICIES)
    require(keys.ndim == 1 and keys.size > 0, "keys", keys.shape, "(n,), n >= 1")
    require(int(keys.min()) >= 0, "keys", int(keys.min()), "0 or more")
    require(capacity >= 1, "capacity", capacity, "1 or more")
    users = int(keys.max()) + 1
    hit, victim = np.empty(keys.size, np.bool_), np.empty(keys.size, np.int64)
    keys = np.ascontiguousarray(keys, np.int64)
    if policy in recency.POLICIES:
        half_life = HALF_LIFE_CAPACITIES * capacity if half_life is None else half_life
        require(half_life > 0, "half_life", half_life, "above 0")
        records = np.zeros(users, recency.USER_FIELDS)
        heap = np.empty(users, recency.HEAP_ENTRY)
        rule, began = recency.POLICIES[policy], time.thread_time()
        _by_recency(rule, records, heap, keys, capacity, float(half_life), hit, victim)
        return Replay(hit, victim, 0, time.thread_time() - began)
    if policy == "belady":
        predicted = next_requests(keys)
    given = None if predicted is None else np.shape(predicted)
    require(given == keys.shape, "predicted", given, f"the shape of keys, {keys.shape}")
    times = np.ascontiguousarray(predicted, np.float64)
    usable = bool((times > -np.inf).all())  # NaN is not
    require(usable, "predicted", "the array", "numbers, or infinity for never")
    lowest = float(times.min())
    require(mirror or lowest >= 0, "predicted", lowest, "0 or more, where nothing is mirrored")
    state = laru.new_state(laru.RULES.get(policy, laru.FPB), capacity)
    places = recency_tape.new_tape(2 * min(capacity, users))
    items, began = laru.new_items(users), time.thread_time()
    _by_prediction(items, *places, state, keys, times, mirror, hit, victim)
    seconds = time.thread_time() - began
    return Replay(hit, victim, int(state["mispredictions"][0]), seconds)


@_compiled
def _by_prediction(
    items: Any,
    tape: Any,
    nodes: Any,
    levels: Any,
    states: Any,
    keys: Keys,
    predicted: Floats,
    mirror: bool,
    hit: NDArray[np.bool_],
    victim: Keys,
) -> None:
    items, tape, nodes, levels = borrowed(items), borrowed(tape), borrowed(nodes), borrowed(levels)
    state = states[0]
    for t in range(keys.size):
        key = keys[t]
        laru.arrive(items, state, key)
        hit[t] = items[key].place >= 0
        victim[t] = NOBODY
        if not hit[t] and state.residents >= state.capacity:
            laru.note_full(state)
            distrusted = laru.distrusts(items, state, key)
            if distrusted:
                laru.lose_confidence(state)
                place = recency_tape.oldest(tape, nodes, levels, state)
            else:
                place = laru.choose(tape, nodes, levels, state, float(t) if mirror else 0.0)
            victim[t] = tape[place].key
            laru.take(items, tape, nodes, levels, state, victim[t])
            laru.note_eviction(items, state, victim[t], not distrusted)
        items[key].next = predicted[t]
        laru.put(items, tape, nodes, levels, state, key)


@_compiled
def _by_recency(
    policy: int,
    users: Any,
    heap: Any,
    keys: Keys,
    capacity: int,
    half_life: float,
    hit: NDArray[np.bool_],
    victim: Keys,
) -> None:
    users, heap = borrowed(users), borrowed(heap)
    size = residents = 0
    origin = 0.0
    for t in range(keys.size):
        key = keys[t]
        half_lives = np.floor((t - origin) / half_life)
        if half_lives > recency.REBASE_HALF_LIVES and policy != recency.LRU:
            recency.rebase(users, heap, size, half_lives)
            origin += half_lives * half_life
        weight = np.exp2((t - origin) / half_life) if policy != recency.LRU else 0.0
        # From 1: a score of 0 is that of a key never seen.
        users[key].score = recency.touch(policy, users[key].score, t + 1.0, weight)
        hit[t] = users[key].pages > 0
        victim[t] = NOBODY
        if hit[t]:
            continue
        if residents == capacity:
            size = recency.settle_root(users, heap, size)
            lowest = heap[0].slot
            if not users[lowest].score < users[key].score:
                victim[t] = NOT_ADMITTED
                continue
            victim[t] = lowest
            users[lowest].pages = 0
            residents -= 1
        users[key].pages = 1
        residents += 1
        size = recency.push(users, heap, size, key)
