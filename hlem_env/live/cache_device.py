# mypy: disallow-untyped-calls=False
"""What an embedding cache has on CUDA only: kernels, a stream beside, and counters that are read later."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlem_env.eviction.predictor import Predictor
from hlem_env.live.background_queue import BackgroundQueue
from hlem_env.live.cache_state import EVICTED, INSERTED, WARMED, CacheState
from hlem_env.live.host_tables import HostTables
from hlem_env.live.ranked_background_queue import RankedBackgroundQueue
from hlem_env.live.row_index import DenseIndex


class DenseKernels:
    """Kernels for a cache with a dense index, and the queue of victims that they read.

    Args:
        state: of the cache.
        index: its index.
        tables: read on a miss.
        rows_per_page: slots of a page.
        stream: of the queue.
        policy: the cache's.
        predictor: with a policy that ranks by prediction.
    """

    def __init__(
        self,
        state: CacheState,
        index: DenseIndex,
        tables: HostTables,
        rows_per_page: int,
        stream: torch.cuda.Stream,
        policy: str,
        predictor: Predictor | None,
    ) -> None:
        from hlem_env.live.kernels.lookup_triton import Chain
        from hlem_env.live.kernels.slots_triton import Slots

        ranked = predictor is not None
        self.chain: Any = Chain(state, index.slot_of, tables.n_rows, tables.rows, ranked)
        self.slots: Any = Slots(state, index.slot_of, rows_per_page, stream)
        self.ranked: RankedBackgroundQueue | None = None
        """The queue, if predictions rank it."""
        if predictor is not None:
            from hlem_env.live.kernels.rank_triton import Ranks

            ranks: Any = Ranks(state.row_of, self.chain.next_of, stream)
            self.ranked = RankedBackgroundQueue(
                state, self.chain, self.slots, ranks, stream, predictor, policy
            )
        self.queue = self.ranked or BackgroundQueue(state, self.chain, self.slots, stream)


class CacheDevice:
    """The CUDA side of one cache.

    Args:
        state: of the cache.
        tables: read on a miss.
        rows_per_page: slots of a page.
        policy: the cache's.
        predictor: with a policy that ranks by prediction and a dense index.
    """

    def __init__(
        self,
        state: CacheState,
        tables: HostTables,
        rows_per_page: int,
        policy: str,
        predictor: Predictor | None,
    ) -> None:
        self.state, self.tables = state, tables
        self.stream = torch.cuda.Stream(state.stamp.device)
        """Of grow, shrink and the victim queue."""
        self.dense: DenseKernels | None = None
        if isinstance(state.index, DenseIndex):
            self.dense = DenseKernels(
                state, state.index, tables, rows_per_page, self.stream, policy, predictor
            )
        self._copy = torch.zeros_like(state.counters, device="cpu").pin_memory()
        self._copied = torch.cuda.Event()
        self._under_way = False
        self._values: list[int] = self._copy.tolist()
        self._outdated = False
        self._sent = torch.cuda.Event()
        # All rows start at a multiple of 16 bytes.
        places = -(-len(state.stamp) // rows_per_page // 4) * 4
        self._pages = torch.zeros(3, places, dtype=torch.int32).pin_memory()
        self._pages_there = torch.zeros_like(self._pages, device=state.stamp.device)
        self.complete = False
        """Whether every row that exists is resident, so that no lookup can miss."""

    def forget_complete(self) -> None:
        """Rows are about to be evicted; a copy of the counters under way does not know it."""
        self.complete = False
        self._outdated = self._under_way

    def snapshot(self) -> None:
        """Copy the counters to the host behind what the current stream was given."""
        if not self._under_way:
            self._copy.copy_(self.state.counters, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.state.stamp.device.index))
            self._under_way = True

    def poll(self) -> list[int]:
        """The counters as the host last knew them, one or more batches ago."""
        if self._under_way and self._copied.query():
            self._under_way = False
            values = self._values = self._copy.tolist()
            if self.dense is not None:
                self.dense.queue.observe(values)
            resident = values[INSERTED] + values[WARMED] - values[EVICTED]
            self.complete = resident == self.tables.n_rows and not self._outdated
            self._outdated = False
        return self._values

    def send_pages(
        self, pages: NDArray[np.int64], mine: NDArray[np.int64]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pages that come or go [n], and all of the cache then [m], to the device, on `stream`.

        The device is not waited for, and `stream` is the current one.

        Returns:
            Both in order, int32 [n] and int32 [m], and int32 [all pages or more], 1 for each of the
            former, else 0: until the next call.
        """
        if not self._sent.query():
            self._pages = torch.zeros_like(self._pages).pin_memory()
        chosen, changed, all_mine = self._pages.numpy()
        chosen[:] = 0
        chosen[pages] = 1
        changed[: len(pages)] = np.sort(pages)
        all_mine[: len(mine)] = np.sort(mine)
        there = self._pages_there.copy_(self._pages, non_blocking=True)
        self._sent.record(self.stream)
        return there[1, : len(pages)], there[2, : len(mine)], there[0]

    def fetch(self, rows: Tensor) -> Tensor:
        """Values [n, dim] of rows, int64 [n], over the link."""
        from hlem_env.live.kernels.gather_triton import gather_rows

        out = torch.empty(len(rows), self.tables.dim, dtype=self.tables.dtype, device=rows.device)
        gather_rows(self.tables.rows, rows, out)
        return out

    def aside(self) -> torch.cuda.StreamContext:
        """The stream beside, behind what the current one was given."""
        self.stream.wait_stream(torch.cuda.current_stream(self.state.stamp.device.index))
        return torch.cuda.stream(self.stream)
