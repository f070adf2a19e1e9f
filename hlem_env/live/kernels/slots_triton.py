# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Slots on CUDA: the lowest scores, and what grow and shrink do, as `lookup_reference` defines them.

Nothing depends on timing: places in a result come from sums over the programs before. Row offsets are
64-bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.cache_state import EVICTED, FOREIGN, FREE, SHRUNK, CacheState
from hlem_env.live.kernels.common_triton import (
    BESIDE,
    MEETING,
    PROGRAMS_PER_PROCESSOR,
    Launcher,
    before_me,
    blocks,
    meet,
    my_share,
    sketch_cells,
    span,
)

BLOCK = 1024
DIGIT_BLOCK = 512
ZEROS, SEEN, FOUND = 256, 4, 16
"""Numbers that are 0 when a kernel starts: where programs meet, two for bits, 16 for each digit."""
MOVERS_PER_PROCESSOR = 8
ALONE = MEETING | {"maxnreg": 128}

_EVICTED = tl.constexpr(EVICTED)
_SHRUNK = tl.constexpr(SHRUNK)
_FREE = tl.constexpr(FREE)
_FOREIGN = tl.constexpr(FOREIGN)
_ZEROS = tl.constexpr(ZEROS)
_SEEN = tl.constexpr(SEEN)
_FOUND = tl.constexpr(FOUND)


@triton.jit
def _take_zeros(zeros, next_zeros):
    """The counter to meet at; sees that the next kernel finds zeros, too."""
    if tl.program_id(0) == 0:
        tl.store(next_zeros + tl.arange(0, _ZEROS), tl.zeros((_ZEROS,), tl.int32))
    return zeros


@triton.jit
def _in_order(score, COUNTED: tl.constexpr):
    """Unsigned numbers in the order of the scores, which are int32 from -1 on, or float32."""
    if COUNTED:
        bits = score.to(tl.int32, bitcast=True)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        return bits.to(tl.uint32, bitcast=True) ^ 0x80000000
    else:
        return (score + 1).to(tl.uint32, bitcast=True)


@triton.jit
def _slot_on(pages, i, inside, rows_per_page):
    """The i-th of the slots on the pages."""
    page = tl.load(pages + i // rows_per_page, mask=inside, other=0)
    return page * rows_per_page + i % rows_per_page


@triton.jit
def _one_hot(place, inside, shift):
    """Which value a digit of each number has: 0 or 1, [BLOCK, 16]."""
    digit = ((place >> shift) & 15).to(tl.int32)
    match = (digit[:, None] == tl.arange(0, 16)[None, :]) & inside[:, None]
    return match.to(tl.int32)


@triton.jit
def _note_bits(bits, place, inside):
    """Collect which bits are 1 anywhere, and which are 0."""
    ones, zeros = bits
    return ones | tl.where(inside, place, 0), zeros | tl.where(inside, place ^ 0xFFFFFFFF, 0)


@triton.jit
def _share_bits(bits, seen, arrived):
    """The bits of all programs that are 1 anywhere, and those that are not the same everywhere."""
    ones, zeros = bits
    tl.atomic_or(seen, tl.reduce_or(ones, 0).to(tl.int32, bitcast=True), sem="relaxed")
    tl.atomic_or(seen + 1, tl.reduce_or(zeros, 0).to(tl.int32, bitcast=True), sem="relaxed")
    meet(arrived, 1)
    some = tl.load(seen).to(tl.uint32, bitcast=True)
    return some, some & tl.load(seen + 1).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["n", "k"])
def _select(
    score, pages, snapshot, slots, scores, sums, zeros, next_zeros, n, k, rows_per_page,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """The k lowest scores of the n slots on the pages.

    The k-th is found digit by digit from the top; digits that all share are left out. Whatever is
    written to the scores meanwhile, all passes see one and the same snapshot, [n].
    """
    arrived, found = _take_zeros(zeros, next_zeros), zeros + _FOUND
    lane, digits = tl.arange(0, BLOCK), tl.arange(0, 16)
    begin, end = my_share(n)
    bits = tl.zeros((BLOCK,), tl.uint32), tl.zeros((BLOCK,), tl.uint32)
    for first in range(begin, end, BLOCK):
        inside = first + lane < end
        slot = _slot_on(pages, first + lane, inside, rows_per_page)
        value = tl.load(score + slot, mask=inside, other=0)
        tl.store(snapshot + first + lane, value, mask=inside)
        bits = _note_bits(bits, _in_order(value, COUNTED), inside)
    common, differ = _share_bits(bits, zeros + _SEEN, arrived)
    last = tl.full((), 0, tl.uint32)
    left, times = k, 1
    for turn in range(8):
        shift = 28 - 4 * turn
        digit = ((common >> shift) & 15).to(tl.int32)
        if ((differ >> shift) & 15) != 0:
            mine = tl.zeros((BLOCK, 16), tl.int32)
            for first in range(begin, end, BLOCK):
                inside = first + lane < end
                value = tl.load(snapshot + first + lane, mask=inside, other=0)
                place = _in_order(value, COUNTED)
                # Two shifts: one by 32 is none.
                mine += _one_hot(place, inside & (((place >> shift) >> 4) == last), shift)
            tl.atomic_add(found + turn * 16 + digits, tl.sum(mine, 0), sem="relaxed")
            times += 1
            meet(arrived, times)
            total = tl.load(found + turn * 16 + digits)
            digit = tl.sum((tl.cumsum(total) < left).to(tl.int32))
            left -= tl.sum(tl.where(digits < digit, total, 0))
        last = last * 16 + digit.to(tl.uint32)
    # Of those that equal the last one, the first `left` are taken.
    lower = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for first in range(begin, end, BLOCK):
        inside = first + lane < end
        place = _in_order(tl.load(snapshot + first + lane, mask=inside, other=0), COUNTED)
        lower += (inside & (place < last)).to(tl.int32)
        equal += (inside & (place == last)).to(tl.int32)
    tl.store(sums + tl.program_id(0), tl.sum(lower))
    tl.store(sums + SPAN + tl.program_id(0), tl.sum(equal))
    meet(arrived, times + 1)
    lower_before, _ = before_me(sums, SPAN)
    equal_before, _ = before_me(sums + SPAN, SPAN)
    for first in range(begin, end, BLOCK):
        i = first + lane
        value = tl.load(snapshot + i, mask=i < end, other=0)
        place = _in_order(value, COUNTED)
        below = ((i < end) & (place < last)).to(tl.int32)
        same = ((i < end) & (place == last)).to(tl.int32)
        rank = equal_before + tl.cumsum(same) - same
        taken = (below == 1) | ((same == 1) & (rank < left))
        at = lower_before + tl.cumsum(below) - below + tl.minimum(rank, left)
        tl.store(slots + at, _slot_on(pages, i, taken, rows_per_page), mask=taken)
        tl.store(scores + at, value, mask=taken)
        lower_before += tl.sum(below)
        equal_before += tl.sum(same)


@triton.jit(do_not_specialize=["k"])
def _sort(
    slots, scores, slots_out, scores_out, head, counts, zeros, next_zeros, k, BLOCK: tl.constexpr,
    SPAN: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Put slots in order of their scores, equals as they are; `head` is set to 0.

    Digit by digit from the bottom, but for those that all share. `slots` and `scores`, [2, k], are
    used up in turn.
    """
    arrived = _take_zeros(zeros, next_zeros)
    program, lane, digits = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, 16)
    others = tl.arange(0, SPAN)[None, :]
    begin, end = my_share(k)
    bits = tl.zeros((BLOCK,), tl.uint32), tl.zeros((BLOCK,), tl.uint32)
    for first in range(begin, end, BLOCK):
        inside = first + lane < end
        score = tl.load(scores + first + lane, mask=inside, other=0)
        bits = _note_bits(bits, _in_order(score, COUNTED), inside)
    _, differ = _share_bits(bits, zeros + _SEEN, arrived)
    here, times = k - k, 1
    for turn in range(8):
        if ((differ >> (4 * turn)) & 15) != 0:
            there = k - here
            mine = tl.zeros((BLOCK, 16), tl.int32)
            for first in range(begin, end, BLOCK):
                inside = first + lane < end
                score = tl.load(scores + here + first + lane, mask=inside, other=0)
                mine += _one_hot(_in_order(score, COUNTED), inside, 4 * turn)
            tl.store(counts + digits * SPAN + program, tl.sum(mine, 0))
            meet(arrived, times + 1)
            place = counts + digits[:, None] * SPAN + others
            found = tl.load(place, mask=others < tl.num_programs(0), other=0)
            total = tl.sum(found, 1)
            at = tl.cumsum(total) - total + tl.sum(tl.where(others < program, found, 0), 1)
            for first in range(begin, end, BLOCK):
                inside = first + lane < end
                score = tl.load(scores + here + first + lane, mask=inside, other=0)
                slot = tl.load(slots + here + first + lane, mask=inside, other=0)
                ones = _one_hot(_in_order(score, COUNTED), inside, 4 * turn)
                to = tl.sum(ones * (tl.cumsum(ones, 0) - 1 + at[None, :]), 1)
                tl.store(slots + there + to, slot, mask=inside)
                tl.store(scores + there + to, score, mask=inside)
                at += tl.sum(ones, 0)
            times += 2
            meet(arrived, times)
            here = there
    if program == 0:
        tl.store(head, 0)
    for first in range(begin, end, BLOCK):
        j = first + lane
        tl.store(slots_out + j, tl.load(slots + here + j, mask=j < end, other=0), mask=j < end)
        tl.store(scores_out + j, tl.load(scores + here + j, mask=j < end, other=0), mask=j < end)


@triton.jit(do_not_specialize=["m"])
def _vacate(
    lowest, row_of, slot_of, stamp, count, sketch, pages, leaves, source, target, moves, sums, zeros,
    next_zeros, counters, m, rows_per_page, cells, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """Evict the m lowest slots' rows, then list what to move and where to: `lookup_reference.shrink`."""
    arrived = _take_zeros(zeros, next_zeros)
    lane = tl.arange(0, BLOCK)
    begin, end = my_share(m)
    for first in range(begin, end, BLOCK):
        inside = first + lane < end
        slot = tl.load(lowest + first + lane, mask=inside, other=0)
        row = tl.load(row_of + slot, mask=inside, other=-1)
        held = inside & (row >= 0)
        if COUNTED:
            one, two = sketch_cells(sketch, row, cells)
            score = tl.load(count + slot, mask=held, other=0.0)
            tl.atomic_max(one, score, mask=held, sem="relaxed")
            tl.atomic_max(two, score, mask=held, sem="relaxed")
            tl.store(count + slot, float("-inf"), mask=inside)
        tl.store(slot_of + row, -1, mask=held)
        tl.store(row_of + slot, tl.full((BLOCK,), -1, tl.int64), mask=inside)
        tl.store(stamp + slot, _FREE, mask=inside)
        evicted = tl.sum(held.to(tl.int64))
        tl.atomic_add(counters + _EVICTED, evicted, sem="relaxed")
        tl.atomic_add(counters + _SHRUNK, evicted, sem="relaxed")
    meet(arrived, 1)
    sources = tl.zeros((BLOCK,), tl.int32)
    targets = tl.zeros((BLOCK,), tl.int32)
    for first in range(begin, end, BLOCK):
        moved, free = _to_move(
            lowest, row_of, pages, leaves, first + lane, first + lane < end, rows_per_page
        )  # fmt: skip
        sources += moved.to(tl.int32)
        targets += free.to(tl.int32)
    tl.store(sums + tl.program_id(0), tl.sum(sources))
    tl.store(sums + SPAN + tl.program_id(0), tl.sum(targets))
    meet(arrived, 2)
    sources_before, total = before_me(sums, SPAN)
    targets_before, _ = before_me(sums + SPAN, SPAN)
    if tl.program_id(0) == 0:
        tl.store(moves, total)
    for first in range(begin, end, BLOCK):
        i = first + lane
        inside = i < end
        moved, free = _to_move(lowest, row_of, pages, leaves, i, inside, rows_per_page)
        ones = moved.to(tl.int32)
        at = sources_before + tl.cumsum(ones) - ones
        tl.store(source + at, _slot_on(pages, i, inside, rows_per_page), mask=moved)
        sources_before += tl.sum(ones)
        ones = free.to(tl.int32)
        at = targets_before + tl.cumsum(ones) - ones
        tl.store(target + at, tl.load(lowest + i, mask=inside, other=0), mask=free)
        targets_before += tl.sum(ones)


@triton.jit
def _to_move(lowest, row_of, pages, leaves, i, inside, rows_per_page):
    """Whether the i-th emptied slot still holds a row, and whether the i-th lowest slot stays."""
    emptied = _slot_on(pages, i, inside, rows_per_page)
    slot = tl.load(lowest + i, mask=inside, other=0)
    moved = inside & (tl.load(row_of + emptied, mask=inside, other=-1) >= 0)
    leaving = tl.load(leaves + slot // rows_per_page, mask=inside, other=1)
    return moved, inside & (leaving == 0)


@triton.jit
def _move(
    slab, row_of, slot_of, stamp, count, source, target, moves, WORDS: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    total = tl.load(moves)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
        j = first + tl.arange(0, ROWS)
        inside = j < total
        old = tl.load(source + j, mask=inside, other=0).to(tl.int64)
        new = tl.load(target + j, mask=inside, other=0).to(tl.int64)
        row = tl.load(row_of + old, mask=inside, other=0)
        tl.store(row_of + new, row, mask=inside)
        tl.store(slot_of + row, new.to(tl.int32), mask=inside)
        tl.store(stamp + new, tl.load(stamp + old, mask=inside, other=0), mask=inside)
        if COUNTED:
            tl.store(count + new, tl.load(count + old, mask=inside, other=0.0), mask=inside)
        moved = inside[:, None] & (column < WORDS)
        value = tl.load(slab + old[:, None] * WORDS + column, mask=moved, other=0)
        tl.store(slab + new[:, None] * WORDS + column, value, mask=moved)


@triton.jit(do_not_specialize=["m"])
def _own(
    row_of, stamp, count, pages, m, rows_per_page, BLOCK: tl.constexpr, OWNED: tl.constexpr,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """The m slots on the pages come, free, or go: `lookup_reference.set_owned`."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = _slot_on(pages, i, i < m, rows_per_page)
    tl.store(row_of + slot, tl.full((BLOCK,), -1, tl.int64), mask=i < m)
    tl.store(stamp + slot, _FREE if OWNED else _FOREIGN, mask=i < m)
    if COUNTED:
        tl.store(count + slot, float("-inf") if OWNED else float("inf"), mask=i < m)


class Slots:
    """The kernels for one cache with a dense index, with their workspace.

    Args:
        state: of the cache.
        slot_of: int32 [n_rows + 1], its index.
        rows_per_page: slots of a page.
        stream: of all its work; whoever calls has made it the current one.
    """

    def __init__(
        self, state: CacheState, slot_of: Tensor, rows_per_page: int, stream: torch.cuda.Stream
    ) -> None:
        self.state, self.slot_of, self.rows_per_page = state, slot_of, rows_per_page
        self.stream = stream
        self.device = state.stamp.device
        self.slab = state.slab.view(torch.int32)
        self.words = self.slab.shape[1]
        self.columns = triton.next_power_of_2(self.words)
        self._launch = Launcher()
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        self._span = span(self._processors * PROGRAMS_PER_PROCESSOR)
        zeros = torch.zeros(2, ZEROS, dtype=torch.int32, device=self.device)
        self._zeros = zeros[0], zeros[1]
        self._sums = self._empty(16 * self._span)
        self._moves = self._empty(1)
        self._snapshot = torch.empty_like(state.score)
        self._mine = self._empty(len(state.stamp) // rows_per_page)
        self._pages = 0
        self._slots, self._scores = self._empty(0), state.score[:0]

    def lowest(self, k: int, beside: bool = False, score: Tensor | None = None) -> Tensor:
        """The k slots of the cache with the lowest scores, int32 [k], in order of the slot.

        Of equals the first; k is at most the cache's capacity. Good until the next call of any kind.
        It takes as long as the cache is large, not the pool.
        With `beside`, other kernels find room meanwhile, and it takes longer.

        Args:
            k: slots wanted.
            beside: whether to leave room.
            score: [slots] of the type of the state's, instead of these.
        """
        score = self.state.score if score is None else score
        self._reserve(k)
        if k:
            self._meeting(
                _select, (score, self._mine, self._snapshot, self._slots, self._scores, self._sums),
                (self._pages * self.rows_per_page, k, self.rows_per_page), DIGIT_BLOCK, beside,
            )  # fmt: skip
        return self._slots[:k]

    def highest_of_lowest(self, k: int, beside: bool, score: Tensor) -> Tensor:
        """The k-th lowest score, of one dimension less; k is 1 or more."""
        self.lowest(k, beside, score)
        return self._scores[:k].amax()

    def lowest_in_order(
        self, k: int, beside: bool = False, score: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same as `lowest` in order of the score, of equals in order of the slot; to keep.

        Returns:
            Slots int32 [k], their scores [k], and 0, int32 [1].
        """
        self._reserve(2 * k)
        self.lowest(k, beside, score)
        out = self._empty(4 + k)
        head, slots = out[:1], out[4:]
        scores = torch.empty(k, dtype=self._scores.dtype, device=self.device)
        if k:
            self._meeting(
                _sort, (self._slots, self._scores, slots, scores, head, self._sums), (k,),
                DIGIT_BLOCK, beside,
            )  # fmt: skip
        else:
            head.zero_()
        return slots, scores, head

    def shrink(self, pages: Tensor, mine: Tensor, leaves: Tensor) -> None:
        """Give up pages, int32 [n], in order.

        Args:
            pages: to give up.
            mine: int32 [m], in order: those that the cache keeps.
            leaves: int32 [all pages], 1 for those that it gives up, else 0.
        """
        state, m = self.state, pages.shape[0] * self.rows_per_page
        apart = -(-m // 4) * 4  # all parts of the workspace lie aligned
        self._reserve(3 * apart)
        lowest, source, target = self.lowest(m), self._slots[apart:], self._slots[2 * apart :]
        self._meeting(
            _vacate,
            (lowest, state.row_of, self.slot_of, state.stamp, state.count, state.sketch, pages,
             leaves, source, target, self._moves, self._sums),
            (state.counters, m, self.rows_per_page, state.sketch.shape[1]), BLOCK, False,
        )  # fmt: skip
        self._run(
            _move, self._processors * MOVERS_PER_PROCESSOR,
            (self.slab, state.row_of, self.slot_of, state.stamp, state.count, source, target,
             self._moves),
            (self.words, self.columns, max(1, 1024 // self.columns), state.counted), {},
        )  # fmt: skip
        self._set_owned(pages, mine, False)

    def grow(self, pages: Tensor, mine: Tensor) -> None:
        """Pages, int32 [n], come, free; `mine`, int32 [m], in order, are all of the cache's then."""
        self._set_owned(pages, mine, True)

    def _set_owned(self, pages: Tensor, mine: Tensor, owned: bool) -> None:
        self._pages = len(mine)
        self._mine[: self._pages].copy_(mine)
        state, m = self.state, pages.shape[0] * self.rows_per_page
        self._run(
            _own, blocks(m, BLOCK),
            (state.row_of, state.stamp, state.count, pages, m, self.rows_per_page),
            (BLOCK, owned, state.counted), {},
        )  # fmt: skip

    def _meeting(
        self,
        kernel: Any,
        tensors: tuple[Tensor, ...],
        others: tuple[Any, ...],
        block: int,
        beside: bool,
    ) -> None:
        """Launch a kernel whose programs meet; the zeros stand between tensors and others."""
        zeros, next_zeros = self._zeros
        self._zeros = next_zeros, zeros
        programs = self._processors * (1 if beside else PROGRAMS_PER_PROCESSOR)
        constants = block // 2 if beside else block, self._span, self.state.counted
        arguments = *tensors, zeros, next_zeros, *others
        self._run(kernel, programs, arguments, constants, BESIDE if beside else ALONE)

    def _reserve(self, n: int) -> None:
        """Make the workspace large enough for n slots and their scores."""
        if n > self._slots.shape[0]:
            self._slots = self._empty(n)
            self._scores = torch.empty(n, dtype=self._scores.dtype, device=self.device)

    def _empty(self, n: int) -> Tensor:
        return torch.empty(n, dtype=torch.int32, device=self.device)

    def _run(
        self,
        kernel: Any,
        programs: int,
        arguments: tuple[Any, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        self._launch(self.stream, kernel, programs, arguments, constants, options)
