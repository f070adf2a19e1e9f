"""LARU, and the policies that it is measured against, as one rule over a recency tape.

    LRU     the least recent item goes
    HF      of the 4 least recent, the one whose predicted next request is farthest (HALP)
    FPB     of all, the farthest (Belady's rule on predictions; with true ones it is Belady)
    LARU    of the ceil(lambda k) least recent, the farthest; lambda falls when that was wrong

LARU is Algorithm 1 of LCR (arXiv 2509.20979). A phase is k distinct items; lambda is 1 at its start.
An item that comes back in the phase in which it was evicted by prediction shows a misprediction: the
least recent item makes room for it, and lambda halves. So a phase has at most k evictions by
prediction and, since only those come back that way, at most k by recency.

Where items differ in size, k is the number of items at the latest eviction, at most the capacity; the
bounds, which are proved for items of one size, do not hold then.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.eviction import recency_tape as tapes
from hlem_env.eviction.recency_tape import Levels, Nodes, Tape

LARU = 0
"""Candidates as lambda says; a rule above 0 is a fixed number of them."""
LRU = 1
HF = 4
FPB = 2**31 - 1
RULES = {"laru": LARU, "fpb": FPB, "hf": HF}
"""Policies that rank by prediction."""

ITEM = np.dtype(
    [
        ("place", "i4"),  # on the tape; -1: not in the cache
        ("pins", "i4"),
        ("seen", "i4"),  # phase of the last access
        ("gone", "i4"),  # phase in which it was last evicted by prediction
        ("next", "f8"),  # predicted time of the next request; infinity: never
        ("last", "f8"),  # time of the last access; -infinity: none
    ]
)
STATE = np.dtype(
    [
        ("rule", "i8"),
        ("capacity", "i8"),
        ("k", "i8"),  # distinct items of a phase
        ("residents", "i8"),
        ("head", "i8"),  # next place of the tape
        ("indexed", "i8"),  # first place that the tape's tree does not know
        ("phase", "i8"),  # its number, from 1
        ("distinct", "i8"),  # items of this phase
        ("confidence", "f8"),  # lambda
        # since the start
        ("by_prediction", "i8"),
        ("by_recency", "i8"),
        ("mispredictions", "i8"),  # detected
    ]
)

Items = Any
State = Any

_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")
_inlined = numba.njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
"""See `hlem_env.eviction.recency_tape`."""


def new_items(n: int) -> NDArray[np.void]:
    """Items [n] that nothing is known of."""
    items = np.zeros(n, ITEM)
    items["place"] = -1
    items["next"], items["last"] = np.inf, -np.inf
    return items


def new_state(rule: int, capacity: int) -> NDArray[np.void]:
    """State [1] of an empty cache."""
    state = np.zeros(1, STATE)
    state["rule"], state["capacity"], state["k"] = rule, capacity, capacity
    state["phase"], state["confidence"] = 1, 1.0
    return state


@_compiled
def begin_phase(state: State) -> None:
    """Forget what this phase has seen and evicted; trust the predictions again."""
    state.phase += 1
    state.distinct = 0
    state.confidence = 1.0


@_compiled
def resize(state: State, capacity: int) -> None:
    """Another capacity, which begins a phase."""
    state.capacity = state.k = capacity
    begin_phase(state)


@_inlined
def arrive(items: Items, state: State, key: int) -> None:
    """Count an access, before it is known to hit or miss."""
    item = items[key]
    if item.seen != state.phase:
        if state.distinct >= state.k:
            begin_phase(state)
        item.seen = state.phase
        state.distinct += 1


@_compiled
def compact(items: Items, tape: Tape, nodes: Nodes, levels: Levels, state: State) -> None:
    """Write the tape anew from its start, without empty places."""
    kept = 0
    for place in range(state.head):
        key = tape[place].key
        if key >= 0:
            tape[kept].key, tape[kept].value = key, tape[place].value
            items[key].place = kept
            kept += 1
    tapes.rebuild(tape, nodes, levels, kept)
    state.head = state.indexed = kept


@_inlined
def put(items: Items, tape: Tape, nodes: Nodes, levels: Levels, state: State, key: int) -> None:
    """Make an item the most recent one in the cache, which it may be new to.

    The tape must have a place left: at most half of it may be in use when it is compacted.
    """
    if state.head == tape.size:
        compact(items, tape, nodes, levels, state)
    item = items[key]
    if item.place >= 0:
        tapes.withdraw(tape, nodes, levels, state, item.place)
        tape[item.place].key = -1
    else:
        state.residents += 1
    item.place = tapes.append(tape, state, key, item.next if item.pins == 0 else np.nan)


@_compiled
def take(items: Items, tape: Tape, nodes: Nodes, levels: Levels, state: State, key: int) -> None:
    """Take an item out of the cache, if it is there."""
    place = items[key].place
    if place >= 0:
        tapes.withdraw(tape, nodes, levels, state, place)
        tape[place].key = -1
        items[key].place = -1
        state.residents -= 1


@_compiled
def note_full(state: State) -> None:
    """The cache is full with the items that it has: so many make up a phase."""
    state.k = min(state.capacity, max(state.residents, 1))


@_compiled
def distrusts(items: Items, state: State, incoming: int) -> bool:
    """Whether room is made for an item that a wrong prediction evicted."""
    return bool(state.rule == LARU and items[incoming].gone == state.phase)


@_compiled
def lose_confidence(state: State) -> None:
    """A misprediction was detected, and paid for by an eviction."""
    state.confidence *= 0.5
    state.mispredictions += 1


@_compiled
def choose(tape: Tape, nodes: Nodes, levels: Levels, state: State, now: float) -> int:
    """Place of the victim by prediction, -1 when nothing may be evicted."""
    n = state.rule
    if n == LARU:
        n = max(int(np.ceil(state.confidence * state.k)), 1)
    return tapes.farthest(tape, nodes, levels, state, n, now)


@_compiled
def note_eviction(items: Items, state: State, key: int, by_prediction: bool) -> None:
    """Count an eviction, and remember one by prediction until the phase ends."""
    if by_prediction:
        items[key].gone = state.phase
        state.by_prediction += 1
    else:
        state.by_recency += 1
