"""train.sb3: what is exported decides as Stable-Baselines3 does."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="needs the extra baselines")

from agents.ppo_only import PpoOnly
from hlem_env.errors import ArgumentError
from serving_bridge.policy import FrozenPolicy
from train import sb3


def small(algorithm: str, output: Path, **overrides: object) -> sb3.Args:
    values = {
        "output": output, "total_timesteps": 64, "num_envs": 2, "eval_every": 16, "eval_seeds": 1,
        **overrides,
    }  # fmt: skip
    return sb3.Args(algorithm=algorithm, **values)


@pytest.fixture(params=["ppo", "dqn"])
def algorithm(request, monkeypatch) -> str:
    monkeypatch.setitem(sb3.SETTINGS["ppo"], "n_steps", 16)
    monkeypatch.setitem(sb3.SETTINGS["ppo"], "batch_size", 16)
    monkeypatch.setitem(sb3.SETTINGS["dqn"], "learning_starts", 8)
    return request.param


def test_the_exported_policy_acts_as_sb3_predicts(algorithm, tmp_path, monkeypatch) -> None:
    models = []
    make = sb3.make_model
    monkeypatch.setattr(sb3, "make_model", lambda args: models.append(make(args)) or models[-1])
    sb3.train(small(algorithm, tmp_path, total_timesteps=64, eval_every=1_000))
    policy = FrozenPolicy.load(tmp_path)
    states = np.random.default_rng(3).random((2_000, 8), np.float32)
    expected, _ = models[0].predict(states, deterministic=True)
    logits = np.stack([policy.logits(state) for state in states])
    two = np.sort(logits, axis=1)[:, -2:]
    clear = two[:, 1] - two[:, 0] > 1e-5  # the order of sums may decide a tie
    assert clear.mean() > 0.9
    assert (logits.argmax(axis=1) == expected)[clear].all()


def test_the_policy_says_what_trained_it_and_is_named_by_it(algorithm, tmp_path) -> None:
    sb3.train(small(algorithm, tmp_path))
    policy = FrozenPolicy.load(tmp_path)
    assert policy.metadata["env_spec"]["library"].startswith("stable-baselines3 ")
    assert policy.metadata["env_spec"]["domain"]["presets"] == ["taobao", "video-games"]
    assert PpoOnly(policy).name == f"SB3 {algorithm.upper()} (working set)"


def test_a_seed_gives_the_same_policy(algorithm, tmp_path) -> None:
    first, again = (
        FrozenPolicy.load(sb3.train(small(algorithm, tmp_path / name))).weights for name in "ab"
    )
    assert all((first[name] == again[name]).all() for name in first)


def test_other_activations_are_refused() -> None:
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", "CartPole-v1", policy_kwargs={"activation_fn": sb3.nn.ReLU})
    with pytest.raises(ArgumentError, match="tanh between them"):
        sb3.Network(model)
