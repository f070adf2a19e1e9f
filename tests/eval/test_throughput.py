"""Throughput at the SLO."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import throughput
from eval.names import BEST_STATIC
from eval.throughput import (
    Args,
    Search,
    best_static_p99_ms,
    collect,
    highest_load,
    main,
    offered_per_s,
    run_search,
)
from hlem_env.controller import Decision
from hlem_env.errors import ArgumentError
from hlem_env.scenario import Scenario

SHORT = Scenario(regime="steady", episode_epochs=12)


def search(name: str, scenario: Scenario = SHORT, **changes: object) -> Search:
    base = Search(scenario, 20_000, name, 50, (), 0.25, 1.5, 0.02, 5.0)
    return replace(base, **changes)


class Raises:
    """A controller that fails at once."""

    name, period, initial_alpha_centi = "raises", 1, 50

    def reset(self, seed: int) -> None: ...

    def decide(self, observation: object, stats: object) -> Decision:
        raise RuntimeError("no decision")


@given(st.floats(0.3, 1.45), st.floats(1e-4, 0.05))
def test_of_an_mm1_queue_the_closed_form_is_found(answer: float, tolerance: float) -> None:
    # P99 of an M/M/1 queue's sojourn time is ln(100) / (mu - lambda): it meets the SLO up to
    # lambda = mu - ln(100) / SLO.
    slo, mu = 30.0, answer + math.log(100) / 30.0
    found = highest_load(
        lambda load: math.log(100) / (mu - load) if load < mu else math.inf,
        slo, 0.25, 1.5, tolerance,
    )  # fmt: skip
    assert found.bound == ""
    assert found.factor <= answer + 1e-9
    assert found.factor > answer - tolerance - 1e-9


@pytest.mark.parametrize(("p99_ms", "bound", "factor"), [(31, "below", 0.25), (30, "above", 1.5)])
def test_beyond_the_range_its_end_is_told_as_a_bound(p99_ms, bound, factor) -> None:
    assert highest_load(lambda _: p99_ms, 30.0, 0.25, 1.5, 0.01) == (factor, bound)


def test_load_one_is_the_scenario_itself_and_arrivals_follow_the_factor() -> None:
    assert search("pid").at(1.0) == SHORT
    long = replace(SHORT, episode_epochs=60)
    one, half = (offered_per_s(search("pid", long).at(f), 20_000) for f in (1.0, 0.5))
    assert half / one == pytest.approx(0.5, rel=0.05)  # Poisson: 33,000 requests


def test_a_found_load_meets_the_slo_and_one_beyond_the_tolerance_misses_it() -> None:
    mine = search(BEST_STATIC)
    [row] = run_search(mine)
    factor = row["factor"]
    assert row["bound"] == ""
    assert best_static_p99_ms(mine.at(factor), mine.seed) <= 30.0
    # Bisection leaves the SLO missed at most a tolerance above.
    step = 1.25 / 2 ** math.ceil(math.log2(1.25 / mine.tolerance))
    assert best_static_p99_ms(mine.at(factor + step), mine.seed) > 30.0


def test_no_static_split_carries_more_than_the_best_in_hindsight() -> None:
    scenario = replace(SHORT, regime="trend", episode_epochs=40)
    [best] = run_search(search(BEST_STATIC, scenario))
    statics = run_search(search("static", scenario))
    assert [row["name"] for row in statics] == [
        f"static {a:.2f}" for a in (0.1, 0.3, 0.5, 0.7, 0.9)
    ]
    assert max(row["factor"] for row in statics) <= best["factor"]
    assert len({row["factor"] for row in statics}) > 1


def test_a_faulty_controller_is_reported_and_the_others_stand(monkeypatch, tmp_path) -> None:
    monkeypatch.setitem(throughput.__dict__, "run_all", lambda s, jobs: [run_search(x) for x in s])
    monkeypatch.setitem(throughput.__dict__, "design_point", lambda scenario: 44)
    file = tmp_path / "throughput.json"
    main(
        Args(
            controllers=("tests.eval.test_throughput:Raises", "working-set", "oracles"),
            regimes=("burst",), seeds=2, epochs=6, tolerance=0.1, json=file,
        )
    )  # fmt: skip
    [cell] = json.loads(file.read_text())["cells"]
    assert list(cell["controllers"]) == [BEST_STATIC, "working-set rule"]
    assert cell["failed"]["raises"] == {
        "seeds": [20_000, 20_001],
        "reason": "decision 1 raised RuntimeError: no decision",
    }
    rates = cell["controllers"]["working-set rule"]
    summary = rates["summary"]["requests_per_s"]
    assert summary["low"] <= summary["value"] <= summary["high"]
    assert summary["value"] == pytest.approx(np.mean(rates["requests_per_s"]))


def test_a_controller_that_fails_on_one_seed_has_no_row() -> None:
    searches = [search(n, seed=s) for n in (BEST_STATIC, "pid") for s in (1, 2)]
    good = {"factor": 1.0, "bound": "", "requests_per_s": 200.0}
    best = {"name": BEST_STATIC, "entry": BEST_STATIC} | good
    pid = {"name": "PID", "entry": "pid"}
    [cell] = collect(searches, [[best], [best], [pid | good], [pid | {"fault": "late"}]])
    assert list(cell["controllers"]) == [BEST_STATIC]
    assert cell["failed"] == {"PID": {"seeds": [2], "reason": "late"}}


@pytest.mark.parametrize(
    "changes",
    [{"lowest": 0.0}, {"highest": 0.2}, {"highest": 8.0}, {"tolerance": 0.0}, {"seeds": 0},
     {"presets": ("nowhere",)}, {"regimes": ("flat",)}, {"controllers": ("nobody",)}],
)  # fmt: skip
def test_arguments_out_of_range_are_refused(changes) -> None:
    with pytest.raises(ArgumentError):
        main(replace(Args(), **changes))
