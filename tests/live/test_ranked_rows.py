"""Ranked embedding rows: batches of one are the policy itself, batches keep the cache whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hlem_env.errors import BackendError
from hlem_env.eviction.predictor import GivenGaps
from hlem_env.eviction.replay import replay
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool
from hlem_env.live.row_index import SetAssociativeIndex
from tests.live.small_cache import expected, tables

ROWS = 40
PAGE_BYTES = 64
"""Four rows."""


def make(pages: int, gaps: Any, policy: str = "laru") -> EmbeddingCache:
    pool = Pool(8 * PAGE_BYTES, PAGE_BYTES)
    cache = EmbeddingCache(pool, tables(ROWS), policy, predictor=GivenGaps(gaps), ring_rows=64)
    cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
    return cache


def spread(cache: EmbeddingCache, rows: int) -> list[int]:
    """Rows that share no cell."""
    assert cache._ranked is not None
    cells = cache._ranked._cells(torch.arange(ROWS)).tolist()
    first = [row for row in range(ROWS) if cells.index(cells[row]) == row]
    return first[:rows]


@pytest.mark.parametrize("policy", ["laru", "fpb", "hf"])
@pytest.mark.parametrize("seed", range(4))
def test_batches_of_one_row_are_the_policy_itself(policy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 250
    predicted = np.arange(n) + rng.integers(1, 60, n).astype(np.float64)
    cache = make(2, lambda keys, times: predicted[times.astype(int)] - times, policy)
    rows = np.array(spread(cache, 14))
    numbers = (rows.size * rng.random(n) ** 1.5).astype(np.int64)
    hits = []
    for t, key in enumerate(rows[numbers].tolist()):
        hits.append(bool(cache.contains(torch.tensor([key]))[0]))
        out = cache.lookup(torch.tensor([key]), float(t))
        assert torch.equal(out, expected(ROWS)[[key]])
        cache.wait_for_predictions()
    result = replay(policy, numbers, 8, predicted)
    assert hits == result.hit.tolist()
    assert (result.mispredictions > 0) == (policy == "laru")
    cache.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_of_hf_goes_as_one_victim_of_four_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gaps = rng.integers(50, 59, ROWS).astype(np.float64)  # with ties
    cache = make(3, lambda keys, times: gaps[keys] - times, "hf")
    order = rng.permutation(12)
    for t, key in enumerate(order.tolist()):
        cache.lookup(torch.tensor([key]), float(t))
        cache.wait_for_predictions()
    cache.lookup(torch.arange(20, 25), 12.0)
    kept = order.tolist()
    for _ in range(5):
        kept.remove(max(kept[:4], key=lambda row: gaps[row]))
    assert cache.contains(torch.from_numpy(order)).tolist() == [row in kept for row in order]
    cache.close()


def test_whole_batches_moves_and_warming_keep_the_cache_whole() -> None:
    rng = np.random.default_rng(1)
    cache = make(6, lambda keys, times: (keys * 7 % 13).astype(np.float64))
    for t in range(59):
        keys = torch.from_numpy(rng.integers(0, ROWS, 20))
        assert torch.equal(cache.lookup(keys, float(t)), expected(ROWS)[keys])
        if t % 7 == 3:
            gone = cache.shrink(2)
            assert cache._ranked.confidence == 1.0  # type: ignore[union-attr]
            cache.warm(torch.arange(5), float(t))
            cache.grow(gone)
        assert cache.resident_rows <= cache.capacity_rows
    assert cache.resident_rows == cache.capacity_rows
    cache.close()


@pytest.mark.parametrize("policy", ["laru", "fpb", "hf"])
def test_slots_that_a_full_set_frees_are_no_victims_twice(policy: str) -> None:
    rng = np.random.default_rng(1)
    host = HostTables(1, 4000, 32, torch.float16, seed=1, device="cpu")
    pool = Pool(64 * 512, 512)
    given = GivenGaps(lambda keys, times: (keys * 7 % 13).astype(np.float64))
    cache = EmbeddingCache(pool, host, policy, "set_associative", predictor=given)
    cache.state.index = SetAssociativeIndex(512, cache.device, ways=1)  # sets are often full
    cache.grow(pool.alloc_pages(64, Owner.EMBEDDING))
    for t in range(15):
        keys = torch.from_numpy(rng.integers(0, 4000, 200))
        assert torch.equal(cache.lookup(keys, float(t)), host.expected(keys))
        held = cache.state.row_of[cache.state.row_of >= 0]
        assert len(held.unique()) == len(held) == cache.resident_rows
    cache.close()


def test_predictions_move_with_their_rows() -> None:
    cache = make(3, lambda keys, times: 100.0 + keys)
    keys = torch.arange(8)
    cache.lookup(keys, 0.0)
    ranked = cache._ranked
    assert ranked is not None
    cache.wait_for_predictions()
    ranked._take_predictions()
    cache.shrink(1)
    there = keys[cache.contains(keys)]
    assert len(there) == 8
    assert ranked.next_of(there).tolist() == (100.0 + there).tolist()
    cache.close()


def test_a_failing_or_slow_predictor_makes_it_lru_and_is_counted() -> None:
    class Unusable(GivenGaps):
        usable = False

    pool = Pool(8 * PAGE_BYTES, PAGE_BYTES)
    given = Unusable(lambda keys, times: np.full(keys.size, math.inf))
    cache = EmbeddingCache(pool, tables(ROWS), "laru", predictor=given, ring_rows=64)
    plain_pool = Pool(8 * PAGE_BYTES, PAGE_BYTES)
    plain = EmbeddingCache(plain_pool, tables(ROWS), "lru", ring_rows=64)
    for each, source in ((cache, pool), (plain, plain_pool)):
        each.grow(source.alloc_pages(2, Owner.EMBEDDING))
    rng = np.random.default_rng(2)
    for t in range(80):
        keys = torch.from_numpy(rng.integers(0, ROWS, 5))
        cache.lookup(keys, float(t))
        plain.lookup(keys, float(t))
        every = torch.arange(ROWS)
        assert torch.equal(cache.contains(every), plain.contains(every))
    assert cache._ranked is not None and cache._ranked.fallbacks > 0
    cache.close()


def test_an_error_of_the_predictor_makes_it_lru_and_is_told() -> None:
    def gaps(keys: Any, times: Any) -> Any:
        raise MemoryError("no room")

    cache = make(2, gaps)
    assert cache._ranked is not None
    for t in range(20):
        cache.lookup(torch.arange(t, t + 5), float(t))
    with pytest.raises(BackendError, match="no room"):
        cache.wait_for_predictions()
    assert not cache._ranked.predictions.usable and cache._ranked.fallbacks > 0
    cache.close()


def test_a_row_is_not_taken_for_an_evicted_one_that_shares_its_cell() -> None:
    cache = make(1, lambda keys, times: np.where(keys == evicted, 90.0, 50.0))
    ranked = cache._ranked
    assert ranked is not None
    cells = ranked._cells(torch.arange(ROWS)).tolist()
    evicted, other = next((a, b) for b in range(ROWS) for a in range(b) if cells[a] == cells[b])
    rest = [row for row in spread(cache, ROWS) if cells[row] != cells[other]]
    confidence = []
    for t, row in enumerate([evicted, *rest[:4], other, evicted]):
        cache.lookup(torch.tensor([row]), float(t))
        cache.wait_for_predictions()
        confidence.append(ranked.confidence)
    assert confidence == [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    cache.close()
