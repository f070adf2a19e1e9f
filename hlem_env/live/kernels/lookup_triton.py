# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""A lookup on CUDA, as `lookup_reference` defines it: no host synchronisation anywhere.

One lookup is a chain of kernels whose sizes stay on the device; without misses all but the first
leave at once.

    probe    map, recency; hits are copied here, or by `copy_hits` beside the chain; misses to a list
    claim    the first key of a missing row sets its bit in a bitmap of all rows, and writes its
             position to the map; the others are repeats
    count    bits in each block of the bitmap, valid entries in each block of the victim queue
    scan     sums over the blocks
    emit     missing rows, distinct and in order, and as many victims; the bitmap is clear again
    place    map, owners and stamps of the slots that change hands
    fetch    rows over the link, in order, into their slots and to the first position that asked
    repeat   rows from the first position to the others

Rows are moved as 32-bit words, whatever their type. Row offsets are 64-bit. A kernel that reads and
writes the same cell has one element a thread, since Triton repeats loads in every warp otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.cache_state import (
    EVICTED,
    INSERTED,
    INVALID,
    LAST_UNIQUE,
    LAST_VALID,
    LOOKED_UP,
    MISSED,
    SKETCH_MULTIPLIERS,
    SKETCH_SHIFT,
    UNIQUE,
    WARMED,
    CacheState,
)

SMALL_ROWS = 2**26
"""Up to so many rows, blocks of the bitmap and the queue are small, for parallelism."""
N_MISSED, N_REPEATS, N_UNIQUE, N_USABLE = range(4)

_LOOKED_UP = tl.constexpr(LOOKED_UP)
_MISSED = tl.constexpr(MISSED)
_UNIQUE = tl.constexpr(UNIQUE)
_INSERTED = tl.constexpr(INSERTED)
_WARMED = tl.constexpr(WARMED)
_EVICTED = tl.constexpr(EVICTED)
_INVALID = tl.constexpr(INVALID)
_LAST_UNIQUE = tl.constexpr(LAST_UNIQUE)
_LAST_VALID = tl.constexpr(LAST_VALID)
_N_MISSED = tl.constexpr(N_MISSED)
_N_REPEATS = tl.constexpr(N_REPEATS)
_N_UNIQUE = tl.constexpr(N_UNIQUE)
_N_USABLE = tl.constexpr(N_USABLE)
_FIRST = tl.constexpr(SKETCH_MULTIPLIERS[0])
_SECOND = tl.constexpr(SKETCH_MULTIPLIERS[1])
_SHIFT = tl.constexpr(SKETCH_SHIFT)


@triton.jit(do_not_specialize=["n", "n_rows", "now"])
def _probe(
    keys, slot_of, stamp, count, slab, out, slots, missed, sizes, counters, n, n_rows, now, weight,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, COPY: tl.constexpr,
    LOOKUP: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    key = tl.load(keys + i, mask=inside, other=-1)
    exists = inside & (key >= 0) & (key < n_rows)
    slot = tl.load(slot_of + key, mask=exists, other=-1)
    hit = exists & (slot >= 0)
    miss = exists & (slot < 0)
    if LOOKUP:
        if COPY:
            column = tl.arange(0, COLUMNS)[None, :]
            moved = hit[:, None] & (column < WORDS)
            row = tl.load(slab + slot.to(tl.int64)[:, None] * WORDS + column, mask=moved, other=0)
            tl.store(
                out + i.to(tl.int64)[:, None] * WORDS + column,
                row,
                mask=moved,
                cache_modifier=".cs",
            )
        else:
            tl.store(slots + i, slot, mask=inside)
        tl.store(stamp + slot, now, mask=hit)
        if COUNTED:
            tl.atomic_add(count + slot, weight, mask=hit, sem="relaxed")
    # Behind the copy, since a sum over the program waits for all of its keys.
    if tl.sum((inside & (hit == 0)).to(tl.int32)) > 0:
        absent = miss.to(tl.int32)
        place = tl.atomic_add(sizes + _N_MISSED, tl.sum(absent)) + tl.cumsum(absent) - absent
        tl.store(missed + place, i, mask=miss)
        if LOOKUP:
            tl.atomic_add(counters + _INVALID, tl.sum((inside & (exists == 0)).to(tl.int64)))


@triton.jit(do_not_specialize=["n"])
def _copy_hits(
    slots, slab, out, n, WORDS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < n, other=-1)
    column = tl.arange(0, COLUMNS)[None, :]
    moved = (slot >= 0)[:, None] & (column < WORDS)
    row = tl.load(slab + slot.to(tl.int64)[:, None] * WORDS + column, mask=moved, other=0)
    tl.store(out + i.to(tl.int64)[:, None] * WORDS + column, row, mask=moved, cache_modifier=".cs")


@triton.jit
def _claim(
    keys, slot_of, bitmap, sketch, missed, repeats, sizes, weight, cells, BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    total = tl.load(sizes + _N_MISSED)
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < total
        i = tl.load(missed + j, mask=inside, other=0)
        key = tl.load(keys + i, mask=inside, other=0)
        if COUNTED:
            one = (key * _FIRST >> _SHIFT) & (cells - 1)
            two = (key * _SECOND >> _SHIFT) & (cells - 1)
            tl.atomic_add(sketch + one, weight, mask=inside, sem="relaxed")
            tl.atomic_add(sketch + cells + two, weight, mask=inside, sem="relaxed")
        unclaimed = inside & (tl.load(slot_of + key, mask=inside, other=0) == -1)
        bit = tl.full((BLOCK,), 1, tl.int32) << (key & 31).to(tl.int32)
        before = tl.atomic_or(bitmap + (key >> 5), bit, mask=unclaimed, sem="relaxed")
        winner = unclaimed & ((before & bit) == 0)
        tl.store(slot_of + key, -2 - i, mask=winner)
        again = inside & (winner == 0)
        ones = again.to(tl.int32)
        found = tl.sum(ones)
        if found > 0:
            place = tl.atomic_add(sizes + _N_REPEATS, found) + tl.cumsum(ones) - ones
            tl.store(repeats + place, i, mask=again)


@triton.jit
def _bits(word):
    """Set bits of each int32 word."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _usable(queue_slot, queue_score, score, stamp, j, inside, limit):
    """Slots of queue entries j, and which of them may be evicted."""
    slot = tl.load(queue_slot + j, mask=inside, other=0)
    queued = tl.load(queue_score + j, mask=inside, other=0)
    current = tl.load(score + slot, mask=inside, other=1)
    used = tl.load(stamp + slot, mask=inside, other=2147483647)
    return slot, inside & (current == queued) & (used < limit)


@triton.jit(do_not_specialize=["words", "queued", "limit", "word_blocks", "queue_blocks"])
def _count(
    keys, slot_of, bitmap, score, stamp, queue_slot, queue_score, repeats, sources, counts, sizes,
    words, queued, limit, word_blocks, queue_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if tl.load(sizes + _N_MISSED) > 0:
        lane = tl.arange(0, BLOCK)
        if block < word_blocks:
            w = block * BLOCK + lane
            tl.store(counts + block, tl.sum(_bits(tl.load(bitmap + w, mask=w < words, other=0))))
        elif block < word_blocks + queue_blocks:
            j = (block - word_blocks) * BLOCK + lane
            _, usable = _usable(queue_slot, queue_score, score, stamp, j, j < queued, limit)
            tl.store(counts + block, tl.sum(usable.to(tl.int32)))
        else:
            total = tl.load(sizes + _N_REPEATS)
            spread = tl.num_programs(0) - word_blocks - queue_blocks
            for first in range((block - word_blocks - queue_blocks) * BLOCK, total, spread * BLOCK):
                j = first + lane
                inside = j < total
                i = tl.load(repeats + j, mask=inside, other=0)
                key = tl.load(keys + i, mask=inside, other=0)
                winner = tl.load(slot_of + key, mask=inside, other=0)
                tl.store(sources + j, -2 - winner, mask=inside)


@triton.jit(do_not_specialize=["n", "word_blocks", "queue_blocks"])
def _scan(
    counts, offsets, sizes, next_sizes, counters, n, word_blocks, queue_blocks, LOOKUP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    missed = tl.load(sizes + _N_MISSED)
    unique = missed - tl.load(sizes + _N_REPEATS)
    if missed > 0:
        lane = tl.arange(0, BLOCK)
        before = missed * 0
        for first in range(0, word_blocks, BLOCK):
            inside = first + lane < word_blocks
            found = tl.load(counts + first + lane, mask=inside, other=0)
            tl.store(offsets + first + lane, before + tl.cumsum(found) - found, mask=inside)
            before += tl.sum(found)
        before = missed * 0
        for first in range(0, queue_blocks, BLOCK):
            j = word_blocks + first + lane
            inside = first + lane < queue_blocks
            found = tl.load(counts + j, mask=inside, other=0)
            tl.store(offsets + j, before + tl.cumsum(found) - found, mask=inside)
            before += tl.sum(found)
        tl.store(sizes + _N_USABLE, tl.minimum(before, unique))
        if LOOKUP:
            tl.store(counters + _LAST_VALID, before.to(tl.int64))
    tl.store(sizes + _N_UNIQUE, unique)
    tl.store(next_sizes + tl.arange(0, 4), tl.zeros((4,), tl.int32))
    if LOOKUP:
        tl.store(counters + _LAST_UNIQUE, unique.to(tl.int64))
        tl.store(counters + _LOOKED_UP, tl.load(counters + _LOOKED_UP) + n)
        tl.store(counters + _MISSED, tl.load(counters + _MISSED) + missed)
        tl.store(counters + _UNIQUE, tl.load(counters + _UNIQUE) + unique)


@triton.jit(do_not_specialize=["words", "queued", "limit", "word_blocks"])
def _emit(
    bitmap, score, stamp, queue_slot, queue_score, counts, offsets, unique_rows, victims, sizes,
    words, queued, limit, word_blocks, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if tl.load(sizes + _N_UNIQUE) > 0:
        lane = tl.arange(0, BLOCK)
        offset = tl.load(offsets + block)
        if block < word_blocks:
            if tl.load(counts + block) > 0:
                w = block * BLOCK + lane
                word = tl.load(bitmap + w, mask=w < words, other=0)
                bits = _bits(word)
                place = offset + tl.cumsum(bits) - bits
                for bit in range(32):
                    found = (word >> bit) & 1
                    tl.store(unique_rows + place, w * 32 + bit, mask=found == 1)
                    place += found
                tl.store(bitmap + w, tl.zeros((BLOCK,), tl.int32), mask=w < words)
        else:
            needed = tl.load(sizes + _N_USABLE)
            if offset < needed:
                j = (block - word_blocks) * BLOCK + lane
                slot, usable = _usable(queue_slot, queue_score, score, stamp, j, j < queued, limit)
                ones = usable.to(tl.int32)
                place = offset + tl.cumsum(ones) - ones
                tl.store(victims + place, slot, mask=usable & (place < needed))


@triton.jit(do_not_specialize=["now"])
def _place(
    slot_of, row_of, stamp, count, sketch, unique_rows, victims, targets, firsts, ring, sizes,
    counters, now, cells, ring_rows, BLOCK: tl.constexpr, LOOKUP: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    unique = tl.load(sizes + _N_UNIQUE)
    usable = tl.load(sizes + _N_USABLE)
    for first in range(tl.program_id(0) * BLOCK, unique, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < unique
        row = tl.load(unique_rows + j, mask=inside, other=0).to(tl.int64)
        tl.store(firsts + j, -2 - tl.load(slot_of + row, mask=inside, other=0), mask=inside)
        has = inside & (j < usable)
        slot = tl.load(victims + j, mask=has, other=0)
        if COUNTED:
            one = tl.load(sketch + ((row * _FIRST >> _SHIFT) & (cells - 1)), mask=has, other=0.0)
            two = tl.load(
                sketch + cells + ((row * _SECOND >> _SHIFT) & (cells - 1)), mask=has, other=0.0
            )
            score = tl.minimum(one, two)
            victim_score = tl.load(count + slot, mask=has, other=float("inf"))
            if LOOKUP:
                has = has & (score > victim_score)
        old = tl.load(row_of + slot, mask=has, other=-1)
        gone = has & (old >= 0)
        if COUNTED:
            tl.atomic_max(
                sketch + ((old * _FIRST >> _SHIFT) & (cells - 1)), victim_score, mask=gone
            )
            tl.atomic_max(
                sketch + cells + ((old * _SECOND >> _SHIFT) & (cells - 1)), victim_score, mask=gone
            )
            tl.store(count + slot, score, mask=has)
        tl.store(slot_of + old, -1, mask=gone)
        tl.store(row_of + slot, row, mask=has)
        tl.store(stamp + slot, now, mask=has)
        target = tl.where(has, slot, -1)
        tl.store(slot_of + row, target, mask=inside)
        tl.store(targets + j, target, mask=inside)
        inserted = tl.sum(has.to(tl.int64))
        evicted = tl.sum(gone.to(tl.int64))
        tl.atomic_add(counters + _EVICTED, evicted)
        if LOOKUP:
            tl.atomic_add(counters + _INSERTED, inserted)
            begin = tl.load(counters + _UNIQUE) - unique
            tl.store(ring + ((begin + j) & (ring_rows - 1)), row, mask=inside)
        else:
            tl.atomic_add(counters + _WARMED, inserted)


@triton.jit
def _fetch(
    source, slab, out, unique_rows, targets, firsts, sizes, WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, STAGED: tl.constexpr, WRITE_OUT: tl.constexpr,
):  # fmt: skip
    unique = tl.load(sizes + _N_UNIQUE)
    column = tl.arange(0, COLUMNS)[None, :]
    for begin in range(tl.program_id(0) * BLOCK, unique, tl.num_programs(0) * BLOCK):
        j = begin + tl.arange(0, BLOCK)
        inside = j < unique
        first = tl.load(firsts + j, mask=inside, other=0).to(tl.int64)[:, None]
        target = tl.load(targets + j, mask=inside, other=-1).to(tl.int64)[:, None]
        if STAGED:
            where = first
        else:
            where = tl.load(unique_rows + j, mask=inside, other=0).to(tl.int64)[:, None]
        used = column < WORDS
        wanted = inside[:, None] & used
        if not WRITE_OUT:
            wanted = wanted & (target >= 0)
        row = tl.load(source + where * WORDS + column, mask=wanted, other=0)
        tl.store(slab + target * WORDS + column, row, mask=(target >= 0) & used)
        if WRITE_OUT:
            tl.store(out + first * WORDS + column, row, mask=wanted)


@triton.jit
def _repeat(
    out, repeats, sources, sizes, WORDS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.load(sizes + _N_REPEATS)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < total
        to = tl.load(repeats + j, mask=inside, other=0).to(tl.int64)[:, None]
        origin = tl.load(sources + j, mask=inside, other=0).to(tl.int64)[:, None]
        moved = inside[:, None] & (column < WORDS)
        row = tl.load(out + origin * WORDS + column, mask=moved, other=0)
        tl.store(out + to * WORDS + column, row, mask=moved)


@triton.jit(do_not_specialize=["n"])
def _gather(
    source, rows, slot_of, out, staged, n, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        row = tl.load(rows + j, mask=j < n, other=-1)
        wanted = row >= 0
        if SKIP:
            wanted = wanted & (tl.load(slot_of + row, mask=wanted, other=0) < 0)
            tl.store(staged + j, tl.where(wanted, row, -1), mask=j < n)
        moved = wanted[:, None] & (column < WORDS)
        value = tl.load(source + row[:, None] * WORDS + column, mask=moved, other=0)
        tl.store(out + j.to(tl.int64)[:, None] * WORDS + column, value, mask=moved)


@triton.jit
def _move(
    slab, row_of, slot_of, stamp, count, source, target, moves, WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    total = tl.load(moves)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < total
        old = tl.load(source + j, mask=inside, other=0)
        new = tl.load(target + j, mask=inside, other=0)
        row = tl.load(row_of + old, mask=inside, other=0)
        tl.store(row_of + new, row, mask=inside)
        tl.store(slot_of + row, new.to(tl.int32), mask=inside)
        tl.store(stamp + new, tl.load(stamp + old, mask=inside, other=0), mask=inside)
        if COUNTED:
            tl.store(count + new, tl.load(count + old, mask=inside, other=0.0), mask=inside)
        moved = inside[:, None] & (column < WORDS)
        value = tl.load(slab + old[:, None] * WORDS + column, mask=moved, other=0)
        tl.store(slab + new[:, None] * WORDS + column, value, mask=moved)


class Chain:
    """The kernels with their workspace, for one cache with a dense index.

    Args:
        state: of the cache.
        slot_of: int32 [n_rows + 1], its index.
        n_rows: rows that exist.
        host: the tables' rows, registered with CUDA.
    """

    def __init__(self, state: CacheState, slot_of: Tensor, n_rows: int, host: Tensor) -> None:
        self.state, self.slot_of, self.n_rows = state, slot_of, n_rows
        self.slab = state.slab.view(torch.int32)
        self.host = host.view(torch.int32)
        self.words = self.slab.shape[1]
        self.columns = triton.next_power_of_2(self.words)
        device = self.slab.device
        self.bitmap = torch.zeros((n_rows + 31) // 32, dtype=torch.int32, device=device)
        self.sizes = torch.zeros(2, 4, dtype=torch.int32, device=device)
        self.queue_slot = torch.empty(0, dtype=torch.int32, device=device)
        self.queue_score = state.score[:0]
        self._turn = 0
        self._size_rows = self.sizes[0], self.sizes[1]
        self._space: tuple[Tensor, ...] = ()
        self._blocks: tuple[Tensor, ...] = ()
        self._keys_max = self._blocks_max = 0
        self._compiled: dict[tuple[object, ...], Any] = {}
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._rows_block = max(1, 1024 // self.columns)
        self._block = 256 if n_rows <= SMALL_ROWS else 1024
        self._events = torch.cuda.Event(), torch.cuda.Event()

    def lookup(
        self,
        keys: Tensor,
        batch: int,
        weight: float,
        expected: int,
        beside: torch.cuda.Stream | None,
    ) -> Tensor:
        """Values [n, dim] of keys, int64 [n]; misses are inserted.

        Args:
            keys: rows to find.
            batch: its number.
            weight: of a lookup, for decayed counts.
            expected: distinct misses there may be; a wrong guess costs time alone.
            beside: with it, misses are fetched on that stream while the current one copies the hits.
        """
        n = keys.shape[0]
        out = torch.empty(n, self.words, dtype=torch.int32, device=keys.device)
        keys = _aligned(keys)
        here = torch.cuda.current_stream(keys.device)
        sizes = self._find(here, keys, out, batch, batch, weight, beside is None, lookup=True)
        if beside is None:
            self._fetch(here, self.host, out, sizes, n, expected, staged=False, lookup=True)
        else:
            found, fetched = self._events
            found.record(here)
            beside.wait_event(found)
            self._fetch(beside, self.host, out, sizes, n, expected, staged=False, lookup=True)
            fetched.record(beside)
            block = self._rows_block
            self._launch(
                here, _copy_hits, triton.cdiv(n, block), (self._space[0], self.slab, out, n),
                (self.words, self.columns, block),
            )  # fmt: skip
            here.wait_event(fetched)
        self._launch(
            here, _repeat, min(self._processors * 8, triton.cdiv(n, self._rows_block)),
            (out, *self._space[2:4], sizes), (self.words, self.columns, self._rows_block),
        )  # fmt: skip
        return out.view(self.state.slab.dtype)

    def lookup_complete(self, keys: Tensor, batch: int, weight: float) -> Tensor:
        """The same where every row that exists is resident: there can be no miss."""
        n = keys.shape[0]
        out = torch.empty(n, self.words, dtype=torch.int32, device=keys.device)
        self._reserve(n)
        here = torch.cuda.current_stream(keys.device)
        self._probe(here, _aligned(keys), out, batch, weight, copy=True, lookup=True)
        return out.view(self.state.slab.dtype)

    def warm(self, rows: Tensor, staged: Tensor | None, batch: int, limit: int) -> None:
        """Insert rows, int64 [n], from the tables, or from their staged values [n, dim].

        Negative rows are ignored. Slots with a stamp below `limit` may be taken.
        """
        source = self.host if staged is None else staged.view(torch.int32)
        rows = _aligned(rows)
        n = rows.shape[0]
        here = torch.cuda.current_stream(rows.device)
        sizes = self._find(here, rows, self.slab, batch, limit, 0.0, copy=False, lookup=False)
        self._fetch(here, source, self.slab, sizes, n, n, staged=staged is not None, lookup=False)

    def gather(self, rows: Tensor, out: Tensor, staged: Tensor | None, programs: int) -> None:
        """Copy rows [n] from the tables to out [n, dim]; negative ones are left out.

        With `staged`, int64 [n], resident rows are left out too, and it says -1 where one was.
        """
        rows = _aligned(rows)
        n = rows.shape[0]
        self._launch(
            torch.cuda.current_stream(rows.device), _gather, max(min(programs, n), 1),
            (self.host, rows, self.slot_of, out.view(torch.int32),
             rows if staged is None else staged, n),
            (self.words, self.columns, 1, staged is not None),
        )  # fmt: skip

    def move(self, moves: Tensor, source: Tensor, target: Tensor) -> None:
        """Move rows between slots, as `lookup_reference.move`; the number stays on the device."""
        state = self.state
        self._launch(
            torch.cuda.current_stream(source.device), _move, self._processors * 8,
            (self.slab, state.row_of, self.slot_of, state.stamp, state.count, source, target, moves),
            (self.words, self.columns, self._rows_block, state.counted),
        )  # fmt: skip

    def _find(
        self,
        here: torch.cuda.Stream,
        keys: Tensor,
        out: Tensor,
        batch: int,
        limit: int,
        weight: float,
        copy: bool,
        lookup: bool,
    ) -> Tensor:
        """All up to `place`; returns the sizes."""
        n, state = keys.shape[0], self.state
        self._reserve(n)
        sizes, next_sizes = self._size_rows[self._turn], self._size_rows[1 - self._turn]
        _, missed, repeats, sources, unique_rows, victims, targets, firsts = self._space
        counts, offsets = self._blocks
        words, queued, block = self.bitmap.shape[0], self.queue_slot.shape[0], self._block
        word_blocks = triton.cdiv(words, block)
        queue_blocks = triton.cdiv(queued, block)
        cells = state.sketch.shape[1]
        few = min(self._processors * 2, triton.cdiv(n, 512))
        queue = (state.score, state.stamp, self.queue_slot, self.queue_score)
        self._probe(here, keys, out, batch, weight, copy, lookup)
        self._turn = 1 - self._turn
        self._launch(
            here, _claim, few,
            (keys, self.slot_of, self.bitmap, state.sketch, missed, repeats, sizes, weight, cells),
            (512, state.counted and lookup),
        )  # fmt: skip
        self._launch(
            here, _count, word_blocks + queue_blocks + few,
            (keys, self.slot_of, self.bitmap, *queue, repeats, sources, counts, sizes, words, queued,
             limit, word_blocks, queue_blocks),
            (block,),
        )  # fmt: skip
        self._launch(
            here, _scan, 1,
            (counts, offsets, sizes, next_sizes, state.counters, n, word_blocks, queue_blocks),
            (lookup, 1024),
        )  # fmt: skip
        self._launch(
            here, _emit, word_blocks + queue_blocks,
            (self.bitmap, *queue, counts, offsets, unique_rows, victims, sizes, words, queued, limit,
             word_blocks),
            (block,),
        )  # fmt: skip
        self._launch(
            here, _place, few,
            (self.slot_of, state.row_of, state.stamp, state.count, state.sketch, unique_rows, victims,
             targets, firsts, state.ring, sizes, state.counters, batch, cells, state.ring.shape[0]),
            (512, lookup, state.counted),
        )  # fmt: skip
        return sizes

    def _fetch(
        self,
        stream: torch.cuda.Stream,
        source: Tensor,
        out: Tensor,
        sizes: Tensor,
        n: int,
        expected: int,
        staged: bool,
        lookup: bool,
    ) -> None:
        # One row a program, started in order: what is under way then stays close together in host
        # memory, and its addresses are translated faster. Programs that stride over the rows drift
        # apart (35 GB/s instead of 43 at 512-byte rows); they do so only where the guess is too low.
        programs = min(n, max(self._processors * 8, expected + expected // 4))
        self._launch(
            stream, _fetch, programs, (source, self.slab, out, *self._space[4:5], *self._space[6:], sizes),
            (self.words, self.columns, 1, staged, lookup),
        )  # fmt: skip

    def _probe(
        self,
        here: torch.cuda.Stream,
        keys: Tensor,
        out: Tensor,
        batch: int,
        weight: float,
        copy: bool,
        lookup: bool,
    ) -> None:
        n, state = keys.shape[0], self.state
        block = self._rows_block if copy else 512
        self._launch(
            here, _probe, triton.cdiv(n, block),
            (keys, self.slot_of, state.stamp, state.count, self.slab, out, *self._space[:2],
             self._size_rows[self._turn], state.counters, n, self.n_rows, batch, weight),
            (self.words, self.columns, block, copy, lookup, state.counted),
        )  # fmt: skip

    def _launch(
        self,
        stream: torch.cuda.Stream,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
    ) -> None:
        """Launch; from the second time on without Triton's look at every argument.

        That look costs up to 50 us. It would always come to the same end: pointers are aligned to 16
        bytes, and sizes are not specialised or never change.
        """
        key = (id(kernel), constants)
        launcher = self._compiled.get(key)
        if launcher is None:
            with torch.cuda.stream(stream):
                compiled = kernel[(programs,)](*arguments, *constants)
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return
        run, function, metadata = launcher
        pointers = [
            value.data_ptr() if isinstance(value, Tensor) and value.is_cuda else value
            for value in arguments
        ]
        no_hooks = None, None, None
        run(
            programs, 1, 1, stream.cuda_stream, function, metadata, *no_hooks, *pointers, *constants
        )  # fmt: skip

    def _reserve(self, n: int) -> None:
        """Make the workspace large enough for n keys and the queue of now."""
        device = self.slab.device
        if n > self._keys_max:
            self._keys_max = max(triton.next_power_of_2(n), 1024)
            space = torch.empty(8, self._keys_max, dtype=torch.int32, device=device)
            self._space = space.unbind()
        blocks = triton.cdiv(self.bitmap.shape[0], self._block) + triton.cdiv(
            self.queue_slot.shape[0], self._block
        )
        if blocks > self._blocks_max:
            self._blocks_max = max(triton.next_power_of_2(blocks), 1024)
            counts = torch.empty(2, self._blocks_max, dtype=torch.int32, device=device)
            self._blocks = counts.unbind()


def _aligned(keys: Tensor) -> Tensor:
    """The keys at an address that is a multiple of 16, which the kernels are compiled for."""
    return keys if keys.data_ptr() % 16 == 0 and keys.is_contiguous() else keys.clone()


def gather_rows(host: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copy rows, int64 [n], from registered host memory [rows, dim] to out [n, dim]."""
    words = host.view(torch.int32).shape[1]
    columns = triton.next_power_of_2(words)
    n = rows.shape[0]
    if n:
        _gather[(n,)](
            host.view(torch.int32), rows, rows, out.view(torch.int32), rows, n, words, columns,
            1, False,
        )  # fmt: skip
