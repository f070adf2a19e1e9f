"""Pool, both caches and the boundary under random requests, lookups and moves.

The memory is real: every user's blocks and every row hold values of their own, so a page that two
owners write to, or a block that moved, is seen in the values.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hlem_env.eviction.policies import make_policy
from hlem_env.live.kv_cache import KvBatch, KvCache, KvLayout
from hlem_env.live.partition import Partition
from hlem_env.live.pool import Owner, Pool
from tests.live.small_embedding import make_embedding

PAGES = 40
LAYOUT = KvLayout(layers=3, heads=1, head_dim=2, block_tokens=2, dtype=torch.float32)
PAGE_BYTES = 2 * LAYOUT.block_bytes
MOST_TOKENS = 30
USERS = 8

request = st.tuples(
    st.integers(0, USERS - 1),
    st.integers(0, 9),  # new items
    st.sampled_from(["grow", "grow", "grow", "shrink", "edit"]),
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
        self.next_key = 1

    @initialize(
        policy=st.sampled_from(["lru", "scan_resistant"]),
        alpha=st.integers(0, 100),
        returns_pinned=st.booleans(),
    )
    def start(self, policy: str, alpha: int, returns_pinned: bool) -> None:
        self.pool = Pool(PAGES * PAGE_BYTES, PAGE_BYTES)
        self.pool.memory.fill_(255)
        self.embedding = make_embedding(self.pool, returns_pinned)
        self.kv = KvCache(
            self.pool,
            LAYOUT,
            make_policy(policy),
            max_history_tokens=MOST_TOKENS,
            max_users=2 * PAGES,
        )
        self.partition = Partition(self.pool, self.embedding, self.kv)
        self.partition.move(alpha)

    # Requests

    @rule(requests=st.lists(request, min_size=1, max_size=6))
    def begin_split(self, requests: list[tuple[int, int, str]]) -> None:
        self.begin_requests(requests, split=True)

    @rule(requests=st.lists(request, min_size=1, max_size=6), commit=st.booleans())
    def begin_and_end(self, requests: list[tuple[int, int, str]], commit: bool) -> None:
        self.begin_requests(requests, split=False)
        if self.running:
            self.finish(len(self.running) - 1, commit)
            self.partition.settle()

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
        self.now += 1.0
        before = dict(self.stored)
        cached_before = self.kv.cached_tokens(users)
        batch = self.kv.begin(users, lengths, new, edits.astype(np.uint64), self.now)
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
            self.partition.settle()

    def finish(self, which: int, commit: bool) -> None:
        batch = self.running.pop(which)
        (self.kv.commit if commit else self.kv.abort)(batch)
        for i, user in enumerate(batch.users.tolist()):
            held = batch.page_table[i][batch.page_table[i] >= 0].tolist()
            if commit and batch.admitted[i]:
                self.stored[user] = (int(batch.stop[i]), held)

    # Lookups

    @rule(n=st.integers(1, 5))
    def insert(self, n: int) -> None:
        for _ in range(n):
            self.embedding.insert(self.next_key)
            self.next_key += 1

    @precondition(lambda self: self.embedding.in_use or self.embedding.pages)
    @rule(data=st.data())
    def start_or_end_lookup(self, data: st.DataObject) -> None:
        if self.embedding.in_use:
            self.embedding.end_lookup()
            return
        pages = st.lists(st.sampled_from(self.embedding.pages), min_size=1, unique=True)
        self.embedding.start_lookup(data.draw(pages))

    # The boundary, and pages taken from outside

    @rule(alpha=st.integers(0, 100))
    def move(self, alpha: int) -> None:
        move = self.partition.move(alpha)
        assert move.wanted_pages == move.moved_pages + move.pending_pages

    @rule()
    def settle(self) -> None:
        pending = self.partition.pending_pages
        move = self.partition.settle()
        assert move.wanted_pages == pending

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
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "pool"):
            return
        kv = [page for pages in self.held_now().values() for page in pages] + self.extra
        assert len(kv) == len(set(kv))
        assert sorted(kv) == np.flatnonzero(self.pool.owner == Owner.KV).tolist()
        assert len(kv) == self.kv.used_pages + len(self.extra)
        embedding = set(np.flatnonzero(self.pool.owner == Owner.EMBEDDING).tolist())
        mine = set(self.embedding.pages)
        assert mine <= embedding
        assert len(embedding - mine) == self.pool.pending_count
        assert embedding - mine <= set(self.embedding.in_use), "only pins hold pages back"
        stats = self.pool.stats()
        assert stats.free + stats.embedding + stats.kv == PAGES

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        stats = self.kv.stats()
        held = self.held_now()
        in_flight = {user for batch in self.running for user in batch.users.tolist()}
        pinned = sum(len(pages) for user, pages in held.items() if user in in_flight)
        assert stats.pinned_pages == pinned
        assert stats.entries == sum(1 for pages in held.values() if pages)
        assert stats.tokens == self.kv.cached_tokens(list(range(USERS))).sum()
        assert self.kv.evictable_pages + pinned == stats.used_pages

    @invariant()
    def pinned_entries_are_there(self) -> None:
        for batch in self.running:
            for i, user in enumerate(batch.users.tolist()):
                assert self.kv.cached_tokens([user])[0] == batch.cached[i]
                row = batch.page_table[i]
                self.assert_blocks(user, int(batch.stop[i]), row[row >= 0].tolist())

    @invariant()
    def resident_blocks_hold_their_values(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.embedding.check_rows()
        held = self.held_now()
        for user, (length, pages) in self.stored.items():
            if held.get(user, [])[: len(pages)] == pages:
                self.assert_blocks(user, length, pages)

    @invariant()
    def capacity_is_kept(self) -> None:
        if not hasattr(self, "pool") or self.partition.pending_pages or self.extra:
            return
        assert self.pool.count(Owner.EMBEDDING) == self.partition.target_pages
        assert self.kv.used_pages <= self.kv.capacity_pages == PAGES - self.partition.target_pages

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.running:
            self.finish(0, commit=True)
        if self.embedding.in_use:
            self.embedding.end_lookup()
        for page in self.extra:
            self.pool.free_page(page)
        assert self.partition.settle().pending_pages == 0
        assert self.pool.stats().pinned == self.pool.pending_count == 0

    # Values of blocks

    def tokens_in_memory(
        self, first: int, stop: int, pages: list[int]
    ) -> list[tuple[torch.Tensor, float]]:
        """K and V of tokens in every layer, and the number of (token, layer)."""
        found = []
        for token in range(first, stop):
            for layer in range(LAYOUT.layers):
                block = token // LAYOUT.block_tokens * LAYOUT.layers + layer
                place = pages[block // 2] * 2 + block % 2
                found.append(
                    (
                        self.kv.blocks[place, :, token % LAYOUT.block_tokens],
                        token + layer / 8,
                    )
                )
        return found

    def write_blocks(self, user: int, first: int, stop: int, pages: list[int]) -> None:
        for kv, number in self.tokens_in_memory(first, stop, pages):
            kv.fill_(1000.0 * user + number)

    def assert_blocks(self, user: int, tokens: int, pages: list[int]) -> None:
        for kv, number in self.tokens_in_memory(0, tokens, pages):
            assert bool((kv == 1000.0 * user + number).all())


NodeMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, print_blob=True
)
TestNode = NodeMachine.TestCase
