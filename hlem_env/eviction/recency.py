"""LRU and the scan-resistant policy, as one rule: every user has a score, the lowest goes first.

    LRU             score = time of the last access
    scan-resistant  score = exponentially decayed number of requests; a user is admitted only when
                    its score exceeds that of every user it would evict, so one-off users stay out

Decayed counts are kept forward: a request at time t adds 2^((t - origin) / half-life), which keeps
the order of all scores while nobody is touched. The origin moves before the weights overflow.

Victims come from a binary heap of (key, slot) whose keys are lower bounds. Scores only rise, so a
hit costs one addition, and a key that is out of date is put right when it reaches the root.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

LRU = 0
SCAN_RESISTANT = 1
POLICIES = {"lru": LRU, "scan_resistant": SCAN_RESISTANT}

USER_FIELDS = [("score", "f8"), ("pages", "i4"), ("in_heap", "i4")]
"""Fields that the functions below need of a structured array of users: the score, the pages that the
entry holds (0: not resident), and whether the user stands on the heap."""
HEAP_ENTRY = np.dtype([("key", "f8"), ("slot", "i8")])

# Structured arrays, since numba counts references of every array that a function is handed.
Users = Any
Heap = Any

REBASE_HALF_LIVES = 256.0
"""Weights stay below 2^256 x requests; doubles reach 2^1023."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def touch(policy: int, score: float, now: float, weight: float) -> float:
    """Score after a request.

    Args:
        policy: LRU or SCAN_RESISTANT.
        score: before the request; 0 for a user never seen.
        now: time of the request, seconds.
        weight: of a request at `now`, 2^((now - origin) / half-life).
    """
    return now if policy == LRU else score + weight


@numba.njit(cache=True, nogil=True, error_model="numpy")
def growth(half_lives: float) -> float:
    """2^half_lives; by its series within 1e-15 for the short times between two requests."""
    if abs(half_lives) > 1e-3:
        return float(np.exp2(half_lives))
    x = half_lives * np.log(2.0)
    return float(1.0 + x * (1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24)))))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def rebase(users: Users, heap: Heap, size: int, half_lives: float) -> None:
    """Move the origin later by a whole number of half-lives: scale scores and keys, order kept."""
    factor = np.exp2(-half_lives)
    for i in range(users.size):
        users[i].score *= factor
    for i in range(size):
        heap[i].key *= factor


@numba.njit(cache=True, nogil=True, error_model="numpy")
def sift_down(heap: Heap, size: int, key: float, slot: int) -> None:
    """Put (key, slot) at the root of a heap of `size` entries and restore its order."""
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size:
            child += heap[child + 1].key < heap[child].key  # no branch: it would be a coin toss
        if heap[child].key >= key:
            break
        heap[i].key, heap[i].slot = heap[child].key, heap[child].slot
        i = child
    heap[i].key, heap[i].slot = key, slot


@numba.njit(cache=True, nogil=True, error_model="numpy")
def push(users: Users, heap: Heap, size: int, slot: int) -> int:
    """Put a resident user on the heap, unless it stands there; returns the new size.

    A root that is no longer resident gives its place: one pass instead of two.
    """
    if users[slot].in_heap:
        return size
    users[slot].in_heap = 1
    key = users[slot].score
    if size > 0 and users[heap[0].slot].pages == 0:
        users[heap[0].slot].in_heap = 0
        sift_down(heap, size, key, slot)
        return size
    i = size
    while i > 0:
        parent = (i - 1) // 2
        if heap[parent].key <= key:
            break
        heap[i].key, heap[i].slot = heap[parent].key, heap[parent].slot
        i = parent
    heap[i].key, heap[i].slot = key, slot
    return size + 1


@numba.njit(cache=True, nogil=True, error_model="numpy")
def pop(users: Users, heap: Heap, size: int) -> int:
    """Remove the root; returns the new size."""
    users[heap[0].slot].in_heap = 0
    size -= 1
    if size > 0:
        sift_down(heap, size, heap[size].key, heap[size].slot)
    return size


@numba.njit(cache=True, nogil=True, error_model="numpy")
def settle_root(users: Users, heap: Heap, size: int) -> int:
    """Make the root the resident user with the lowest score; returns the new size (0: none).

    Keys that are out of date are raised, and entries of users that are no longer resident dropped.
    """
    while size > 0:
        slot = heap[0].slot
        if users[slot].pages == 0:
            size = pop(users, heap, size)
        elif heap[0].key < users[slot].score:
            sift_down(heap, size, users[slot].score, slot)
        else:
            break
    return size
