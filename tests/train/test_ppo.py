"""train.ppo: a short training leaves a policy that loads, resumes, and refuses what does not fit."""

import json
import re
from pathlib import Path

import pytest

from hlem_env.errors import ArgumentError, ArtefactError
from serving_bridge.policy import FrozenPolicy
from train.ppo import Args, evaluation_scenarios, train

SMALL = {"num_envs": 2, "num_steps": 16, "num_minibatches": 2, "update_epochs": 1}


def arguments(output: Path, **overrides: object) -> Args:
    values = {"output": output, "total_timesteps": 64, "eval_seeds": 1, **SMALL, **overrides}
    return Args(**values)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(arguments(tmp_path_factory.mktemp("ppo")))


def test_a_training_exports_a_policy_with_its_domain_and_seed(trained: Path) -> None:
    policy = FrozenPolicy.load(trained)
    assert policy.metadata["seed"] == 1
    assert policy.metadata["env_spec"]["domain"]["presets"] == ["taobao", "video-games"]


def test_the_log_has_the_names_of_cleanrl(trained: Path) -> None:
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    names = set().union(*lines)
    assert {"charts/SPS", "losses/approx_kl", "losses/explained_variance", "slo/p99_ms"} <= names


def test_a_seed_gives_the_same_policy(trained: Path, tmp_path: Path) -> None:
    again = FrozenPolicy.load(train(arguments(tmp_path)))
    first = FrozenPolicy.load(trained)
    assert all((again.weights[k] == v).all() for k, v in first.weights.items())


def test_resume_refuses_other_arguments(trained: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"--features='working_set'.*paper, as in the checkpoint"
    ):
        train(arguments(trained, resume=True, features="working_set"))


def test_resume_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=re.escape(f"no checkpoint in {tmp_path}")):
        train(arguments(tmp_path, resume=True))


def test_resume_of_a_finished_training_keeps_the_policy(trained: Path) -> None:
    before = (trained / "policy.safetensors").read_bytes()
    train(arguments(trained, resume=True))
    assert (trained / "policy.safetensors").read_bytes() == before


def test_held_out_settings_are_never_evaluated_on(tmp_path: Path) -> None:
    scenarios = evaluation_scenarios(arguments(tmp_path, eval_seeds=50))
    assert all(s.preset != "books" and s.hardware == "h100" for s in scenarios)
    assert all(s.population_factor <= 1.5 and s.tables <= 18 for s in scenarios)
    assert all(s.mean_history_tokens < 14_000 and s.gather_scale >= 0.8 for s in scenarios)
