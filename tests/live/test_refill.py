import time
from collections.abc import Callable

import pytest
import torch

from hlem_env.errors import ArgumentError
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool
from hlem_env.live.refill import Refill, TokenBucket

ROWS = 400
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(
    pages: int, device: str = "cpu", gbps: float | None = None, index: str = "dense"
) -> tuple[Pool, EmbeddingCache]:
    """A cache with pages of 8 rows of 64 bytes."""
    tables = HostTables(1, ROWS, 32, torch.float16, seed=1, device=device)
    pool = Pool(64 * 512, 512, device)
    cache = EmbeddingCache(pool, tables, index=index, emulated_link_gbps=gbps)
    cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
    return pool, cache


def run(refill: Refill, tick: Callable[[], object] = lambda: None) -> float:
    """Step with a clock of 1 ms until nothing is left; returns the seconds of that clock."""
    now = 0.0
    for _ in range(100_000):
        refill.step(now)
        if refill.idle:
            return now
        tick()
        now += 1e-3
        if refill.cache.device.type == "cuda":
            time.sleep(1e-4)
    raise AssertionError("no progress")


def check_values(cache: EmbeddingCache) -> None:
    rows = cache.state.row_of
    held = rows >= 0
    assert torch.equal(cache.state.slab[held], cache.tables.expected(rows[held]))
    assert len(rows[held].unique()) == int(held.sum()) == cache.resident_rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", ["dense", "set_associative"])
def test_new_pages_get_the_rows_missed_most(index: str, device: str) -> None:
    pool, cache = make(2, device, index=index)  # 16 rows
    for turn in range(6):
        cache.lookup(torch.arange(20, device=device) + 20 * (turn % 2))  # 40 rows, 3 times each
    cache.lookup(torch.arange(100, 116, device=device))
    cache.grow(pool.alloc_pages(5, Owner.EMBEDDING))
    refill = Refill(cache, chunk_rows=7)
    refill.refill(40)
    assert refill.refilling
    run(refill)
    assert not refill.refilling
    assert cache.contains(torch.arange(40, device=device)).all()
    assert cache.contains(torch.arange(100, 116, device=device)).all()  # nothing was evicted
    check_values(cache)
    assert refill.refill_bytes == 40 * 64 and refill.prefetch_bytes == 0
    assert cache.counters().warmed == 40 and cache.counters().looked_up == 136


@pytest.mark.parametrize("device", DEVICES)
def test_refill_leaves_out_what_is_resident_and_what_has_no_room(device: str) -> None:
    _, cache = make(2, device)  # 16 rows
    cache.lookup(torch.arange(4, device=device))
    refill = Refill(cache, chunk_rows=8)
    refill.insert(torch.tensor([-1, 0, 1, 7, 7, 9, -1], device=device))
    run(refill)
    assert refill.refill_bytes == 2 * 64
    refill.insert(torch.arange(100, 150, device=device))
    run(refill)
    assert cache.resident_rows == 16 and cache.counters().evicted == 0
    check_values(cache)


@pytest.mark.parametrize("device", DEVICES)
def test_prefetch_comes_first_and_evicts_no_rows_in_use(device: str) -> None:
    _, cache = make(2, device)  # 16 rows
    cache.lookup(torch.arange(8, device=device))
    cache.lookup(torch.arange(8, 16, device=device))
    refill = Refill(cache, chunk_rows=4, buffers=1)
    refill.insert(torch.arange(300, 304, device=device))
    refill.prefetch(torch.tensor([50, 51, 8, 50], device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    assert refill.step(0.0) == 1
    assert refill._buffers[0].prefetch
    run(refill)
    assert cache.contains(torch.tensor([50, 51, *range(8, 16)], device=device)).all()
    assert not cache.contains(torch.arange(300, 304, device=device)).any()  # no free slot
    refill.prefetch(torch.arange(100, 200, device=device))
    assert not refill.refilling and not refill.idle
    run(refill)
    assert cache.contains(torch.tensor([50, 51, *range(8, 16)], device=device)).all()
    assert cache.resident_rows == 16
    check_values(cache)
    assert refill.prefetch_bytes == 102 * 64


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefetch_that_would_come_too_late_is_dropped(device: str) -> None:
    _, cache = make(2, device)  # 16 rows
    refill = Refill(cache, chunk_rows=4, buffers=1)
    refill.insert(torch.tensor([7], device=device))
    refill.prefetch(torch.arange(100, 108, device=device))
    if device == "cuda":
        torch.cuda.synchronize()
    refill.step(0.0)  # its first chunk is under way
    refill.prefetch(torch.arange(200, 204, device=device))
    run(refill)
    held = [row for row in range(ROWS) if cache.contains(torch.tensor([row], device=device))]
    assert held == [7, 100, 101, 102, 103, 200, 201, 202, 203]
    refill.prefetch(torch.arange(300, 304, device=device))
    refill.forget_prefetch()
    assert refill.idle


def test_a_refill_buffer_overwritten_before_its_copy_ran() -> None:
    # A link so slow that each chunk's copy runs many steps after it was begun.
    _, cache = make(50, gbps=64 * 10 / 5e-3 / 1e9)  # 10 rows take 5 ms
    refill = Refill(cache, chunk_rows=10, buffers=2)
    refill.insert(torch.arange(100))
    seconds = run(refill, lambda: cache.lookup(torch.tensor([399])))
    assert cache.contains(torch.arange(100)).all()
    check_values(cache)
    assert 0.049 <= seconds <= 0.06


@pytest.mark.gpu
def test_a_refill_buffer_overwritten_before_its_copy_ran_on_a_gpu() -> None:
    _, cache = make(50, "cuda")
    refill = Refill(cache, chunk_rows=10, buffers=2)
    refill.insert(torch.arange(100, device="cuda"))
    torch.cuda.synchronize()
    assert refill._stream is not None
    for turn in range(30):  # both streams lag far behind the host, in turns
        with torch.cuda.stream(refill._stream if turn % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(20_000_000)  # about 10 ms
        for _ in range(50):
            refill.step(float(turn))
        time.sleep(5e-3)
    run(refill)
    assert cache.contains(torch.arange(100, device="cuda")).all()
    check_values(cache)


@pytest.mark.gpu
def test_lookups_and_refill_at_once() -> None:
    tables = HostTables(1, 200_000, 64, torch.float16, seed=1, device="cuda")
    pool = Pool(100_000 * 128, 1000 * 128, "cuda")
    cache = EmbeddingCache(pool, tables)
    cache.grow(pool.alloc_pages(pool.pages, Owner.EMBEDDING))
    refill = Refill(cache, chunk_rows=2000)
    order = torch.randperm(200_000, device="cuda")
    refill.insert(order[:60_000])
    generator = torch.Generator("cuda").manual_seed(0)
    while not refill.idle:
        refill.step(time.perf_counter())
        keys = torch.randint(200_000, (3000,), device="cuda", generator=generator)
        assert torch.equal(cache.lookup(keys), tables.expected(keys))
    check_values(cache)


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_gpu() -> None:
    _, cache = make(30, "cuda")
    refill = Refill(cache, TokenBucket(1e9), chunk_rows=16)
    for _ in range(2):
        refill.insert(torch.arange(100, device="cuda"))
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for turn in range(5):
                refill.step(turn * 1.0)
                refill.prefetch(cache.hottest_missed(8))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_refill_pauses_near_the_slo() -> None:
    _, cache = make(20)
    refill = Refill(cache, chunk_rows=10, buffers=1, slo_ms=30.0, pause_at=0.9)
    refill.insert(torch.arange(50))
    assert refill.step(0.0, 27.0) == 0 and refill.step(0.0, lambda: 40.0) == 0
    assert refill.paused_steps == 2
    assert refill.step(0.0, 26.9) == 1
    assert refill.step(0.0, 100.0) == 0  # what has arrived is published all the same
    assert cache.resident_rows == 10
    assert refill.step(0.0) == 1


def test_the_bucket_gives_what_the_link_has_left() -> None:
    bucket = TokenBucket(1000.0, headroom=0.1, burst_s=0.1)
    for turn in range(200):  # critical misses take 300 a second
        bucket.observe(int(turn * 30), turn * 0.1)
    assert bucket.rate_bytes_per_s == pytest.approx(600.0, rel=1e-3)
    taken, now = 0, 20.0
    while now < 30.0:
        taken += 25 * bucket.take(25, now)
        now += 0.001
    assert taken == pytest.approx(6000, rel=0.02)
    now += 100.0  # a long rest leaves no more than the burst
    burst = sum(bucket.take(1, now) for _ in range(1000))
    assert burst == pytest.approx(60, abs=2)


def test_the_bucket_is_empty_while_critical_misses_need_the_link() -> None:
    bucket = TokenBucket(1000.0, headroom=0.1)
    for turn in range(100):
        bucket.observe(turn * 100, turn * 0.1)
    assert bucket.rate_bytes_per_s == 0.0
    assert not any(bucket.take(1, 10.0 + turn) for turn in range(10))


def test_refill_keeps_to_its_budget() -> None:
    _, cache = make(60)
    refill = Refill(cache, TokenBucket(64_000.0, headroom=0.0), chunk_rows=10)  # 1000 rows a second
    refill.insert(torch.arange(300))
    assert run(refill) == pytest.approx(0.3, rel=0.1)


def test_critical_misses_take_from_the_budget() -> None:
    _, cache = make(60)
    bucket = TokenBucket(64_000.0, headroom=0.0)
    refill = Refill(cache, bucket, chunk_rows=10)
    for turn in range(200):  # one missing row every 2 ms: half of the link
        if turn % 2 == 0:
            cache.lookup(torch.tensor([100 + turn]))
        refill.step(turn * 1e-2 / 10)
    assert bucket.demand_bytes_per_s == pytest.approx(32_000 * (1 - 0.5 ** (0.2 / 0.5)), rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "name"), [((0.0,), "link"), ((1.0, 1.5), "headroom"), ((1.0, 0.1, 0.0), "burst")]
)
def test_a_bucket_that_cannot_be_is_refused(arguments: tuple[float, ...], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        TokenBucket(*arguments)
