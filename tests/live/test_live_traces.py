"""Recorded requests on a live node."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import hlem_env
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig
from hlem_env.live.hot_users import HotUsers
from hlem_env.live.node import LiveNode
from hlem_env.live_scenario import live_workload
from hlem_env.mdp import HOT_WINDOW_EPOCHS
from hlem_env.scenario import Scenario
from hlem_env.workload.traces import TraceWorkload

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = replace(
    LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, mean_history_tokens=100,
    max_history_tokens=160, rows_per_table=5000, emulated_link_gbps=None, token_budget=400,
)  # fmt: skip
FLAT = replace(CONFIG, hot_share=(0.5,), requests_per_s=(40.0,))
"""A load that does not depend on the hot share."""


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[[int], Path]:
    """Writes a trace of 300 requests over an hour: 30 users whose histories grow by 1 to 40 items."""

    def write(longest_first: int) -> Path:
        rng = np.random.default_rng(0)
        arrival_s, length = np.sort(rng.uniform(0, 3600, 300)), np.zeros(30, int)
        lines = ["arrival_s,user_id,history_length,new_items"]
        for time_s, user in zip(arrival_s, rng.zipf(1.5, 300) % 30, strict=True):
            new = rng.integers(1, longest_first if length[user] == 0 else 40, endpoint=True)
            length[user] += new
            lines.append(f"{time_s:.3f},{user},{length[user]},{new}")
        (tmp_path / "requests.csv").write_text("\n".join(lines) + "\n")
        return tmp_path / "requests.csv"

    return write


def workload(path: Path, config: LiveConfig, speed: float = 1.0, **fields: object) -> TraceWorkload:
    found = live_workload(Scenario(trace=str(path), **fields), config, 20, speed)
    assert isinstance(found, TraceWorkload)
    return found


def test_scores_are_the_same_with_and_without_a_kv_cache(recorded: Callable[[int], Path]) -> None:
    """Through histories that grow beyond the maximum, and a trace that starts over."""
    trace = workload(recorded(100), CONFIG, trace_histories="native")
    trace.reset(np.random.default_rng(0), 0.0)
    requests = trace.take(2.5 * 300 / trace.mean_requests_per_s)
    assert len(requests) > 700 and requests.history_length.max() <= CONFIG.max_history_tokens
    scores, reused = [], []
    for alpha_centi in (100, 40):
        node = LiveNode(CONFIG)
        node.reset(trace.persistent_users)
        node.move(alpha_centi)
        left, parts, tokens = requests, [], 0
        while len(left):
            count = node.first_batch(left)
            done = node.execute(left[:count], left[:0], float(left.arrival_s[0]))
            parts.append(done.scores)
            tokens += int(done.reused.sum())
            left = left[count:]
        scores.append(torch.cat(parts))
        reused.append(tokens)
    assert reused[0] == 0 and reused[1] > 0.2 * requests.history_length.sum()
    assert float((scores[1] - scores[0]).norm() / scores[0].norm()) < 1e-4


def test_long_histories_are_cut_as_in_the_regimes(recorded: Callable[[int], Path]) -> None:
    trace = workload(recorded(400), FLAT, trace_histories="native")
    trace.reset(np.random.default_rng(0), 0.0)
    requests = trace.take(300 / trace.mean_requests_per_s)
    before: dict[int, int] = {}
    cuts = 0
    for user, length, new in zip(
        requests.user.tolist(), requests.history_length.tolist(), requests.new_items.tolist(),
        strict=True,
    ):  # fmt: skip
        grown = before.get(user, 0) + new
        if user not in before:
            assert length <= 160
        elif grown > 160:  # the oldest quarter at once
            assert length == grown - grown // 4
            cuts += 1
        else:
            assert length == grown
        before[user] = length
    assert cuts > 20


def test_base_histories_are_the_surrogates_in_the_nodes_sizes(
    recorded: Callable[[int], Path],
) -> None:
    path = recorded(1)
    surrogate = Scenario(trace=str(path)).recorded().history_length
    large = replace(FLAT, mean_history_tokens=10_000, max_history_tokens=15_000)
    assert (workload(path, large).trace.history_length == surrogate).all()
    small = workload(path, replace(FLAT, mean_history_tokens=100, max_history_tokens=150))
    first = small.trace.is_first
    assert small.trace.history_length[first] == pytest.approx(surrogate[first] / 100, abs=2)


def test_the_load_is_the_presets(recorded: Callable[[int], Path]) -> None:
    path = recorded(100)
    trace = workload(path, FLAT)
    tokens_per_s = trace.mean_requests_per_s * trace.mean_history_tokens
    assert tokens_per_s == pytest.approx(40.0 * 100)
    twice = workload(path, FLAT, speed=2.0).mean_requests_per_s
    assert twice == pytest.approx(2 * trace.mean_requests_per_s)
    half = workload(path, FLAT, utilisation=FLAT.utilisation / 2).mean_requests_per_s
    assert half == pytest.approx(trace.mean_requests_per_s / 2)
    slowed = workload(path, FLAT, time_scale=0.5)
    assert slowed.mean_requests_per_s == pytest.approx(2 * slowed.trace.mean_requests_per_s)


def test_the_load_is_that_of_the_traces_hot_share(recorded: Callable[[int], Path]) -> None:
    steep = replace(CONFIG, hot_share=(0.0, 1.0), requests_per_s=(20.0, 40.0))
    trace = workload(recorded(100), steep)
    rate = trace.mean_requests_per_s * trace.mean_history_tokens / 100
    trace.reset(np.random.default_rng(0), 0.0)
    requests = trace.take(300 / trace.mean_requests_per_s)
    users = HotUsers(30, HOT_WINDOW_EPOCHS * steep.epoch_seconds)
    hot = [users.visit(u, t, 1) for u, t in zip(requests.user, requests.arrival_s, strict=True)]
    assert 0.2 < np.mean(hot) < 0.99
    assert rate == pytest.approx(20 + 20 * np.mean(hot), rel=0.01)


def test_the_environment_serves_a_trace(recorded: Callable[[int], Path]) -> None:
    path = recorded(100)
    env = gym.make(
        hlem_env.LIVE_ENV_ID, workload=f"trace:{path}", epoch_seconds=0.1, episode_epochs=15
    )
    _, info = env.reset(seed=1)
    requests, truncated = info["requests"], False
    while not truncated:
        _, _, _, truncated, info = env.step(3)
        requests += info["requests"]
    backend = env.unwrapped._node
    assert isinstance(backend.workload, TraceWorkload)
    assert requests > 0
    env.close()


def test_a_trace_that_is_not_there_is_named_at_once() -> None:
    with pytest.raises(ArgumentError, match=r"somewhere\.csv"):
        gym.make(hlem_env.LIVE_ENV_ID, workload="trace:somewhere.csv")
