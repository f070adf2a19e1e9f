"""Which tokens a request reuses, who is stored, and what happens to pages meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hlem_env.errors import ArgumentError, BackendError
from hlem_env.eviction.policies import Lru, ScanResistant, make_policy
from hlem_env.eviction.protocol import EvictionPolicy
from hlem_env.live.kv_cache import KvBatch, KvCache, KvLayout
from hlem_env.live.pool import Owner, Pool
from hlem_env.surrogate.hardware import HardwareProfile
from hlem_env.surrogate.node import NodeConfig, SurrogateBackend
from hlem_env.workload.requests import Catalogue, Requests
from tests.surrogate import exact_simulation
from tests.surrogate.cases import Replay
from tests.surrogate.streams import Source

LAYOUT = KvLayout(layers=3, heads=1, head_dim=4, block_tokens=4, dtype=torch.float16)
PAGE_BYTES = 2 * LAYOUT.block_bytes
"""Two blocks; twelve tokens of three layers take five pages, the last half full."""
MAX_TOKENS = 200


def make(pages: int, policy: EvictionPolicy | None = None, **options: int) -> KvCache:
    pool = Pool(pages * PAGE_BYTES, PAGE_BYTES)
    options = {"max_history_tokens": MAX_TOKENS, **options}
    return KvCache(pool, LAYOUT, policy or Lru(), **options)


def pages_of(tokens: int) -> int:
    """Chunks of four tokens, three blocks each, two blocks to a page."""
    chunks = (tokens + 3) // 4
    return (3 * chunks + 1) // 2


class Clock:
    now = 0.0

    @classmethod
    def tick(cls) -> float:
        cls.now += 1.0
        return cls.now


def begin(kv: KvCache, user: int, length: int, new: int | None = None, prefix: int = 0) -> KvBatch:
    return kv.begin([user], [length], [length if new is None else new], [prefix], Clock.tick())


def serve(kv: KvCache, user: int, length: int, new: int | None = None, prefix: int = 0) -> int:
    """Tokens reused by a request that runs to its end."""
    batch = begin(kv, user, length, new, prefix)
    kv.commit(batch)
    return int(batch.cached[0])


def assert_whole(kv: KvCache, running: Sequence[KvBatch] = ()) -> None:
    """Nothing is in flight but `running`, and all books agree."""
    stats, pool = kv.stats(), kv.pool
    assert stats.used_pages == pool.count(Owner.KV)
    assert stats.used_pages + pool.free_count + pool.count(Owner.EMBEDDING) == pool.pages
    pinned = sum(int((batch.page_table >= 0).sum()) for batch in running)
    assert stats.pinned_pages == pool.stats().pinned == pinned
    assert kv.evictable_pages == stats.used_pages - pinned


def test_layout_of_the_default_model() -> None:
    layout = KvLayout(layers=6, heads=8, head_dim=64)
    assert layout.block_shape == (2, 128, 8, 64)
    assert layout.block_bytes == 256 * 2**10
    node = NodeConfig(layers=6)
    tokens = np.array([1, 128, 129, 1000, 12_000, 15_000])
    assert layout.pages(tokens, 8).tolist() == [node.kv_pages(n) for n in tokens.tolist()]


def test_blocks_must_fill_a_page() -> None:
    with pytest.raises(ArgumentError, match="16 of every page would be lost"):
        KvCache(Pool(10 * 208, 208), LAYOUT, Lru())


def test_a_second_request_reuses_the_first_and_computes_what_is_new() -> None:
    kv = make(100)
    first = begin(kv, 7, 10)
    assert (first.cached[0], first.start[0], first.stop[0]) == (0, 0, 10)
    kv.commit(first)
    second = begin(kv, 7, 13, new=3)
    assert (second.cached[0], second.start[0], second.stop[0]) == (10, 10, 13)
    assert second.admitted[0]
    kv.commit(second)
    assert kv.cached_tokens([7]).tolist() == [13]
    assert kv.stats().tokens == 13
    assert_whole(kv)


def test_growth_only_appends_pages() -> None:
    kv = make(100)
    table = begin(kv, 1, 10)
    kv.commit(table)
    before = table.page_table[0, : pages_of(10)]
    serve(kv, 2, 30)
    grown = begin(kv, 1, 50, new=40)
    assert grown.page_table[0, : pages_of(10)].tolist() == before.tolist()
    held = grown.page_table[0, : pages_of(50)]
    assert len(set(held.tolist())) == pages_of(50)
    assert (kv.pool.owner[held] == Owner.KV).all()
    assert (grown.page_table[0, pages_of(50) :] == -1).all()
    assert grown.page_table.shape == (1, kv.max_pages) == (1, pages_of(MAX_TOKENS))


def test_the_rest_of_a_page_needs_no_new_one() -> None:
    kv = make(pages_of(9))
    serve(kv, 1, 9)
    batch = begin(kv, 1, 12, new=3)
    assert batch.admitted[0]
    kv.commit(batch)
    assert kv.cached_tokens([1]).tolist() == [12]


@pytest.mark.parametrize(
    ("length", "new", "prefix"),
    [
        pytest.param(15, 6, 0, id="shrunk: only nine old items where ten are stored"),
        pytest.param(8, 0, 0, id="shrunk below what is stored"),
        pytest.param(13, 3, 1, id="edited"),
        pytest.param(3, 3, 0, id="all new"),
    ],
)
def test_a_history_that_is_no_longer_the_same_is_a_miss(length: int, new: int, prefix: int) -> None:
    kv = make(100)
    serve(kv, 1, 10)
    assert serve(kv, 1, length, new, prefix) == 0
    assert kv.stats().invalidated == 1
    assert kv.stats().evictions == 0
    assert serve(kv, 1, length, 0, prefix) == length
    assert_whole(kv)


def test_a_shrunk_history_does_not_ask_for_a_huge_number_of_pages() -> None:
    kv = make(100)
    serve(kv, 1, 150)
    batch = kv.begin(
        np.array([1], np.uint64),
        np.array([5], np.uint16),
        np.array([0], np.uint8),
        np.array([0], np.uint64),
        Clock.tick(),
    )
    assert batch.cached[0] == 0
    assert (batch.page_table >= 0).sum() == pages_of(5)
    kv.commit(batch)
    assert kv.used_pages == pages_of(5)
    with pytest.raises(ArgumentError, match="new_items"):
        begin(kv, 1, 3, new=4)
    with pytest.raises(ArgumentError, match="new_items"):
        begin(kv, 1, 3, new=-1)


def test_a_shrunk_history_is_noticed_although_less_is_stored() -> None:
    kv = make(pages_of(10))
    serve(kv, 1, 10)
    assert serve(kv, 1, 60, new=50) == 10, "cannot grow and stays as it is"
    assert kv.cached_tokens([1]).tolist() == [10]
    assert serve(kv, 1, 60, new=0) == 10
    assert serve(kv, 1, 55, new=3) == 0, "its last request had 60 tokens"


def test_another_model_version_is_a_miss() -> None:
    kv = make(100)
    serve(kv, 1, 10)
    kv.model_version = 1
    assert serve(kv, 1, 12, new=2) == 0
    assert serve(kv, 1, 12, new=0) == 12


def test_an_aborted_batch_leaves_what_was_there() -> None:
    kv = make(100)
    serve(kv, 1, 10)
    batch = kv.begin([1, 2], [60, 30], [50, 30], [0, 0], Clock.tick())
    assert_whole(kv, [batch])
    kv.abort(batch)
    assert_whole(kv)
    assert kv.used_pages == pages_of(10)
    assert kv.cached_tokens([1, 2]).tolist() == [10, 0]
    assert kv.stats().entries == 1
    assert serve(kv, 1, 60, new=50) == 10, "the same request again is no shrunk history"


def test_a_batch_ends_once() -> None:
    kv = make(100)
    for end in (kv.commit, kv.abort):
        batch = begin(kv, 1, 10)
        end(batch)
        for again in (kv.commit, kv.abort):
            with pytest.raises(BackendError, match=r"users \[1\] ended already"):
                again(batch)
    assert_whole(kv)


def test_nothing_is_valid_before_the_commit() -> None:
    kv = make(100)
    batch = begin(kv, 1, 10)
    assert kv.cached_tokens([1]).tolist() == [0]
    assert kv.stats().tokens == 0
    kv.commit(batch)
    assert kv.cached_tokens([1]).tolist() == [10]


def test_two_requests_of_one_user_in_one_batch() -> None:
    kv = make(100)
    users, lengths, new = [4, 5, 4, 6, 4], [10, 9, 12, 3, 12], [10, 9, 2, 3, 0]
    with pytest.raises(ArgumentError, match=r"users=\[4\].*split"):
        kv.begin(users, lengths, new, [0] * 5, Clock.tick())
    assert kv.stats().users == 0
    parts = kv.split(users, lengths)
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part.tolist() for part in kv.split([4, 5, 4, 5], [4] * 4)] == [[0, 1], [2, 3]]
    reused = []
    for part in parts:
        batch = kv.begin(
            np.array(users)[part], np.array(lengths)[part], np.array(new)[part],
            [0] * part.size, Clock.tick(),
        )  # fmt: skip
        reused += batch.cached.tolist()
        kv.commit(batch)
    assert reused == [0, 0, 10, 0, 12]


def test_a_user_of_a_running_batch_is_refused() -> None:
    kv = make(100)
    batch = begin(kv, 1, 10)
    with pytest.raises(BackendError, match="user 1 has a request in a running batch"):
        kv.begin([2, 1], [5, 12], [5, 2], [0, 0], Clock.tick())
    assert kv.stats().users == 1, "user 2 was not touched"
    kv.commit(batch)
    assert serve(kv, 1, 12, new=2) == 10


def test_a_page_conflict_inside_one_batch() -> None:
    kv = make(40)
    kv.commit(kv.begin([1, 2, 3], [8, 12, 20], [8, 12, 20], [0] * 3, Clock.tick()))
    batch = kv.begin([3, 1, 4, 2], [24, 16, 9, 12], [4, 8, 9, 0], [0] * 4, Clock.tick())
    held = batch.page_table[batch.page_table >= 0]
    assert np.unique(held).size == held.size == sum(map(pages_of, (24, 16, 9, 12)))
    assert_whole(kv, [batch])


def test_a_batch_whose_pins_exceed_the_kv_pages_is_split() -> None:
    kv = make(3 * pages_of(20))
    users, lengths = list(range(7)), [20, 20, 20, 20, 200, 20, 20]
    parts = kv.split(users, lengths)
    # The request of 200 tokens fits in no batch: it is not stored and takes nothing.
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5, 6]]
    for part in parts:
        batch = kv.begin(part, np.array(lengths)[part], np.array(lengths)[part], part, Clock.tick())
        assert batch.admitted.tolist() == [lengths[i] <= 20 for i in part]
        kv.commit(batch)


def test_a_stored_entry_counts_in_a_split_although_it_cannot_grow() -> None:
    kv = make(pages_of(20) + pages_of(8))
    serve(kv, 1, 20)
    assert [part.tolist() for part in kv.split([1, 2], [100, 12])] == [[0], [1]]
    assert [part.tolist() for part in kv.split([1, 2], [100, 8])] == [[0, 1]]
    assert kv.split([], []) == []


def test_a_batch_that_was_not_split_loses_admission_only() -> None:
    kv = make(2 * pages_of(20))
    batch = kv.begin([1, 2, 3], [20] * 3, [20] * 3, [0] * 3, Clock.tick())
    assert batch.admitted.tolist() == [True, True, False]
    assert (batch.page_table[2] == -1).all()
    kv.commit(batch)
    assert kv.stats().not_admitted == 1
    assert_whole(kv)


def test_without_kv_pages_everything_is_unadmitted() -> None:
    pool = Pool(10 * PAGE_BYTES, PAGE_BYTES)
    pool.alloc_pages(10, Owner.EMBEDDING)
    kv = KvCache(pool, LAYOUT, Lru(), max_history_tokens=MAX_TOKENS)
    assert [part.tolist() for part in kv.split([1, 2, 3], [8, 9, 200])] == [[0, 1, 2]]
    batch = kv.begin([1, 2, 3], [8, 9, 200], [8, 9, 200], [0] * 3, Clock.tick())
    assert not batch.admitted.any()
    kv.commit(batch)
    assert kv.used_pages == kv.stats().entries == 0


def test_a_look_at_an_unknown_user_leaves_no_phantom_entry() -> None:
    kv = make(10)
    assert kv.cached_tokens([1, 2]).tolist() == [0, 0]
    assert kv.split([1, 2], [4, 4])[0].tolist() == [0, 1]
    assert (kv.stats().users, kv.stats().entries, kv.used_pages) == (0, 0, 0)
    kv.abort(begin(kv, 1, 8))
    batch = begin(kv, 2, 200)  # does not fit
    kv.commit(batch)
    assert (kv.stats().entries, kv.used_pages) == (0, 0)
    assert kv.release(5) == 0
    assert_whole(kv)


@pytest.mark.parametrize("policy", ["lru", "scan_resistant"])
def test_eviction_never_chooses_an_in_flight_user(policy: str) -> None:
    kv = make(2 * pages_of(20), make_policy(policy))
    serve(kv, 1, 20)
    running = begin(kv, 1, 20, new=0)
    table = running.page_table.copy()
    for user in (2, 3, 2, 3, 2, 3, 3):
        serve(kv, user, 20)
    assert kv.release(1000) == pages_of(20), "all but the entry in flight"
    assert kv.resize(0) == 0
    assert kv.cached_tokens([1]).tolist() == [20]
    kv.commit(running)
    assert (running.page_table == table).all()
    assert kv.resize(0) == pages_of(20)
    assert_whole(kv)


def test_a_batch_does_not_evict_its_own_users() -> None:
    kv = make(3 * pages_of(20))
    for user in (1, 2, 3):
        serve(kv, user, 20)
    # The newcomer comes first; the oldest entry, user 1, is in the batch.
    batch = kv.begin([9, 1], [20, 20], [20, 0], [0, 0], Clock.tick())
    assert batch.cached.tolist() == [0, 20]
    assert kv.cached_tokens([1, 2, 3]).tolist() == [20, 0, 20]


def test_a_zero_length_history() -> None:
    kv = make(10)
    batch = kv.begin([1, 2], [0, 4], [0, 4], [0, 0], Clock.tick())
    assert batch.admitted.tolist() == [False, True]
    assert (batch.start[0], batch.stop[0]) == (0, 0)
    kv.commit(batch)
    assert kv.stats().entries == 1
    assert serve(kv, 1, 4, new=4) == 0
    assert serve(kv, 1, 0, new=0) == 0, "the history is gone"
    assert kv.stats().entries == 1
    empty = kv.begin([], [], [], [], Clock.tick())
    assert empty.page_table.shape == (0, kv.max_pages)
    kv.commit(empty)
    assert_whole(kv)


def test_a_history_longer_than_the_maximum_is_refused() -> None:
    kv = make(100)
    message = f"history_lengths=\\[{MAX_TOKENS + 1}\\].*max_history_tokens={MAX_TOKENS}"
    with pytest.raises(ArgumentError, match=message):
        kv.begin([1, 2], [4, MAX_TOKENS + 1], [4, 0], [0, 0], Clock.tick())
    with pytest.raises(ArgumentError, match="history_lengths"):
        kv.split([1], [MAX_TOKENS + 1])
    with pytest.raises(ArgumentError, match="history_lengths"):
        begin(kv, 1, -1, new=0)
    assert kv.stats().users == 0
    assert serve(kv, 1, MAX_TOKENS) == 0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([1], [4, 4], [4], [0], 0.0), "history_lengths"),
        (([1], [4], [4], [0, 1], 0.0), "prefix_hashes"),
        (([1], [4.5], [4], [0], 0.0), "history_lengths"),
        (([[1]], [4], [4], [0], 0.0), "users"),
        (([1], [4], [4], [0], float("nan")), "now"),
        (([1], [4], [4], [0], [1.0, 2.0]), "now"),
        (([2**63], [4], [4], [0], 0.0), "users"),
    ],
)
def test_arguments_are_checked(arguments: tuple[object, ...], name: str) -> None:
    kv = make(10)
    with pytest.raises(ArgumentError, match=name):
        kv.begin(*arguments)  # type: ignore[arg-type]
    assert kv.stats().users == 0


def test_hashes_use_all_64_bits() -> None:
    kv = make(10)
    high = np.array([2**63 + 1], np.uint64)
    kv.commit(kv.begin([1], [4], [4], high, Clock.tick()))
    batch = kv.begin([1], [4], [0], high.view(np.int64), Clock.tick())
    assert batch.cached[0] == 4
    kv.commit(batch)
    assert serve(kv, 1, 4, new=0, prefix=1) == 0


def test_evictable_pages_are_not_counted_twice() -> None:
    kv = make(5 * pages_of(8))
    for user in range(5):
        serve(kv, user, 8)
    running = kv.begin([0, 1], [8, 8], [0, 0], [0, 0], Clock.tick())
    assert kv.evictable_pages == 3 * pages_of(8)
    # Room for four more beside the two in flight: three can go, so it must fail and evict nobody.
    batch = begin(kv, 9, 32)
    assert not batch.admitted[0]
    assert kv.cached_tokens(list(range(5))).tolist() == [8] * 5
    kv.commit(batch)
    kv.commit(running)
    assert kv.release(kv.used_pages) == 5 * pages_of(8)
    assert kv.stats().evictions == 5
    assert_whole(kv)


class Broken(Lru):
    """Offers what it should not, again and again."""

    def __init__(self, offer: Sequence[int]) -> None:
        super().__init__()
        self.offer = np.array(offer, np.int64)

    def pick_victims(self, n: int, incoming: NDArray[np.int64], now: object) -> NDArray[np.int64]:
        return np.resize(self.offer, n if self.offer.size else 0)


@pytest.mark.parametrize("offer", [[], [0], [5], [0, 0]])
def test_an_eviction_loop_that_cannot_make_progress_fails(offer: list[int]) -> None:
    policy = Broken(offer)
    kv = make(100, policy)
    for user in (1, 2, 3):
        serve(kv, user, 8)
    with pytest.raises(BackendError, match="policy Broken"):
        kv.release(kv.used_pages)
    assert kv.stats().entries == 3


def test_a_slot_that_another_user_gets_inherits_nothing() -> None:
    kv = make(8, ScanResistant(1e6), max_users=16)
    residents = [1, 2, 3, 4]
    for _ in range(2):
        for user in residents:
            serve(kv, user, 4, new=0 if kv.cached_tokens([user])[0] else 4)
    # With one visit each, nobody beats two. With a visit inherited, everybody would.
    for user in range(100, 160):
        serve(kv, user, 4)
        assert kv.stats().users <= 16
    assert kv.cached_tokens(residents).tolist() == [4] * 4
    assert kv.stats().users == 16
    assert kv.stats().evictions == 0


def test_a_full_table_forgets_the_least_worthy_without_an_entry() -> None:
    kv = make(4, Lru(), max_users=32)
    for user in range(32):
        serve(kv, user, 200)  # never stored
    serve(kv, 99, 200)  # two are forgotten for it, so a slot is left over
    for first in range(100, 400, 3):
        known = first - 1 if first > 100 else 31
        batch = kv.begin(
            [first, known, first + 1, first + 2], [4] * 4, [4] * 4, [0] * 4, Clock.tick()
        )
        assert np.unique(batch.slots).size == 4, "a user of the batch is not forgotten for another"
        kv.commit(batch)
        assert kv.stats().users <= 32
        assert kv.stats().entries == 2
        assert_whole(kv)
    # The oldest first: all but the latest are gone, and asking for them adds nobody.
    users = kv.stats().users
    assert kv.cached_tokens(list(range(32))).tolist() == [0] * 32
    assert kv.stats().users == users


def test_the_oldest_known_user_of_a_batch_is_not_forgotten_for_a_new_one() -> None:
    kv = make(4, Lru(), max_users=8)
    for user in range(8):
        serve(kv, user, 200)
    batch = kv.begin([0, 50], [200, 200], [0, 200], [0, 0], Clock.tick())
    assert np.unique(batch.slots).size == 2
    kv.commit(batch)
    assert kv.stats().users == 8


def test_users_in_flight_or_stored_are_not_forgotten() -> None:
    kv = make(4, Lru(), max_users=8)
    serve(kv, 0, 4)
    batch = kv.begin(list(range(8)), [4] * 8, [0] * 8, [0] * 8, Clock.tick())
    with pytest.raises(BackendError, match="neither an entry nor a request in flight"):
        kv.begin([50], [4], [4], [0], Clock.tick())
    kv.commit(batch)
    for user in range(60, 90):
        serve(kv, user, 4)
    assert kv.stats().users <= 8
    with pytest.raises(ArgumentError, match="most_users=7"):
        make(4, max_users=7)


def test_lru_and_scan_resistant_differ_on_one_off_users() -> None:
    for policy, kept in ((Lru(), 0), (ScanResistant(60.0), 20)):
        kv = make(2 * pages_of(20), policy)
        for user in (1, 2, 1, 2):
            serve(kv, user, 20, new=0 if kv.cached_tokens([user])[0] else 20)
        for user in range(100, 110):
            serve(kv, user, 20)
        assert kv.cached_tokens([1, 2]).tolist() == [kept, kept]


def draw_requests(seed: int, n: int, returning: bool) -> tuple[Requests, NDArray[np.uint64]]:
    """Requests one second apart whose histories grow, and now and then shrink or are edited.

    The hash counts the edits that the surrogate sees: L - n below the last length.
    """
    rng = np.random.default_rng(seed)
    users = (30 * rng.random(n) ** 2).astype(np.int64)
    if not returning:
        once = rng.random(n) < 0.4
        users[once] = 30 + np.arange(np.count_nonzero(once))
    lengths, new = np.zeros(n, np.int32), np.zeros(n, np.int32)
    edits = np.zeros(n, np.uint64)
    last: dict[int, tuple[int, int]] = {}
    for i, user in enumerate(users.tolist()):
        before, edited = last.get(user, (int(rng.integers(0, 90)), 0))
        added = int(rng.integers(0, 12))
        length = before + added
        if rng.random() < 0.1:
            length = int(rng.integers(added, MAX_TOKENS))
        if length > MAX_TOKENS:
            length -= length // 4
        edited += length - added < before
        last[user] = (length, edited)
        lengths[i], new[i], edits[i] = length, min(added, length), edited
    arrival_s = np.arange(n) + rng.uniform(0.1, 0.4, n)
    return Requests(arrival_s, users, lengths, new), edits


def reused_by_cache(
    policy: str, half_life_s: float, pages: int, embedding_pages: int,
    requests: Requests, edits: NDArray[np.uint64],
) -> list[int]:  # fmt: skip
    pool = Pool(pages * PAGE_BYTES, PAGE_BYTES)
    pool.alloc_pages(embedding_pages, Owner.EMBEDDING)
    kv = KvCache(pool, LAYOUT, make_policy(policy, half_life_s), max_history_tokens=2 * MAX_TOKENS)
    reused = []
    for i in range(len(requests)):
        now = requests.arrival_s[i]
        batch = kv.begin(
            requests.user[[i]],
            requests.history_length[[i]],
            requests.new_items[[i]],
            edits[[i]],
            now,
        )
        kv.commit(batch)
        reused.append(int(batch.cached[0]))
    assert kv.stats().evictions > 0
    assert 0 < sum(reused) < requests.history_length.sum()
    assert_whole(kv)
    return reused


@pytest.mark.parametrize("policy", ["lru", "scan_resistant"])
@pytest.mark.parametrize("seed", range(4))
def test_reuse_equals_the_surrogates(policy: str, seed: int) -> None:
    requests, edits = draw_requests(seed, 1200, returning=True)
    node = NodeConfig(
        pool_bytes=600 * PAGE_BYTES,
        page_bytes=PAGE_BYTES,
        block_tokens=LAYOUT.block_tokens,
        block_bytes=LAYOUT.block_bytes,
        layers=LAYOUT.layers,
        kv_policy=policy,
        refill=False,
        warmup_epochs=0,
        epoch_seconds=(5.0, 0.1)[seed % 2],  # at 0.1 s, decayed counts are rescaled
    )
    assert node.kv_pages(77) == pages_of(77)
    hardware = HardwareProfile(
        name="fast", estimate=True, hardware="none", source="drawn", gather_gbps=1e12,
        hbm_gbps=1e12, link_gbps=1.0, refill_slowdown=0.0, overhead_ms=1.0,
        recompute_tokens=(128.0, 256.0), recompute_layer_ms=(1.0, 2.0), append_tokens=8.0,
        append_history_tokens=(128.0, 256.0), append_layer_ms=(1.0, 2.0),
    )  # fmt: skip
    source = Source(30, 2 * MAX_TOKENS, MAX_TOKENS / 2, Catalogue(2, 1000, 64, candidates=1))
    surrogate = SurrogateBackend(Replay(requests, source), node, hardware)
    surrogate.reset(0)
    # One request to a run: its reused tokens are the run's.
    runs = [surrogate.run(50, 1.0) for _ in range(len(requests))]
    assert all(stats.requests == 1 for stats in runs)
    theirs = [stats.reused_tokens for stats in runs]
    mine = reused_by_cache(policy, 12 * node.epoch_seconds, 600, 300, requests, edits)
    assert mine == theirs


@pytest.mark.parametrize("policy", ["lru", "scan_resistant"])
@pytest.mark.parametrize("seed", range(3))
def test_reuse_with_one_off_users_equals_the_exact_simulation(policy: str, seed: int) -> None:
    requests, edits = draw_requests(100 + seed, 1500, returning=False)
    exact = exact_simulation.KvCache(
        exact_simulation.ExactConfig(
            pool_pages=400,
            page_bytes=PAGE_BYTES,
            layers=LAYOUT.layers,
            block_tokens=LAYOUT.block_tokens,
            block_bytes=LAYOUT.block_bytes,
            overhead_ms=0.0,
            gather_gbps=1.0,
            hbm_gbps=1.0,
            kv_policy=policy,
            half_life_s=60.0,
        )
    )
    exact.resize(250, 0.0)
    theirs = [
        exact.access(*request)
        for request in zip(
            requests.user.tolist(),
            requests.history_length.tolist(),
            requests.new_items.tolist(),
            requests.arrival_s.tolist(),
            strict=True,
        )
    ]
    assert reused_by_cache(policy, 60.0, 400, 150, requests, edits) == theirs
