"""An embedding cache in plain Python, to hold the real one against, and a small real one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hlem_env.live.cache_state import FOREIGN
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool

DIM = 16
ROWS = 60
PAGE_ROWS = 4
TABLES = HostTables(2, ROWS // 2, DIM, torch.float16, seed=1)


class LruModel:
    """Slots with (row, batch of the last use); free ones are (None, -1)."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int | None, int]] = {}
        self.batch = 0
        self.hits = self.unique_misses = self.inserted = self.evicted = self.warmed = 0

    def where(self) -> dict[int, int]:
        return {row: slot for slot, (row, _) in self.slots.items() if row is not None}

    def lookup(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        if not keys:
            return
        self.batch += 1
        where = self.where()
        missing = sorted({key for key in keys if key not in where})
        self.hits += sum(key in where for key in keys)
        self.unique_misses += len(missing)
        for key in keys:
            if key in where:
                self.slots[where[key]] = (key, self.batch)
        self.inserted += self._insert(missing, self.batch)

    def warm(self, keys: Iterable[int], evict: bool) -> None:
        where = self.where()
        missing = sorted({key for key in keys if key >= 0 and key not in where})
        self.warmed += self._insert(missing, self.batch if evict else 0)

    def _insert(self, rows: list[int], limit: int) -> int:
        order = sorted((stamp, slot) for slot, (_, stamp) in self.slots.items() if stamp < limit)
        chosen = list(zip(rows, order, strict=False))
        for row, (_, slot) in chosen:
            self.evicted += self.slots[slot][0] is not None
            self.slots[slot] = (row, self.batch)
        return len(chosen)

    def grow(self, slots: Iterable[int]) -> None:
        self.slots |= {slot: (None, -1) for slot in slots}

    def copy_from(self, cache: EmbeddingCache) -> None:
        """Take over what the cache chose among equals."""
        self.slots = contents(cache)


def contents(cache: EmbeddingCache) -> dict[int, tuple[int | None, int]]:
    """The cache's slots in the model's form."""
    cache.contains(torch.zeros(1, dtype=torch.int64, device=cache.device))
    rows, stamps = cache.state.row_of.tolist(), cache.state.stamp.tolist()
    return {
        slot: (None if row < 0 else row, stamp)
        for slot, (row, stamp) in enumerate(zip(rows, stamps, strict=True))
        if stamp != FOREIGN
    }


def make(
    pages: int, policy: str = "lru", index: str = "dense", device: str = "cpu"
) -> tuple[Pool, EmbeddingCache]:
    tables = on_device(device)
    pool = Pool(24 * PAGE_ROWS * tables.row_bytes, PAGE_ROWS * tables.row_bytes, device)
    cache = EmbeddingCache(pool, tables, policy, index)
    cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
    return pool, cache


def on_device(device: str) -> HostTables:
    return TABLES if device == "cpu" else HostTables(2, ROWS // 2, DIM, torch.float16, 1, device)


def look_up(cache: EmbeddingCache, keys: list[int], now: float = 0.0) -> torch.Tensor:
    """The rows, checked."""
    out = cache.lookup(torch.tensor(keys, dtype=torch.int64, device=cache.device), now)
    assert torch.equal(out.cpu(), TABLES.rows[torch.tensor(keys, dtype=torch.int64)])
    return out


def check_consistent(cache: EmbeddingCache) -> None:
    """Every resident row has one slot, which the index names, with its values; nothing else is there."""
    held = contents(cache)
    rows = [row for row, _ in held.values() if row is not None]
    assert len(rows) == len(set(rows)) == cache.resident_rows <= cache.capacity_rows == len(held)
    slots = [slot for slot, (row, _) in held.items() if row is not None]
    everything = torch.arange(ROWS, device=cache.device)
    where = cache.state.index.find(everything).tolist()
    assert {row: where[row] for row in range(ROWS) if where[row] >= 0} == dict(
        zip(rows, slots, strict=True)
    )
    assert torch.equal(cache.state.slab[slots].cpu(), TABLES.rows[rows])
    owned = {page * PAGE_ROWS + i for page in cache.pages.tolist() for i in range(PAGE_ROWS)}
    assert set(held) == owned
