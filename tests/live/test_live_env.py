"""The environment on a live node: HSTU on a CPU, end to end."""

import copy
import json
import pickle
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import hlem_env
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig
from serving_bridge.policy import FrozenPolicy


def live(**arguments: object) -> gym.Env:
    return gym.make(hlem_env.LIVE_ENV_ID, epoch_seconds=0.1, **arguments)


def test_the_checkers_accept_the_live_environment(tmp_path: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3.common.env_checker")
    config = replace(LiveConfig.load("cpu-small"), warmup_epochs=1)  # they reset a dozen times
    (tmp_path / "preset.json").write_text(json.dumps(config.to_json()))
    env = live(episode_epochs=20, hardware=str(tmp_path / "preset.json"))
    assert env.spec is not None and env.spec.nondeterministic
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped, skip_render_check=True)
        sb3.check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_a_frozen_policy_drives_a_live_node() -> None:
    before = threading.active_count()
    env = live(workload="trend", episode_epochs=30)
    policy = FrozenPolicy.load("agents/pretrained/paper")
    observation, info = env.reset(seed=1)
    truncated, requests, hits = False, info["requests"], []
    while not truncated:
        observation, reward, terminated, truncated, info = env.step(policy.act(observation))
        assert np.isfinite(reward) and not terminated
        requests += info["requests"]
        hits.append(info["emb_hit"])
    # How many come depends on the machine's speed, by which the load is set.
    assert requests > 0 and 0 < np.max(hits) < 1
    assert info["alpha_star"] == -1.0  # nobody has tried the other alphas
    env.close()
    assert threading.active_count() == before


def test_a_live_environment_that_has_not_begun_can_be_copied() -> None:
    env = live(workload="burst").unwrapped
    for twin in (copy.deepcopy(env), pickle.loads(pickle.dumps(env))):
        assert (twin.scenario, twin.config) == (env.scenario, env.config)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"workload": "training"}, "workload"),
        ({"hardware": "abacus"}, "abacus"),
    ],
)
def test_what_a_live_node_cannot_do_is_refused(arguments: dict[str, str], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        live(**arguments)
