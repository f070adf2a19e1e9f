"""Pages change owners on the host; every misuse is refused and changes nothing."""

import numpy as np
import pytest
import torch

from hlem_env.errors import ArgumentError, BackendError
from hlem_env.live.pool import Owner, Pool, PoolExhausted

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def pool() -> Pool:
    return Pool(8 * 64, 64)


def assert_whole(pool: Pool) -> None:
    stats = pool.stats()
    assert stats.free + stats.embedding + stats.kv == stats.pages == pool.pages
    by_owner = np.bincount(pool.owner, minlength=3).tolist()
    assert by_owner == [stats.free, stats.embedding, stats.kv]


def test_pages_come_from_the_pool_once_each(pool: Pool) -> None:
    pages = [pool.alloc_page(Owner.KV) for _ in range(3)]
    pages += pool.alloc_pages(5, Owner.EMBEDDING).tolist()
    assert sorted(pages) == list(range(8))
    assert pool.owner[pages].tolist() == [Owner.KV] * 3 + [Owner.EMBEDDING] * 5
    assert (pool.count(Owner.KV), pool.count(Owner.EMBEDDING), pool.free_count) == (3, 5, 0)
    assert_whole(pool)


def test_one_call_for_many_pages_is_many_calls(pool: Pool) -> None:
    other = Pool(8 * 64, 64)
    assert pool.alloc_pages(4, Owner.KV).tolist() == [other.alloc_page(Owner.KV) for _ in range(4)]
    pool.free_pages([2, 0])
    for page in (0, 2):
        other.free_page(page)
    assert pool.alloc_pages(6, Owner.KV).tolist() == [other.alloc_page(Owner.KV) for _ in range(6)]


def test_alloc_is_all_or_nothing(pool: Pool) -> None:
    pool.alloc_pages(6, Owner.KV)
    with pytest.raises(PoolExhausted, match="3 pages asked for EMBEDDING, 2 of 8 are free"):
        pool.alloc_pages(3, Owner.EMBEDDING)
    assert pool.free_count == 2
    pool.alloc_pages(2, Owner.EMBEDDING)
    with pytest.raises(PoolExhausted, match="1 pages asked for KV, 0 of 8"):
        pool.alloc_page(Owner.KV)
    assert pool.alloc_pages(0, Owner.KV).size == 0
    assert_whole(pool)


@pytest.mark.parametrize("many", [False, True])
def test_double_free_is_refused(pool: Pool, many: bool) -> None:
    pages = pool.alloc_pages(2, Owner.KV)
    pool.free_page(int(pages[0]))
    with pytest.raises(BackendError, match="belongs to nobody"):
        if many:
            pool.free_pages(pages)
        else:
            pool.free_page(int(pages[0]))
    assert pool.count(Owner.KV) == 1, "the other page is not freed either"
    assert_whole(pool)


def test_freeing_a_page_twice_while_it_is_pinned_is_refused(pool: Pool) -> None:
    page = pool.alloc_page(Owner.KV)
    pool.pin([page])
    pool.free_page(page)
    for free in (lambda: pool.free_page(page), lambda: pool.free_pages([page])):
        with pytest.raises(BackendError, match="was freed already"):
            free()
    with pytest.raises(BackendError, match="cannot be pinned: it was freed already"):
        pool.pin([page])
    assert pool.pending_count == 1


def test_a_page_named_twice_in_a_call_is_refused(pool: Pool) -> None:
    pages = pool.alloc_pages(3, Owner.KV)
    for call in (pool.free_pages, pool.pin):
        with pytest.raises(ArgumentError, match="each page once"):
            call([*pages, pages[1]])
    assert pool.count(Owner.KV) == 3
    assert pool.stats().pinned == 0


@pytest.mark.parametrize("page", [-1, 8, 2**40])
def test_unknown_pages_are_refused(pool: Pool, page: int) -> None:
    with pytest.raises(ArgumentError, match="0 to 7"):
        pool.free_page(page)
    for call in (pool.free_pages, pool.pin, pool.unpin):
        with pytest.raises(ArgumentError, match="0 to 7"):
            call([page])


def test_unpin_without_pin_is_refused(pool: Pool) -> None:
    pages = pool.alloc_pages(2, Owner.KV)
    pool.pin(pages[:1])
    with pytest.raises(BackendError, match=f"page {pages[1]} is unpinned but was not pinned"):
        pool.unpin(pages)
    pool.unpin(pages[:1])
    with pytest.raises(BackendError, match="was not pinned"):
        pool.unpin(pages[:1])


def test_pinning_a_page_of_nobody_is_refused(pool: Pool) -> None:
    with pytest.raises(BackendError, match="page 3 cannot be pinned: it belongs to nobody"):
        pool.pin([3])


@pytest.mark.parametrize("owner", [Owner.FREE, 3, -1])
def test_only_caches_own_pages(pool: Pool, owner: int) -> None:
    for call in (lambda: pool.alloc_page(owner), lambda: pool.alloc_pages(1, owner)):  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="EMBEDDING or KV"):
            call()


def test_a_pinned_page_stays_its_owners_until_the_last_unpin(pool: Pool) -> None:
    pages = pool.alloc_pages(4, Owner.EMBEDDING)
    pool.pin(pages[:2])
    pool.pin(pages[:1])
    pool.free_pages(pages)
    assert (pool.count(Owner.EMBEDDING), pool.pending(Owner.EMBEDDING)) == (2, 2)
    assert (pool.pending_count, pool.free_count) == (2, 6)
    pool.unpin(pages[:2])
    assert (pool.pending_count, pool.free_count) == (1, 7)
    assert pool.owner[pages[0]] == Owner.EMBEDDING
    pool.unpin(pages[:1])
    assert (pool.pending_count, pool.free_count) == (0, 8)
    pool.free_pages(pool.alloc_pages(8, Owner.KV))
    assert_whole(pool)


def test_what_does_not_fill_the_pool_or_a_page_is_said() -> None:
    assert Pool(200, 64).pages == 3
    with pytest.raises(ArgumentError, match="pool_bytes=63"):
        Pool(63, 64)
    with pytest.raises(ArgumentError, match="multiple of 16"):
        Pool(640, 40)
    pool = Pool(4 * 96, 96)
    with pytest.raises(ArgumentError, match="32 of every page would be lost"):
        pool.view_rows(16, torch.float32)
    with pytest.raises(ArgumentError, match="with 40 bytes each, 16 of every page would be lost"):
        pool.view_blocks((2, 5), torch.float32)
    with pytest.raises(ArgumentError, match="96 of every page would be lost"):
        pool.view_rows(100, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
def test_views_are_the_same_memory(device: str) -> None:
    pool = Pool(4 * 256, 256, device)
    rows, blocks = (
        pool.view_rows(8, torch.float32),
        pool.view_blocks((2, 4, 2, 2), torch.float16),
    )
    assert rows.shape == (4 * 8, 8)
    assert blocks.shape == (4 * 4, 2, 4, 2, 2)
    page = 2
    pool.memory.zero_()
    blocks[page * 4 : (page + 1) * 4] = 1.0
    touched = (rows != 0).any(1).nonzero().flatten().tolist()
    assert touched == list(range(page * 8, (page + 1) * 8))
    rows[page * 8 : (page + 1) * 8] = 0.0
    assert not blocks.any()


@pytest.mark.gpu
def test_bookkeeping_never_waits_for_the_device() -> None:
    pool = Pool(64 * 4096, 4096, "cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pages = pool.alloc_pages(40, Owner.KV)
        pool.pin(pages)
        pool.free_pages(pages)
        pool.unpin(pages)
        pool.free_page(pool.alloc_page(Owner.EMBEDDING))
        pool.stats()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert pool.free_count == 64
