"""An embedding cache in plain Python, to hold the real one against."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hlem_env.live.cache_state import FOREIGN
from hlem_env.live.embedding_cache import EmbeddingCache


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
