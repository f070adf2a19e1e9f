"""Policies by name; LRU and the scan-resistant one behind the protocol (`hlem_env.eviction.recency`)."""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import BackendError, require, require_choice, require_number
from hlem_env.eviction import laru, recency
from hlem_env.eviction.learned import REPREDICTED, Learned
from hlem_env.eviction.online import OnlinePredictor
from hlem_env.eviction.predictor import Predictor
from hlem_env.eviction.protocol import EvictionPolicy, Keys, Times

_INITIAL_KEYS = 1024


POLICIES = (*recency.POLICIES, *laru.RULES)
"""Names that `make_policy` knows."""


def make_policy(
    name: str, half_life_s: float = 60.0, predictor: Predictor | None = None
) -> EvictionPolicy:
    """The policy of that name.

    Args:
        name: "lru", "scan_resistant", "laru", "hf" or "fpb".
        half_life_s: of the scan-resistant policy's counts; half the label window of a learned policy's
            own predictor.
        predictor: of a learned policy; by default one that learns as it goes, which needs the extra
            `baselines` (LightGBM).

    Raises:
        ArgumentError: there is no such policy.
        ImportError: LightGBM is not installed.
    """
    require_choice("policy", name, POLICIES)
    if name in recency.POLICIES:
        return Lru() if name == "lru" else ScanResistant(half_life_s)
    if predictor is None:
        predictor = OnlinePredictor(label_window=2.0 * half_life_s)
    return Learned(name, predictor, REPREDICTED)


class _Recency:
    """What both policies share: every key has a score, the lowest goes first.

    Victims come from a heap whose keys are lower bounds: an access costs one addition, a victim
    the logarithm of the cache's items. A number of keys above the largest seen takes no more space
    than that number times 72 bytes.
    """

    _rule: int
    _unseen: float
    """Score of a key without an access."""

    def __init__(self, half_life_s: float) -> None:
        self.capacity = 0
        """What `on_resize` said last; neither policy depends on it."""
        self._half_life_s = half_life_s
        self._origin_s = math.nan
        self._size = 0
        self._pinned = 0
        self._users = np.zeros(0, recency.USER_FIELDS)
        self._heap = np.empty(0, recency.HEAP_ENTRY)
        self._pins = np.zeros(0, np.int32)
        self._reserve(_INITIAL_KEYS)

    def admit(self, keys: Keys, now: Times) -> NDArray[np.bool_]:
        """See `EvictionPolicy.admit`."""
        self._reserve_for(keys)
        self._size, mask = _admit(
            self._users, self._heap, self._size, self._pins, self._pinned, keys
        )
        admitted: NDArray[np.bool_] = mask
        return admitted

    def describe(self, keys: Keys, sizes: NDArray[np.int64]) -> None:
        """See `EvictionPolicy.describe`; not heeded."""

    def on_hit(self, keys: Keys, now: Times) -> None:
        """See `EvictionPolicy.on_hit`; hits and misses count alike."""
        if keys.size == 0:
            return
        times = np.asarray(now, np.float64)
        if times.shape != keys.shape:
            times = np.full(keys.shape, times)
        highest, latest = _highest_and_latest(keys, times)
        self._reserve(highest + 1)
        self._follow(latest)
        _touch(self._users, keys, times, self._rule, self._origin_s, self._half_life_s)

    on_miss = on_hit

    def on_insert(self, keys: Keys, now: Times) -> None:
        """See `EvictionPolicy.on_insert`."""
        if keys.size:
            self._reserve_for(keys)
            self._size = _insert(self._users, self._heap, self._size, keys)

    def on_remove(self, keys: Keys) -> None:
        """See `EvictionPolicy.on_remove`. The heap drops them when they reach its root."""
        self._users["pages"][keys] = 0

    def pick_victims(self, n: int, incoming: Keys, now: Times) -> NDArray[np.int64]:
        """See `EvictionPolicy.pick_victims`."""
        require(n >= 1, "n", n, "1 or more")
        self._reserve_for(incoming)
        self._size, victims = _pick(
            self._users, self._heap, self._size, self._pins, self._pinned, n, incoming
        )
        slots: NDArray[np.int64] = victims
        return slots

    def pin(self, keys: Keys) -> None:
        """See `EvictionPolicy.pin`."""
        if keys.size:
            self._reserve_for(keys)
            self._pinned += _pin(self._pins, keys)

    def unpin(self, keys: Keys) -> None:
        """See `EvictionPolicy.unpin`."""
        if keys.size == 0:
            return
        freed = _unpin(self._pins, keys)
        if freed < 0:
            raise BackendError(f"one of the keys {keys.tolist()} is unpinned but was not pinned")
        self._pinned -= freed

    def on_resize(self, capacity: int) -> None:
        """See `EvictionPolicy.on_resize`."""
        self.capacity = capacity

    def worth(self, keys: Keys, now: Times) -> NDArray[np.float64]:
        """See `EvictionPolicy.worth`: the scores, whose order does not depend on the time."""
        self._reserve_for(keys)
        scores: NDArray[np.float64] = self._users["score"][keys]
        return scores

    def forget(self, keys: Keys) -> None:
        """See `EvictionPolicy.forget`."""
        known = keys[keys < self._pins.size]
        held = (self._users["pages"][known] > 0) | (self._pins[known] > 0)
        if held.any():
            raise BackendError(f"key {known[held][0]} is cached or pinned and cannot be forgotten")
        # Their places on the heap would be no lower bounds of what comes under the same numbers.
        entries = self._heap[: self._size]
        kept = self._users["pages"][entries["slot"]] > 0
        self._users["in_heap"][entries["slot"][~kept]] = 0
        entries = entries[kept]
        self._size = entries.size
        self._heap[: self._size] = entries[np.argsort(entries["key"])]  # sorted is a heap, too
        self._users["score"][known] = self._unseen

    def close(self) -> None:
        """See `EvictionPolicy.close`: nothing runs."""

    def _follow(self, now: float) -> None:
        """Move the origin of decayed counts so that no weight overflows."""
        if math.isnan(self._origin_s):
            self._origin_s = now
        half_lives = math.floor((now - self._origin_s) / self._half_life_s)
        if half_lives > recency.REBASE_HALF_LIVES:
            if self._rule == recency.SCAN_RESISTANT:
                recency.rebase(self._users, self._heap, self._size, float(half_lives))
            self._origin_s += half_lives * self._half_life_s

    def _reserve_for(self, keys: Keys) -> None:
        """Make room for these, and all below them."""
        if keys.size:
            self._reserve(_highest(keys) + 1)

    def _reserve(self, keys: int) -> None:
        """Make room for keys 0 to `keys` - 1."""
        more = max(keys, 2 * self._users.size) - self._users.size
        if keys <= self._users.size:
            return
        unseen = np.zeros(more, self._users.dtype)
        unseen["score"] = self._unseen
        self._users = np.concatenate((self._users, unseen))
        self._heap = np.concatenate((self._heap, np.empty(more, self._heap.dtype)))
        self._pins = np.concatenate((self._pins, np.zeros(more, np.int32)))


class Lru(_Recency):
    """The key that was not accessed for the longest time goes first."""

    _rule = recency.LRU
    _unseen = -math.inf

    def __init__(self) -> None:
        super().__init__(half_life_s=1.0)


class ScanResistant(_Recency):
    """The key with the lowest exponentially decayed number of accesses goes first.

    A key is admitted only when its count exceeds that of every key it would evict, so that keys
    which come once stay out.

    Args:
        half_life_s: of a count: 12 epochs, 60 s at 5 s.
    """

    _rule = recency.SCAN_RESISTANT
    _unseen = 0.0

    def __init__(self, half_life_s: float = 60.0) -> None:
        require_number("half_life_s", half_life_s)
        require(half_life_s > 0, "half_life_s", half_life_s, "above 0")
        super().__init__(half_life_s)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _highest(keys: Any) -> int:
    """Of one key or more."""
    return int(keys.max())


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _highest_and_latest(keys: Any, times: Any) -> tuple[int, float]:
    return int(keys.max()), times.max()


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _pin(pins: Any, keys: Any) -> int:
    """Count a pin of each key; returns how many had none."""
    first = 0
    for key in keys:
        first += pins[key] == 0
        pins[key] += 1
    return first


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _unpin(pins: Any, keys: Any) -> int:
    """Undo a pin of each key; returns how many have none left. Where one has none: -1, and no change."""
    for key in keys:
        if key >= pins.size or pins[key] == 0:
            return -1
    freed = 0
    for key in keys:
        pins[key] -= 1
        freed += pins[key] == 0
    return freed


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _touch(
    users: Any, keys: Any, times: Any, rule: int, origin_s: float, half_life_s: float
) -> None:
    """Count an access of each key. Scores never fall, even where times come out of order."""
    for i in range(keys.size):
        user = users[keys[i]]
        weight = np.exp2((times[i] - origin_s) / half_life_s) if rule != recency.LRU else 0.0
        user.score = max(user.score, recency.touch(rule, user.score, times[i], weight))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _insert(users: Any, heap: Any, size: int, keys: Any) -> int:
    """Put keys into the cache and on the heap; returns the heap's size."""
    for i in range(keys.size):
        users[keys[i]].pages = 1  # for the heap's functions: resident
        size = recency.push(users, heap, size, keys[i])
    return size


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _pick(
    users: Any, heap: Any, size: int, pins: Any, pinned: int, most: int, incoming: Any
) -> tuple[int, Any]:
    """Up to `most` keys that are worth less than each that comes in; and the heap's size before them."""
    below = np.inf
    for key in incoming:
        below = min(below, users[key].score)
    out = np.empty(min(most, size), np.int64)
    taken = np.empty(out.size + pinned, np.int64)
    size, count = _lowest(users, heap, size, pins, below, out, taken)
    return size, out[:count]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _admit(users: Any, heap: Any, size: int, pins: Any, pinned: int, keys: Any) -> tuple[int, Any]:
    """The heap's size, and which keys [n] are worth more than the victim that is their match."""
    size, victims = _pick(users, heap, size, pins, pinned, max(keys.size, 1), keys[:0])
    scores = np.empty(keys.size)
    for i in range(keys.size):
        scores[i] = users[keys[i]].score
    best = np.argsort(-scores, kind="mergesort")
    mask = np.zeros(keys.size, np.bool_)
    for i in range(min(best.size, victims.size)):
        mask[best[i]] = scores[best[i]] > users[victims[i]].score
    return size, mask


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _lowest(
    users: Any, heap: Any, size: int, pins: Any, below: float, out: Any, taken: Any
) -> tuple[int, int]:
    """Fill `out` with unpinned keys of scores under `below`, the lowest first.

    All that leaves the heap for that, pinned ones too, is noted in `taken` and returns to it.

    Returns
    -------
    (the heap's size, keys in `out`).
    """
    count = off = 0
    while count < out.size:
        size = recency.settle_root(users, heap, size)
        if size == 0 or not users[heap[0].slot].score < below:
            break
        slot = heap[0].slot
        size = recency.pop(users, heap, size)
        taken[off] = slot
        off += 1
        if pins[slot] == 0:
            out[count] = slot
            count += 1
    for i in range(off):
        size = recency.push(users, heap, size, taken[i])
    return size, count
