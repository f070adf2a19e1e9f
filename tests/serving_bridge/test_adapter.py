import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlem_env.errors import ArgumentError
from serving_bridge import residual_network
from serving_bridge.adapted_step import adapted_step, bounded
from serving_bridge.adapter import AdapterSettings, OnlineAdapter, Sample
from serving_bridge.cache_worth import Worth
from serving_bridge.residual_network import (
    ascend,
    copied,
    forward,
    initial_weights,
    packed,
)
from tests.serving_bridge.proposals import propose

FAST = AdapterSettings(explore=0.01, learning_rate=0.05)


def train(adapter: OnlineAdapter, best: float, epochs: int = 300, seed: int = 0) -> None:
    """Epochs whose reward falls with the distance of what was applied to `best`."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        x, applied, mean = propose(adapter, rng.random(4))
        reward = -((100 * (applied - best)) ** 2)
        adapter.learn(Sample(x, applied, mean, reward, 0.5))


def means(adapter: OnlineAdapter) -> np.ndarray:
    rng = np.random.default_rng(9)
    return np.array([propose(adapter, rng.random(4))[2] for _ in range(50)])


def test_untrained_the_mean_is_zero_and_what_is_applied_is_noise() -> None:
    adapter = OnlineAdapter(AdapterSettings(explore=0.01))
    proposals = np.array([propose(adapter, np.full(4, 0.5))[1:] for _ in range(500)])
    assert (proposals[:, 1] == 0).all()
    assert 0.005 < proposals[:, 0].std() < 0.01
    assert np.abs(proposals[:, 0]).max() == 0.01  # cut there


def test_noise_is_the_generators_one_after_the_other() -> None:
    adapter, rng = (
        OnlineAdapter(AdapterSettings(explore=0.01), seed=7),
        np.random.default_rng((7, 1)),
    )
    for _ in range(2500):
        expected = min(max(0.01 * rng.standard_normal(), -0.01), 0.01)
        assert propose(adapter, (0.5,) * 4)[1:] == (expected, 0.0)


def test_the_residual_is_that_of_equation_6() -> None:
    rng = np.random.default_rng(5)
    weights = copied(initial_weights(rng))
    weights.output[:], weights.output_bias[:] = rng.normal(size=16), 0.3
    for features in rng.normal(size=(20, 5)):
        hidden = np.tanh(weights.hidden @ features + weights.hidden_bias)
        expected = 0.02 * np.tanh(weights.output @ hidden + weights.output_bias[0])
        found = residual_network.propose(packed(weights), tuple(features), 0.02, 0.005, 1e6)
        assert found == pytest.approx((min(expected + 0.005, 0.02), expected), rel=1e-12)


def test_the_compiled_step_is_the_interpreted_one() -> None:
    rng = np.random.default_rng(6)
    weights = copied(initial_weights(rng))
    weights.output[:] = rng.normal(size=16)
    rows, above = packed(weights), 0
    for _ in range(300):
        worth = Worth(1.0 + rng.random(), rng.choice([0.0, 0.5]), 0.06)
        memory = rng.choice([-1.0, 20.0]), rng.choice([-1.0, 0.4]), rng.uniform(-0.5, 0.5)
        epoch = *rng.random(3).tolist(), rng.uniform(5.0, 60.0), rng.uniform(0.2, 0.9)
        args = rows, worth, 0.02, 1.0, 0.001, memory, 30.0, int(rng.integers(10, 91)), -6, *epoch
        step, residual_centi, *rest = adapted_step(*args)
        assert (step, residual_centi, *rest) == adapted_step.py_func(*args)
        above += residual_centi > 2.0
    assert 0 < above < 300  # a step away from the balance held back, and not


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_what_is_beyond_the_bound_is_the_bound_and_no_number_is_nothing(residual: float) -> None:
    expected = 0.0 if np.isnan(residual) else float(np.clip(residual, -0.02, 0.02))
    assert bounded(residual, 0.02) == expected


@pytest.mark.parametrize("best", [-0.015, 0.015])
def test_moves_towards_what_is_rewarded(best: float) -> None:
    adapter = OnlineAdapter(FAST)
    train(adapter, best)
    assert np.sign(means(adapter).mean()) == np.sign(best)
    assert abs(means(adapter).mean()) > 0.008


def test_learns_to_tell_states_apart() -> None:
    adapter, rng = OnlineAdapter(FAST), np.random.default_rng(1)
    for _ in range(800):
        x, applied, mean = propose(adapter, rng.random(4), rng.choice([-6, 6]))
        adapter.learn(Sample(x, applied, mean, 100 * applied * x[4], 0.5))
    low, high = (propose(adapter, (0.5,) * 4, base_centi)[2] for base_centi in (-6, 6))
    assert low < -0.005 and high > 0.005


def test_a_reward_that_says_nothing_leaves_it_near_zero() -> None:
    adapter = OnlineAdapter()
    rng = np.random.default_rng(2)
    for _ in range(200):
        adapter.learn(Sample(*propose(adapter, rng.random(4)), 1.0, 0.5))
    assert np.abs(means(adapter)).max() == 0.0


def test_no_surprise_no_learning() -> None:
    adapter = OnlineAdapter(FAST)
    for i in range(20):
        adapter.learn(Sample(*propose(adapter, (0.5,) * 4), float(i), 0.0))
    assert (means(adapter) == 0).all()


@given(
    four=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=4, max_size=4),
    reward=st.floats(allow_nan=True, allow_infinity=True),
)
def test_within_its_bound_whatever_it_is_told(four: list[float], reward: float) -> None:
    adapter = OnlineAdapter(AdapterSettings(learning_rate=1.0, steps=4))
    for r in (0.0, 1.0, reward, -1.0):
        x, applied, mean = propose(adapter, four)
        assert abs(applied) <= 0.02 and abs(mean) <= 0.02
        adapter.learn(Sample(x, applied, mean, r, 1.0))
    assert all(np.isfinite(array).all() for array in adapter.snapshot)


def test_seeds_reproduce() -> None:
    runs = []
    for seed in (1, 1, 2):
        adapter = OnlineAdapter(FAST, seed=seed)
        train(adapter, 0.01, 50)
        runs.append(means(adapter))
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    adapter.reset(1)
    train(adapter, 0.01, 50)
    assert np.array_equal(means(adapter), runs[0])


def test_the_replay_forgets_the_oldest() -> None:
    adapter = OnlineAdapter(AdapterSettings(replay=10, steps=0))
    for i in range(25):
        adapter.learn(Sample((0.0,) * 5, 0.0, 0.0, float(i), 0.1))
    assert sorted(adapter.learner.replay[:, -1]) == list(range(15, 25))


def test_a_snapshot_never_changes() -> None:
    adapter = OnlineAdapter(FAST)
    train(adapter, 0.01, 20)
    held = adapter.snapshot
    before = [array.copy() for array in held]
    train(adapter, -0.01, 20)
    assert adapter.snapshot is not held
    assert all(np.array_equal(a, b) for a, b in zip(held, before, strict=True))
    with pytest.raises(ValueError, match="read-only"):
        held[0, 0] = 1.0


def test_the_gradient_is_that_of_finite_differences() -> None:
    rng = np.random.default_rng(3)
    weights = copied(initial_weights(rng))
    weights.output[:] = rng.normal(size=16)
    features, slopes, rate = rng.random((7, 5)), rng.normal(size=7), 1e-6
    moved = copied(weights)
    hidden = np.empty((7, 16))
    ascend(moved, features, hidden, forward(weights, features, hidden), slopes, rate)
    for k, array in enumerate(weights):
        place = tuple(rng.integers(0, n) for n in array.shape)
        high, low = copied(weights), copied(weights)
        high[k][place] += 1e-5
        low[k][place] -= 1e-5
        worth = [
            np.mean(
                [
                    s * residual_network.propose(packed(w), x, 1.0, 0.0, 1e6)[1]
                    for s, x in zip(slopes, features, strict=True)
                ]
            )
            for w in (high, low)
        ]
        step = (moved[k][place] - array[place]) / rate
        assert step == pytest.approx((worth[0] - worth[1]) / 2e-5, rel=1e-3, abs=1e-7)


def test_the_thread_learns_the_same_as_the_caller() -> None:
    samples, rng = [], np.random.default_rng(4)
    for _ in range(40):
        samples.append(Sample(tuple(rng.random(5)), rng.normal() / 100, 0.0, rng.normal(), 0.5))
    here, there = OnlineAdapter(FAST), OnlineAdapter(FAST, background=True)
    for sample in samples:
        here.learn(sample)
        there.learn(sample)
    there.close()
    assert there.dropped == 0
    for mine, theirs in zip(here.snapshot, there.snapshot, strict=True):
        assert np.array_equal(mine, theirs)
    there.close()


def test_a_slow_thread_costs_samples_not_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, gate = OnlineAdapter(FAST, background=True), threading.Event()
    take = adapter.learner.take

    def held(sample: Sample) -> None:
        gate.wait(10)
        take(sample)

    monkeypatch.setattr(adapter.learner, "take", held)
    for i in range(200):
        adapter.learn(Sample((0.0,) * 5, 0.0, 0.0, float(i), 0.0))
    assert len(adapter._samples) <= adapter.WAITING
    gate.set()
    adapter.close()
    assert adapter.dropped + adapter.learner.seen == 200
    assert adapter.dropped >= 200 - adapter.WAITING - 1


def test_a_fault_ends_neither_thread_nor_decisions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = OnlineAdapter(FAST, background=True)
    sample = Sample((0.0,) * 5, 0.001, 0.0, 1.0, 0.5)
    take = adapter.learner.take
    monkeypatch.setattr(adapter.learner, "take", lambda sample: 1 / 0)
    adapter.learn(sample)
    deadline = time.monotonic() + 10
    while "could not learn" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    monkeypatch.setattr(adapter.learner, "take", take)
    adapter.learn(sample)
    adapter.close()
    assert "could not learn" in caplog.text
    assert adapter.learner.seen == 1
    propose(adapter, np.zeros(4))


def test_settings_are_checked() -> None:
    for wrong in ({"bound": 0.03}, {"explore": 0.02}, {"replay": 1001}, {"steps": 65}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            AdapterSettings(**wrong)  # type: ignore[arg-type]
