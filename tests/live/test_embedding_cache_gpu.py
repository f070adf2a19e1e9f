"""The embedding cache on a GPU, at sizes and in situations that a CPU does not know."""

import numpy as np
import pytest
import torch

from hlem_env.errors import BackendError
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool
from tests.live.embedding_model import ROWS, check_consistent, contents, look_up, make

pytestmark = pytest.mark.gpu


def test_row_offsets_past_2_31() -> None:
    tables = HostTables(1, 3 * 2**20, 512, torch.float32, seed=4, device="cuda")  # 6 GiB
    pool = Pool(4 * 2**30 + 2**27, 2**21, "cuda")
    cache = EmbeddingCache(pool, tables)
    pages = pool.alloc_pages(pool.pages, Owner.EMBEDDING)
    cache.grow(pages[-64:])  # slots from 2^31 bytes and 2^30 words on
    assert int(cache.pages.min()) * 2**21 >= 2**32
    keys = torch.arange(3 * 2**20 - 50_000, 3 * 2**20, device="cuda")
    for _ in range(2):
        for some in keys.split(30_000):
            assert torch.equal(cache.lookup(some), tables.expected(some))
    assert cache.resident_rows == 50_000
    assert int(cache.state.index.find(keys).min()) * 2048 >= 2**32  # bytes


@pytest.mark.parametrize("policy", ["lru", "scan_resistant"])
def test_large_batches_on_a_gpu(policy: str) -> None:
    """Batches of sizes at which the queue is built in the background and misses go beside hits."""
    tables = HostTables(4, 500_000, 32, torch.float16, seed=2, device="cuda")
    pool = Pool(500 * 2**16, 2**16, "cuda")  # 512,000 slots for 2,000,000 rows
    cache = EmbeddingCache(pool, tables, policy)
    cache.grow(pool.alloc_pages(400, Owner.EMBEDDING))
    generator = torch.Generator("cuda").manual_seed(0)
    hits = 0
    for turn in range(60):
        keys = (torch.rand(200_000, device="cuda", generator=generator) ** 3 * 2_000_000).long()
        resident = cache.contains(keys)
        hits += int(resident.sum())
        stamps = cache.state.stamp.clone()
        rows = cache.state.row_of.clone()
        assert torch.equal(cache.lookup(keys, turn * 0.1), tables.expected(keys))
        gone = (rows >= 0) & (cache.state.row_of != rows)
        kept = (rows >= 0) & (cache.state.row_of == rows) & (cache.state.stamp == stamps)
        if policy == "lru" and gone.any() and kept.any():
            assert stamps[gone].max() <= stamps[kept].min()  # exact recency
        held = cache.state.row_of[cache.state.row_of >= 0]
        assert len(held.unique()) == len(held) == cache.resident_rows
        if turn % 20 == 10:
            pool.free_pages(cache.shrink(100))
        if turn % 20 == 15:
            cache.grow(pool.alloc_pages(100, Owner.EMBEDDING))
    assert cache.counters().hit == hits
    if policy == "lru":
        assert cache.resident_rows == cache.capacity_rows


@pytest.mark.parametrize(("keys", "pages"), [(100_000, 160), (300_000, 160), (2000, 160)])
def test_every_missing_row_finds_a_victim_while_the_host_is_far_ahead(
    keys: int, pages: int
) -> None:
    """The device sleeps until the host has given it all batches."""
    tables = HostTables(2, 1_000_000, 32, torch.float16, seed=2, device="cuda")
    pool = Pool(pages * 2**16, 2**16, "cuda")  # 163,840 slots
    cache = EmbeddingCache(pool, tables)
    cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
    generator = torch.Generator("cuda").manual_seed(0)
    batches = [
        (torch.rand(keys, device="cuda", generator=generator) ** 2 * 2_000_000).long()
        for _ in range(40)
    ]
    cache.warm(torch.arange(1_700_000, 1_900_000, device="cuda"))
    for batch in batches[:10]:
        cache.lookup(batch)
    before = cache.counters()
    assert cache.resident_rows == cache.capacity_rows
    out = []
    torch.cuda._sleep(2 * 10**9)
    for batch in batches[10:]:
        out.append(cache.lookup(batch))
    assert not torch.cuda.current_stream().query()  # it was far ahead
    done = cache.counters() - before
    assert done.unique_misses > 0
    for batch, rows in zip(batches[10:], out, strict=True):
        assert torch.equal(rows, tables.expected(batch))
    if keys < cache.capacity_rows:  # no batch can use all slots
        assert done.inserted == done.unique_misses
    else:
        assert done.inserted < done.unique_misses
        # The last batch filled every slot that it did not hit.
        assert (cache.state.stamp == len(batches)).all()
    held = cache.state.row_of[cache.state.row_of >= 0]
    assert len(held.unique()) == len(held) == cache.resident_rows


def test_victims_beyond_a_long_void_part_of_the_queue() -> None:
    tables = HostTables(1, 2_000_000, 8, torch.float16, seed=2, device="cuda")
    pool = Pool(2**24, 2**16, "cuda")  # 1,048,576 slots
    cache = EmbeddingCache(pool, tables)
    cache.grow(pool.alloc_pages(pool.pages, Owner.EMBEDDING))
    keys = torch.arange(2**20, device="cuda")
    for part in (keys[:1], keys[1:500_000], keys[500_000:]):
        cache.lookup(part)
    torch.cuda.synchronize()
    for part in keys[1:500_000].split(1000):  # all of the second batch, but not the first key
        cache.lookup(part)
    assert cache.counters().unique_misses == 2**20
    missing = torch.arange(1_500_000, 1_501_000, device="cuda")
    assert torch.equal(cache.lookup(missing), tables.expected(missing))
    gone = keys[~cache.contains(keys)]
    assert gone.tolist() == [0, *range(500_000, 500_999)]


@pytest.mark.parametrize(("page_rows", "dim"), [(64, 16), (37, 24)])
def test_a_gpu_does_what_the_reference_defines(page_rows: int, dim: int) -> None:
    pairs = []
    for device in ("cpu", "cuda"):
        tables = HostTables(2, 20_000, dim, torch.float16, 1, device)
        page_bytes = page_rows * tables.row_bytes
        pool = Pool(200 * page_bytes, page_bytes, device)
        cache = EmbeddingCache(pool, tables)
        cache.grow(pool.alloc_pages(60, Owner.EMBEDDING))
        pairs.append((pool, cache))
    (pool, want), (other_pool, got) = pairs
    rng = np.random.default_rng(1)
    for turn in range(25):
        keys = torch.from_numpy(
            (rng.random(rng.integers(1, 20_000)) ** 3 * 40_000).astype(np.int64)
        )
        assert torch.equal(want.lookup(keys), got.lookup(keys.cuda()).cpu())
        torch.cuda.synchronize()  # a queue that is made beside other work may order equals otherwise
        kind = rng.integers(5)
        if kind == 0 and pool.free_count >= 9:
            want.grow(pool.alloc_pages(9, Owner.EMBEDDING))
            got.grow(other_pool.alloc_pages(9, Owner.EMBEDDING))
        elif kind == 1 and len(want.pages) > 9:
            pool.free_pages(want.shrink(9))
            other_pool.free_pages(got.shrink(9))
        elif kind == 2:
            evict = bool(rng.integers(2))
            want.warm((keys + 10_000 * turn) % 40_000, evict=evict)
            got.warm((keys.cuda() + 10_000 * turn) % 40_000, evict=evict)
        torch.cuda.synchronize()
        assert contents(want) == contents(got)
        assert want.counters() == got.counters()
        assert torch.equal(want.state.ring, got.state.ring.cpu())
        held = want.state.row_of >= 0
        assert torch.equal(want.state.slab[held], got.state.slab.cpu()[held])


def test_a_complete_cache_that_shrinks_misses_again() -> None:
    pool, cache = make(20, device="cuda")  # 80 slots for 60 rows
    everything = list(range(ROWS))
    for _ in range(3):
        look_up(cache, everything)
        torch.cuda.synchronize()
    look_up(cache, everything[::2])
    assert cache._device_side is not None and cache._device_side.complete
    pool.free_pages(cache.shrink(15))  # 20 slots
    look_up(cache, everything)
    look_up(cache, everything)
    counters = cache.counters()
    assert counters.looked_up == 5 * ROWS + ROWS // 2
    assert counters.hit == 2 * ROWS + ROWS // 2 + 2 * 20
    check_consistent(cache)


def test_nothing_waits_for_the_gpu() -> None:
    pool, cache = make(4, device="cuda")
    keys = torch.arange(0, 40, 2, device="cuda")
    pages = pool.alloc_pages(2, Owner.EMBEDDING)

    def use() -> None:
        cache.lookup(keys)
        cache.grow(pages)
        cache.warm(keys + 1)
        cache.shrink(2)
        cache.lookup(keys + 20)
        assert cache.shrink_evictions >= 0 and cache.critical_bytes >= 0

    use()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        use()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_consistent(cache)


def test_unknown_keys_on_a_gpu_are_told_later() -> None:
    _, cache = make(2, device="cuda")
    cache.lookup(torch.tensor([1, ROWS, -1], device="cuda"))
    with pytest.raises(BackendError, match="2 keys"):
        cache.counters()
