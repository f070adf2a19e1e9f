# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""The middle of a lookup on CUDA: which rows are missing, distinct and in order, and who makes room.

One kernel in phases, between which all programs meet:

    claim   the first key of a missing row sets its bit in a bitmap of all rows, and writes its
            position to the map; the others are repeats
    tally   bits in each program's share of the bitmap, valid entries in its share of a window of the
            victim queue
    emit    missing rows, and the window's victims; where they are too few, the next window. The
            bitmap is clear again
    place   map, owners and stamps of the slots that change hands; what LARU remembers of them
"""

from __future__ import annotations

import triton
import triton.language as tl

from hlem_env.live.cache_state import (
    DISTRUSTED,
    EVICTED,
    INSERTED,
    LAST_UNIQUE,
    LEFT,
    MISPREDICTED,
    MISPREDICTED_BEFORE,
    MISSED,
    PHASE,
    QUEUE_NUMBER,
    RECENT,
    RECENT_OF,
    UNIQUE,
    VALID_UNTIL,
    WARMED,
)
from hlem_env.live.kernels.common_triton import before_me, meet, my_share, sketch_cells

SIZES = 8
N_MISSED, N_REPEATS, N_UNIQUE, ARRIVED, TICKET, TICKETS_DONE = range(6)
"""Places in the sizes of one batch, which the kernels of a lookup hand on."""
SUMS = 5
"""Numbers of every program."""

_MISSED = tl.constexpr(MISSED)
_UNIQUE = tl.constexpr(UNIQUE)
_INSERTED = tl.constexpr(INSERTED)
_WARMED = tl.constexpr(WARMED)
_EVICTED = tl.constexpr(EVICTED)
_LAST_UNIQUE = tl.constexpr(LAST_UNIQUE)
_VALID_UNTIL = tl.constexpr(VALID_UNTIL)
_QUEUE_NUMBER = tl.constexpr(QUEUE_NUMBER)
_MISPREDICTED = tl.constexpr(MISPREDICTED)
_MISPREDICTED_BEFORE = tl.constexpr(MISPREDICTED_BEFORE)
_DISTRUSTED = tl.constexpr(DISTRUSTED)
_LEFT = tl.constexpr(LEFT)
_PHASE = tl.constexpr(PHASE)
_RECENT = tl.constexpr(RECENT)
_RECENT_OF = tl.constexpr(RECENT_OF)
_SIZES = tl.constexpr(SIZES)
_N_MISSED = tl.constexpr(N_MISSED)
_N_REPEATS = tl.constexpr(N_REPEATS)
_N_UNIQUE = tl.constexpr(N_UNIQUE)
_ARRIVED = tl.constexpr(ARRIVED)
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def _bits(word):
    """Set bits of each int32 word."""
    x = word.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


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
            one, two = sketch_cells(sketch, key, cells)
            tl.atomic_add(one, weight, mask=inside, sem="relaxed")
            tl.atomic_add(two, weight, mask=inside, sem="relaxed")
        unclaimed = inside & (tl.load(slot_of + key, mask=inside, other=0) == -1)
        bit = tl.full((BLOCK,), 1, tl.int32) << (key & 31).to(tl.int32)
        before = tl.atomic_or(bitmap + (key >> 5), bit, mask=unclaimed, sem="relaxed")
        winner = unclaimed & ((before & bit) == 0)
        tl.store(slot_of + key, -2 - i, mask=winner)
        again = inside & (winner == 0)
        ones = again.to(tl.int32)
        found = tl.sum(ones)
        if found > 0:
            taken = tl.atomic_add(sizes + _N_REPEATS, found, sem="relaxed")
            place = taken + tl.cumsum(ones) - ones
            tl.store(repeats + place, i, mask=again)


@triton.jit
def slot_of_entry(entry):
    """An entry is a slot, or its complement where a prediction put it in the queue."""
    return entry ^ (entry >> 31)


@triton.jit
def valid(queue_slot, queue_score, score, j, inside):
    """Queue entries j, and which of them still have the score that they were queued with."""
    entry = tl.load(queue_slot + j, mask=inside, other=0)
    queued = tl.load(queue_score + j, mask=inside, other=0)
    return entry, inside & (tl.load(score + slot_of_entry(entry), mask=inside, other=0) == queued)


@triton.jit
def _tally_rows(bitmap, sums, words, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.int32)
    begin, end = my_share(words)
    for first in range(begin, end, BLOCK):
        w = first + tl.arange(0, BLOCK)
        found += _bits(tl.load(bitmap + w, mask=w < end, other=0))
    tl.store(sums + tl.program_id(0), tl.sum(found))


@triton.jit
def _tally_victims(
    score, stamp, queue_slot, queue_score, sums, begin, size, limit, BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Usable entries of this program's share of a window, and where its first valid one is."""
    found = tl.zeros((BLOCK,), tl.int32)
    head = tl.full((BLOCK,), _NOWHERE, tl.int32)
    mine, end = my_share(size)
    for first in range(begin + mine, begin + end, BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < begin + end
        entry, current = valid(queue_slot, queue_score, score, j, inside)
        usable = current & (tl.load(stamp + slot_of_entry(entry), mask=inside, other=0) < limit)
        found += usable.to(tl.int32)
        head = tl.minimum(head, tl.where(current, j, _NOWHERE))
    tl.store(sums + tl.program_id(0), tl.sum(found))
    tl.store(sums + SPAN + tl.program_id(0), tl.min(head))


@triton.jit
def _trace(keys, slot_of, repeats, sources, sizes, BLOCK: tl.constexpr):
    """For each repeat the position of the first key of its row."""
    total = tl.load(sizes + _N_REPEATS)
    for first in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < total
        i = tl.load(repeats + j, mask=inside, other=0)
        key = tl.load(keys + i, mask=inside, other=0)
        tl.store(sources + j, -2 - tl.load(slot_of + key, mask=inside, other=0), mask=inside)


@triton.jit
def _emit_rows(bitmap, rows, sums, words, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    offset, _ = before_me(sums, SPAN)
    begin, end = my_share(words)
    for first in range(begin, end, BLOCK):
        w = first + tl.arange(0, BLOCK)
        word = tl.load(bitmap + w, mask=w < end, other=0)
        bits = _bits(word)
        place = offset + tl.cumsum(bits) - bits
        offset += tl.sum(bits)
        tl.store(bitmap + w, tl.zeros((BLOCK,), tl.int32), mask=word != 0)
        for _ in range(tl.max(bits)):
            some = word != 0
            lowest = _bits((word & -word) - 1)
            tl.store(rows + place, w * 32 + lowest, mask=some)
            place += some.to(tl.int32)
            word = word & (word - 1)


@triton.jit
def _emit_victims(
    score, stamp, queue_slot, queue_score, victims, begin, size, offset, needed, limit,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries of this program's share of a window; `offset` is where they go."""
    mine, end = my_share(size)
    first, end = begin + mine, begin + end
    while (first < end) & (offset < needed):
        j = first + tl.arange(0, BLOCK)
        entry, current = valid(queue_slot, queue_score, score, j, j < end)
        used = tl.load(stamp + slot_of_entry(entry), mask=j < end, other=0)
        usable = current & (used < limit)
        ones = usable.to(tl.int32)
        place = offset + tl.cumsum(ones) - ones
        tl.store(victims + place, entry, mask=usable & (place < needed))
        offset += tl.sum(ones)
        first += BLOCK


@triton.jit
def _choose_victims(
    score, stamp, queue_slot, queue_score, queue_head, victims, arrived, sums, queued, needed, limit,
    BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The first usable entries, `needed` or all there are; returns how many, and the meetings so far.

    Entries before the head are void for ever. One window is nearly always enough: it is four times
    as long as what is needed, and starts where the last batch's started to be valid.
    """
    begin = tl.load(queue_head)
    size = tl.minimum(tl.maximum(4 * needed, BLOCK * tl.num_programs(0)), queued - begin)
    have = needed * 0
    times = have + 1
    more = True
    while more:
        # Two sets of sums in turn: some programs may still read those of the window before.
        area = sums + 2 * SPAN * (times % 2)
        _tally_victims(
            score, stamp, queue_slot, queue_score, area, begin, size, limit, BLOCK, SPAN
        )  # fmt: skip
        times += 1
        meet(arrived, times)
        before, found = before_me(area, SPAN)
        if (times == 2) & (tl.program_id(0) == 0):
            lane = tl.arange(0, SPAN)
            firsts = tl.load(area + SPAN + lane, mask=lane < tl.num_programs(0), other=_NOWHERE)
            tl.store(queue_head, tl.minimum(tl.min(firsts), begin + size))
        _emit_victims(
            score, stamp, queue_slot, queue_score, victims, begin, size, have + before, needed, limit,
            BLOCK,
        )  # fmt: skip
        have += found
        begin += size
        size = tl.minimum(2 * size, queued - begin)
        more = (have < needed) & (size > 0)
    return tl.minimum(have, needed), times


@triton.jit
def _judge(
    stamp, gone_in, counters, row, inside, slot, has, entry, old, gone, start, phase,
    LOOKUP: tl.constexpr,
):  # fmt: skip
    """Note which rows a prediction evicts, and which missing ones it had evicted in this phase.

    A byte of each row: twice the phase, and 1 more while it counts as seen and evicted.
    """
    before = tl.load(gone_in + row, mask=inside, other=0).to(tl.int32)
    wrong = inside & ((before >> 1) == phase)
    back = wrong & has
    away = gone & (entry < 0)
    seen = away & (tl.load(stamp + slot, mask=away, other=0) >= start)
    tl.store(gone_in + row, (before & 254).to(tl.uint8), mask=back)
    tl.store(gone_in + old, (2 * phase + seen.to(tl.int32)).to(tl.uint8), mask=away)
    left = tl.sum(seen.to(tl.int64)) - tl.sum(tl.where(back, before & 1, 0).to(tl.int64))
    tl.atomic_add(counters + _LEFT, left, sem="relaxed")
    if LOOKUP:
        tl.atomic_add(counters + _MISPREDICTED, tl.sum(wrong.to(tl.int64)), sem="relaxed")


@triton.jit
def _place(
    slot_of, row_of, stamp, count, sketch, rows, victims, targets, firsts, ring, counters, next_of,
    gone_in, unique, usable, now, now_s, start, phase, cells, ring_rows, BLOCK: tl.constexpr,
    LOOKUP: tl.constexpr, COUNTED: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    for first in range(tl.program_id(0) * BLOCK, unique, tl.num_programs(0) * BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < unique
        row = tl.load(rows + j, mask=inside, other=0).to(tl.int64)
        tl.store(firsts + j, -2 - tl.load(slot_of + row, mask=inside, other=0), mask=inside)
        has = inside & (j < usable)
        entry = tl.load(victims + j, mask=has, other=0)
        slot = slot_of_entry(entry)
        if COUNTED:
            one, two = sketch_cells(sketch, row, cells)
            score = tl.minimum(
                tl.load(one, mask=has, other=0.0), tl.load(two, mask=has, other=0.0)
            )  # fmt: skip
            victim_score = tl.load(count + slot, mask=has, other=float("inf"))
            if LOOKUP:
                has = has & (score > victim_score)
        old = tl.load(row_of + slot, mask=has, other=-1)
        gone = has & (old >= 0)
        if RANKED:
            # What was predicted of it is over; it counts as due until there is more.
            tl.store(next_of + row, now_s, mask=inside)
            _judge(
                stamp, gone_in, counters, row, inside, slot, has, entry, old, gone, start, phase,
                LOOKUP,
            )  # fmt: skip
        if COUNTED:
            one, two = sketch_cells(sketch, old, cells)
            tl.atomic_max(one, victim_score, mask=gone, sem="relaxed")
            tl.atomic_max(two, victim_score, mask=gone, sem="relaxed")
            tl.store(count + slot, score, mask=has)
        tl.store(slot_of + old, -1, mask=gone)
        tl.store(row_of + slot, row, mask=has)
        tl.store(stamp + slot, now, mask=has)
        target = tl.where(has, slot, -1)
        tl.store(slot_of + row, target, mask=inside)
        tl.store(targets + j, target, mask=inside)
        inserted = tl.sum(has.to(tl.int64))
        tl.atomic_add(counters + _EVICTED, tl.sum(gone.to(tl.int64)), sem="relaxed")
        if LOOKUP:
            tl.atomic_add(counters + _INSERTED, inserted, sem="relaxed")
            begin = tl.load(counters + _UNIQUE) - unique
            tl.store(ring + ((begin + j) & (ring_rows - 1)), row, mask=inside)
        else:
            tl.atomic_add(counters + _WARMED, inserted, sem="relaxed")


@triton.jit
def _account(counters, sizes, missed, unique, LOOKUP: tl.constexpr):
    """What one program notes for all."""
    tl.store(sizes + _N_UNIQUE, unique)
    if LOOKUP:
        tl.store(counters + _LAST_UNIQUE, unique.to(tl.int64))
        tl.store(counters + _MISSED, tl.load(counters + _MISSED) + missed)
        tl.store(counters + _UNIQUE, tl.load(counters + _UNIQUE) + unique)


@triton.jit
def _judge_batch(counters, queue_head, phase):
    """Count the batch before, if it had mispredicted rows; a new phase starts at 0.

    And hand on how many rows of the phase were resident when the queue was begun, and its number.
    """
    tl.store(counters + _RECENT, tl.load(queue_head + 1).to(tl.int64))
    tl.store(counters + _RECENT_OF, tl.load(queue_head + 2).to(tl.int64))
    wrong = tl.load(counters + _MISPREDICTED)
    if tl.load(counters + _PHASE) != phase:
        tl.store(counters + _PHASE, phase.to(tl.int64))
        tl.store(counters + _DISTRUSTED, 0)
        tl.store(counters + _LEFT, 0)
    elif wrong > tl.load(counters + _MISPREDICTED_BEFORE):
        tl.store(counters + _DISTRUSTED, tl.load(counters + _DISTRUSTED) + 1)
    tl.store(counters + _MISPREDICTED_BEFORE, wrong)


@triton.jit(
    do_not_specialize=[
        "words", "queued", "limit", "now", "given", "number", "audit", "start", "phase",
    ]
)  # fmt: skip
def resolve(
    keys, slot_of, row_of, stamp, count, score, sketch, bitmap, queue_slot, queue_score, queue_head,
    missed, repeats, sources, rows, victims, targets, firsts, sums, ring, sizes, next_sizes, counters,
    next_of, gone_in, words, queued, limit, now, given: tl.int64, number, audit, weight, now_s, start,
    phase, cells, ring_rows, BLOCK: tl.constexpr, SPAN: tl.constexpr, LOOKUP: tl.constexpr,
    COUNTED: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """All phases. With `audit`, `serve` is about to count the valid entries of the queue."""
    arrived = sizes + _ARRIVED
    total = tl.load(sizes + _N_MISSED)
    if tl.program_id(0) == 0:
        tl.store(next_sizes + tl.arange(0, _SIZES), tl.zeros((_SIZES,), tl.int32))
        if LOOKUP:
            tl.store(counters + _LAST_UNIQUE, 0)
            if audit > 0:
                tl.store(counters + _VALID_UNTIL, given)
                tl.store(counters + _QUEUE_NUMBER, number.to(tl.int64))
        if RANKED:
            _judge_batch(counters, queue_head, phase)
    if total > 0:
        _claim(
            keys, slot_of, bitmap, sketch, missed, repeats, sizes, weight, cells, BLOCK,
            COUNTED and LOOKUP,
        )  # fmt: skip
        meet(arrived, 1)
        unique = total - tl.load(sizes + _N_REPEATS)
        _tally_rows(bitmap, sums, words, BLOCK)
        _trace(keys, slot_of, repeats, sources, sizes, BLOCK)
        usable, times = _choose_victims(
            score, stamp, queue_slot, queue_score, queue_head, victims, arrived, sums + SPAN, queued,
            unique, limit, BLOCK, SPAN,
        )  # fmt: skip
        _emit_rows(bitmap, rows, sums, words, BLOCK, SPAN)
        if tl.program_id(0) == 0:
            _account(counters, sizes, total, unique, LOOKUP)
        meet(arrived, times + 1)
        _place(
            slot_of, row_of, stamp, count, sketch, rows, victims, targets, firsts, ring, counters,
            next_of, gone_in, unique, usable, now, now_s, start, phase, cells, ring_rows, BLOCK, LOOKUP,
            COUNTED, RANKED,
        )  # fmt: skip
