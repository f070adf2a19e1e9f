"""What the CUDA kernels of a ranked cache do, in plain PyTorch, so that its queue runs on a CPU, too.

Streams and events stand still there: everything has happened when it is asked for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from hlem_env.eviction.predictor import Predictor
from hlem_env.live import cache_device, slot_ranks
from hlem_env.live.background_queue import BackgroundQueue
from hlem_env.live.cache_state import (
    DISTRUSTED,
    EVICTED,
    FOREIGN,
    INSERTED,
    LAST_UNIQUE,
    LEFT,
    LOOKED_UP,
    MISPREDICTED,
    MISPREDICTED_BEFORE,
    MISSED,
    PHASE,
    QUEUE_NUMBER,
    RECENT,
    RECENT_OF,
    UNIQUE,
    VALID_UNTIL,
    CacheState,
)
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.kernels import lookup_reference as reference
from hlem_env.live.ranked_background_queue import RankedBackgroundQueue


class NoStream:
    """A stream of a device that is done with everything at once."""

    def __init__(self, *_: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        pass

    def wait_event(self, _: object) -> None:
        pass

    def record_event(self) -> NoEvent:
        return NoEvent()


class NoEvent:
    """An event that has passed."""

    def record(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class ModelChain:
    """`lookup_triton.Chain`."""

    def __init__(self, state: CacheState, tables: HostTables, ranked: bool) -> None:
        self.state, self.tables, self.ranked = state, tables, ranked
        self.queue_slot = torch.empty(0, dtype=torch.int32)
        self.queue_score = state.stamp[:0]
        self.queue_head = torch.zeros(4, dtype=torch.int32)
        self.queue_number = self.given = 0
        self.audit = False
        self.next_of = torch.zeros(tables.n_rows + 1)
        self.gone_in = torch.zeros(tables.n_rows + 1, dtype=torch.uint8)
        self.phase, self.phase_start, self.now_s = 1, 0, 0.0
        self._counted = torch.zeros(tables.n_rows + 1, dtype=torch.bool)

    def lookup(self, keys: Tensor, batch: int, weight: float, few: bool) -> Tensor:
        state, counters = self.state, self.state.counters
        slots = state.index.find(keys)
        state.stamp[slots[slots >= 0]] = batch
        rows = torch.unique(keys[slots < 0])
        counters[LOOKED_UP] += len(keys)
        counters[MISSED] += (slots < 0).sum()
        counters[UNIQUE] += len(rows)
        counters[LAST_UNIQUE] = len(rows)
        if self.ranked:
            self._judge_batch()
        slot = self.queue_slot ^ (self.queue_slot >> 31)
        valid = state.stamp[slot] == self.queue_score
        victims = self.queue_slot[valid & (state.stamp[slot] < batch)][: len(rows)]
        self._place(rows, victims, batch)
        if self.audit:
            valid = state.stamp[slot] == self.queue_score
            counters[VALID_UNTIL], counters[QUEUE_NUMBER] = (
                self.given + valid.sum(),
                self.queue_number,
            )
        return self.tables.rows[keys]

    def lookup_complete(self, keys: Tensor, batch: int, weight: float) -> Tensor:
        return self.lookup(keys, batch, weight, few=True)

    def _judge_batch(self) -> None:
        counters = self.state.counters
        if counters[PHASE] != self.phase:
            counters[PHASE], counters[DISTRUSTED], counters[LEFT] = self.phase, 0, 0
            self._counted[:] = False
        else:
            counters[DISTRUSTED] += counters[MISPREDICTED] > counters[MISPREDICTED_BEFORE]
        counters[MISPREDICTED_BEFORE] = counters[MISPREDICTED]
        counters[RECENT], counters[RECENT_OF] = self.queue_head[1], self.queue_head[2]

    def _place(self, rows: Tensor, victims: Tensor, batch: int) -> None:
        state, counters = self.state, self.state.counters
        slots = (victims ^ (victims >> 31)).long()
        old, used = state.row_of[slots], state.stamp[slots]
        away = old[(victims < 0) & (old >= 0)]
        self.next_of[rows] = self.now_s
        counters[MISPREDICTED] += (self.gone_in[rows] == self.phase).sum()
        self._counted[rows[: len(slots)]] = False
        self.gone_in[away] = self.phase
        self._counted[old[(victims < 0) & (old >= 0) & (used >= self.phase_start)]] = True
        counters[LEFT] = self._counted.sum()
        counters[EVICTED] += (old >= 0).sum()
        counters[INSERTED] += len(slots)
        state.index.remove(old)
        placed = rows[: len(slots)]
        state.index.insert(placed, slots, state.stamp, batch)
        state.row_of[slots], state.stamp[slots] = placed, batch
        state.slab[slots] = self.tables.rows[placed]


class ModelSlots:
    """`slots_triton.Slots`."""

    def __init__(self, state: CacheState, rows_per_page: int) -> None:
        self.state, self.rows_per_page = state, rows_per_page

    def lowest(self, k: int, beside: bool = False, score: Tensor | None = None) -> Tensor:
        return self.lowest_in_order(k, beside, score)[0].sort().values

    def highest_of_lowest(self, k: int, beside: bool, score: Tensor) -> Tensor:
        return score.sort().values[k - 1]

    def lowest_in_order(
        self, k: int, beside: bool = False, score: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        score = self.state.stamp if score is None else score
        in_order, slots = score.sort(stable=True)
        assert (in_order[:k] < FOREIGN).all()
        return slots[:k].int(), in_order[:k].clone(), torch.zeros(1, dtype=torch.int32)

    def grow(self, pages: Tensor, mine: Tensor) -> None:
        reference.set_owned(self.state, self._slots(pages), True)

    def shrink(self, pages: Tensor, mine: Tensor, leaves: Tensor) -> None:
        reference.give_up(self.state, self._slots(pages))

    def _slots(self, pages: Tensor) -> Tensor:
        row = torch.arange(self.rows_per_page)
        return (pages.long()[:, None] * self.rows_per_page + row).reshape(-1)


class ModelRanks:
    """`rank_triton.Ranks`."""

    def __init__(self, state: CacheState, chain: ModelChain) -> None:
        self.state, self.chain = state, chain

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
        head[1], head[2] = ((stamp >= start) & (stamp < FOREIGN)).sum(), number
        expected = self.chain.next_of[self.state.row_of]
        return slot_ranks.ranks(stamp, expected, now_s, pace_s, batch, last)

    def entries(self, slots: Tensor, rank: Tensor, stamp: Tensor) -> tuple[Tensor, Tensor]:
        return slot_ranks.entries(slots, rank), stamp[slots]


class ModelKernels:
    """`cache_device.DenseKernels`."""

    def __init__(
        self,
        state: CacheState,
        index: Any,
        tables: HostTables,
        rows_per_page: int,
        stream: Any,
        policy: str,
        predictor: Predictor | None,
    ) -> None:
        self.chain = ModelChain(state, tables, predictor is not None)
        self.slots = ModelSlots(state, rows_per_page)
        self.ranked = None
        if predictor is not None:
            ranks = ModelRanks(state, self.chain)
            self.ranked = RankedBackgroundQueue(
                state, self.chain, self.slots, ranks, stream, predictor, policy
            )
        self.queue = self.ranked or BackgroundQueue(state, self.chain, self.slots, stream)


def without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's names mean the CPU's memory, and work is done when it is given."""
    for name, stand_in in {
        "Stream": NoStream,
        "Event": NoEvent,
        "current_stream": lambda *_: NoStream(),
        "stream": lambda _: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(cache_device, "DenseKernels", ModelKernels)


def model_cache(
    pool: Any, tables: HostTables, policy: str, predictor: Predictor | None = None
) -> EmbeddingCache:
    """A cache on a CPU that works as one with the kernels does; within `without_device`."""
    cache = EmbeddingCache(pool, tables, "lru", "dense")
    side = cache_device.CacheDevice(cache.state, tables, cache.rows_per_page, policy, predictor)
    cache._device_side, cache._dense = side, side.dense
    if side.dense is not None and side.dense.ranked is not None:
        cache._predictions = side.dense.ranked.predictions
    return cache
