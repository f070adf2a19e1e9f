# mypy: disallow-untyped-calls=False
"""LARU, FPB and HF for embedding rows on CUDA: a victim queue in the order of predictions.

`ranked_rows` says what the policies are by whole batches. Here a queue that is sorted beside the
lookups serves several of them as though they were one batch:

    FPB     all rows, those expected last first
    LARU    the ceil(lambda k) least recent (and their equals), those expected last first; then the
            others by recency. Before them as many of the least recent as rows were mispredicted
    HF      one after the other, of the 4 least recent the one expected last

So a victim of LARU was among the ceil(lambda k) least recent when its queue was begun, and it is used
up in the queue's order: rows used since are passed over, rows inserted since are spared until the next
queue. A queue is replaced when about 1/32 of the cache was inserted since it is in use.

Predictions arrive in `next_of`, a time for each row that exists, written by the predictor's thread on
a stream of its own. A row of which nothing is known since its last use counts as due then, so that it
is expected after as long as it has not been used.

What the phase has seen and evicted the kernels count exactly (`resolve_triton`), and the host hears of
it one or more batches later: lambda halves, room is made by recency, and phases end that much later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hlem_env.errors import require_choice
from hlem_env.eviction import laru
from hlem_env.eviction.predictor import Floats, Predictor
from hlem_env.eviction.protocol import Keys
from hlem_env.live.background_queue import BackgroundQueue
from hlem_env.live.cache_state import (
    DISTRUSTED,
    FREE,
    LAST_UNIQUE,
    LEFT,
    MISPREDICTED,
    MISPREDICTED_BEFORE,
    PHASE,
    RECENT,
    RECENT_OF,
    CacheState,
)
from hlem_env.live.row_predictions import RowPredictions
from hlem_env.live.slot_ranks import far, hold_back, recencies

SPARED_SHARE = 32
"""A queue is replaced when about 1/32 of the slots were filled since it is in use."""
PHASES = 127
"""Numbers of phases before they repeat."""


class RankedBackgroundQueue(BackgroundQueue):
    """Victims by prediction, in the place of a queue by recency.

    Args:
        state: of the cache, not counted.
        chain: of kernels, ranked.
        slots: finds the lowest scores.
        ranks: of slots by prediction (`rank_triton`).
        stream: to sort on.
        predictor: asked in the thread of `predictions`.
        policy: "laru", "fpb" or "hf".

    Raises:
        ArgumentError: another policy.
    """

    def __init__(
        self,
        state: CacheState,
        chain: Any,
        slots: Any,
        ranks: Any,
        stream: torch.cuda.Stream,
        predictor: Predictor,
        policy: str,
    ) -> None:
        require_choice("policy", policy, laru.RULES)
        super().__init__(state, chain, slots, stream)
        self._rule = laru.RULES[policy]
        self._ranks = ranks
        self.fallbacks = 0
        """Queues by recency for want of predictions."""
        self.predictions = RowPredictions(predictor, self._write)
        self._upload = torch.cuda.Stream(state.stamp.device)
        self._written = torch.cuda.Event()
        self._origin_s: float | None = None
        self._batch = 0
        self._capacity = 0
        self._misses = 0.0  # distinct ones of a batch, of late
        self._distrusted = 0  # batches of this phase that had mispredicted rows
        self._mispredicted = self._made_up_for = 0  # rows
        self._phase_queue = 1  # the first queue that counts what this phase has seen
        self._phase_over = False

    @property
    def confidence(self) -> float:
        """Lambda, as far as the host knows."""
        return float(0.5**self._distrusted)

    def begin(self, batch: int, now_s: float) -> None:
        """A lookup of this number starts, or rows are inserted ahead after it, at a time in seconds."""
        if self._origin_s is None:
            self._origin_s = now_s
        # float32 on the device: from the first lookup on, to be exact for longer.
        self.chain.now_s = max(self.chain.now_s, float(now_s - self._origin_s))
        self._batch = batch
        if self._phase_over:
            self._begin_phase(batch)

    def ask(self, keys: Tensor) -> None:
        """Have something predicted of the keys, int64 [n], that were looked up."""
        if self.predictions.has_room():
            assert self._origin_s is not None
            now_s = self._origin_s + self.chain.now_s
            self.predictions.ask(_on_host(keys), now_s)

    def observe(self, counters: list[int]) -> None:
        """See `BackgroundQueue.observe`."""
        super().observe(counters)
        self._misses += 0.5 * (counters[LAST_UNIQUE] - self._misses)
        self._mispredicted = counters[MISPREDICTED]
        if counters[PHASE] == self.chain.phase:
            last = counters[MISPREDICTED] > counters[MISPREDICTED_BEFORE]
            self._distrusted = counters[DISTRUSTED] + last
            known = counters[RECENT_OF] >= self._phase_queue
            seen = counters[RECENT] + counters[LEFT]
            self._phase_over = self._rule == laru.LARU and known and seen >= self._capacity

    def prepare(self, n: int, capacity: int) -> None:
        """See `BackgroundQueue.prepare`."""
        self._capacity = capacity
        super().prepare(n, capacity)

    def rebuild_here(self, capacity: int) -> None:
        """See `BackgroundQueue.rebuild_here`. The cache was resized, which begins a phase."""
        self._begin_phase(self._batch + 1)
        super().rebuild_here(capacity)

    def _begin_phase(self, batch: int) -> None:
        """Forget what the phase has seen and evicted, from this batch on."""
        chain = self.chain
        chain.phase, chain.phase_start = chain.phase % PHASES + 1, batch
        if chain.phase == 1:
            chain.gone_in.zero_()
        self._distrusted, self._phase_over = 0, False
        self._phase_queue = self.builds + 1

    def _old(self, capacity: int) -> bool:
        return self._age * self._misses * SPARED_SHARE > capacity

    def _in_order(self, k: int, capacity: int, beside: bool) -> tuple[Tensor, Tensor, Tensor]:
        head = torch.zeros(4, dtype=torch.int32, device=self.state.stamp.device)
        usable = k > 0 and self.predictions.usable
        if usable:
            self.stream.wait_event(self._written)
        if usable and self._rule != laru.HF:
            return *self._ranked(k, capacity, beside, head), head
        slots, stamp, _ = super()._in_order(k, capacity, beside)
        if usable:
            return *self._held_back(slots, stamp), head
        self.fallbacks += k > 0
        self._made_up_for = self._mispredicted
        return slots, stamp, head

    def _ranked(self, k: int, capacity: int, beside: bool, head: Tensor) -> tuple[Tensor, Tensor]:
        stamp = self.state.stamp.clone()  # lookups go on
        last, oldest = None, 0
        if self._rule == laru.LARU:
            candidates = math.ceil(self.confidence * capacity)
            if candidates < capacity:
                last = self.slots.highest_of_lowest(candidates, beside, stamp)
            oldest = min(self._mispredicted - self._made_up_for, k)
            self._made_up_for += oldest
        start, number = self.chain.phase_start, self.builds + 1
        rank = self._ranks.ranks(stamp, *self._moment(), last, start, number, head)
        if oldest:
            first = self.slots.lowest(oldest, beside, stamp).long()
            used = stamp[first]
            rank[first] = torch.where(used == FREE, used, recencies(used, self._batch))
        slots, rank, _ = self.slots.lowest_in_order(k, beside, rank)
        if self._rule != laru.LARU:
            return slots, stamp[slots]
        entries: tuple[Tensor, Tensor] = self._ranks.entries(slots, rank, stamp)
        return entries

    def _held_back(self, slots: Tensor, stamp: Tensor) -> tuple[Tensor, Tensor]:
        expected = self.chain.next_of[self.state.row_of[slots]]
        farness = far(stamp, expected, *self._moment())
        farness = torch.where(stamp == FREE, torch.inf, farness)
        order = hold_back(farness, laru.HF - 1)
        return slots[order], stamp[order]

    def _moment(self) -> tuple[float, float, int]:
        """Seconds now, seconds from one batch to the next, and the last batch."""
        return self.chain.now_s, self.chain.now_s / max(self._batch, 1), self._batch

    def _write(self, rows: Keys, times: Floats) -> None:
        """In the predictor's thread: put times [n] of rows [n] where the next queue finds them."""
        assert self._origin_s is not None
        device = self.state.stamp.device
        with torch.cuda.stream(self._upload):
            where = torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)
            since = torch.from_numpy((times - self._origin_s).astype(np.float32)).pin_memory()
            self.chain.next_of.index_copy_(0, where, since.to(device, non_blocking=True))
            written = torch.cuda.Event()
            written.record()
        self._written = written


def _on_host(keys: Tensor) -> Callable[[], Keys]:
    """Keys, int64 [n], copied behind what the current stream was given; whoever calls waits for them."""
    copy = keys.to("cpu", non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> Keys:
        copied.synchronize()
        rows: Keys = copy.numpy()
        return rows

    return wait
