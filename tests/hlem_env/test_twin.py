"""The environment on the surrogate of a live node."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import hlem_env
from hlem_env.env import HBMPartitionEnv
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig
from hlem_env.scenario import Scenario, TrainingDomain
from hlem_env.surrogate.batched import BatchedBackend


def twin(**arguments: Any) -> Any:
    values = {"backend": "twin", "hardware": "h200", "epoch_seconds": 1.0} | arguments
    return gym.make(hlem_env.ENV_ID, **values).unwrapped


def test_it_has_the_nodes_sizes_rules_and_slo() -> None:
    env, config = twin(workload="trend"), LiveConfig.load("h200")
    env.reset(seed=1)
    backend = env._runner.backend
    assert isinstance(backend, BatchedBackend)
    node = backend.node
    assert (node.pool_bytes, node.layers) == (config.pool_bytes, config.layers)
    assert (node.only_graphs, node.prefetch_beside) == (config.only_graphs, config.prefetch_beside)
    assert env.config.slo_ms == config.slo_ms
    assert env.config.epoch_seconds == 1.0


def test_the_checker_accepts_it_and_a_seed_gives_the_same_episode() -> None:
    check_env(twin(workload="burst", episode_epochs=20), skip_render_check=True)
    episodes = []
    for _ in range(2):
        env = twin(workload="training", episode_epochs=8)
        states = [env.reset(seed=3)[0]] + [env.step(k % 7)[0] for k in range(8)]
        episodes.append(np.stack(states))
    np.testing.assert_array_equal(*episodes)


def test_random_scenarios_vary_skew_and_speed() -> None:
    """Less skewed items and a slower machine: both keep the node busier."""
    busy = []
    for zipf, scale in ((0.9, 1.0), (0.7, 1.0), (0.9, 0.7)):
        env = twin(workload=Scenario(zipf=zipf, compute_scale=scale, utilisation=0.5))
        env.reset(seed=5)
        busy.append(np.mean([env.step(3)[4]["utilisation"] for _ in range(20)]))
    assert busy[0] < busy[1] and busy[0] < busy[2]
    domain = TrainingDomain(zipf=(0.6, 0.61))
    env = twin(workload=domain)
    env.reset(seed=5)
    assert env.scenario.zipf in (0.6, 0.61)


def test_a_backend_of_ones_own_may_be_any_callable() -> None:
    class Factory:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, scenario: Scenario) -> Any:
            return scenario.build()

    info = HBMPartitionEnv(backend=Factory(), episode_epochs=3).reset(seed=1)[1]
    assert 0.1 <= info["alpha_star"] <= 0.9


def test_there_is_no_closed_form() -> None:
    env = twin(workload="steady")
    info = env.reset(seed=1)[1]
    assert info["alpha_star"] == -1.0 and info["reward_reference"] == 0.0


def test_a_node_that_was_not_calibrated_is_refused(tmp_path: Path) -> None:
    other = replace(LiveConfig.load("h200"), name="mine")
    (tmp_path / "mine.json").write_text(json.dumps(other.to_json()))
    with pytest.raises(ArgumentError, match="mine-live"):
        twin(hardware=str(tmp_path / "mine.json"))
    with pytest.raises(ArgumentError, match="cpu-small"):
        twin(hardware="h300")
