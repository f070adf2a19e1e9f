"""The surrogate in batches: where none can form it is the plain one, and its batches keep the rules."""

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest

from hlem_env.errors import BackendError
from hlem_env.surrogate.batched import BatchedBackend, BatchedNode
from hlem_env.surrogate.hardware import HardwareProfile, NodeProfile
from hlem_env.surrogate.hit_rates import distinct_curve, distinct_rows, miss_probability
from hlem_env.surrogate.node import NodeConfig, SurrogateBackend
from hlem_env.telemetry import EpochStats
from hlem_env.workload.regimes import LoadCurve, RegimeConfig, SyntheticWorkload
from hlem_env.workload.requests import Catalogue, Requests
from tests.surrogate.cases import Replay

H100 = HardwareProfile.load("h100")
PAGE = 2 * 2**20


def profile(**changes: Any) -> NodeProfile:
    """The shipped profile with what a batch takes."""
    return NodeProfile(**(vars(H100) | changes))


def workload(rate: float = 60.0, hot_share: float = 0.4) -> SyntheticWorkload:
    """Requests of a small node."""
    config = RegimeConfig(
        steady_hot_share=hot_share, pool_bytes=3_000_000_000, mean_history_tokens=4000,
        epoch_seconds=1.0, catalogue=Catalogue(4, 2_000_000), warm_users=200,
    )  # fmt: skip
    return SyntheticWorkload(config, LoadCurve((hot_share,), (rate,)))


def node(**changes: Any) -> BatchedNode:
    """A small node."""
    values: dict[str, Any] = {"pool_bytes": 3_000_000_000, "epoch_seconds": 1.0}
    return BatchedNode(**(values | changes))


class Unhashed(BatchedBackend):
    """Items are rows, as in the plain surrogate."""

    def _distinct_curve(self) -> Any:
        catalogue = self.workload.catalogue
        return distinct_curve(catalogue.rows_per_table, catalogue.zipf)


def test_without_batches_it_is_the_plain_surrogate() -> None:
    plain_node = {f.name: getattr(node(refill=False), f.name) for f in fields(NodeConfig)}
    plain = SurrogateBackend(workload(), NodeConfig(**plain_node), H100)
    batched = Unhashed(workload(), node(refill=False, token_budget=1), profile())
    for backend in (plain, batched):
        backend.reset(3)
        backend.run(40, backend.warmup_s)
    for alpha in (40, 70, 20, 20):
        mine, theirs = batched.run(alpha, 3.0), plain.run(alpha, 3.0)
        assert mine.requests == theirs.requests > 100
        # The plain one expands the curve of distinct rows to the second order.
        for name in ("latency_ms", "service_ms", "arrival_s"):
            np.testing.assert_allclose(getattr(mine, name), getattr(theirs, name), rtol=1e-4)
        assert mine.emb_hit == pytest.approx(theirs.emb_hit, rel=1e-6)
        for name in ("kv_hit", "hot_share", "kv_pages", "working_set_bytes", "evictions"):
            assert getattr(mine, name) == getattr(theirs, name)


def at_once(users: Sequence[int], length: int) -> Requests:
    """Requests that all arrive at the start."""
    n = len(users)
    lengths = np.full(n, length, np.int32)
    return Requests(np.zeros(n), np.array(users, np.int64), lengths, lengths)


def served(requests: Requests, config: BatchedNode, hardware: NodeProfile) -> EpochStats:
    """What becomes of them from cold caches."""
    source = workload()
    backend = BatchedBackend(Replay(requests, source), replace(config, warmup_epochs=0), hardware)
    backend.reset(0)
    return backend.run(10, 100.0)


def test_a_batch_is_as_large_as_the_budget_allows_and_completes_as_a_whole() -> None:
    strangers = [10**6 + i for i in range(10)]
    stats = served(at_once(strangers, 1900), node(token_budget=6000), profile(request_ms=0.5))
    done, sizes = np.unique(np.round(stats.latency_ms, 6), return_counts=True)
    assert sizes.tolist() == [3, 3, 3, 1]  # 2,000 tokens each
    assert (np.diff(done) > 0).all()
    # Time of a batch is shared out by tokens.
    assert stats.service_ms.sum() == pytest.approx(done[-1], rel=1e-6)


def test_no_user_stands_twice_in_a_batch() -> None:
    stats = served(at_once([0, 1, 0, 2], 500), node(), profile())
    assert np.unique(np.round(stats.latency_ms, 6), return_counts=True)[1].tolist() == [2, 2]


def test_entries_of_a_batch_fit_together() -> None:
    config = node(pool_bytes=100 * PAGE)
    pages = config.kv_pages(6000)
    assert 2 * pages < 90 < 3 * pages
    stats = served(at_once(range(8), 6000), replace(config, token_budget=10**6), profile())
    sizes = np.unique(np.round(stats.latency_ms, 6), return_counts=True)[1]
    assert sizes.tolist() == [2, 2, 2, 2]


def test_a_batch_may_end_before_a_request_that_has_no_graph() -> None:
    """Four that are short, one that is long, two that are short."""
    lengths = np.array([100, 100, 100, 100, 3000, 100, 100], np.int32)
    users = 10**6 + np.arange(7)
    requests = Requests(np.zeros(7), users, lengths, lengths)
    for only_graphs, expected in ((False, [7]), (True, [4, 1, 2])):
        config = node(token_budget=9000, only_graphs=only_graphs)
        stats = served(requests, config, profile(graph_tokens=256))
        sizes = np.unique(np.round(stats.latency_ms, 6), return_counts=True)[1]
        assert sizes.tolist() == expected


def test_rows_of_a_batch_are_fetched_once() -> None:
    strangers = [10**6 + i for i in range(4)]
    slow, free = profile(gather_gbps=1.0), profile(gather_gbps=1e9)
    config = replace(node(token_budget=8000), pool_bytes=100 * PAGE)
    args = at_once(strangers, 1900), config
    fetched_ms = served(*args, slow).service_ms.sum() - served(*args, free).service_ms.sum()
    catalogue = workload().catalogue
    curve = distinct_curve(catalogue.rows_per_table, catalogue.zipf, hashed=True)
    rows = catalogue.tables * distinct_rows(curve, 4 * 2000.0)
    assert fetched_ms == pytest.approx(rows * catalogue.row_bytes / 1e9 * 1e3, rel=1e-6)


def test_choosing_among_several_delays_them_all_but_is_no_service() -> None:
    strangers = [10**6 + i for i in range(4)]
    args = at_once(strangers, 4000), node(token_budget=1)
    plain, chosen = (served(*args, profile(choose_ms=more)) for more in (0.0, 2.0))
    np.testing.assert_allclose(chosen.service_ms, plain.service_ms)
    # Before the last one nobody else waits.
    later = np.sort(chosen.latency_ms) - np.sort(plain.latency_ms)
    np.testing.assert_allclose(later, [2.0, 4.0, 6.0, 6.0], atol=1e-6)


@pytest.mark.parametrize("name", ["request_ms", "eager_ms", "eager_layer_ms", "mixed_slowdown"])
def test_what_a_batch_costs_more_is_paid(name: str) -> None:
    first = at_once([0], 3000)
    second = Requests(
        np.array([5.0, 5.0]), np.array([0, 10**6]), np.array([3010, 3000], np.int32),
        np.array([10, 3000], np.int32),
    )  # fmt: skip
    both = first.then(second)
    base = profile(graph_tokens=256)
    changes: tuple[dict[str, Any], ...] = ({name: 0.0}, {name: 0.7})
    costs = [served(both, node(), replace(base, **changed)).service_ms.sum() for changed in changes]
    assert costs[1] > costs[0] + 0.1


def test_each_entry_that_goes_for_a_request_is_paid() -> None:
    """Two requests fill the cache, each of two more takes the place of one."""
    config = node(pool_bytes=100 * PAGE, kv_policy="lru", token_budget=1)
    pages = config.kv_pages(6000)
    assert 2 * pages <= 90 < 3 * pages
    lengths = np.full(4, 6000, np.int32)
    requests = Requests(0.1 * np.arange(4), 10**6 + np.arange(4), lengths, lengths)
    fast, slow = (served(requests, config, profile(evict_ms=ms)) for ms in (0.0, 0.5))
    assert fast.evictions == slow.evictions == 2
    more_ms = slow.service_ms - fast.service_ms
    np.testing.assert_allclose(more_ms, [0.0, 0.0, 0.5, 0.5], atol=1e-9)
    assert profile(evict_ms=0.5).slower_host(1.2).evict_ms == 0.6


def test_what_is_stored_is_paid_and_nothing_else() -> None:
    """A user's history; the same with ten more tokens; a longer one that is worth less and stays out."""
    config = node(pool_bytes=100 * PAGE)
    assert config.kv_pages(9010) < 90 < config.kv_pages(9010) + config.kv_pages(9000)
    lengths, new = np.array([9000, 9010, 9000], np.int32), np.array([9000, 10, 9000], np.int32)
    requests = Requests(np.arange(3.0), np.array([0, 0, 10**6]), lengths, new)
    free, paid = (served(requests, config, profile(store_layer_ms=ms)) for ms in (0.0, 1e-4))
    more_ms = paid.service_ms - free.service_ms
    np.testing.assert_allclose(more_ms, config.layers * 1e-4 * np.array([9000, 10, 0]), atol=1e-9)
    assert profile(store_layer_ms=1e-4).slower(1.5).store_layer_ms == pytest.approx(1.5e-4)


def test_who_finds_the_server_idle_waits_for_it_to_wake() -> None:
    lengths = np.full(3, 4000, np.int32)
    arrivals = np.array([0.1, 0.1001, 0.5])  # the second finds it busy
    requests = Requests(arrivals, np.arange(3), lengths, lengths)
    config = node(token_budget=1)
    plain, woken = (served(requests, config, profile(wake_ms=wake)) for wake in (0.0, 2.0))
    np.testing.assert_allclose(woken.latency_ms, plain.latency_ms + 2.0)
    np.testing.assert_allclose(woken.service_ms, plain.service_ms)
    assert woken.utilisation == pytest.approx(plain.utilisation)


def test_the_loop_keeps_the_server_busy_before_each_batch() -> None:
    lengths = np.full(3, 4000, np.int32)
    requests = Requests(np.zeros(3), np.arange(3), lengths, lengths)
    config = node(token_budget=1)
    plain, looped = (served(requests, config, profile(loop_ms=loop)) for loop in (0.0, 2.0))
    np.testing.assert_allclose(looped.latency_ms, plain.latency_ms + np.array([2.0, 4.0, 6.0]))
    np.testing.assert_allclose(looped.service_ms, plain.service_ms)


def test_a_batch_after_a_pause_takes_longer_by_how_long_it_was() -> None:
    lengths = np.full(4, 4000, np.int32)
    arrivals = np.array([0.1, 0.1001, 0.3, 0.9])  # the second finds the server busy
    requests = Requests(arrivals, np.arange(4), lengths, lengths)
    config = node(token_budget=1)
    pausing = profile(idle_ms=(100.0, 500.0), after_idle_ms=(1.0, 3.0))
    plain, paused = (served(requests, config, one) for one in (profile(), pausing))
    ends = arrivals + 1e-3 * paused.latency_ms
    pauses_ms = 1e3 * (arrivals[2:] - ends[1:3])
    more = paused.service_ms - plain.service_ms
    assert more[1] == pytest.approx(0.0, abs=1e-9)
    np.testing.assert_allclose(more[2:], np.interp(pauses_ms, (0, 100, 500), (0, 1, 3)), rtol=1e-6)


def test_jitter_is_drawn_batch_after_batch_in_the_order_measured() -> None:
    lengths = np.full(6, 4000, np.int32)
    requests = Requests(np.arange(6) / 10, np.arange(6), lengths, lengths)
    config = node(token_budget=1)
    ratios = (1.0, 1.5, 2.0, 3.0)
    plain = served(requests, config, profile())
    some = served(requests, config, profile(jitter=(9.0,) * 4, jitter_cold=ratios))
    found = np.round(some.service_ms / plain.service_ms, 9)
    first = ratios.index(found[0])
    assert found.tolist() == [ratios[(first + i) % 4] for i in range(6)]


def test_each_draw_begins_elsewhere_in_the_jitter() -> None:
    series = tuple(np.linspace(0.5, 1.5, 50))
    backend = BatchedBackend(workload(), node(), profile(jitter=series, jitter_cold=series))
    totals = []
    for backend.draw in (0, 1, 0):
        backend.reset(1)
        totals.append(float(backend.run(50, 2.0).service_ms.sum()))
    assert totals[0] == totals[2] != totals[1]


def test_prefetch_brings_rows_of_the_next_batch() -> None:
    strangers = [10**6 + i for i in range(6)]
    args = at_once(strangers, 4000), node(token_budget=1)
    without, some = served(*args, profile()), served(*args, profile(prefetch_gbps=10.0))
    assert without.prefetch_bytes == 0 < some.prefetch_bytes
    assert some.service_ms.sum() < without.service_ms.sum()
    assert without.rows_hit < some.rows_hit < some.rows_looked_up
    # A batch's time bounds what comes meanwhile.
    assert some.prefetch_bytes <= 10e9 * 1e-3 * some.service_ms.sum()


def test_planning_ahead_hides_behind_a_graph() -> None:
    strangers = [10**6 + i for i in range(6)]
    none = profile(prefetch_gbps=10.0, graph_tokens=256)
    plan = replace(none, ahead_ms=0.7)
    hidden = replace(plan, ahead_hidden=1.0)
    for budget, planned, hides in ((1, 5, True), (9000, 2, False)):  # one by one, or two together
        args = at_once(strangers, 4000), node(token_budget=budget)
        free, full, less = (served(*args, one).service_ms.sum() for one in (none, plan, hidden))
        assert full == pytest.approx(free + 0.7 * planned, rel=1e-3)
        assert (less < full - 1e-6) == hides


def test_prefetch_comes_beside_enough_compute_alone() -> None:
    strangers = [10**6 + i for i in range(6)]
    hardware, layers = profile(prefetch_gbps=10.0), node().layers
    tokens = layers * (4000 + 100)
    brought = [
        served(
            at_once(strangers, 4000), node(token_budget=1, prefetch_beside=least), hardware
        ).prefetch_bytes
        for least in (0, tokens, tokens + 1)
    ]
    assert brought[0] == brought[1] > 0 == brought[2]


def test_a_machine_that_changes_its_speed() -> None:
    """From its start on as a node of that speed; meanwhile queue and caches stay."""
    fast, seconds = profile(wake_ms=0.2, loop_ms=0.1, ahead_ms=0.3, prefetch_gbps=2.0), 2.0
    slow = fast.slower(1.7)
    one, other = (BatchedBackend(workload(), node(), hardware) for hardware in (fast, slow))
    one.reset(3)
    one.set_speed(slow)
    other.reset(3)
    for backend in (one, other):
        backend.run(30, backend.warmup_s)
    mine, theirs = one.run(30, seconds), other.run(30, seconds)
    np.testing.assert_array_equal(mine.latency_ms, theirs.latency_ms)
    one.set_speed(fast)
    mine, theirs = one.run(30, seconds), other.run(30, seconds)
    assert mine.kv_hit == pytest.approx(theirs.kv_hit, abs=0.02) and mine.kv_hit > 0.1
    assert 1.2 < theirs.mean_service_ms / mine.mean_service_ms < 1.8


def test_refill_comes_after_a_move_up_and_pauses_near_the_slo() -> None:
    moved = {}
    for slo_ms in (1e6, 1e-3):
        backend = BatchedBackend(workload(), node(slo_ms=slo_ms), profile())
        backend.reset(1)
        backend.run(60, backend.warmup_s)
        steady = backend.run(60, 2.0).refill_bytes
        backend.run(20, 2.0)
        moved[slo_ms] = backend.run(50, 2.0).refill_bytes
        assert steady == 0
    assert moved[1e6] > 1e6
    assert moved[1e-3] == 0


def test_a_saved_state_goes_on_the_same_way() -> None:
    jittering = profile(prefetch_gbps=2.0, jitter=(0.9, 1.1), jitter_cold=(1.2, 0.8))
    backend = BatchedBackend(workload(), node(), jittering)
    backend.reset(5)
    backend.run(30, backend.warmup_s)
    state, requests = backend.save(), backend.workload.take(3.0)
    once = backend.serve(requests, 60, 3.0)
    backend.restore(state)
    again = backend.serve(requests, 60, 3.0)
    np.testing.assert_array_equal(once.latency_ms, again.latency_ms)
    assert once.refill_bytes == again.refill_bytes


def test_requests_are_counted_once_across_runs() -> None:
    backend = BatchedBackend(workload(rate=200.0), node(), profile())
    backend.reset(2)
    requests, count = backend.workload.take(0.0), 0
    stats = backend.serve(requests, 40, backend.warmup_s)
    count += stats.requests
    for _ in range(200):  # far shorter than a batch now and then
        stats = backend.serve(Requests.empty(), 40, 0.003)
        count += stats.requests
    assert count + stats.backlog == len(requests)


@pytest.mark.parametrize("zipf", [0.0, 0.9])
def test_hashed_rows(zipf: float) -> None:
    items, draws = 5000, 8000
    rng = np.random.default_rng(0)
    weight = np.arange(1, items + 1) ** -zipf
    found = []
    for _ in range(30):
        row_of = rng.integers(items, size=items)
        drawn = rng.choice(items, draws, p=weight / weight.sum())
        found.append(len(np.unique(row_of[drawn])))
    curve = distinct_curve(items, zipf, hashed=True)
    assert distinct_rows(curve, draws) == pytest.approx(np.mean(found), rel=0.01)
    slope = distinct_rows(curve, draws + 1.0) - distinct_rows(curve, draws - 1.0)
    assert miss_probability(curve, draws) == pytest.approx(slope / 2, rel=0.02)


def test_the_plain_profile_is_refused() -> None:
    with pytest.raises(BackendError, match="calibrated"):
        BatchedBackend(workload(), node(), H100)
    assert asdict(profile())["request_ms"] == 0.0
