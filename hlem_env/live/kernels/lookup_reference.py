"""What a lookup does, in PyTorch on any device: it defines the result.

One batch is one moment: a key hits when its row was resident at the start, every row that was hit
is in use and is not evicted, each missing row is fetched once, and missing rows take, in order of
their numbers, the slots with the lowest scores (free ones first, equals in order of the slot).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hlem_env.live.cache_state import (
    EVICTED,
    FOREIGN,
    FREE,
    INSERTED,
    INVALID,
    LAST_UNIQUE,
    LOOKED_UP,
    MISSED,
    SHRUNK,
    UNIQUE,
    WARMED,
    CacheState,
)

EXEMPT_SHARE = 16
Fetch = Callable[[Tensor], Tensor]
"""Values [n, dim] of rows, int64 [n], from the tables."""


class VictimQueue:
    """Slots in order of their score, sorted once and checked when they are taken.

    Scores only rise. An entry whose score is still the queued one comes before everything that is
    not queued; one whose score has changed has been used, or holds another row, and is passed over.
    (Decayed counts: a row inserted since may have a lower score; it is exempt until the next sort,
    which comes after at most 1/16 of the slots. Slots that a full set of the index sets free are
    found by the next sort, too.)
    """

    def __init__(self, state: CacheState) -> None:
        self.state = state
        self._slots = torch.empty(0, dtype=torch.int64, device=state.stamp.device)
        self._scores = state.score[:0]
        self._exempt = 0

    def invalidate(self) -> None:
        """Sort anew at the next call: slots were added, or taken away."""
        self._slots, self._scores = self._slots[:0], self._scores[:0]

    def take(self, n: int, limit: int, batch: int) -> Tensor:
        """The n lowest slots whose stamp is below `limit`, int64 [n or fewer]; they stay queued.

        Args:
            n: slots wanted.
            limit: at most `batch`.
            batch: number of the running batch, or of the last one between two.
        """
        stale = self.state.counted and self._exempt * EXEMPT_SHARE > len(self._slots)
        found = self._slots[:0] if stale else self._valid(n, limit)
        if len(found) < n:
            self._sort(batch)
            found = self._valid(n, limit)
        self._exempt += len(found)
        return found

    def _valid(self, n: int, limit: int) -> Tensor:
        parts: list[Tensor] = []
        have, first, drop = 0, 0, 0
        step = max(2 * n, 1024)
        while have < n and first < len(self._slots):
            slots = self._slots[first : first + step]
            current = self.state.score[slots] == self._scores[first : first + step]
            usable = current & (self.state.stamp[slots] < limit)
            if drop == first and not bool(current.any()):
                drop = first + len(slots)  # nothing here will be valid again
            parts.append(slots[usable])
            have += len(parts[-1])
            first += step
        self._slots, self._scores = self._slots[drop:], self._scores[drop:]
        return torch.cat(parts)[:n] if parts else self._slots[:0]

    def _sort(self, batch: int) -> None:
        # By stamps, what the batch itself uses stays out: it is no victim, and rows stamped later in
        # the same batch are its equals, which the queue would not have in order of the slot.
        below = FOREIGN if self.state.counted else batch
        owned = torch.nonzero(self.state.stamp < below)[:, 0]
        self._scores, order = self.state.score[owned].sort(stable=True)
        self._slots = owned[order]
        self._exempt = 0


def lookup(
    state: CacheState, queue: VictimQueue, keys: Tensor, fetch: Fetch, batch: int, weight: float
) -> tuple[Tensor, int]:
    """Rows of a batch of keys.

    Args:
        state: of the cache; changed.
        queue: of its victims.
        keys: int64 [n], each an existing row; may repeat.
        fetch: reads missing rows.
        batch: number of this batch, above every stamp so far.
        weight: of a lookup at this time, for decayed counts.

    Returns:
        Values [n, dim] in the order of the keys, and the number of rows fetched.
    """
    slots = state.index.find(keys)
    hit = slots >= 0
    hit_slots = slots[hit]
    state.stamp[hit_slots] = batch
    if state.counted:
        state.count.index_add_(
            0, hit_slots, torch.full_like(hit_slots, weight, dtype=torch.float32)
        )
    _add(state, LOOKED_UP, len(keys))
    state.counters[LAST_UNIQUE] = 0
    if len(hit_slots) == len(keys):
        return state.slab[slots], 0
    missed = keys[~hit]
    rows, inverse = torch.unique(missed, return_inverse=True)
    if state.counted:
        state.note_missed(missed, weight)
    values = fetch(rows)
    out = torch.empty(len(keys), state.slab.shape[1], dtype=state.slab.dtype, device=keys.device)
    out[hit] = state.slab[hit_slots]
    out[~hit] = values[inverse]
    begin = int(state.counters[UNIQUE])
    place = torch.arange(begin, begin + len(rows), device=keys.device) % len(state.ring)
    state.ring[place] = rows
    _add(state, MISSED, len(missed))
    _add(state, UNIQUE, len(rows))
    state.counters[LAST_UNIQUE] = len(rows)
    insert(state, queue, rows, values, batch, limit=batch, admission=True, counter=INSERTED)
    return out, len(rows)


def warm(
    state: CacheState, queue: VictimQueue, rows: Tensor, fetch: Fetch, batch: int, evict: bool
) -> int:
    """Insert rows ahead of their use; returns how many were fetched.

    Args:
        state: of the cache; changed.
        queue: of its victims.
        rows: int64 [n], may repeat and be resident already; negative ones are ignored.
        fetch: reads the rows that are missing, of distinct rows in order.
        batch: number of the last batch: what it used, or what was warmed since, is not evicted.
        evict: take victims' slots; else free ones only.
    """
    rows = torch.unique(rows[rows >= 0])
    rows = rows[state.index.find(rows) < 0]
    limit = batch if evict else FREE + 1
    room = len(queue.take(len(rows), limit, batch))
    rows = rows[:room]
    if room:
        insert(state, queue, rows, fetch(rows), batch, limit, admission=False, counter=WARMED)
    return room


def insert(
    state: CacheState,
    queue: VictimQueue,
    rows: Tensor,
    values: Tensor,
    batch: int,
    limit: int,
    admission: bool,
    counter: int,
) -> None:
    """Put missing rows, distinct, in the slots of victims; those without a victim stay out.

    With `admission` and decayed counts, a row stays out unless its count exceeds its victim's.
    """
    victims = queue.take(len(rows), limit, batch)
    rows, values = rows[: len(victims)], values[: len(victims)]
    if state.counted:
        scores = state.sketched(rows)
        if admission:
            admitted = scores > state.count[victims]
            rows, values, victims = rows[admitted], values[admitted], victims[admitted]
            scores = scores[admitted]
    _evict(state, victims, EVICTED)
    taken, displaced = state.index.insert(rows, victims, state.stamp, batch)
    _release(state, displaced)
    _add(state, EVICTED, len(displaced))
    rows, values, victims = rows[taken], values[taken], victims[taken]
    state.slab[victims] = values
    state.row_of[victims] = rows
    state.stamp[victims] = batch
    if state.counted:
        state.count[victims] = scores[taken]
    _add(state, counter, len(rows))


def give_up(state: CacheState, emptied: Tensor) -> None:
    """Slots, int64 [m] in order, go: as many of the lowest rows are evicted and the others moved."""
    moves, source, target = shrink(state, emptied)
    move(state, moves, source, target)
    set_owned(state, emptied, False)


def shrink(state: CacheState, emptied: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give up slots: evict as many of the lowest rows as must go, and say which of the rest to move.

    Nothing here depends on how many rows that is, so nothing waits for the device.

    Args:
        state: of the cache; the rows that must go are evicted.
        emptied: slots to give up, int64 [m].

    Returns:
        `moves`, int64 scalar; `source` and `target`, int64 [m + 1], of which the first `moves`
        count: emptied slots that still hold a row, and free slots elsewhere, each in order.
    """
    m = len(emptied)
    victims = lowest(state.score, m)
    inside = torch.zeros(len(state.stamp), dtype=torch.bool, device=emptied.device)
    inside.index_fill_(0, emptied, True)
    gone = state.row_of[victims]
    if state.counted:
        kept = torch.where(gone >= 0, state.count[victims], 0.0)
        state.remember(gone.clamp(min=0), kept)
    state.index.remove(gone)
    evicted = (gone >= 0).sum()
    state.counters[EVICTED] += evicted
    state.counters[SHRUNK] += evicted
    _clear(state, victims)
    source, moves = _compact(emptied, state.row_of[emptied] >= 0)
    target, _ = _compact(victims, ~inside[victims])
    return moves, source, target


def lowest(score: Tensor, k: int) -> Tensor:
    """The k slots with the lowest scores [slots], int64 [k], in order of the slot; of equals the first."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=score.device)
    last = torch.topk(score, k, largest=False, sorted=False).values.amax()
    below, equal = score < last, score == last
    taken = below | (equal & (equal.cumsum(0) <= k - below.sum()))
    return _compact(torch.arange(len(score), device=score.device), taken)[0][:k]


def move(state: CacheState, moves: Tensor, source: Tensor, target: Tensor) -> None:
    """Move rows with all that is known of them, as `shrink` says."""
    n = int(moves)
    source, target = source[:n], target[:n]
    rows = state.row_of[source]
    state.slab[target] = state.slab[source]
    state.row_of[target] = rows
    state.index.remove(rows)
    stamp = state.stamp[source]
    state.stamp[target] = stamp
    if state.counted:
        state.count[target] = state.count[source]
    # Every row had its place, so every row finds one: nobody makes room.
    state.index.insert(rows, target, state.stamp, FOREIGN)


def set_owned(state: CacheState, slots: Tensor, owned: bool) -> None:
    """Slots [n] come, free, or go."""
    state.row_of.index_fill_(0, slots, -1)
    state.stamp.index_fill_(0, slots, FREE if owned else FOREIGN)
    if state.counted:
        state.count.index_fill_(0, slots, -torch.inf if owned else torch.inf)


def check_keys(state: CacheState, keys: Tensor, n_rows: int) -> Tensor:
    """Drop keys that do not exist, and count them."""
    good = (keys >= 0) & (keys < n_rows)
    _add(state, INVALID, int((~good).sum()))
    return keys[good]


def _evict(state: CacheState, victims: Tensor, counter: int) -> None:
    rows = state.row_of[victims]
    resident = rows >= 0
    rows = rows[resident]
    if state.counted:
        state.remember(rows, state.count[victims[resident]])
    state.index.remove(rows)
    _add(state, counter, len(rows))
    _clear(state, victims)


def _release(state: CacheState, slots: Tensor) -> None:
    """Slots whose rows made room in a full set become free."""
    if state.counted:
        state.remember(state.row_of[slots], state.count[slots])
    _clear(state, slots)


def _clear(state: CacheState, slots: Tensor) -> None:
    """Slots [n] hold no row; nothing of the old one stays."""
    set_owned(state, slots, True)


def _compact(values: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The kept values first, [n + 1], and how many; the last place is for what is dropped."""
    place = torch.where(keep, keep.cumsum(0) - 1, len(values))
    out = torch.empty(len(values) + 1, dtype=values.dtype, device=values.device)
    out[place] = values
    return out, keep.sum()


def _add(state: CacheState, counter: int, n: int) -> None:
    state.counters[counter] += n
