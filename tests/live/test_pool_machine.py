"""Pool, both caches and the boundary under random requests, lookups and moves.

The memory is real: every user's blocks and every row hold values of their own, so a page that two
owners write to, a block that moved, or a row that lies in the wrong slot is seen in the values.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from hlem_env.eviction.policies import make_policy
from hlem_env.live.cache_state import LOOKED_UP, MISSED
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.kv_cache import KvBatch, KvCache, KvLayout
from hlem_env.live.partition import Move, Partition
from hlem_env.live.pool import Owner, Pool
from tests.live.small_cache import (
    DIM,
    INDEXES,
    ROW_BYTES,
    PatientCache,
    check_cache,
    look_up,
    make_embedding,
    resident,
)

PAGES = 40
LAYOUT = KvLayout(layers=3, heads=1, head_dim=2, block_tokens=2, dtype=torch.float32)
PAGE_BYTES = 2 * LAYOUT.block_bytes
"""Two blocks, or four rows."""
MOST_TOKENS = 30
USERS = 8
ROWS = 130
"""Of the tables; 160 fit in the pool."""
POLICIES = ("lru", "scan_resistant")

request = st.tuples(
    st.integers(0, USERS - 1),
    st.integers(0, 9),  # new items
    st.sampled_from(["grow", "grow", "grow", "shrink", "edit"]),
)


def draw_keys(seed: int, n: int, span: int) -> NDArray[np.int64]:
    """Rows, some of them several times."""
    return np.random.default_rng(seed).integers(0, span, n)


keys_of_a_batch = st.builds(
    draw_keys,
    st.integers(0, 2**16),
    st.one_of(st.integers(0, 30), st.integers(0, 400)),
    st.sampled_from([6, 40, ROWS]),
)


class NodeMachine(RuleBasedStateMachine):
    """A node without a model."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[KvBatch] = []
        self.now = 0.0
        self.history: dict[int, tuple[int, int]] = {}
        """By user: length and edits."""
        self.stored: dict[int, tuple[int, list[int]]] = {}
        """By user, as the model has it: tokens committed and pages."""
        self.extra: list[int] = []
        self.reading: NDArray[np.int64] = np.empty(0, np.int64)
        """Pages of rows that somebody reads."""
        self.given_up: dict[int, torch.Tensor] = {}
        """What lies on pages that the embedding cache gave up while they are read."""
        self.in_use: set[int] = set()
        """Rows that the last lookup used, or that came ahead of their use since."""
        self.staged: tuple[torch.Tensor, torch.Tensor] | None = None
        self.looked_up = self.hit = self.unique_misses = self.shrunk = 0

    @initialize(
        kv_policy=st.sampled_from(POLICIES),
        policy=st.sampled_from(POLICIES),
        index=st.sampled_from(INDEXES),
        kind=st.sampled_from([EmbeddingCache, PatientCache]),
        alpha=st.integers(0, 100),
    )
    def start(
        self, kv_policy: str, policy: str, index: str, kind: type[EmbeddingCache], alpha: int
    ) -> None:
        self.pool = Pool(PAGES * PAGE_BYTES, PAGE_BYTES)
        self.pool.memory.fill_(255)
        self.embedding = make_embedding(self.pool, ROWS, policy, index, kind)
        self.kv = KvCache(
            self.pool,
            LAYOUT,
            make_policy(kv_policy),
            max_history_tokens=MOST_TOKENS,
            max_users=2 * PAGES,
        )
        self.partition = Partition(self.pool, self.embedding, self.kv)
        self.partition.move(alpha)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    # Requests

    @rule(requests=st.lists(request, min_size=1, max_size=6))
    def begin_split(self, requests: list[tuple[int, int, str]]) -> None:
        self.begin_requests(requests, split=True)

    @rule(requests=st.lists(request, min_size=1, max_size=6), commit=st.booleans())
    def begin_and_end(self, requests: list[tuple[int, int, str]], commit: bool) -> None:
        self.begin_requests(requests, split=False)
        if self.running:
            self.finish(len(self.running) - 1, commit)
            self.checked(self.partition.settle)

    @rule(requests=st.lists(request, min_size=1, max_size=6))
    def begin(self, requests: list[tuple[int, int, str]]) -> None:
        self.begin_requests(requests, split=False)

    def begin_requests(self, requests: list[tuple[int, int, str]], split: bool) -> None:
        busy = {user for batch in self.running for user in batch.users.tolist()}
        drawn = [r for r in requests if r[0] not in busy]
        if not split:
            drawn = list({r[0]: r for r in drawn}.values())
        if not drawn:
            self.finish(0, commit=True)
            return
        arguments = [(user, *self.grow(user, new, kind)) for user, new, kind in drawn]
        users, lengths, new, edits = (np.array(column) for column in zip(*arguments, strict=True))
        parts = self.kv.split(users, lengths) if split else [np.arange(len(drawn))]
        assert np.concatenate(parts).tolist() == list(range(len(drawn)))
        # Parts run one after the other, the last is left running.
        for k, part in enumerate(parts):
            self.begin_part(users[part], lengths[part], new[part], edits[part])
            if k + 1 < len(parts):
                self.finish(len(self.running) - 1, commit=True)

    def grow(self, user: int, new: int, kind: str) -> tuple[int, int, int]:
        length, edits = self.history.get(user, (0, 0))
        if kind == "shrink" or length + new > MOST_TOKENS:
            length, edits = length // 2, edits + 1
        elif kind == "edit":
            edits += 1
        length = min(length + new, MOST_TOKENS)
        self.history[user] = (length, edits)
        return length, min(new, length), edits

    def begin_part(
        self, users: np.ndarray, lengths: np.ndarray, new: np.ndarray, edits: np.ndarray
    ) -> None:
        before = dict(self.stored)
        cached_before = self.kv.cached_tokens(users)
        batch = self.kv.begin(users, lengths, new, edits.astype(np.uint64), self.tick())
        self.running.append(batch)
        for i, user in enumerate(users.tolist()):
            cached, held = int(batch.cached[i]), batch.page_table[i]
            held = held[held >= 0].tolist()
            tokens, pages = before.get(user, (0, []))
            assert cached in (0, tokens)
            assert cached in (0, cached_before[i])
            assert cached <= lengths[i] - new[i]
            if cached:
                assert held[: len(pages)] == pages, "a resident block changed its address"
                self.assert_blocks(user, cached, held)
            else:
                self.stored.pop(user, None)
            if batch.admitted[i]:
                assert batch.stop[i] == lengths[i]
                blocks = -(-int(lengths[i]) // LAYOUT.block_tokens) * LAYOUT.layers
                assert len(held) == -(-blocks // 2)
                self.write_blocks(user, cached, int(lengths[i]), held)
            else:
                assert batch.stop[i] == batch.start[i] == cached
                assert cached or not held, "a user that is not admitted costs no page"

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 5), commit=st.booleans())
    def end(self, which: int, commit: bool) -> None:
        self.finish(which % len(self.running), commit)
        if which % 2:
            self.checked(self.partition.settle)

    def finish(self, which: int, commit: bool) -> None:
        batch = self.running.pop(which)
        (self.kv.commit if commit else self.kv.abort)(batch)
        for i, user in enumerate(batch.users.tolist()):
            held = batch.page_table[i][batch.page_table[i] >= 0].tolist()
            if commit and batch.admitted[i]:
                self.stored[user] = (int(batch.stop[i]), held)

    # Rows

    @rule(keys=keys_of_a_batch)
    def lookup(self, keys: NDArray[np.int64]) -> None:
        if not keys.size:
            look_up(self.embedding, [])
            return
        hit = np.isin(keys, resident(self.embedding))
        look_up(self.embedding, keys, self.tick())
        self.looked_up += keys.size
        self.hit += np.count_nonzero(hit)
        self.unique_misses += np.unique(keys[~hit]).size
        now_there = resident(self.embedding)
        assert np.isin(keys[hit], now_there).all(), "a row was evicted by the batch that used it"
        self.in_use = set(keys.tolist()) & set(now_there.tolist())

    @rule(keys=keys_of_a_batch, evict=st.booleans())
    def warm(self, keys: NDArray[np.int64], evict: bool) -> None:
        wanted = torch.from_numpy(np.append(keys, -1))
        self.insert_ahead(
            lambda: self.embedding.warm(wanted, self.tick(), evict), set(keys.tolist())
        )

    @rule(keys=keys_of_a_batch)
    def stage(self, keys: NDArray[np.int64]) -> None:
        """As refill does: what is staged may be resident, or its page gone, when it is published."""
        rows = torch.from_numpy(np.unique(keys))
        values, staged = torch.empty(len(rows), DIM), torch.empty_like(rows)
        self.embedding.stage(rows, values, staged)
        there = torch.from_numpy(np.isin(rows.numpy(), resident(self.embedding)))
        assert torch.equal(staged, torch.where(there, -1, rows))
        self.staged = staged, values

    @precondition(lambda self: self.staged is not None)
    @rule(evict=st.booleans())
    def publish(self, evict: bool) -> None:
        assert self.staged is not None
        (rows, values), self.staged = self.staged, None
        self.insert_ahead(
            lambda: self.embedding.publish(rows, values, self.tick(), evict), set(rows.tolist())
        )

    def insert_ahead(self, call: Callable[[], None], wanted: set[int]) -> None:
        before = set(resident(self.embedding).tolist())
        call()
        after = set(resident(self.embedding).tolist())
        assert after - before <= wanted
        assert self.in_use & before <= after, "a row in use was evicted for one that is not yet"
        self.in_use |= after - before

    @precondition(lambda self: self.reading.size or self.embedding.pages.size)
    @rule(data=st.data())
    def start_or_end_reading(self, data: st.DataObject) -> None:
        if self.reading.size:
            self.end_reading()
            return
        pages = st.sampled_from(self.embedding.pages.tolist())
        self.read(np.array(data.draw(st.lists(pages, min_size=1, max_size=9, unique=True))))

    def read(self, pages: NDArray[np.int64]) -> None:
        self.pool.pin(pages)
        self.reading = pages
        if isinstance(self.embedding, PatientCache):
            self.embedding.in_use = pages

    def end_reading(self) -> None:
        self.pool.unpin(self.reading)
        self.read(np.empty(0, np.int64))

    # The boundary, and pages taken from outside

    @rule(alpha=st.integers(0, 100))
    def move(self, alpha: int) -> None:
        move = self.checked(lambda: self.partition.move(alpha))
        assert move.wanted_pages == move.moved_pages + move.pending_pages

    @rule()
    def settle(self) -> None:
        pending = self.partition.pending_pages
        move = self.checked(self.partition.settle)
        assert move.wanted_pages == pending

    def checked(self, call: Callable[[], Move]) -> Move:
        """A move evicts as few rows as it can, the least valuable, and keeps what is known of others."""
        state = self.embedding.state
        before, score = state.row_of.clone(), state.score.clone()
        move = call()
        known = dict(zip(before[before >= 0].tolist(), score[before >= 0].tolist(), strict=True))
        held = state.row_of >= 0
        left = dict(zip(state.row_of[held].tolist(), state.score[held].tolist(), strict=True))
        assert left.items() <= known.items()
        gone = [known[row] for row in known.keys() - left.keys()]
        assert len(gone) == max(0, len(known) - self.embedding.capacity_rows) == move.evicted_rows
        assert max(gone, default=-np.inf) <= min(left.values(), default=np.inf)
        self.shrunk += len(gone)
        return move

    @rule(n=st.integers(1, 60))
    def release(self, n: int) -> None:
        evictable, used = self.kv.evictable_pages, self.kv.used_pages
        freed = self.kv.release(n)
        assert min(n, evictable) <= freed <= evictable
        assert self.kv.used_pages == used - freed

    @rule(n=st.integers(1, 12))
    def alloc_or_free(self, n: int) -> None:
        """Somebody else has pages for a while: the caches get by with fewer."""
        if self.extra:
            for page in self.extra:
                self.pool.free_page(page)
            self.extra = []
        else:
            n = min(n, self.pool.free_count)
            self.extra = [self.pool.alloc_page(Owner.KV) for _ in range(n)]

    # What always holds

    def held_now(self) -> dict[int, list[int]]:
        """Pages by user, from batches in flight and from what the cache says is stored."""
        held = {}
        for batch in self.running:
            for user, row in zip(batch.users.tolist(), batch.page_table, strict=True):
                held[user] = row[row >= 0].tolist()
        tokens = self.kv.cached_tokens(list(range(USERS))).tolist()
        for user, (length, pages) in self.stored.items():
            if user not in held and tokens[user]:
                assert tokens[user] == length
                held[user] = pages
        return held

    @invariant()
    def what_always_holds(self) -> None:
        if not hasattr(self, "pool"):
            return
        held = self.held_now()
        self.every_page_has_one_owner(held)
        self.books_agree(held)
        self.counters_add_up()
        self.pinned_entries_are_there()
        self.memory_holds_its_values(held)
        self.pages_that_are_read_stay_as_they_are()
        self.capacity_is_kept()

    def every_page_has_one_owner(self, held: dict[int, list[int]]) -> None:
        kv = [page for pages in held.values() for page in pages] + self.extra
        assert len(kv) == len(set(kv))
        assert sorted(kv) == np.flatnonzero(self.pool.owner == Owner.KV).tolist()
        assert len(kv) == self.kv.used_pages + len(self.extra)
        embedding = set(np.flatnonzero(self.pool.owner == Owner.EMBEDDING).tolist())
        mine = set(self.embedding.pages.tolist())
        assert mine <= embedding
        assert len(embedding - mine) == self.pool.pending_count
        assert embedding - mine <= set(self.reading.tolist()), "only pins hold pages back"
        assert set(self.reading.tolist()) <= embedding, "a page that is read has a new owner"
        stats = self.pool.stats()
        assert stats.free + stats.embedding + stats.kv == PAGES

    def books_agree(self, held: dict[int, list[int]]) -> None:
        stats = self.kv.stats()
        in_flight = {user for batch in self.running for user in batch.users.tolist()}
        pinned = sum(len(pages) for user, pages in held.items() if user in in_flight)
        assert stats.pinned_pages == pinned
        assert stats.entries == sum(1 for pages in held.values() if pages)
        assert stats.tokens == self.kv.cached_tokens(list(range(USERS))).sum()
        assert self.kv.evictable_pages + pinned == stats.used_pages

    def counters_add_up(self) -> None:
        counters, raw = self.embedding.counters(), self.embedding.state.counters.tolist()
        counted = counters.looked_up, counters.hit, counters.unique_misses
        assert counted == (self.looked_up, self.hit, self.unique_misses)
        assert raw[LOOKED_UP] == counters.hit + raw[MISSED]
        assert counters.fetched_bytes == self.unique_misses * ROW_BYTES
        assert counters.evicted_by_shrinking == self.shrunk
        came = counters.inserted + counters.warmed
        assert resident(self.embedding).size == came - counters.evicted

    def pinned_entries_are_there(self) -> None:
        for batch in self.running:
            for i, user in enumerate(batch.users.tolist()):
                assert self.kv.cached_tokens([user])[0] == batch.cached[i]
                row = batch.page_table[i]
                self.assert_blocks(user, int(batch.stop[i]), row[row >= 0].tolist())

    def memory_holds_its_values(self, held: dict[int, list[int]]) -> None:
        check_cache(self.embedding, self.pool)
        for user, (length, pages) in self.stored.items():
            if held.get(user, [])[: len(pages)] == pages:
                self.assert_blocks(user, length, pages)

    def pages_that_are_read_stay_as_they_are(self) -> None:
        if not self.pool.pending_count:
            self.given_up = {}
            return
        memory = self.pool.memory.view(PAGES, -1)
        owned = np.flatnonzero(self.pool.owner == Owner.EMBEDDING)
        leaving = np.setdiff1d(owned, self.embedding.pages).tolist()
        self.given_up = {page: self.given_up.get(page, memory[page].clone()) for page in leaving}
        for page, before in self.given_up.items():
            assert torch.equal(memory[page], before)

    def capacity_is_kept(self) -> None:
        if self.partition.pending_pages or self.extra:
            return
        assert self.pool.count(Owner.EMBEDDING) == self.partition.target_pages
        assert self.kv.used_pages <= self.kv.capacity_pages == PAGES - self.partition.target_pages

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.running:
            self.finish(0, commit=True)
        self.end_reading()
        for page in self.extra:
            self.pool.free_page(page)
        assert self.partition.settle().pending_pages == 0
        assert self.pool.stats().pinned == self.pool.pending_count == 0

    # Values of blocks

    def memory_of(self, first: int, stop: int, pages: list[int]) -> tuple[np.ndarray, ...]:
        """Blocks and places in them of tokens' K and V, and a number for each, [tokens, layers]."""
        token = np.arange(first, stop)[:, None]
        layer = np.arange(LAYOUT.layers)
        block = token // LAYOUT.block_tokens * LAYOUT.layers + layer
        place = np.array(pages, np.int64)[block // 2] * 2 + block % 2
        return place, token % LAYOUT.block_tokens, token + layer / 8

    def write_blocks(self, user: int, first: int, stop: int, pages: list[int]) -> None:
        place, within, number = self.memory_of(first, stop, pages)
        values = (1000.0 * (user + 1) + number)[..., None, None, None]
        self.kv.blocks.numpy()[place, :, within] = values

    def assert_blocks(self, user: int, tokens: int, pages: list[int]) -> None:
        place, within, number = self.memory_of(0, tokens, pages)
        values = (1000.0 * (user + 1) + number)[..., None, None, None]
        assert (self.kv.blocks.numpy()[place, :, within] == values).all()


NodeMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("HLEM_MACHINE_RUNS") or 50),
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
)
TestNode = NodeMachine.TestCase
