"""A ranked cache with the kernels' queue: LRU, the reference and a phase's rules, on a CPU and a GPU.

On a CPU `dense_model` stands in for the kernels; on a GPU they are held against it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hlem_env.eviction import laru
from hlem_env.eviction.predictor import GivenGaps
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.node import LiveNode
from hlem_env.live.pool import Owner, Pool
from hlem_env.live.ranked_background_queue import RankedBackgroundQueue
from hlem_env.workload.requests import Requests
from tests.live.dense_model import model_cache, without_device
from tests.live.embedding_model import contents
from tests.live.test_given_items import CUDA

ROWS = 6000
PAGE_ROWS = 8
POOL_PAGES = 100
TABLES = HostTables(1, ROWS, 16, torch.float32, seed=1)
Gaps = Callable[[NDArray[np.int64], NDArray[np.float64]], NDArray[np.float64]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(policy: str, gaps: Gaps | None, device: str = "cpu", pages: int = 75) -> EmbeddingCache:
    """A cache of 8 slots a page with the kernels' queue."""
    tables = TABLES
    if device == "cuda":
        tables = HostTables(1, ROWS, 16, torch.float32, 1, device)
    pool = Pool(POOL_PAGES * PAGE_ROWS * 64, PAGE_ROWS * 64, device)
    predictor = None if gaps is None else GivenGaps(late(gaps))
    if device == "cpu":
        cache = model_cache(pool, tables, policy, predictor)
    else:
        cache = EmbeddingCache(pool, tables, policy, predictor=predictor)
    cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
    return cache


may_answer = threading.Event()
may_answer.set()


def late(gaps: Gaps) -> Gaps:
    """The same when it may be told."""

    def answer(rows: NDArray[np.int64], times: NDArray[np.float64]) -> NDArray[np.float64]:
        may_answer.wait()
        return gaps(rows, times)

    return answer


def look_up(cache: EmbeddingCache, keys: torch.Tensor, now: float) -> None:
    """A lookup with the right values. Once a queue is made, all that was predicted of it arrives."""
    may_answer.clear()
    out = cache.lookup(keys.to(cache.device), now)
    assert torch.equal(out.cpu(), TABLES.rows[keys])
    if cache.device.type == "cuda":
        torch.cuda.synchronize()
    may_answer.set()
    cache.wait_for_predictions()
    if cache.device.type == "cuda":
        torch.cuda.synchronize()


def queue_of(cache: EmbeddingCache) -> RankedBackgroundQueue:
    assert cache._dense is not None and cache._dense.ranked is not None
    return cache._dense.ranked


def batches(n: int, seed: int = 0, keys: int = 60) -> list[torch.Tensor]:
    """Skewed batches whose popular rows change slowly."""
    rng = np.random.default_rng(seed)
    return [
        torch.from_numpy(((rng.random(keys) ** 3 * ROWS).astype(np.int64) + 7 * t) % ROWS)
        for t in range(n)
    ]


def true_gaps(requests: list[torch.Tensor]) -> Gaps:
    """Batches until a row's next request."""
    after = np.full((len(requests) + 1, ROWS), np.inf)
    for t in range(len(requests) - 1, -1, -1):
        after[t] = after[t + 1]
        after[t, requests[t].numpy()] = t
    return lambda rows, times: after[int(times[0]) + 1, rows] - times


@pytest.fixture(autouse=True)
def no_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.get_closest_marker("gpu"):
        without_device(monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", laru.RULES)
def test_equal_predicted_times_make_it_lru(policy: str, device: str) -> None:
    ranked = make(policy, lambda rows, times: 1e6 - times, device)
    plain = make("lru", None, device)
    for t, keys in enumerate(batches(60)):
        look_up(ranked, keys, float(t))
        look_up(plain, keys, float(t))
        if t == 25:
            assert ranked.shrink(15).tolist() == plain.shrink(15).tolist()
        if t == 40:
            ranked.grow(range(POOL_PAGES - 10, POOL_PAGES))
            plain.grow(range(POOL_PAGES - 10, POOL_PAGES))
        assert contents(ranked) == contents(plain)
    assert ranked.counters() == plain.counters()
    assert queue_of(ranked).fallbacks == 0 and plain.counters().evicted > 1000
    ranked.close()


def hit_rates(requests: list[torch.Tensor], gaps: Gaps, policy: str, device: str) -> list[float]:
    """Of the reference, of the kernels' queue, and of LRU, when the cache is full."""
    pool = Pool(POOL_PAGES * PAGE_ROWS * 64, PAGE_ROWS * 64)
    reference = EmbeddingCache(pool, TABLES, policy, predictor=GivenGaps(gaps))
    reference.grow(pool.alloc_pages(75, Owner.EMBEDDING))
    rates = []
    for cache in (reference, make(policy, gaps, device), make("lru", None, device)):
        for t, keys in enumerate(requests):
            look_up(cache, keys, float(t))
            if t == 40:
                begun = cache.counters()
        done = cache.counters() - begun
        rates.append(done.hit / done.looked_up)
        cache.close()
    return rates


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["laru", "fpb"])
def test_true_predictions_hit_nearly_as_often_as_the_reference(policy: str, device: str) -> None:
    """Within 2 points; LRU is further away."""
    requests = batches(110, keys=40)
    reference, ours, lru = hit_rates(requests, true_gaps(requests), policy, device)
    assert ours > reference - 0.02
    assert lru < reference - 0.04


@pytest.mark.parametrize("device", DEVICES)
def test_laru_stops_trusting_what_is_always_wrong(device: str) -> None:
    """What comes soonest is said to come last: LARU loses less than FPB, 4 points more than the reference."""
    requests = batches(110, keys=40)
    true = true_gaps(requests)

    def wrong(rows: NDArray[np.int64], times: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1000.0 / np.minimum(true(rows, times), 1000.0)

    reference, laru_rate, lru = hit_rates(requests, wrong, "laru", device)
    _, fpb_rate, _ = hit_rates(requests, wrong, "fpb", device)
    assert laru_rate > reference - 0.04
    assert fpb_rate + 0.05 < laru_rate < lru


@pytest.mark.parametrize("device", DEVICES)
def test_confidence_halves_for_what_comes_back_and_recovers_with_the_phase(device: str) -> None:
    cache = make("laru", lambda rows, times: np.where(rows < 8, 900.0, 50.0), device, pages=2)
    queue = queue_of(cache)

    def after(t: int, *rows: int) -> float:
        look_up(cache, torch.tensor(rows), float(t))
        cache._device_side.poll()  # type: ignore[union-attr]
        return queue.confidence

    for t, rows in enumerate((range(8), range(8, 16), [20], [8], [9], [10])):
        assert after(t, *rows) == 1.0
    phase = cache._dense.chain.phase  # type: ignore[union-attr]
    before = cache.contains(torch.arange(8).to(device))
    # The first 8 are said to come last: two of them go, and are asked for again.
    assert after(6, 21, 22) == 1.0
    gone = torch.nonzero(before & ~cache.contains(torch.arange(8).to(device)))[:, 0].tolist()
    assert len(gone) == 2
    assert after(7, *gone) == 0.5
    assert after(8, 11) == 0.5
    assert cache._dense.chain.phase == phase  # type: ignore[union-attr]
    for t in range(9, 17):  # a phase is 16 rows
        after(t, *range(100 + 4 * t, 104 + 4 * t))
    assert cache._dense.chain.phase > phase  # type: ignore[union-attr]
    assert queue.confidence == 1.0
    cache.close()


def test_a_predictor_that_is_not_usable_makes_it_lru_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GivenGaps, "usable", False)
    ranked = make("laru", lambda rows, times: rows % 13 + 1.0)
    plain = make("lru", None)
    for t, keys in enumerate(batches(30)):
        look_up(ranked, keys, float(t))
        look_up(plain, keys, float(t))
        assert contents(ranked) == contents(plain)
    assert queue_of(ranked).fallbacks > 0
    ranked.close()


def test_what_is_not_predicted_goes_by_recency(monkeypatch: pytest.MonkeyPatch) -> None:
    """The predictor never says anything; batches are dropped and counted."""
    ranked = make("fpb", lambda rows, times: np.ones(rows.size))
    plain = make("lru", None)
    with monkeypatch.context() as patched:
        patched.setattr(queue_of(ranked).predictions, "_asked", _Full())
        for t, keys in enumerate(batches(30)):
            for cache in (ranked, plain):
                assert torch.equal(cache.lookup(keys, float(t)), TABLES.rows[keys])
            assert contents(ranked) == contents(plain)
        assert queue_of(ranked).predictions.dropped == 30
    ranked.close()


class _Full:
    """A queue whose reader is always behind."""

    def full(self) -> bool:
        return True


@pytest.mark.gpu
@pytest.mark.parametrize("policy", laru.RULES)
def test_the_kernels_do_what_the_model_does(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    said = rng.integers(1, 60, (50, ROWS)).astype(np.float64)
    got = make(policy, lambda rows, times: said[int(times[0]), rows], "cuda")
    requests = batches(50, 1, 150)
    states = []
    for t, keys in enumerate(requests):
        look_up(got, keys, float(t))
        if t == 30:
            got.shrink(15)
        torch.cuda.synchronize()
        states.append((contents(got), got.state.counters.tolist()))
    got.close()
    with monkeypatch.context() as patched:
        without_device(patched)
        want = make(policy, lambda rows, times: said[int(times[0]), rows])
        for t, keys in enumerate(requests):
            look_up(want, keys, float(t))
            if t == 30:
                want.shrink(15)
            assert (contents(want), want.state.counters.tolist()) == states[t]
        want.close()


@pytest.mark.gpu
def test_a_large_ranked_cache_stays_whole_while_the_host_is_ahead() -> None:
    tables = HostTables(4, 500_000, 32, torch.float16, seed=2, device="cuda")
    pool = Pool(500 * 2**16, 2**16, "cuda")  # 512,000 slots for 2,000,000 rows
    predictor = GivenGaps(lambda rows, times: (rows * 7 % 13).astype(np.float64))
    cache = EmbeddingCache(pool, tables, "laru", predictor=predictor)
    cache.grow(pool.alloc_pages(400, Owner.EMBEDDING))
    generator = torch.Generator("cuda").manual_seed(0)
    for turn in range(60):
        keys = (torch.rand(100_000, device="cuda", generator=generator) ** 3 * 2_000_000).long()
        out = cache.lookup(keys, turn * 0.1)
        cache.warm(keys[:2000] + 1, turn * 0.1)
        assert turn % 10 or torch.equal(out, tables.expected(keys))
        if turn % 20 == 10:
            pool.free_pages(cache.shrink(100))
        if turn % 20 == 15:
            cache.grow(pool.alloc_pages(100, Owner.EMBEDDING))
    counters = cache.counters()
    held = cache.state.row_of[cache.state.row_of >= 0]
    assert len(held.unique()) == len(held) == cache.resident_rows == cache.capacity_rows
    assert torch.equal(cache.state.row_of[cache.state.index.find(held)], held)
    slots = torch.nonzero(cache.state.row_of >= 0)[:, 0]
    assert torch.equal(cache.state.slab[slots], tables.expected(cache.state.row_of[slots]))
    assert counters.inserted == counters.unique_misses
    cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", laru.RULES)
def test_nothing_waits_for_the_gpu(policy: str) -> None:
    cache = make(policy, lambda rows, times: rows % 13 + 1.0, "cuda")
    requests = [keys.cuda() for keys in batches(12)]

    def use(some: list[torch.Tensor]) -> None:
        for t, keys in enumerate(some):
            cache.lookup(keys, float(t))
            cache.warm(keys + 1, float(t))
        cache.grow(cache.shrink(10))
        cache.lookup(keys)

    use([(keys * 3) % ROWS for keys in requests])
    cache.wait_for_predictions()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        use(requests)
        cache.wait_for_predictions()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    cache.close()


@pytest.mark.gpu
def test_a_live_node_on_a_gpu_takes_it_by_name() -> None:
    pytest.importorskip("lightgbm")
    node = LiveNode(CUDA, row_policy="laru")
    scores = []
    for _ in range(2):
        node.reset(0)
        node.move(2)  # 20,480 rows for 400,000
        for visit in range(12):
            users, lengths = 4 * visit + np.arange(4), np.full(4, 900)
            requests = Requests(np.zeros(4), users, lengths, lengths)
            scores.append(node.execute(requests, requests[:0], 0.1 * visit).scores.float())
        node.embedding.wait_for_predictions()
        counters = node.embedding.counters()
        assert counters.evicted > 0 and counters.inserted == counters.unique_misses
    first, second = torch.cat(scores[:12]), torch.cat(scores[12:])
    assert (first - second).norm() < 2e-2 * first.norm()
    assert queue_of(node.embedding).predictions.dropped < 12
    node.close()
