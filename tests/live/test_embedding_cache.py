import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hlem_env.errors import ArgumentError
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.partition import Partition
from hlem_env.live.pool import Owner, Pool
from hlem_env.live.time_source import WallTime
from tests.live.embedding_model import (
    DIM,
    PAGE_ROWS,
    ROWS,
    TABLES,
    LruModel,
    check_consistent,
    contents,
    look_up,
    make,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [
    (policy, index)
    for policy in ("lru", "scan_resistant")
    for index in ("dense", "set_associative")
]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("lookup"), st.lists(st.integers(0, ROWS - 1), max_size=40)),
        st.tuples(st.just("warm"), st.lists(st.integers(-1, ROWS - 1), max_size=20)),
        st.tuples(st.just("refill"), st.lists(st.integers(-1, ROWS - 1), max_size=20)),
        st.tuples(st.just("grow"), st.integers(1, 4)),
        st.tuples(st.just("shrink"), st.integers(1, 4)),
    ),
    max_size=25,
)


def run_against_model(steps: list[tuple[str, object]], device: str) -> None:
    pool, cache = make(2, device=device)
    model = LruModel()
    model.grow(contents(cache))
    for name, argument in steps:
        if name == "lookup":
            assert isinstance(argument, list)
            look_up(cache, argument)
            model.lookup(argument)
        elif name in ("warm", "refill"):
            assert isinstance(argument, list)
            keys = torch.tensor(argument, dtype=torch.int64, device=device)
            cache.warm(keys, evict=name == "warm")
            model.warm(argument, evict=name == "warm")
        elif name == "grow":
            assert isinstance(argument, int)
            pages = pool.alloc_pages(min(argument, pool.free_count), Owner.EMBEDDING)
            cache.grow(pages)
            model.grow(int(page) * PAGE_ROWS + i for page in pages for i in range(PAGE_ROWS))
        else:
            assert isinstance(argument, int)
            check_shrink(pool, cache, model, min(argument, len(cache.pages)))
        assert contents(cache) == model.slots
        check_consistent(cache)
    counters = cache.counters()
    assert (counters.hit, counters.unique_misses, counters.inserted, counters.evicted) == (
        model.hits,
        model.unique_misses,
        model.inserted,
        model.evicted,
    )
    assert counters.warmed == model.warmed
    assert counters.fetched_bytes == model.unique_misses * TABLES.row_bytes


def check_shrink(pool: Pool, cache: EmbeddingCache, model: LruModel, n: int) -> None:
    """The least recent rows go, as few as must, and the others keep their recency."""
    before = {row: stamp for row, stamp in model.slots.values() if row is not None}
    pages = cache.shrink(n)
    assert len(pages) == n and not set(pages.tolist()) & set(cache.pages.tolist())
    pool.free_pages(pages)
    after = {row: stamp for row, stamp in contents(cache).values() if row is not None}
    assert after.items() <= before.items()
    gone = before.keys() - after.keys()
    assert len(gone) == max(0, len(before) - cache.capacity_rows)
    if gone and after:
        assert max(before[row] for row in gone) <= min(after.values())
    model.evicted += len(gone)
    model.copy_from(cache)


# A row that its own batch used was queued before its equals of that batch.
@example(
    [
        ("grow", 2), ("grow", 4), ("lookup", [0, 1]), ("shrink", 1), ("shrink", 2), ("shrink", 4),
        ("lookup", [1, 2, 3, 4]), ("lookup", [0]),
    ]
)  # fmt: skip
@given(operations)
def test_lru_is_the_model(steps: list[tuple[str, object]]) -> None:
    run_against_model(steps, "cpu")


@pytest.mark.gpu
@settings(max_examples=60)
@given(operations)
def test_lru_on_a_gpu_is_the_model(steps: list[tuple[str, object]]) -> None:
    run_against_model(steps, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("policy", "index"), KINDS)
def test_values_are_right_whatever_the_policy(policy: str, index: str, device: str) -> None:
    pool, cache = make(2, policy, index, device)
    rng = np.random.default_rng(0)
    for turn in range(150):
        keys = (rng.random(rng.integers(0, 50)) ** 3 * ROWS).astype(int).tolist()
        look_up(cache, keys, now=turn * 7.0)
        kind = rng.integers(6)
        if kind == 0 and pool.free_count >= 2:
            cache.grow(pool.alloc_pages(2, Owner.EMBEDDING))
        elif kind == 1 and len(cache.pages) > 2:
            pool.free_pages(cache.shrink(2))
        elif kind == 2:
            cache.warm(torch.tensor(keys, dtype=torch.int64, device=device), turn * 7.0)
        check_consistent(cache)


def test_the_hashed_index_gives_up_the_least_recent_row_of_a_full_set() -> None:
    tables = HostTables(1, 4000, 8)
    pool = Pool(8 * tables.row_bytes * 64, tables.row_bytes * 64)
    cache = EmbeddingCache(pool, tables, index="set_associative")
    index = cache.state.index
    index.sets, index.ways = 4, 2  # type: ignore[attr-defined]
    index.tags = torch.full((4, 2), -1, dtype=torch.int64)  # type: ignore[attr-defined]
    index.slots = torch.full((4, 2), -1, dtype=torch.int32)  # type: ignore[attr-defined]
    cache.grow(pool.alloc_pages(8, Owner.EMBEDDING))
    in_set = index._set_of(torch.arange(4000)) == 1  # type: ignore[attr-defined]
    a, b, c, d, e = torch.nonzero(in_set)[:5, 0].tolist()
    for keys, left in (
        ([a], {a}),
        ([b], {a, b}),
        ([a], {a, b}),
        ([c], {a, c}),
        ([c, d, e], {c, d}),
    ):
        out = cache.lookup(torch.tensor(keys))
        assert torch.equal(out, tables.rows[keys])
        resident = cache.contains(torch.arange(4000))
        assert set(torch.nonzero(resident)[:, 0].tolist()) == left
        assert cache.resident_rows == len(left)


def test_scan_resistance_keeps_what_is_asked_for_often() -> None:
    hits = {}
    for policy in ("lru", "scan_resistant"):
        _, cache = make(3, policy)  # 12 rows
        rng = np.random.default_rng(3)
        for turn in range(200):
            scan = rng.integers(12, ROWS, 10).tolist()
            look_up(cache, [*rng.integers(0, 10, 4).tolist(), *scan], now=turn * 1.0)
        resident = cache.contains(torch.arange(10))
        hits[policy] = cache.counters().hit
        if policy == "scan_resistant":
            assert resident.all()
    assert hits["scan_resistant"] > 0.95 * 800  # nearly all of what is asked for often
    assert hits["lru"] < 0.85 * 800


def test_decayed_counts_forget() -> None:
    _, cache = make(1, "scan_resistant")  # 4 rows, half-life 60 s
    for _ in range(50):
        look_up(cache, [0, 1, 2, 3], now=0.0)
    for turn in range(4):
        look_up(cache, [4, 5, 6, 7], now=600.0 + turn)  # 50 counts are 0.05 by now
    assert cache.contains(torch.tensor([4, 5, 6, 7])).all()


def test_decayed_counts_outlast_a_move_of_their_origin() -> None:
    _, cache = make(1, "scan_resistant")
    for turn in range(40):
        look_up(cache, [0, 1, 2, 3], now=turn * 1000.0)  # 16 half-lives each
        look_up(cache, [10 + turn], now=turn * 1000.0)
        assert cache.contains(torch.tensor([0, 1, 2, 3])).all()
        assert torch.isfinite(cache.state.count[cache.state.row_of >= 0]).all()


# Faults seen in other systems.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", ["dense", "set_associative"])
def test_empty_key_set(index: str, device: str) -> None:
    _, cache = make(2, index=index, device=device)
    assert look_up(cache, []).shape == (0, DIM)
    cache.warm(torch.empty(0, dtype=torch.int64, device=device))
    assert cache.counters().looked_up == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("policy", "index"), KINDS)
def test_one_lookup_larger_than_the_cache(policy: str, index: str, device: str) -> None:
    _, cache = make(2, policy, index, device)
    for _ in range(3):
        look_up(cache, list(range(ROWS)) + list(range(0, ROWS, 3)))
        assert cache.resident_rows == cache.capacity_rows == 8
        check_consistent(cache)
    assert cache.counters().hit == 2 * (8 + len([row for row in range(8) if row % 3 == 0]))


def test_a_cache_without_pages_serves() -> None:
    _, cache = make(0)
    look_up(cache, [3, 1, 3])
    cache.warm(torch.tensor([1]))
    assert cache.counters().unique_misses == 2 and cache.resident_rows == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("policy", "index"), KINDS)
def test_cache_larger_than_the_tables(policy: str, index: str, device: str) -> None:
    _, cache = make(20, policy, index, device)  # 80 slots for 60 rows
    rng = np.random.default_rng(0)
    for _ in range(40):
        look_up(cache, rng.integers(0, ROWS, 30).tolist())
    assert cache.resident_rows == ROWS
    before = cache.counters()
    for _ in range(5):
        look_up(cache, rng.integers(0, ROWS, 30).tolist())
    since = cache.counters() - before
    assert since.hit == since.looked_up == 150 and since.evicted == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", ["dense", "set_associative"])
def test_duplicate_keys_in_one_batch(index: str, device: str) -> None:
    _, cache = make(2, index=index, device=device)
    look_up(cache, [5] * 700 + [9] + [5] * 700)
    counters = cache.counters()
    assert (counters.unique_misses, counters.hit, counters.looked_up) == (2, 0, 1401)
    assert cache.resident_rows == 2
    look_up(cache, [5, 5, 9])
    assert cache.counters().hit == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["lru", "scan_resistant"])
def test_a_reclaimed_slot_inherits_no_recency_or_frequency(policy: str, device: str) -> None:
    pool, cache = make(2, policy, device=device)  # 8 rows
    for turn in range(30):
        look_up(cache, [0, 1, 2, 3, 4, 5, 6, 7], now=float(turn))
    pool.free_pages(cache.shrink(2))
    cache.grow(pool.alloc_pages(2, Owner.EMBEDDING))
    look_up(cache, [20, 21, 22, 23, 24, 25, 26, 27], now=31.0)
    assert cache.contains(torch.arange(20, 28, device=device)).all()
    fresh = cache.state.score[cache.state.row_of >= 0]
    if policy == "lru":
        assert (fresh == 31).all()
    else:  # one lookup each, not 31
        assert fresh.max() < 2.0
    look_up(cache, [30, 31], now=32.0)
    look_up(cache, [30, 31], now=32.0)
    assert cache.contains(torch.tensor([30, 31], device=device)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", ["dense", "set_associative"])
def test_prefetch_evicts_no_rows_in_use(index: str, device: str) -> None:
    _, cache = make(2, index=index, device=device)  # 8 rows
    look_up(cache, [0, 1, 2, 3])
    look_up(cache, [4, 5, 6, 7])
    cache.warm(torch.arange(20, 40, device=device))  # takes the place of 0 to 3, and of no others
    assert cache.contains(torch.arange(4, 8, device=device)).all()
    assert cache.contains(torch.arange(20, 24, device=device)).all()
    cache.warm(torch.arange(40, 60, device=device))
    assert cache.contains(torch.arange(20, 24, device=device)).all()  # not used yet
    cache.warm(torch.arange(40, 60, device=device), evict=False)
    assert cache.counters().evicted == 4


def test_unknown_keys_are_refused() -> None:
    _, cache = make(2)
    for keys in ([0, ROWS], [-1]):
        with pytest.raises(ArgumentError, match=f"0 to {ROWS - 1}"):
            cache.lookup(torch.tensor(keys))
    with pytest.raises(ArgumentError, match="int64"):
        cache.lookup(torch.tensor([1], dtype=torch.int32))
    assert cache.counters().looked_up == 0


def test_pages_are_taken_once_and_given_back() -> None:
    pool, cache = make(3)
    with pytest.raises(ArgumentError, match="once"):
        cache.grow(cache.pages[:1])
    with pytest.raises(ArgumentError, match="0 to 23"):
        cache.grow([24])
    with pytest.raises(ArgumentError, match="0 to 3 pages"):
        cache.shrink(4)
    assert len(cache.shrink(0)) == 0
    assert sorted(cache.shrink(3).tolist()) == [0, 1, 2]
    assert cache.capacity_rows == 0


class NoKv:
    """A KV side without entries."""

    evictions = 0

    def resize(self, capacity_pages: int) -> int:
        return 0


@pytest.mark.parametrize("device", DEVICES)
def test_the_boundary_moves_it(device: str) -> None:
    pool, cache = make(12, device=device)  # half of 24 pages
    partition = Partition(pool, cache, NoKv())
    look_up(cache, list(range(40)))
    assert partition.move(25).moved_pages == -6
    assert pool.count(Owner.EMBEDDING) == 6 and cache.resident_rows == 24
    look_up(cache, list(range(40)))
    assert cache.counters().evicted_by_shrinking == 16
    assert partition.move(100).moved_pages == 18
    assert pool.free_count == 0 and cache.capacity_rows == 96
    look_up(cache, list(range(ROWS)))
    look_up(cache, list(range(ROWS)))
    check_consistent(cache)
    assert cache.resident_rows == ROWS
    if device == "cuda":
        torch.cuda.synchronize()
    assert cache.shrink_evictions == 16


class StoppedTime(WallTime):
    """Stands still, and notes what is waited for."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_an_emulated_link_takes_its_time() -> None:
    clock = StoppedTime()
    pool = Pool(24 * PAGE_ROWS * TABLES.row_bytes, PAGE_ROWS * TABLES.row_bytes)
    gbps = ROWS * TABLES.row_bytes / 0.05 / 1e9  # 50 ms for all rows
    cache = EmbeddingCache(pool, TABLES, emulated_link_gbps=gbps, time_source=clock)
    cache.grow(pool.alloc_pages(20, Owner.EMBEDDING))
    look_up(cache, list(range(ROWS)))
    assert clock.slept == pytest.approx([0.05])
    look_up(cache, list(range(ROWS)))
    assert len(clock.slept) == 1  # all are resident
    with pytest.raises(ArgumentError, match="emulated_link_gbps"):
        EmbeddingCache(pool, TABLES, emulated_link_gbps=0.0)


def test_the_rows_missed_most_that_are_gone() -> None:
    _, cache = make(1)  # 4 rows
    for keys in ([1, 2], [3, 4, 5, 6], [1], [7, 8, 9, 10], [1, 2], [11, 12, 13, 14]):
        look_up(cache, keys)
    assert cache.hottest_missed(2).tolist() == [1, 2]  # 3 and 2 times
    assert cache.hottest_missed(10).tolist()[:1] == [1]
    assert set(cache.hottest_missed(10).tolist()) == {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
    assert cache.hottest_missed(14).tolist()[:4] == [-1] * 4


def test_the_index_follows_the_number_of_rows() -> None:
    pool = Pool(2**12, 2**10)
    assert EmbeddingCache(pool, TABLES).index_kind == "dense"
    assert EmbeddingCache(pool, TABLES, dense_rows_limit=ROWS - 1).index_kind == "set_associative"
