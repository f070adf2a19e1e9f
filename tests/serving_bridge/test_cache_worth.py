import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlem_env.mdp import queueing_p99_ms
from hlem_env.scenario import Scenario
from hlem_env.surrogate import load
from serving_bridge.cache_worth import FEWEST, Seen, Worth, WorthLearner, seen, target
from tests.serving_bridge.made_epochs import stats_of

OUTGROWN = Scenario(population_factor=2.0)
FITTING = (Scenario(), Scenario(preset="books"), Scenario(tables=25), Scenario(hardware="a100"))


def moments(scenario: Scenario, hot_share: float) -> np.ndarray:
    """The closed form's mean and second moment of the service time, [2, 101]."""
    found: np.ndarray = load._closed_form(
        scenario.regime_config(), scenario.node(), scenario.profile(), (hot_share,)
    )[0]
    return found


def rest(scenario: Scenario, hot_share: float) -> tuple[int, np.ndarray]:
    """Where the target comes to rest in the closed form's node, hundredths, and its P99 over the best."""
    service, node = moments(scenario, hot_share), scenario.node()
    miss_ms = moments(scenario, 1e-9)[0]
    users = int(scenario.regime_config().hot_users(np.array([hot_share]))[0])
    working_set = users * node.kv_pages(int(scenario.mean_history_tokens)) / node.pool_pages
    hits = hot_share * min(1.0, 1.0 / working_set)
    saved = (miss_ms[0] - service[0, 0]) / hits / miss_ms[0]
    alpha = 0.5
    for _ in range(100):
        i = round(100 * alpha)
        gain = math.log(miss_ms[i - 3] / miss_ms[i + 3]) / math.log((i + 3) / (i - 3))
        hits = hot_share * min(1.0, (1.0 - alpha) / working_set)
        wanted, _ = target(Worth(1.0, saved, gain), working_set, hot_share, hits)
        alpha += 0.5 * (min(max(wanted, 0.1), 0.9) - alpha)
    rate = float(scenario.build().workload.load(np.array([hot_share]))[0])
    p99 = np.array([queueing_p99_ms(*m, rate) for m in service.T.tolist()])
    return round(100 * alpha), p99 / p99[10:91].min()


@pytest.mark.parametrize("hot_share", [0.1, 0.2, 0.35, 0.6])
def test_it_rests_where_the_closed_form_is_best(hot_share: float) -> None:
    for scenario in FITTING:
        alpha, p99 = rest(scenario, hot_share)
        assert p99[alpha] < 1.01
    alpha, p99 = rest(OUTGROWN, hot_share)
    assert p99[alpha] < 1.01
    users = int(OUTGROWN.regime_config().hot_users(np.array([hot_share]))[0])
    working_set = users * OUTGROWN.node().kv_pages(10_000) / OUTGROWN.node().pool_pages
    knee = max(round(100 * (1.0 - working_set)), 10)
    assert alpha > knee + 10 and p99[knee] > 1.02  # there the knee is not the place


@given(st.floats(0, 3), st.floats(0, 1), st.floats(0, 1), st.floats(1, 2), st.floats(0, 1))
def test_the_target_is_never_below_the_knee(
    working_set: float, hot_share: float, kv_hit: float, unseen: float, saved: float
) -> None:
    wanted, above = target(Worth(unseen, saved), working_set, hot_share, kv_hit)
    assert wanted >= 1.0 - unseen * working_set
    assert above == (wanted > 1.0 - unseen * working_set)


def epoch(
    alpha: float, reused: float = 1.0, working_set: float = 0.4, miss_ms: float = 4.0
) -> Seen:
    return Seen(alpha, working_set, 200, 800, reused, 1.0, miss_ms, 0.05)


def test_hits_and_misses_are_told_by_their_times() -> None:
    rng = np.random.default_rng(1)
    is_hot = rng.random(2000) < 0.3
    hit = is_hot & (rng.random(2000) < 0.8)
    service_ms = np.where(hit, 1.5, 3.5) * rng.uniform(0.8, 1.2, 2000)
    found = seen(stats_of(requests=2000, service_ms=service_ms, is_hot=is_hot))
    assert (found.hot, found.cold) == (is_hot.sum(), (~is_hot).sum())
    assert found.reused == pytest.approx(hit.sum() / is_hot.sum(), abs=0.005)
    assert found.hit_ms == pytest.approx(service_ms[hit].mean(), rel=0.01)
    assert found.miss_ms == pytest.approx(service_ms[~is_hot].mean())
    assert found.as_fast == 0.0


def test_unseen_users_show_in_the_hot_requests_that_miss() -> None:
    learner, real = WorthLearner(), 0.5  # 0.4 is measured
    for alpha in 40 * (0.60, 0.55, 0.62):
        learner.take(epoch(alpha, reused=min(1.0, (1.0 - alpha) / real)))
    assert learner.worth.unseen == pytest.approx(real / 0.4, rel=0.01)
    knee, _ = target(learner.worth, 0.4, 0.5, 0.4)
    assert knee == pytest.approx(1.0 - real, abs=0.01)
    # All hit with less KV than that: it was too much.
    learner.take(epoch(0.56))
    assert learner.worth.unseen == pytest.approx(0.44 / 0.4)


def test_the_gain_is_the_slope_of_the_misses_time() -> None:
    rng, moving, still = np.random.default_rng(2), WorthLearner(), WorthLearner()
    before = still.worth.gain
    for alpha in np.linspace(0.1, 0.6, 100):
        noise = rng.normal(1.0, 0.005)
        moving.take(epoch(alpha, miss_ms=4.0 * alpha**-0.11 * noise))
        still.take(epoch(0.5, miss_ms=4.0 * noise))
    assert moving.worth.gain == pytest.approx(0.11, abs=0.005)
    assert still.worth.gain == before  # alpha has not moved: nothing to tell it by


def test_what_tells_nothing_is_not_learnt() -> None:
    learner = WorthLearner()
    few = stats_of(requests=4 * FEWEST, is_hot=np.arange(4 * FEWEST) < FEWEST - 1)
    equal = stats_of(requests=500, service_ms=np.full(500, 2.0))
    for stats in (few, equal, stats_of(requests=0), *(stats_of(i, 500) for i in range(20))):
        learner.take(seen(stats))  # the last ones: hot requests are as long as cold ones
    assert learner.worth == Worth()
    assert target(learner.worth, 0.4, 0.2, 0.2) == (0.6, False)
