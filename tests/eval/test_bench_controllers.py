"""Timing of decisions: what is counted as one, and that controllers meet what a node would give."""

import json

import numpy as np
import pytest

from eval import bench_controllers
from eval.bench_controllers import Args, Timed, main, record_stream
from eval.unit import mdp_config
from hlem_env.controller import Decision
from hlem_env.errors import ArgumentError
from hlem_env.mdp import observe
from hlem_env.scenario import Scenario

SCENARIO = Scenario(regime="trend", episode_epochs=36)
CONFIG = mdp_config(SCENARIO)


class Listens:
    """Keeps what it is told; holds alpha."""

    name, initial_alpha_centi = "listens", 50

    def __init__(self, period: int = 1) -> None:
        self.period = period

    def reset(self, seed: int) -> None:
        self.heard: list[tuple[object, int, float]] = []

    def decide(self, observation, stats) -> Decision:
        self.heard.append((observation, stats.requests, stats.duration_s))
        return Decision(50)


class Fails(Listens):
    name = "fails"

    def decide(self, observation, stats) -> Decision:
        raise RuntimeError("never")


@pytest.fixture(scope="module")
def stream():
    return record_stream(SCENARIO, CONFIG, 1)


def test_the_stream_is_that_of_the_node(stream) -> None:
    one = Timed("listens", Listens(), 1)
    one.play(stream, CONFIG)
    for (observation, requests, _), stats in zip(one.controller.heard, stream, strict=True):
        np.testing.assert_array_equal(observation, observe(stats, CONFIG))
        assert requests == stats.requests
    assert len({stats.alpha_target for stats in stream}) > 5


@pytest.mark.parametrize(
    ("period", "every", "choices"), [(1, 1, 36), (1, 12, 3), (12, 1, 3), (5, 1, 7)]
)
def test_a_decision_is_a_call_that_chooses_anew(stream, period, every, choices) -> None:
    one = Timed("listens", Listens(period), every)
    one.play(stream, CONFIG)
    assert len(one.choices_ns) == choices
    assert one.epochs == 36 // period * period
    assert {duration for *_, duration in one.controller.heard} == {5.0 * period}
    figures = one.figures()
    assert figures["decides_every_epochs"] == period * every
    assert figures["decision_us"]["p99_9"] is None  # far too few


def test_bayesian_and_milp_choose_in_the_calls_that_are_counted() -> None:
    pytest.importorskip("bayes_opt", reason="needs the extra baselines")
    long = record_stream(Scenario(regime="trend", episode_epochs=60), CONFIG, 1)
    from agents.registry import make

    for entry in ("bayesian", "milp"):
        every, controller = bench_controllers.CHOOSES_EVERY[entry], make(entry)
        controller.reset(0)
        reasons = [controller.decide(observe(s, CONFIG), s).reason for s in long]
        chose = [not reason.startswith("walks") for reason in reasons]
        assert chose == [(i + 1) % every == 0 for i in range(len(long))]


def test_a_controller_that_fails_is_told_and_the_others_are_timed(tmp_path, capsys) -> None:
    file = tmp_path / "times.json"
    code = main(
        Args(
            controllers=("tests.eval.test_bench_controllers:Fails", "static", "ppo", "oracles"),
            epochs=24, decisions=30, json=file,
        )
    )  # fmt: skip
    assert code == 1
    result = json.loads(file.read_text())
    assert result["failed"] == {
        "fails": "an episode of decisions raised RuntimeError: never",
    }
    assert {"static 0.50", "ppo-only"} <= set(result["controllers"])
    for row in result["controllers"].values():
        assert row["decisions"] >= 30  # whole episodes
        assert row["decision_us"]["p50"] > 0
    assert "fails failed" in capsys.readouterr().out


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ArgumentError, match="--epochs"):
        main(Args(epochs=6))
