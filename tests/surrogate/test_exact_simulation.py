"""The exact simulation against cases worked out by hand."""

import math

import numpy as np
import pytest

from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Catalogue, Requests
from tests.surrogate.exact_simulation import (
    EmbeddingCache,
    ExactConfig,
    ExactNode,
    Histories,
    KvCache,
)

A, B, C = 1, 2, 3


def config(**values: object) -> ExactConfig:
    """A page is a block of 10 tokens in the one layer. Nothing takes time but the overhead."""
    defaults = {
        "pool_pages": 100,
        "page_bytes": 1000,
        "layers": 1,
        "block_tokens": 10,
        "block_bytes": 1000,
        "overhead_ms": 10.0,
        "gather_gbps": math.inf,
        "hbm_gbps": math.inf,
        "half_life_s": 10.0,
        "hot_window_s": 60.0,
    }
    return ExactConfig(**(defaults | values))


def requests(*rows: tuple[float, int, int, int]) -> Requests:
    """From (arrival_s, user, history_length, new_items)."""
    arrival, user, length, new = zip(*rows, strict=True)
    return Requests(
        np.array(arrival),
        np.array(user, np.int64),
        np.array(length, np.int32),
        np.array(new, np.int32),
    )


def node(catalogue: Catalogue, compute_ms=lambda tokens, context: 0.0, **values) -> ExactNode:
    return ExactNode(config(**values), catalogue, compute_ms, np.random.default_rng(0), 0.0)


ONE_ROW = Catalogue(tables=2, rows_per_table=1, row_bytes=1000, candidates=3)


def test_embedding_cache_is_lru_over_batches() -> None:
    cache = EmbeddingCache(9)

    def read(*rows: int) -> tuple[int, int]:
        return cache.read(np.array(rows))

    cache.resize(3)
    assert read(1, 2, 2) == (0, 2)  # empty: three lookups miss, two rows are fetched
    assert read(2, 3, 3) == (1, 1)  # 3 is not there at the start, neither time
    assert cache.rows.tolist() == [1, 2, 3]
    assert read(4, 1, 1) == (2, 1)  # 2 is the least recently used of 2 3 4 1
    assert cache.rows.tolist() == [3, 4, 1]
    assert read(5, 6, 7, 8) == (0, 4)  # more rows than fit: the last three stay
    assert cache.rows.tolist() == [6, 7, 8]
    cache.resize(1)
    assert cache.rows.tolist() == [8]


def test_kv_pages_round_up_blocks_then_pages() -> None:
    # 11 tokens are two blocks a layer, six in all, 1800 bytes: two pages of 1000.
    assert config(layers=3, block_bytes=300).kv_pages(11) == 2
    assert config(layers=3, block_bytes=300).kv_pages(10) == 1
    assert config().kv_pages(0) == 0


def test_scan_resistant_admission() -> None:
    kv = KvCache(config(kv_policy="scan_resistant"))
    kv.resize(4, 0.0)
    assert kv.access(A, 20, 20, 0.0) == 0  # count 1, takes 2 pages
    assert kv.access(A, 25, 5, 1.0) == 20  # 0.5^0.1 + 1 = 1.933; grows to 3 pages
    assert kv.access(B, 20, 20, 2.0) == 0  # B 1 against A 1.933 x 0.5^0.1 = 1.804: refused
    assert kv.tokens == {A: 25}
    assert kv.access(B, 30, 10, 3.0) == 0  # B 0.933 + 1 = 1.933, A 1.683: B evicts A
    assert kv.tokens == {B: 30}
    assert (kv.used, kv.evictions) == (3, 1)
    assert kv.score(A, 3.0) == pytest.approx(1.683, abs=1e-3)  # scores outlive entries
    assert kv.access(A, 50, 25, 4.0) == 0  # 2.570 is above B, but 5 pages never fit: B stays
    assert kv.tokens == {B: 30}


def test_lru_admission() -> None:
    kv = KvCache(config(kv_policy="lru"))
    kv.resize(4, 0.0)
    kv.access(A, 20, 20, 0.0)
    assert kv.access(A, 25, 5, 1.0) == 20
    kv.access(B, 20, 20, 2.0)  # 1 page free, 2 needed: A, used at 1, goes
    assert kv.tokens == {B: 20}
    kv.access(C, 20, 20, 3.0)
    assert kv.access(B, 21, 1, 4.0) == 20  # needs a third page: C, used at 3, goes
    assert kv.tokens == {B: 21}


def test_growth_that_finds_no_room_keeps_the_old_entry_and_evicts_nobody() -> None:
    kv = KvCache(config(kv_policy="scan_resistant"))
    kv.resize(4, 0.0)
    for second in (0.0, 0.1, 0.2, 0.3):
        kv.access(A, 20, 0, second)  # two pages, a count of almost 4
    kv.access(B, 10, 10, 1.0)
    kv.access(C, 10, 10, 2.0)
    assert kv.access(C, 35, 5, 3.0) == 10  # three more pages, B gives one: not enough
    assert kv.tokens == {A: 20, B: 10, C: 10}
    assert kv.access(C, 40, 5, 3.5) == 10  # tokens 10 to 40 were never cached
    assert kv.access(C, 18, 5, 4.0) == 0  # 13 of the old 40 kept: the history shrank
    assert kv.tokens == {A: 20, C: 18}  # two pages: its own and B's (1 against C's 3.6)
    kv.resize(2, 6.0)  # C (2.9) is above A (2.6)
    assert (kv.tokens, kv.used) == ({C: 18}, 2)


def test_history_grows_and_drops_its_oldest() -> None:
    histories = Histories(Catalogue(rows_per_table=10**6, zipf=0), np.random.default_rng(0))
    first = histories.visit(A, 5, 2)
    second = histories.visit(A, 7, 2)
    assert list(second[:5]) == list(first)
    third = histories.visit(A, 4, 2)
    assert list(third[:2]) == list(second[5:])


def test_zipf_popularity() -> None:
    # s = 1 over three items: 6/11, 3/11, 2/11.
    ranks = Histories(Catalogue(rows_per_table=3, zipf=1), np.random.default_rng(0)).draw(100_000)
    assert np.bincount(ranks) / ranks.size == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.01)


def test_queue_and_what_belongs_to_which_run() -> None:
    n = node(ONE_ROW)
    # 10 ms each: 0 to 10, 10 to 20, 20 to 30, then idle, 50 to 60.
    arriving = requests((0.0, A, 10, 10), (0.004, B, 10, 10), (0.005, C, 10, 10), (0.05, A, 11, 1))
    first = n.run(arriving[:3], 50, 0.015)
    assert first.latency_ms == pytest.approx([10])
    assert first.utilisation == pytest.approx(1)
    assert first.backlog == 2  # one in service, one waiting
    assert first.backlog_age_s == pytest.approx(0.011)
    assert first.history_tokens == 10
    second = n.run(arriving[3:], 50, 0.040)
    assert second.latency_ms == pytest.approx([16, 25])
    assert second.utilisation == pytest.approx((15 + 5) / 40)  # 15 to 30 and 50 to 55
    assert second.backlog == 1
    third = n.run(Requests.empty(), 50, 0.045)
    assert third.latency_ms == pytest.approx([10])
    assert third.reused_tokens == 10
    assert third.utilisation == pytest.approx(5 / 45)
    assert (third.backlog, third.backlog_age_s) == (0, 0.0)
    both: EpochStats = first.merge(second).merge(third)
    assert both.utilisation == pytest.approx(0.4)  # 40 of 100 ms


def test_service_time_and_counts() -> None:
    n = node(
        ONE_ROW,
        compute_ms=lambda tokens, context: tokens + context / 100,
        gather_gbps=1.0,
        hbm_gbps=2.0,
    )
    stats = n.run(requests((0.0, A, 4, 4), (0.1, A, 5, 1)), 50, 1.0)
    # First: 4 + 3 tokens miss the one row of each table, which is fetched once: 2 x 1000 bytes at
    # 1 GB/s are 0.002 ms; the model takes 7 + 7/100. Second: 1 + 3 tokens hit; 4 x 2 rows, read and
    # written, are 16,000 bytes, 0.008 ms at 2 GB/s; the model takes 4 + 8/100.
    assert stats.service_ms == pytest.approx([10 + 7.07 + 0.002, 10 + 4.08 + 0.008])
    assert (stats.history_tokens, stats.reused_tokens) == (9, 4)
    assert (stats.computed_tokens, stats.rows_looked_up, stats.rows_hit) == (11, 22, 8)
    assert (stats.embedding_pages, stats.kv_pages, stats.free_pages) == (50, 1, 49)
    assert stats.alpha_resident == pytest.approx(2 * 1000 / 100_000)


def test_hot_users_and_working_set() -> None:
    n = node(ONE_ROW, hot_window_s=10.0)
    stats = n.run(
        requests((0.0, A, 10, 10), (5.0, A, 11, 1), (6.0, B, 50, 50), (10.0, A, 21, 10)), 0, 10.1
    )
    assert list(stats.is_hot) == [False, False, False, True]
    assert stats.working_set_bytes == 0  # at 10.1 A's third most recent request is 10.1 s old
    stats = n.run(requests((10.5, A, 31, 10)), 0, 4.0)
    assert stats.working_set_bytes == 4000  # 31 tokens are four pages
    assert n.run(Requests.empty(), 0, 1.0).working_set_bytes == 0


def test_a_move_of_alpha_evicts_on_both_sides() -> None:
    # 10 pages; at alpha 0.5 five hold 5 rows, two tables with 2 rows each; five pages of KV.
    n = node(
        Catalogue(tables=2, rows_per_table=1000, row_bytes=1000, candidates=0),
        pool_pages=10,
    )
    n.run(requests((0.0, A, 30, 30), (1.0, B, 20, 20)), 50, 2.0)
    assert (len(n.embedding.rows), n.kv.tokens) == (2, {A: 30, B: 20})
    stats = n.run(Requests.empty(), 70, 1.0)  # three pages of KV; A's count is the older
    assert (n.kv.tokens, stats.evictions, stats.free_pages) == ({B: 20}, 1, 1)
    n.run(Requests.empty(), 20, 1.0)  # two rows, one a table
    assert len(n.embedding.rows) == 1
