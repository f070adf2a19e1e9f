"""An embedding cache over a few rows, for tests of the pool and the boundary, and what it must hold."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hlem_env.live.cache_state import FOREIGN
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool
from hlem_env.live.row_index import SetAssociativeIndex

DIM = 4
ROW_BYTES = DIM * 4
HALF_LIFE_S = 0.5
"""So short that counts get a new origin within a few dozen seconds."""
INDEXES = ("dense", "set_associative", "crowded")
"""The last one is set-associative and so small that rows make room for one another."""


@functools.cache
def tables(rows: int) -> HostTables:
    """That many rows of 16 bytes."""
    return HostTables(1, rows, DIM, torch.float32, seed=1)


class PatientCache(EmbeddingCache):
    """Keeps the pages that somebody reads, where the cache itself leaves it to the pool to hold them."""

    in_use: NDArray[np.int64] = np.empty(0, np.int64)

    def shrink(self, n: int) -> NDArray[np.int64]:
        """The latest pages down to one in use, at most n."""
        in_use = np.isin(self.pages[::-1], self.in_use)
        return super().shrink(min(n, int(np.argmax(np.append(in_use, True)))))


def make_embedding(
    pool: Pool,
    rows: int,
    policy: str = "lru",
    index: str = "dense",
    kind: type[EmbeddingCache] = EmbeddingCache,
) -> EmbeddingCache:
    """A cache without pages."""
    name = "dense" if index == "dense" else "set_associative"
    cache = kind(pool, tables(rows), policy, name, half_life_s=HALF_LIFE_S, ring_rows=256)
    if index == "crowded":
        cache.state.index = SetAssociativeIndex(len(cache.state.stamp) // 4, pool.device, ways=2)
    return cache


@functools.cache
def expected(rows: int) -> torch.Tensor:
    """What those rows hold, [rows, DIM], without a look at the tables' memory."""
    return tables(rows).expected(torch.arange(rows))


def look_up(cache: EmbeddingCache, keys: ArrayLike, now: float = 0.0) -> None:
    """A lookup that must give the tables' rows."""
    wanted = torch.from_numpy(np.array(keys, np.int64))
    assert torch.equal(cache.lookup(wanted, now), expected(cache.tables.n_rows)[wanted])


def resident(cache: EmbeddingCache) -> NDArray[np.int64]:
    """Rows in the cache, ascending, as its slots have them."""
    rows = cache.state.row_of.numpy()
    return np.sort(rows[rows >= 0])


def check_cache(cache: EmbeddingCache, pool: Pool) -> None:
    """Rows lie once each in slots of the cache's pages, where the index says, with the tables' bytes."""
    state, per_page = cache.state, cache.rows_per_page
    row_of, stamp = state.row_of.numpy(), state.stamp.numpy()
    mine = np.zeros(pool.pages, bool)
    mine[cache.pages] = True
    assert np.count_nonzero(mine) == len(cache.pages)
    assert (pool.owner[mine] == Owner.EMBEDDING).all()
    slots = np.repeat(mine, per_page)
    held = np.flatnonzero(row_of >= 0)
    assert slots[held].all(), "a row on a page that is not the cache's"
    assert ((stamp != FOREIGN) == slots).all()
    assert ((stamp >= 0) == slots)[held].all()
    if state.counted:
        count = state.count.numpy()
        assert ((count < np.inf) == slots).all() and (count[held] > -np.inf).all()
    found = state.index.find(torch.arange(cache.tables.n_rows)).numpy()
    where = np.full(cache.tables.n_rows, -1)
    where[row_of[held]] = held
    assert np.count_nonzero(where >= 0) == held.size, "a row in two slots"
    assert (found == where).all(), "the index says something else than the slots"
    values = expected(cache.tables.n_rows).numpy()[row_of[held]]
    assert (state.slab.numpy()[held] == values).all(), "a slot that holds another row's values"
