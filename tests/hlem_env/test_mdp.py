"""State and reward at values worked out by hand from the paper's definitions, and their bounds."""

import json
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlem_env import mdp
from hlem_env.errors import ArgumentError
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats
from tests.hlem_env.epochs import epochs, make_stats

EQ5 = MdpConfig()
BUSY = MdpConfig(reward="busy_time")
QUEUEING = MdpConfig(reward="queueing")
WORKING_SET = MdpConfig(features="working_set")


# Reward


@pytest.mark.parametrize(
    ("latency_ms", "expected"),
    [
        ([12.0] * 100, 1.0),
        ([30.0] * 100, 1.0),  # the SLO itself is met
        # P99 lies a hundredth of the way from 20 to 120: within the SLO, one request is not
        ([20.0] * 99 + [120.0], 0.99),
        # P99 60 is one SLO over it
        ([10.0] * 98 + [60.0] * 2, 0.98 - 1.0),
        ([10.0] * 3 + [45.0], 0.75 - (43.95 - 30) / 30),
        ([90.0], 0.0 - 2.0),
        ([149.0], -119 / 30),
        ([150.0], -4.0),
        ([1e6], -4.0),
    ],
)
def test_eq5(latency_ms: list[float], expected: float) -> None:
    assert mdp.reward(make_stats(latency_ms), EQ5) == pytest.approx(expected, abs=1e-12)
    in_seconds = replace(EQ5, slo_ms=30_000.0)
    scaled = make_stats([1000 * ms for ms in latency_ms])
    assert mdp.reward(scaled, in_seconds) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "eq5"),
    [
        ({}, 1.0),
        ({"backlog": 1, "backlog_age_s": 0.010}, 0.0),
        ({"backlog": 2, "backlog_age_s": 0.060}, -1.0),
        ({"backlog": 9, "backlog_age_s": 500.0}, -4.0),
    ],
    ids=["no request", "a young backlog", "an old backlog", "a very old backlog"],
)
def test_eq5_without_completions(fields: dict[str, Any], eq5: float) -> None:
    assert mdp.reward(make_stats(**fields), EQ5) == pytest.approx(eq5, abs=1e-12)


@pytest.mark.parametrize(
    ("service_ms", "expected"),
    [([3.0], -0.1), ([1.0, 2.0, 6.0], -0.1), ([60.0], -2.0), ([1e4], -4.0), ([], 0.0)],
)
def test_busy_time(service_ms: list[float], expected: float) -> None:
    stats = make_stats([1e5] * len(service_ms), service_ms=service_ms)
    assert mdp.reward(stats, BUSY) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("rho", [0.05, 0.3, 0.7, 0.85])
def test_queueing_p99_of_an_exponential_server(rho: float) -> None:
    """M/M/1: the wait's distribution is known, P(wait > t) = rho exp(-(1 - rho) t / S)."""
    mean_ms = 10.0
    wait_ms = mean_ms / (1 - rho) * np.log(rho / 0.01)
    p99_ms = mdp.queueing_p99_ms(mean_ms, 2 * mean_ms**2, 1000 * rho / mean_ms)
    assert p99_ms == pytest.approx(mean_ms + wait_ms)


def test_queueing_p99_without_a_queue() -> None:
    assert mdp.queueing_p99_ms(0.0, 0.0, 0.0) == 0.0
    # Fewer than one request in a hundred waits.
    assert mdp.queueing_p99_ms(10.0, 100.0, 0.5) == 10.0


def test_queueing_is_the_logarithm_of_the_p99_over_the_slo() -> None:
    # 350 requests of 10 ms in 5 s: busy for 0.7 of it, and half of E[S^2] / E[S] is 5 ms.
    stats = make_stats([1e5] * 350, service_ms=[10.0] * 350)
    p99_ms = 10 + 5 / 0.3 * np.log(70)
    assert mdp.reward(stats, QUEUEING) == pytest.approx(-np.log(p99_ms / 30))
    assert mdp.reward(make_stats(), QUEUEING) == 1.0
    fast = make_stats([1.0], service_ms=[1.0])
    assert mdp.reward(fast, QUEUEING) == 1.0


def test_queueing_gets_worse_with_load_and_is_bounded_in_overload() -> None:
    rewards = [
        mdp.reward(make_stats([1.0] * n, service_ms=[10.0] * n), QUEUEING)
        for n in (100, 200, 300, 400, 450, 499, 600)
    ]
    assert rewards[:5] == sorted(rewards[:5], reverse=True)
    assert len(set(rewards[:5])) == 5
    assert rewards[4:] == pytest.approx([rewards[4]] * 3)


@pytest.mark.parametrize("reward", ["busy_time", "queueing"])
def test_a_node_that_is_stuck_is_worse_than_an_idle_one(reward: str) -> None:
    config = replace(EQ5, reward=reward)
    stuck = make_stats(backlog=9, backlog_age_s=500.0)
    assert mdp.reward(stuck, config) < mdp.reward(make_stats(), config)


@given(
    epochs(),
    st.sampled_from([EQ5, BUSY, QUEUEING, replace(EQ5, slo_ms=1e-3), replace(BUSY, slo_ms=1e-3)]),
)
def test_rewards_are_bounded(stats: EpochStats, config: MdpConfig) -> None:
    value = mdp.reward(stats, config)
    assert type(value) is float
    assert mdp.REWARD_FLOOR <= value <= 1.0


# State


def test_features_by_hand() -> None:
    stats = make_stats(
        [10.0, 20.0, 30.0, 60.0],
        is_hot=[True, False, False, False],
        history_tokens=48_000,
        reused_tokens=6000,
        rows_looked_up=1000,
        rows_hit=812.5,
        alpha_target=0.37,
        working_set_bytes=12e9,
    )
    # P99 of four lies 0.97 of the way from the third to the fourth: 59.1 ms, over 4 x 30 ms.
    expected = [0.25, 0.125, 0.8125, 0.8, 0.25, 0.37, 0.4925]
    paper = mdp.observe(stats, EQ5)
    assert paper.dtype == np.float32
    assert paper.tolist() == pytest.approx(expected, abs=1e-6)
    assert mdp.observe(stats, WORKING_SET).tolist() == pytest.approx([*expected, 0.2], abs=1e-6)
    assert not np.shares_memory(paper, mdp.observe(stats, EQ5))


def test_features_are_the_papers_and_named() -> None:
    names = ("hot_share", "kv_hit", "emb_hit", "length", "violation", "alpha", "p99")
    assert EQ5.feature_names == names
    assert WORKING_SET.feature_names == (*names, "working_set")


def test_features_of_an_empty_epoch() -> None:
    assert mdp.observe(make_stats(alpha_target=0.1), WORKING_SET).tolist() == pytest.approx(
        [0, 0, 0, 0, 0, 0.1, 0, 0]
    )


def test_features_of_a_backlog_alone() -> None:
    stuck = make_stats(alpha_target=0.9, backlog=3, backlog_age_s=0.060)
    assert mdp.observe(stuck, EQ5).tolist() == pytest.approx([0, 0, 0, 0, 1, 0.9, 0.5])


def test_features_are_clipped_at_one() -> None:
    stats = make_stats(
        [1e6], history_tokens=40_000, pool_bytes=1000, working_set_bytes=2000.0, alpha_target=1.0
    )
    assert mdp.observe(stats, WORKING_SET)[[3, 4, 5, 6, 7]].tolist() == [1.0] * 5


def test_a_pool_of_no_bytes_has_no_working_set() -> None:
    assert mdp.observe(make_stats(pool_bytes=0, working_set_bytes=1.0), WORKING_SET)[7] == 0.0


@given(epochs(), st.sampled_from([EQ5, WORKING_SET, replace(WORKING_SET, slo_ms=1e-3)]))
def test_features_are_within_the_space(stats: EpochStats, config: MdpConfig) -> None:
    state = mdp.observe(stats, config)
    assert state.shape == (len(config.feature_names),)
    assert ((state >= 0) & (state <= 1)).all()


# Actions and config


def test_actions_are_the_papers() -> None:
    assert [a / 100 for a in mdp.ACTIONS_CENTI] == [-0.06, -0.04, -0.02, 0.0, 0.02, 0.04, 0.06]


@given(st.integers(-300, 300), st.integers(0, 99), st.integers(1, 100))
def test_clip_gives_the_nearest_alpha_within_the_bounds(alpha: int, low: int, high: int) -> None:
    if low >= high:
        low, high = high - 1, low + 1
    config = MdpConfig(alpha_min_centi=low, alpha_max_centi=high)
    nearest = min(range(low, high + 1), key=lambda allowed: abs(allowed - alpha))
    assert config.clip(alpha) == nearest


def test_defaults_are_the_papers() -> None:
    assert (EQ5.slo_ms, EQ5.epoch_seconds) == (30.0, 5.0)
    assert (EQ5.alpha_min_centi, EQ5.alpha_max_centi) == (10, 90)


@given(
    slo_ms=st.floats(0.001, 1e5),
    max_history_tokens=st.integers(1, 10**7),
    alpha_min_centi=st.integers(0, 49),
    alpha_max_centi=st.integers(50, 100),
    epoch_seconds=st.floats(0.01, 3600),
    features=st.sampled_from(sorted(mdp.FEATURES)),
    reward=st.sampled_from(mdp.REWARDS),
)
def test_config_survives_json(**fields: Any) -> None:
    config = MdpConfig(**fields)
    assert MdpConfig(**json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slo_ms": 0}, "slo_ms=0"),
        ({"slo_ms": float("nan")}, "slo_ms=nan"),
        ({"slo_ms": 1e6}, "slo_ms=1000000.0"),
        ({"max_history_tokens": 0}, "max_history_tokens=0"),
        ({"alpha_min_centi": -1}, r"alpha_bounds=\(-0.01, 0.9\)"),
        ({"alpha_min_centi": 90}, r"alpha_bounds=\(0.9, 0.9\)"),
        ({"alpha_max_centi": 101}, r"alpha_bounds=\(0.1, 1.01\)"),
        ({"epoch_seconds": 0.0}, "epoch_seconds=0.0"),
        ({"epoch_seconds": float("nan")}, "epoch_seconds=nan"),
        ({"features": "all"}, "features='all'.*paper, working_set"),
        ({"reward": "none"}, "reward='none'.*busy_time, eq5, queueing"),
    ],
    ids=str,
)
def test_wrong_fields_name_themselves(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named) as caught:
        MdpConfig(**fields)
    assert "; allowed: " in str(caught.value)


def test_config_cannot_change() -> None:
    with pytest.raises(FrozenInstanceError):
        EQ5.slo_ms = 10.0  # type: ignore[misc]
