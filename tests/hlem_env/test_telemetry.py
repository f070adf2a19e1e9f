"""EpochStats: what is derived from an epoch, and that two runs merge into the joined one."""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlem_env.scenario import Scenario
from hlem_env.surrogate.node import SurrogateBackend
from hlem_env.telemetry import EpochStats, percentile
from tests.hlem_env.epochs import epochs, make_stats
from tests.surrogate.cases import Replay

finite = st.floats(0, 1e9)


@given(st.lists(finite, min_size=1, max_size=100), st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    given = np.array(values)
    kept = given.copy()
    expected = float(np.percentile(given, 100 * share))
    assert percentile(given, share) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert np.array_equal(given, kept)


def test_percentile_of_many() -> None:
    values = np.random.default_rng(0).exponential(size=100_001)
    for share in (0.0, 0.5, 0.99, 0.999, 1.0):
        assert percentile(values, share) == pytest.approx(np.quantile(values, share), rel=1e-12)


# Derived values


def test_derived_values_are_computed_once() -> None:
    stats = make_stats([1.0, 2.0], is_hot=[True, False])
    first = stats.p99_ms, stats.hot_share
    stats.latency_ms[:] = 9.0
    stats.is_hot[:] = True
    assert (stats.p99_ms, stats.hot_share) == first
    assert replace(stats).hot_share == 1.0


def test_derived_values_by_hand() -> None:
    stats = make_stats(
        [10.0, 30.0, 31.0, 50.0, 70.0],
        service_ms=[1.0, 2.0, 3.0, 4.0, 5.0],
        is_hot=[True, True, True, True, False],
        history_tokens=500,
        reused_tokens=125,
        rows_looked_up=80,
        rows_hit=60.0,
        pool_bytes=1000,
        working_set_bytes=1500.0,
    )
    assert stats.requests == 5
    assert stats.p99_ms == pytest.approx(50 + 0.96 * 20)
    assert (stats.qos(30.0), stats.qos(29.9), stats.qos(70.0)) == (0.4, 0.2, 1.0)
    assert (stats.hot_share, stats.kv_hit, stats.emb_hit) == (0.8, 0.25, 0.75)
    assert (stats.mean_history_tokens, stats.mean_service_ms) == (100.0, 3.0)
    assert stats.working_set == 1.5


def test_every_zero_denominator_has_its_value() -> None:
    empty = make_stats(pool_bytes=0)
    assert empty.requests == 0
    assert (empty.p99_ms, empty.qos(30.0)) == (0.0, 1.0)
    assert (empty.hot_share, empty.kv_hit, empty.emb_hit, empty.working_set) == (0, 0, 0, 0)
    assert (empty.mean_history_tokens, empty.mean_service_ms) == (0, 0)
    no_history = make_stats([5.0])
    assert (no_history.kv_hit, no_history.emb_hit, no_history.mean_history_tokens) == (0, 0, 0)


def test_a_backlog_alone_counts_as_late() -> None:
    stuck = make_stats(backlog=2, backlog_age_s=1.25)
    assert (stuck.p99_ms, stuck.qos(1e9)) == (1250.0, 0.0)
    served = make_stats([7.0], backlog=2, backlog_age_s=1.25)
    assert (served.p99_ms, served.qos(10.0)) == (7.0, 1.0)


# Merge


def values_of(stats: EpochStats) -> dict[str, Any]:
    return {field.name: getattr(stats, field.name) for field in fields(stats)}


def assert_equal(one: EpochStats, other: EpochStats, but: Sequence[str] = ()) -> None:
    """All fields alike, floats to rounding; those named in `but` are not looked at."""
    for name, value in values_of(one).items():
        expected = getattr(other, name)
        if name in but:
            continue
        if isinstance(value, np.ndarray):
            assert value.dtype == expected.dtype, name
            assert np.array_equal(value, expected), name
        else:
            assert value == pytest.approx(expected, rel=1e-9, abs=1e-12), name


def test_merge_by_hand() -> None:
    first = make_stats(
        [10.0, 20.0],
        duration_s=1.0,
        is_hot=[True, False],
        service_ms=[1.0, 2.0],
        arrival_s=[0.1, 0.2],
        history_tokens=10,
        reused_tokens=1,
        rows_looked_up=100,
        rows_hit=50.5,
        computed_tokens=3,
        refill_bytes=7.0,
        prefetch_bytes=8.0,
        evictions=2,
        alpha_target=0.5,
        alpha_resident=0.4,
        embedding_pages=9,
        kv_pages=8,
        free_pages=7,
        pending_pages=6,
        working_set_bytes=5.0,
        backlog=4,
        backlog_age_s=0.5,
        utilisation=0.2,
    )
    second = make_stats(
        [5.0],
        duration_s=3.0,
        is_hot=[True],
        service_ms=[3.0],
        arrival_s=[0.3],
        history_tokens=30,
        reused_tokens=2,
        rows_looked_up=200,
        rows_hit=100.0,
        computed_tokens=4,
        refill_bytes=70.0,
        prefetch_bytes=80.0,
        evictions=20,
        alpha_target=0.6,
        alpha_resident=0.45,
        embedding_pages=90,
        kv_pages=80,
        free_pages=70,
        pending_pages=60,
        working_set_bytes=50.0,
        backlog=0,
        backlog_age_s=0.0,
        utilisation=0.6,
    )
    merged = first.merge(second)
    assert merged.latency_ms.tolist() == [10.0, 20.0, 5.0]
    assert merged.service_ms.tolist() == [1.0, 2.0, 3.0]
    assert merged.arrival_s.tolist() == [0.1, 0.2, 0.3]
    assert merged.is_hot.tolist() == [True, False, True]
    added = {
        "duration_s": 4.0,
        "history_tokens": 40,
        "reused_tokens": 3,
        "rows_looked_up": 300,
        "rows_hit": 150.5,
        "computed_tokens": 7,
        "refill_bytes": 77.0,
        "prefetch_bytes": 88.0,
        "evictions": 22,
    }
    for name, value in added.items():
        assert getattr(merged, name) == value, name
    assert merged.utilisation == pytest.approx(0.5)
    last = values_of(second).keys() - added.keys() - {"utilisation"}
    for name in last - {"latency_ms", "service_ms", "arrival_s", "is_hot"}:
        assert getattr(merged, name) == getattr(second, name), name


@given(epochs(), epochs(), epochs())
def test_merge_is_associative(a: EpochStats, b: EpochStats, c: EpochStats) -> None:
    assert_equal(a.merge(b).merge(c), a.merge(b.merge(c)))


@given(st.lists(epochs(), min_size=2, max_size=5))
def test_a_merge_derives_its_values_from_all_requests(parts: list[EpochStats]) -> None:
    merged = reduce(EpochStats.merge, parts)
    latencies = [ms for part in parts for ms in part.latency_ms.tolist()]
    assert merged.requests == len(latencies)
    if latencies:
        assert merged.p99_ms == pytest.approx(float(np.percentile(latencies, 99)))
        assert merged.qos(100.0) == pytest.approx(np.mean([ms <= 100 for ms in latencies]))
        shares = [part.is_hot.mean() * part.requests for part in parts if part.requests]
        assert merged.hot_share == pytest.approx(sum(shares) / len(latencies))


def test_merge_of_runs_of_no_time() -> None:
    now = make_stats([1.0], duration_s=0.0, utilisation=0.75)
    merged = make_stats(duration_s=0.0).merge(now)
    assert (merged.duration_s, merged.utilisation, merged.requests) == (0.0, 0.75, 1)


# Ticks and the epoch that they make up

SCENARIO = Scenario(
    pool_bytes=6_000_000_000, mean_history_tokens=2000, max_history_tokens=3000, utilisation=0.7
)
MOVES = (50, 20, 20, 80, 80, 80, 35, 35)
EPOCH_S = 5.0
TICKS = 10


def replay(refill: bool, policy: str, utilisation: float) -> SurrogateBackend:
    scenario = Scenario.parse(SCENARIO, kv_policy=policy, refill=refill, utilisation=utilisation)
    workload = scenario.workload()
    workload.reset(np.random.default_rng(3), 0.0)
    requests = workload.take(len(MOVES) * EPOCH_S)
    # No warm-up: rows and KV fill within the first epochs.
    node = Scenario.parse(scenario, warmup_epochs=0).node()
    backend = SurrogateBackend(Replay(requests, workload), node, scenario.profile())
    backend.reset(0)
    return backend


def in_ticks(backend: SurrogateBackend, alpha_centi: int) -> EpochStats:
    ticks = [backend.run(alpha_centi, EPOCH_S / TICKS) for _ in range(TICKS)]
    assert all(tick.requests for tick in ticks)
    return reduce(EpochStats.merge, ticks)


@pytest.mark.parametrize("utilisation", [0.7, 1.3])
@pytest.mark.parametrize("policy", ["scan_resistant", "lru"])
def test_ten_ticks_are_an_epoch(policy: str, utilisation: float) -> None:
    whole, ticked = (replay(False, policy, utilisation) for _ in range(2))
    for alpha_centi in MOVES:
        epoch = whole.run(alpha_centi, EPOCH_S)
        assert epoch.requests > 500
        assert_equal(in_ticks(ticked, alpha_centi), epoch)


@pytest.mark.parametrize("policy", ["scan_resistant", "lru"])
def test_ten_ticks_are_an_epoch_but_for_the_budget_of_refill(policy: str) -> None:
    """Refill's budget starts anew in every run, so rows may come a little sooner or later."""
    whole, ticked = (replay(True, policy, 0.7) for _ in range(2))
    served: list[list[EpochStats]] = [[], []]
    for alpha_centi in MOVES:
        epoch, ticks = whole.run(alpha_centi, EPOCH_S), in_ticks(ticked, alpha_centi)
        served[0].append(epoch)
        served[1].append(ticks)
        assert epoch.kv_hit == pytest.approx(ticks.kv_hit, abs=0.002)
        assert epoch.emb_hit == pytest.approx(ticks.emb_hit, abs=0.01)
        assert epoch.hot_share == pytest.approx(ticks.hot_share, abs=0.002)
        assert epoch.working_set_bytes == pytest.approx(ticks.working_set_bytes, rel=0.02)
        assert epoch.refill_bytes == pytest.approx(ticks.refill_bytes, rel=0.1, abs=1e8)
        assert epoch.alpha_resident == pytest.approx(ticks.alpha_resident, abs=0.01)
        assert epoch.embedding_pages == ticks.embedding_pages
        assert epoch.duration_s == pytest.approx(ticks.duration_s)
    arrivals = [np.concatenate([stats.arrival_s for stats in part]) for part in served]
    n = min(part.size for part in arrivals)
    assert n > 5000
    assert np.array_equal(arrivals[0][:n], arrivals[1][:n])
    assert max(part.size for part in arrivals) - n <= 2
