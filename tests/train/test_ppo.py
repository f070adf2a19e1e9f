"""train.ppo: a short training leaves a policy that loads, resumes, and refuses what does not fit."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.scenario import Scenario, TrainingDomain
from serving_bridge.policy import FrozenPolicy
from train.ppo import Args, evaluation_scenarios, rollout_p99, train

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


def test_a_seed_gives_the_same_policy_however_many_processes(trained: Path, tmp_path: Path) -> None:
    again = FrozenPolicy.load(train(arguments(tmp_path, processes=1)))
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


@pytest.mark.parametrize("crowded_share", [0.0, 1.0])
def test_held_out_settings_are_never_evaluated_on(tmp_path: Path, crowded_share: float) -> None:
    args = arguments(tmp_path, eval_seeds=50, crowded_share=crowded_share)
    scenarios = evaluation_scenarios(args)
    assert all(s.preset != "books" and s.hardware == "h100" for s in scenarios)
    assert all(s.population_factor <= 1.5 and s.tables <= 18 for s in scenarios)
    assert all(s.mean_history_tokens < 14_000 and s.gather_scale >= 0.8 for s in scenarios)


def test_a_policy_is_trained_and_evaluated_on_the_hardware_named(tmp_path: Path) -> None:
    args = arguments(tmp_path, hardware="h200-live", eval_seeds=2)
    assert {scenario.hardware for scenario in evaluation_scenarios(args)} == {"h200-live"}
    train(args)
    spec = json.loads((tmp_path / "policy.json").read_text())["env_spec"]
    assert spec["kwargs"]["hardware"] == "h200-live"
    with pytest.raises(ArgumentError, match="hardware"):
        train(arguments(tmp_path / "other", hardware="h300"))


def test_it_is_evaluated_at_the_epochs_that_it_is_trained_at(tmp_path: Path) -> None:
    args = arguments(tmp_path, epoch_seconds=1.0)
    scenario = replace(evaluation_scenarios(args)[0], episode_epochs=4)
    short, usual = (
        rollout_p99(a, [scenario], None) for a in (args, replace(args, epoch_seconds=None))
    )
    assert short != pytest.approx(usual)


def test_a_policy_is_trained_for_one_live_node(tmp_path: Path) -> None:
    args = arguments(tmp_path, live_preset="cpu-small", epoch_seconds=1.0, eval_seeds=2)
    assert all(0.55 <= scenario.zipf <= 1.0 for scenario in evaluation_scenarios(args))
    train(args)
    kwargs = json.loads((tmp_path / "policy.json").read_text())["env_spec"]["kwargs"]
    assert (kwargs["backend"], kwargs["hardware"]) == ("twin", "cpu-small")
    with pytest.raises(ArgumentError, match="--hardware"):
        train(arguments(tmp_path / "other", live_preset="cpu-small", hardware="h100"))
    with pytest.raises(ArgumentError, match="live preset"):
        train(arguments(tmp_path / "other", live_preset="h300"))


def test_a_named_workload_may_have_another_population(tmp_path: Path) -> None:
    args = arguments(tmp_path, workload="trend", population_factor=1.5, eval_seeds=2)
    assert {(s.regime, s.population_factor) for s in evaluation_scenarios(args)} == {("trend", 1.5)}
    train(args)
    spec = json.loads((tmp_path / "policy.json").read_text())["env_spec"]
    assert spec["kwargs"]["workload"]["population_factor"] == 1.5
    with pytest.raises(ArgumentError, match="--population-factor"):
        train(arguments(tmp_path / "other", population_factor=1.5))


def draws(domain: TrainingDomain) -> list[Scenario]:
    return [domain.sample(Scenario(), np.random.default_rng(seed)) for seed in range(400)]


def test_crowded_draws_take_their_share_and_leave_the_others_as_they_are() -> None:
    plain, mixed = draws(TrainingDomain()), draws(TrainingDomain(crowded_share=0.25))
    changed = sum(a != b for a, b in zip(plain, mixed, strict=True))
    assert 70 <= changed <= 130  # 100 expected, deviation 8.7
    assert [s.regime for s in plain] == [s.regime for s in mixed]


def test_hot_users_of_crowded_draws_outgrow_the_pool() -> None:
    for scenario in draws(TrainingDomain(crowded_share=1.0)):
        node = scenario.node()
        entry = node.kv_pages(round(scenario.mean_history_tokens))
        users = scenario.regime_config().hot_users(np.array([0.60]))[0]
        assert users * entry > node.pool_pages


def test_a_policy_names_its_crowded_share_and_resumes_only_with_it(tmp_path: Path) -> None:
    train(arguments(tmp_path, crowded_share=0.5))
    spec = FrozenPolicy.load(tmp_path).metadata["env_spec"]
    assert spec["kwargs"]["workload"] == "training"
    assert spec["domain"]["crowded_share"] == 0.5
    with pytest.raises(ArgumentError, match=r"--crowded-share=0\.0.*0\.5, as in the checkpoint"):
        train(arguments(tmp_path, resume=True))


@pytest.mark.parametrize(
    ("overrides", "allowed"),
    [
        ({"crowded_share": 1.5}, "0 to 1"),
        ({"crowded_share": float("nan")}, "finite"),
        ({"crowded_share": 0.5, "workload": "trend"}, "0, but with --workload training"),
    ],
)
def test_a_crowded_share_that_cannot_be_is_refused(
    tmp_path: Path, overrides: dict[str, object], allowed: str
) -> None:
    with pytest.raises(ArgumentError, match=allowed):
        train(arguments(tmp_path, **overrides))
