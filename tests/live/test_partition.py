"""The boundary moves to where it is told, through evictions, pins and back."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hlem_env.errors import ArgumentError, BackendError
from hlem_env.eviction.policies import Lru
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.kv_cache import KvBatch, KvCache, KvLayout
from hlem_env.live.partition import Partition
from hlem_env.live.pool import Owner, Pool
from tests.live.small_cache import (
    ROW_BYTES,
    PatientCache,
    check_cache,
    look_up,
    make_embedding,
    resident,
)

PAGES = 100
LAYOUT = KvLayout(layers=2, heads=1, head_dim=4, block_tokens=2, dtype=torch.float16)
PAGE_BYTES = 2 * LAYOUT.block_bytes
"""Two blocks: a page holds two tokens of both layers."""
ROWS_PER_PAGE = PAGE_BYTES // ROW_BYTES
ROWS = 200


class Node:
    """Both caches over one pool."""

    def __init__(self, kind: type[EmbeddingCache] = EmbeddingCache) -> None:
        self.pool = Pool(PAGES * PAGE_BYTES, PAGE_BYTES)
        self.embedding = make_embedding(self.pool, ROWS, kind=kind)
        self.kv = KvCache(self.pool, LAYOUT, Lru(), max_history_tokens=200)
        self.partition = Partition(self.pool, self.embedding, self.kv)
        self.now = 0.0

    def begin(self, user: int, pages: int) -> KvBatch:
        self.now += 1
        return self.kv.begin([user], [2 * pages], [2 * pages], [user], self.now)

    def store(self, *users: int, pages: int = 10) -> None:
        for user in users:
            self.kv.commit(self.begin(user, pages))

    def counts(self) -> tuple[int, int, int]:
        return tuple(self.pool.count(owner) for owner in Owner)  # type: ignore[return-value]


def test_growing_takes_free_pages_first() -> None:
    node = Node()
    node.store(1, 2)
    move = node.partition.move(80)
    assert (move.wanted_pages, move.moved_pages, move.pending_pages) == (80, 80, 0)
    assert (move.evicted_entries, move.evicted_rows) == (0, 0)
    assert node.counts() == (0, 80, 20)
    assert len(node.embedding.pages) == 80


def test_growing_evicts_whole_entries_by_policy() -> None:
    node = Node()
    node.store(*range(10))
    node.store(0)  # the oldest is now user 1
    move = node.partition.move(15)
    assert (move.moved_pages, move.evicted_entries) == (15, 2)
    assert node.kv.cached_tokens(list(range(10))).tolist() == [20, 0, 0, *[20] * 7]
    assert node.counts() == (5, 15, 80), "what an eviction frees beyond the need stays free"


def test_shrinking_gives_pages_to_kv_and_keeps_the_newest_rows() -> None:
    node = Node()
    node.partition.move(50)
    for first in range(0, ROWS, ROWS_PER_PAGE):  # all 50 pages full
        look_up(node.embedding, range(first, first + ROWS_PER_PAGE))
    move = node.partition.move(30)
    assert (move.wanted_pages, move.moved_pages, move.pending_pages) == (-20, -20, 0)
    assert move.evicted_rows == 20 * ROWS_PER_PAGE
    check_cache(node.embedding, node.pool)
    assert resident(node.embedding).tolist() == list(range(20 * ROWS_PER_PAGE, ROWS))
    node.store(*range(7))
    assert node.counts() == (0, 30, 70)


def test_alpha_of_one_leaves_no_kv_page_and_everything_unadmitted() -> None:
    node = Node()
    node.store(1, 2)
    assert node.partition.move(100).evicted_entries == 2
    batch = node.begin(1, 10)
    assert (batch.cached.tolist(), batch.admitted.tolist()) == ([0], [False])
    assert (batch.page_table == -1).all()
    node.kv.commit(batch)
    assert node.counts() == (0, 100, 0)
    assert node.partition.move(0).moved_pages == -100
    assert node.counts() == (100, 0, 0)


def test_entries_of_running_requests_stay_and_the_move_completes_in_settle() -> None:
    node = Node()
    node.store(*range(8))
    running = node.kv.begin([0, 1], [22, 22], [2, 2], [0, 1], 100.0)
    pages = running.page_table.copy()
    move = node.partition.move(90)
    assert (move.wanted_pages, move.moved_pages, move.pending_pages) == (90, 78, 12)
    assert move.evicted_entries == 6
    assert node.counts() == (0, 78, 22)
    again = node.partition.settle()
    assert (again.moved_pages, again.pending_pages) == (0, 12), "nothing has ended"
    node.kv.commit(running)
    assert node.partition.pending_pages == 12
    move = node.partition.settle()
    # Two entries of eleven pages each: both go, since ten pages are left.
    assert (move.wanted_pages, move.moved_pages, move.pending_pages) == (12, 12, 0)
    assert move.evicted_entries == 2
    assert node.counts() == (10, 90, 0)
    assert (pages[:, :11] >= 0).all()


def test_kv_does_not_take_pages_that_the_embedding_cache_waits_for() -> None:
    node = Node()
    node.store(*range(10))
    running = node.kv.begin(list(range(10)), [20] * 10, [0] * 10, list(range(10)), 100.0)
    assert node.partition.move(50).pending_pages == 50
    node.kv.commit(running)
    # An edited history frees its ten pages; they are not for KV.
    batch = node.kv.begin([3], [20], [20], [999], 101.0)
    assert batch.cached.tolist() == [0]
    node.kv.commit(batch)
    assert node.kv.used_pages <= 50
    assert node.partition.settle().pending_pages == 0
    assert node.counts()[Owner.EMBEDDING] == 50


@pytest.mark.parametrize("kind", [EmbeddingCache, PatientCache])
def test_pages_of_rows_that_are_read_stay_and_the_move_completes_in_settle(
    kind: type[EmbeddingCache],
) -> None:
    node = Node(kind)
    node.partition.move(10)
    look_up(node.embedding, range(10 * ROWS_PER_PAGE))
    reading = node.embedding.pages[2:6]
    before = node.pool.memory.view(PAGES, -1)[reading].clone()
    node.pool.pin(reading)
    if isinstance(node.embedding, PatientCache):
        node.embedding.in_use = reading
    move = node.partition.move(2)
    assert (move.wanted_pages, move.moved_pages, move.pending_pages) == (-8, -4, -4)
    node.store(*range(12))  # KV takes what is free
    assert (node.pool.owner[reading] == Owner.EMBEDDING).all()
    if kind is EmbeddingCache:  # it has given them up, so nobody writes to them
        assert torch.equal(node.pool.memory.view(PAGES, -1)[reading], before)
    assert node.partition.settle().moved_pages == 0
    node.pool.unpin(reading)
    if isinstance(node.embedding, PatientCache):
        node.embedding.in_use = reading[:0]
    assert node.partition.settle().pending_pages == 0
    assert node.counts()[Owner.EMBEDDING] == len(node.embedding.pages) == 2
    check_cache(node.embedding, node.pool)


def test_a_move_back_before_pins_are_gone() -> None:
    node = Node()
    node.partition.move(10)
    reading = node.embedding.pages[-4:]
    node.pool.pin(reading)
    node.partition.move(2)
    node.partition.move(9)
    assert len(node.embedding.pages) == 9, "the cache has other pages for those that still leave"
    assert node.partition.pending_pages == -4
    node.pool.unpin(reading)
    assert node.partition.settle().pending_pages == 0
    assert node.counts() == (91, 9, 0)


def test_pages_are_rounded_down_and_alpha_is_checked() -> None:
    pool = Pool(7 * PAGE_BYTES, PAGE_BYTES)
    kv = KvCache(pool, LAYOUT, Lru(), max_history_tokens=10)
    partition = Partition(pool, make_embedding(pool, ROWS), kv)
    assert partition.move(50).moved_pages == 3
    for alpha in (-1, 101):
        with pytest.raises(ArgumentError, match="alpha_centi"):
            partition.move(alpha)
    assert partition.target_pages == 3


def test_a_cache_that_gives_up_what_it_should_not_is_an_error() -> None:
    class TooMany(EmbeddingCache):
        def shrink(self, n: int) -> NDArray[np.int64]:
            return super().shrink(n + 1)

    class NotItsOwn(EmbeddingCache):
        def shrink(self, n: int) -> NDArray[np.int64]:
            return np.setdiff1d(np.arange(self.pool.pages), self.pages)[:n]

    for kind in (TooMany, NotItsOwn):
        pool = Pool(10 * PAGE_BYTES, PAGE_BYTES)
        kv = KvCache(pool, LAYOUT, Lru(), max_history_tokens=10)
        partition = Partition(pool, make_embedding(pool, ROWS, kind=kind), kv)
        partition.move(50)
        with pytest.raises(BackendError, match="was to give up 2 pages"):
            partition.move(30)
