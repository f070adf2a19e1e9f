# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""`slot_ranks` on CUDA, in one launch each: over millions of slots and beside lookups that counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.cache_state import FOREIGN, FREE
from hlem_env.live.kernels.common_triton import Launcher, blocks
from hlem_env.live.slot_ranks import (
    INFINITY,
    OTHERS,
    PREDICTED,
    RECENCIES,
    RECENCIES_BITS,
    YOUNGEST,
)

BLOCK = 1024

_FREE = tl.constexpr(FREE)
_FOREIGN = tl.constexpr(FOREIGN)
_INFINITY = tl.constexpr(INFINITY)
_OTHERS = tl.constexpr(OTHERS)
_PREDICTED = tl.constexpr(PREDICTED)
_RECENCIES = tl.constexpr(RECENCIES)
_RECENCIES_BITS = tl.constexpr(RECENCIES_BITS)
_YOUNGEST = tl.constexpr(YOUNGEST)


@triton.jit(do_not_specialize=["n", "batch", "start", "number"])
def _rank(
    stamp, row_of, next_of, last, rank, head, n, now_s, pace_s, batch, start, number,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """`slot_ranks.ranks`, and how many slots were used from the batch `start` on."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = tl.load(stamp + i, mask=i < n, other=_FOREIGN)
    row = tl.load(row_of + i, mask=i < n, other=-1)
    expected = tl.load(next_of + row, mask=row >= 0, other=float("inf"))
    age = tl.maximum(batch - used, 0).to(tl.float32)
    coarse = (age.to(tl.int32, bitcast=True) >> 13) - (_YOUNGEST - 1)
    recency = tl.minimum(_RECENCIES - 1 - coarse, _RECENCIES - 1)
    due = now_s - age * pace_s
    # A comparison with NaN is false, so that NaN stays here and is infinity below.
    farness = tl.abs(tl.where(expected < due, due, expected) - now_s)
    farness = tl.where(farness == farness, farness, float("inf"))
    nearness = _INFINITY - (farness.to(tl.int32, bitcast=True) >> 16)
    value = (nearness << _RECENCIES_BITS) + recency + _PREDICTED
    value = tl.where(used <= tl.load(last), value, _OTHERS + recency)
    value = tl.where((used == _FREE) | (used == _FOREIGN), used, value)
    tl.store(rank + i, value, mask=i < n)
    seen = (used >= start) & (used < _FOREIGN)
    tl.atomic_add(head + 1, tl.sum(seen.to(tl.int32)), sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(head + 2, number)


@triton.jit(do_not_specialize=["k"])
def _enter(slots, rank, stamp, out, scores, k, BLOCK: tl.constexpr):
    """`slot_ranks.entries`, and the stamps that they are queued with."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + j, mask=j < k, other=0)
    value = tl.load(rank + j, mask=j < k, other=0)
    predicted = (value >= _PREDICTED) & (value < _OTHERS)
    tl.store(out + j, tl.where(predicted, ~slot, slot), mask=j < k)
    tl.store(scores + j, tl.load(stamp + slot, mask=j < k, other=0), mask=j < k)


class Ranks:
    """The kernels for one cache.

    Args:
        row_of: int64 [slots], -1 where no row is.
        next_of: float32 [n_rows + 1], when a row is expected next, in seconds.
        stream: of all its work; whoever calls has made it the current one.
    """

    def __init__(self, row_of: Tensor, next_of: Tensor, stream: torch.cuda.Stream) -> None:
        self.row_of, self.next_of, self.stream = row_of, next_of, stream
        self._launch = Launcher()
        self._all = torch.full((1,), FOREIGN, dtype=torch.int32, device=row_of.device)

    def ranks(
        self,
        stamp: Tensor,
        now_s: float,
        pace_s: float,
        batch: int,
        last: Tensor | None,
        start: int,
        number: int,
        head: Tensor,
    ) -> Tensor:
        """See `slot_ranks.ranks`.

        Args:
            stamp: int32 [slots].
            now_s: see there.
            pace_s: see there.
            batch: see there.
            last: see there.
            start: slots with a stamp from here on are counted.
            number: of the queue.
            head: int32 [4], zeros: the count is put in its second place, the number in its third.
        """
        rank = torch.empty_like(stamp)
        self._launch(
            self.stream, _rank, blocks(len(stamp), BLOCK),
            (stamp, self.row_of, self.next_of, self._all if last is None else last, rank,
             head, len(stamp), now_s, pace_s, batch, start, number),
            (BLOCK,), {},
        )  # fmt: skip
        return rank

    def entries(self, slots: Tensor, rank: Tensor, stamp: Tensor) -> tuple[Tensor, Tensor]:
        """See `slot_ranks.entries`; with the slots' stamps, int32 [k]."""
        out, scores = torch.empty_like(slots), torch.empty_like(slots)
        self._launch(
            self.stream, _enter, blocks(len(slots), BLOCK),
            (slots, rank, stamp, out, scores, len(slots)), (BLOCK,), {},
        )  # fmt: skip
        return out, scores
