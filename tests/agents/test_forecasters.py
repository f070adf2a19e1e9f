"""The trained forecasters of alpha*: how good they are, and what they do with it."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("xgboost", reason="needs the extra baselines")

from agents.boosted_trees import BoostedTrees, load_booster
from agents.forecast import PRETRAINED, AimSettings, read_about
from agents.lstm import (
    WEIGHTS_FILE,
    WINDOW,
    FineTunedLstm,
    FineTuningSettings,
    Lstm,
    LstmForecaster,
)
from hlem_env.errors import ArgumentError, ArtefactError
from tests.hlem_env.epochs import make_stats
from train.forecasters import Samples, samples
from train.labels import LabelPlan, label_episode

FOLDERS = {"boosted-trees": PRETRAINED / "boosted-trees", "lstm": PRETRAINED / "lstm"}
STATE = np.array([0.3, 0.2, 0.7, 0.6, 0.01, 0.5, 0.2, 0.4], np.float32)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Courses that no training has seen, labelled more coarsely."""
    cache = str(tmp_path_factory.mktemp("labels"))
    plan = LabelPlan(epochs=60, alpha_step_centi=4, repeats=4, cache=cache)
    return samples([label_episode(plan, index) for index in range(5000, 5006)])


@pytest.mark.parametrize("name", FOLDERS)
def test_forecasts_are_far_better_than_a_constant(name: str, fresh: Samples) -> None:
    about = read_about(FOLDERS[name], ("held_out_error", "constant_error"))
    assert about["held_out_error"] < 0.4 * about["constant_error"]
    if name == "lstm":
        with torch.inference_mode():
            forecast = LstmForecaster.load(FOLDERS[name])(torch.from_numpy(fresh.windows)).numpy()
    else:
        forecast = load_booster(FOLDERS[name]).inplace_predict(fresh.states)
    error = np.abs(forecast - fresh.alpha_star).mean()
    best_constant = np.abs(np.median(fresh.alpha_star) - fresh.alpha_star).mean()
    assert error < 0.6 * best_constant
    assert error < 2.0 * about["held_out_error"]  # what is stated is about right


@pytest.mark.parametrize("kind", [BoostedTrees, Lstm, FineTunedLstm])
def test_goes_to_its_forecast_at_the_step_limit(kind: type) -> None:
    agent = kind(AimSettings())
    agent.reset(0)
    decision = agent.decide(STATE, make_stats([20.0], alpha_target=0.9))
    assert decision.alpha_centi == 84
    forecast = float(decision.reason.split()[-1])
    assert 0.3 < forecast < 0.84
    near = agent.decide(STATE, make_stats([20.0], alpha_target=round(forecast, 2)))
    assert abs(near.alpha_centi - 100 * forecast) <= 6


def test_within_its_dead_band_it_stays() -> None:
    class Booster:
        def inplace_predict(self, states: np.ndarray) -> np.ndarray:
            return np.array([0.53])

    for dead, share, wanted in ((0, 1.0, 53), (2, 1.0, 53), (4, 1.0, 50), (0, 0.34, 51)):
        agent = BoostedTrees(AimSettings(share, dead), Booster())
        assert agent.decide(STATE, make_stats(alpha_target=0.5)).alpha_centi == wanted


@pytest.mark.parametrize("kind", [BoostedTrees, Lstm, FineTunedLstm])
@pytest.mark.parametrize("state", [STATE[:7], np.full(8, np.nan, np.float32)], ids=["7", "NaN"])
def test_other_states_are_refused(kind: type, state: np.ndarray) -> None:
    with pytest.raises(ArgumentError, match=r"finite, \[8\]: hot_share, .* working_set"):
        kind().decide(state, make_stats())


def test_the_lstm_sees_16_states_and_the_first_one_before_them() -> None:
    agent, rng = Lstm(AimSettings()), np.random.default_rng(0)
    states = rng.random((20, 8), dtype=np.float32)
    forecasts = [agent._forecast(state) for state in states]
    with torch.inference_mode():
        late = float(agent.forecaster(torch.from_numpy(states[None, -WINDOW:])))
        padded = np.concatenate((np.repeat(states[:1], WINDOW - 3, axis=0), states[:3]))
        early = float(agent.forecaster(torch.from_numpy(padded[None])))
    assert forecasts[-1] == pytest.approx(late, abs=1e-6)
    assert forecasts[2] == pytest.approx(early, abs=1e-6)
    agent.reset(0)
    assert agent._forecast(states[0]) == pytest.approx(forecasts[0], abs=1e-6)


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS["lstm"], tmp_path / "lstm")
    model = LstmForecaster.load(tmp_path / "lstm")
    model.save(tmp_path / "lstm")
    again = LstmForecaster.load(tmp_path / "lstm")
    windows = torch.rand(4, WINDOW, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(windows), again(windows))


@pytest.mark.parametrize(
    ("name", "file"), [("lstm", WEIGHTS_FILE), ("boosted-trees", "model.json")]
)
def test_damaged_artefacts_are_named(tmp_path: Path, name: str, file: str) -> None:
    load = LstmForecaster.load if name == "lstm" else load_booster
    folder = tmp_path / name
    with pytest.raises(ArtefactError, match="cannot read"):
        load(folder)
    shutil.copytree(FOLDERS[name], folder)
    (folder / file).write_bytes(b"{}")
    with pytest.raises(ArtefactError, match=file):
        load(folder)
    (folder / "about.json").write_text('{"feature_names": ["alpha"], "hidden": 2}')
    with pytest.raises(ArtefactError, match="is for"):
        load(folder)


def drive(agent: FineTunedLstm, best: float, epochs: int) -> list[float]:
    """Forecasts on one and the same state where P99 rises with the distance from `best`."""
    alpha, forecasts = 0.5, []
    for _ in range(epochs):
        state = STATE.copy()
        state[5] = 0.5
        p99 = 20 + 60 * abs(alpha - best)
        decision = agent.decide(state, make_stats([p99], alpha_target=round(alpha, 2)))
        alpha = decision.alpha_centi / 100
        forecasts.append(float(decision.reason.split()[-1]))
    return forecasts


def test_fine_tuning_learns_which_alphas_do_better() -> None:
    tuning = FineTuningSettings(learning_rate=3e-3, temperature=0.02, explore_centi=2.0)
    agent = FineTunedLstm(AimSettings(), tuning=tuning)
    ends = []
    for best in (0.3, 0.9):
        agent.reset(1)
        ends.append(np.mean(drive(agent, best, 300)[-50:]))
    agent = FineTunedLstm(AimSettings(), tuning=replace(tuning, learning_rate=0.0))
    frozen = np.mean(drive(agent, 0.9, 300)[-50:])
    assert ends[0] < frozen - 0.01 and frozen + 0.01 < ends[1]


def test_fine_tuning_forgets_at_reset_and_repeats_by_seed() -> None:
    agent = FineTunedLstm(AimSettings(), tuning=FineTuningSettings(learning_rate=1e-2))
    runs = []
    for seed in (1, 1, 2):
        agent.reset(seed)
        runs.append(drive(agent, 0.7, 30))
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] == runs[2][0]
