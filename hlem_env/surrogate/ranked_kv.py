"""The surrogate's KV cache under a policy that ranks by prediction (`hlem_env.eviction.laru`).

Entries differ in pages, so k, the length of a phase, is the number of entries at the latest eviction,
and the bounds proved for LARU do not hold. Every request is stored whose entry fits at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.eviction import laru, recency_tape


class RankedKv(NamedTuple):
    """What a learned policy knows."""

    items: NDArray[np.void]
    tape: NDArray[np.void]
    nodes: NDArray[np.void]
    levels: NDArray[np.int64]
    state: NDArray[np.void]

    @classmethod
    def of(cls, policy: str, slots: int) -> RankedKv | None:
        """For a node with so many slots of users; None where the policy is not a learned one."""
        if policy not in laru.RULES:
            return None
        state = laru.new_state(laru.RULES[policy], 2**31)
        return cls(laru.new_items(slots), *recency_tape.new_tape(2 * slots), state)

    def copy(self) -> RankedKv:
        """The same at this moment."""
        return RankedKv(
            self.items.copy(),
            self.tape.copy(),
            self.nodes.copy(),
            self.levels.copy(),
            self.state.copy(),
        )


_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


@_compiled
def give_up(users: Any, clock: Any, kv: Any, place: int, by_prediction: bool) -> None:
    """Evict the entry at a place of the tape."""
    slot = kv.tape[place].key
    laru.take(kv.items, kv.tape, kv.nodes, kv.levels, kv.state[0], slot)
    laru.note_eviction(kv.items, kv.state[0], slot, by_prediction)
    clock.kv_used -= users[slot].pages
    users[slot].pages = users[slot].cached = 0


@_compiled
def shrink(users: Any, clock: Any, kv: Any, capacity: int) -> int:
    """Apply a capacity in pages, entries going in order of recency; returns how many go."""
    gone = 0
    if kv.state[0].capacity != capacity:
        laru.resize(kv.state[0], capacity)
        kv.state[0].k = max(capacity, 1)
    while clock.kv_used > capacity:
        place = recency_tape.oldest(kv.tape, kv.nodes, kv.levels, kv.state[0])
        # One by one, slots of one-off users that others have taken over since come up, too.
        give_up(users, clock, kv, place, False)
        gone += 1
    return gone


@_compiled
def lookup(
    users: Any,
    clock: Any,
    kv: Any,
    slot: int,
    one_off: bool,
    pages: int,
    length: int,
    new_items: int,
    capacity: int,
    now: float,
    gap: float,
) -> int:
    """Tokens reused for a request; stores or grows the entry if `pages` fit in `capacity` at all."""
    items, tape, nodes, levels = kv.items, kv.tape, kv.nodes, kv.levels
    state, user, item = kv.state[0], users[slot], kv.items[slot]
    if user.length > length - new_items:  # shrank or was edited
        clock.kv_used -= user.pages
        user.pages = user.cached = 0
    if user.pages == 0:
        laru.take(items, tape, nodes, levels, state, slot)
    if one_off:
        item.seen = item.gone = 0
    laru.arrive(items, state, slot)
    user.length = length
    item.next = now + gap
    reused = user.cached
    fits = pages <= capacity
    more = pages - user.pages
    if fits and clock.kv_used + more > capacity:
        laru.note_full(state)
        if item.place >= 0:  # not a victim of its own
            recency_tape.withdraw(tape, nodes, levels, state, item.place)
        distrusted = laru.distrusts(items, state, slot)
        if distrusted:
            laru.lose_confidence(state)
        while clock.kv_used + more > capacity:
            if distrusted:
                place = recency_tape.oldest(tape, nodes, levels, state)
            else:
                place = laru.choose(tape, nodes, levels, state, now)
            give_up(users, clock, kv, place, not distrusted)
            clock.evictions += 1
    if fits:
        clock.kv_used += more
        user.pages = pages
        user.cached = length
    if user.pages > 0:
        laru.put(items, tape, nodes, levels, state, slot)
    return int(reused)
