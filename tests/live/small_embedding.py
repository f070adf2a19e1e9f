"""An embedding side of a few rows, for tests of the pool and the boundary."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from hlem_env.live.pool import Pool

DIM = 4
ROW_BYTES = DIM * 4


def make_embedding(pool: Pool, returns_pinned: bool = False) -> SmallEmbedding:
    """The embedding side that the tests run with."""
    return SmallEmbedding(pool, returns_pinned)


class SmallEmbedding:
    """Keys and their rows in pages of the pool; the oldest go first.

    Pages in use by a lookup are pinned in the pool. Asked to shrink, it keeps them, or with
    `returns_pinned` gives them up like others and leaves it to the pool to hold them back.
    """

    def __init__(self, pool: Pool, returns_pinned: bool) -> None:
        self.pool = pool
        self.returns_pinned = returns_pinned
        self.rows = pool.view_rows(DIM, torch.float32)
        self.rows_per_page = pool.page_bytes // ROW_BYTES
        self.pages: list[int] = []
        self.slot_of: dict[int, int] = {}
        """From oldest to newest."""
        self.in_use: list[int] = []
        self.shrink_evictions = 0

    @property
    def resident_rows(self) -> int:
        return len(self.slot_of)

    @property
    def capacity_rows(self) -> int:
        return len(self.pages) * self.rows_per_page

    def insert(self, key: int) -> None:
        """Put a row in, in the place of the oldest outside pinned pages if all are taken."""
        if key in self.slot_of:
            return
        free = self._free_slots(self.pages)
        if not free:
            old = [k for k, s in self.slot_of.items() if s // self.rows_per_page not in self.in_use]
            if not old:
                return
            free = [self.slot_of.pop(old[0])]
        self.slot_of[key] = free[0]
        self.rows[free[0]] = float(key)

    def grow(self, pages: NDArray[np.int64]) -> None:
        assert not set(pages.tolist()) & set(self.pages)
        self.pages.extend(pages.tolist())

    def shrink(self, n: int) -> NDArray[np.int64]:
        movable = [p for p in self.pages if self.returns_pinned or p not in self.in_use]
        leaving = movable[-n:]
        staying = [p for p in self.pages if p not in leaving]
        while len(self.slot_of) > len(staying) * self.rows_per_page:
            del self.slot_of[next(iter(self.slot_of))]
            self.shrink_evictions += 1
        # Compaction. Rows on pinned pages that stay keep their place.
        free = self._free_slots(staying)
        for key, slot in self.slot_of.items():
            if slot // self.rows_per_page in leaving:
                self.slot_of[key] = free.pop()
                self.rows[self.slot_of[key]] = self.rows[slot]
        self.pages = staying
        return np.array(leaving, np.int64)

    def start_lookup(self, pages: list[int]) -> None:
        self.pool.pin(pages)
        self.in_use = list(pages)

    def end_lookup(self) -> None:
        self.pool.unpin(self.in_use)
        self.in_use = []

    def check_rows(self) -> None:
        """Every resident row lies in a page of the cache and holds its values."""
        assert len(set(self.slot_of.values())) == len(self.slot_of)
        for key, slot in self.slot_of.items():
            assert slot // self.rows_per_page in self.pages
            assert self.rows[slot].tolist() == [float(key)] * DIM

    def _free_slots(self, pages: list[int]) -> list[int]:
        taken = set(self.slot_of.values())
        first = [p * self.rows_per_page for p in pages]
        return [s for f in first for s in range(f, f + self.rows_per_page) if s not in taken]
