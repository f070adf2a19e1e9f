from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.milp import WINDOW_EPOCHS, MilpPlanner, MilpSettings, plan
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import HOT_SHARES, load_curve
from tests.hlem_env.epochs import make_stats

POINTS = np.array([10, 13, 20, 24, 30])


def cost_of(alphas, latency, start, move_ms):  # type: ignore[no-untyped-def]
    costs = [np.interp(a, POINTS, row) for a, row in zip(alphas, latency, strict=True)]
    return sum(costs) + move_ms * np.abs(np.diff([start, *alphas])).sum()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 50), min_size=5, max_size=5), min_size=1, max_size=3),
    st.integers(10, 30),
    st.integers(1, 20),
    st.sampled_from([0.0, 0.3, 2.0]),
)
def test_plan_equals_brute_force(
    rows: list[list[int]], start: int, reach: int, move_ms: float
) -> None:
    """Over every sequence of integer alphas, with latencies that need not be convex."""
    latency = np.array(rows, float)
    best = np.inf
    for alphas in product(range(10, 31), repeat=len(rows)):
        if np.abs(np.diff([start, *alphas])).max() <= reach:
            best = min(best, cost_of(alphas, latency, start, move_ms))
    found = plan(latency, POINTS, start, reach, move_ms, time_limit_s=10.0)
    assert found is not None
    assert np.abs(np.diff([start, *found])).max() <= reach
    assert cost_of(found, latency, start, move_ms) == pytest.approx(best, abs=1e-5)


def test_without_time_there_is_no_plan_and_alpha_holds() -> None:
    agent = MilpPlanner(MilpSettings(time_limit_s=0.0))
    stats = make_stats([20.0] * 100, history_tokens=10**6, working_set_bytes=1e10)
    decisions = [agent.decide(np.zeros(8, np.float32), stats) for _ in range(WINDOW_EPOCHS)]
    assert decisions[-1].alpha_centi == 50
    assert "no plan" in decisions[-1].reason


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_latency_model_has_the_closed_form_s_optimum(share: float) -> None:
    """Against the optimum that the environment gives as alpha*, at the same working set and rate."""
    scenario = Scenario.parse("steady")
    found = scenario.optimum()
    assert found is not None
    index = HOT_SHARES.index(share)
    config, node = scenario.regime_config(), scenario.node()
    users = config.hot_users(np.array([share]))[0]
    working_set = users * node.kv_pages(10_000) / node.pool_pages
    load = load_curve(config, node, scenario.profile(), scenario.utilisation)
    rate = float(load(np.array([share]))[0])
    agent = MilpPlanner(MilpSettings(spacing_centi=1), scenario)
    latency = agent.latency_ms(share, working_set, 10_000.0, rate)
    assert 10 + latency.argmin() == np.clip(found[1].alpha_centi[index], 10, 90)


def test_plans_every_12_epochs_and_keeps_the_step_limit() -> None:
    agent, alpha, planned = MilpPlanner(MilpSettings(time_limit_s=10.0)), 50, []
    alphas = [alpha]
    for epoch in range(1, 37):
        hot = epoch > 12
        stats = make_stats(
            [20.0] * 100, is_hot=[hot] * 50 + [False] * 50, history_tokens=10**6,
            working_set_bytes=5e10 if hot else 0.0, alpha_target=alpha / 100,
        )  # fmt: skip
        decision = agent.decide(np.zeros(8, np.float32), stats)
        planned += [epoch] if "plans" in decision.reason else []
        alpha = decision.alpha_centi
        alphas.append(alpha)
    assert planned == [12, 24, 36]
    assert np.abs(np.diff(alphas)).max() <= 6
    assert alphas[23] > 80 and alphas[-1] < 40
