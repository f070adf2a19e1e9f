"""train.ppo --from-log: a known workload is found again in its log, and trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agents.forecast import PRETRAINED
from eval.served_surrogate import Node, config_of
from hlem_env.errors import ArtefactError
from hlem_env.live.config import LiveConfig
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from serving_bridge.control_loop import ControlLoop, ControlSettings
from serving_bridge.epoch_log import EpochLog
from serving_bridge.policy import FrozenPolicy
from tests.serving_bridge.made_epochs import entry, served_of, stats_of
from train.log_fit import fit_log, table
from train.ppo import Args, train


def logged(folder: Path, scenario: Scenario, epochs: int) -> Path:
    """A log of a surrogate node that serves the scenario."""
    loop = ControlLoop(
        FrozenPolicy.load(PRETRAINED / "working_set"), config_of(scenario),
        ControlSettings(background=False, adapter=None),
        log=EpochLog(folder, config_of(scenario), about={"tables": scenario.tables}),
    )  # fmt: skip
    list(Node(scenario, loop, 5).epochs(epochs, ticks=False))
    loop.close()
    return folder


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scenario = Scenario(
        preset="books", steady_hot_share=0.33, population_factor=0.6, mean_history_tokens=8_000,
        utilisation=0.6, tables=12,
    )  # fmt: skip
    return logged(tmp_path_factory.mktemp("log"), scenario, 80)


def test_the_workload_is_found_again(steady: Path) -> None:
    fit = fit_log(steady, Scenario(preset="books"))
    assert fit.scenario.regime == "steady" and fit.scenario.tables == 12
    assert fit.scenario.steady_hot_share == pytest.approx(0.33, abs=0.02)
    assert fit.scenario.population_factor == pytest.approx(0.6, rel=0.15)
    assert fit.scenario.mean_history_tokens == pytest.approx(8_000, rel=0.05)
    assert fit.scenario.utilisation == pytest.approx(0.6, rel=0.10)
    assert fit.notes == ()


@pytest.mark.parametrize("regime", ["trend", "burst"])
def test_the_regime_is_told_by_the_hot_share_over_time(regime: str, tmp_path: Path) -> None:
    scenario = Scenario(regime=regime, utilisation=0.3, episode_epochs=160)
    assert fit_log(logged(tmp_path, scenario, 160)).scenario.regime == regime


def test_what_the_fitted_workload_shows_is_what_the_log_shows(steady: Path) -> None:
    fit = fit_log(steady, Scenario(preset="books"))
    workload = fit.scenario.workload()
    workload.reset(np.random.default_rng(0), 0.0)
    requests = workload.take(400.0)
    assert len(requests) / 400.0 == pytest.approx(fit.log.requests_per_s, rel=0.05)
    assert requests.history_length.mean() == pytest.approx(fit.log.mean_history_tokens, rel=0.05)


def test_both_are_shown_side_by_side(steady: Path) -> None:
    rows = {name: (log, own) for name, log, own in table(fit_log(steady))}
    assert float(rows["requests/s"][0]) == pytest.approx(float(rows["requests/s"][1]), rel=0.02)
    assert float(rows["hot users"][0]) == pytest.approx(float(rows["hot users"][1]), rel=0.02)


def test_it_trains_on_the_fit(
    steady: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = Args(
        output=tmp_path, from_log=steady, total_timesteps=64, eval_seeds=1, num_envs=2,
        num_steps=16, num_minibatches=2, update_epochs=1, warmup_steps=8,
    )  # fmt: skip
    policy = FrozenPolicy.load(train(arguments))
    fitted = Scenario.parse(policy.metadata["env_spec"]["kwargs"]["workload"])
    assert fitted.steady_hot_share == pytest.approx(0.33, abs=0.02)
    assert policy.metadata["env_spec"]["domain"] is None
    assert "hot users" in capsys.readouterr().out


def test_a_small_node_is_fitted_in_proportion(tmp_path: Path) -> None:
    small = LiveConfig.load("cpu-small")
    config = MdpConfig(slo_ms=small.slo_ms, max_history_tokens=small.max_history_tokens,
                       epoch_seconds=small.epoch_seconds)  # fmt: skip
    log = EpochLog(tmp_path, config, about=small.to_json())
    for epoch in range(30):
        stats = stats_of(epoch, 40, utilisation=0.55, working_set_bytes=0.4 * 6e10)
        served = served_of(stats)
        length = np.full(40, 512, np.int32)
        served = served._replace(requests=replace(served.requests, history_length=length))
        log.put(entry(epoch % 50)._replace(stats=stats, served=served))
    log.close()
    fit = fit_log(tmp_path)
    rows = {name: own for name, _, own in table(fit)}
    assert fit.scenario.mean_history_tokens == pytest.approx(7_500)  # half of the longest
    assert float(rows["requests an epoch"]) == pytest.approx(40, abs=1)
    assert float(rows["hot users' KV over the pool"]) == pytest.approx(0.40, abs=0.02)
    assert fit.scenario.utilisation == 0.55 and "in proportion" in fit.notes[0]
    fit.scenario.build().reset(0)


def test_a_short_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="5 epochs with telemetry; a fit needs 24"):
        fit_log(logged(tmp_path, Scenario(utilisation=0.1), 5))
