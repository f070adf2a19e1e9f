from dataclasses import replace
from pathlib import Path

import pytest

from eval.cells import collect
from eval.compare import Args, plan_units, quick, workloads
from eval.lineup import ALL, DEFAULT, resolve
from eval.names import ALPHA_STAR, BEST_STATIC, FORESEEN, REACHABLE
from eval.records import Record, replay
from eval.unit import Unit, run_unit
from hlem_env.errors import ArgumentError
from hlem_env.scenario import Scenario

CONTROLLERS = '''
from hlem_env.controller import Decision


class Steps:
    """Moves up until a given decision, at which something happens."""

    period, initial_alpha_centi = 1, 50

    def reset(self, seed):
        self.seed, self.decisions = seed, 0

    def decide(self, observation, stats):
        self.decisions += 1
        return self.answer(round(100 * stats.alpha_target) + 2)


class Fine(Steps):
    name = "fine"

    def answer(self, alpha_centi):
        return Decision(alpha_centi + 100)


class Raises(Steps):
    name = "raises"

    def answer(self, alpha_centi):
        if self.seed == 2 and self.decisions == 5:
            raise RuntimeError("no idea")
        return Decision(alpha_centi)


class OffGrid(Steps):
    name = "off the grid"

    def answer(self, alpha_centi):
        return Decision(alpha_centi + 0.5)


class Hangs(Steps):
    name = "hangs"

    def answer(self, alpha_centi):
        while True:
            pass


class Unmade(Steps):
    def __init__(self):
        raise ValueError("no weights")
'''


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unit:
    (tmp_path / "my_controllers.py").write_text(CONTROLLERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Unit(
        Scenario.parse("steady", episode_epochs=12), 1, 50, ("working-set",), (), 5.0, False, 4, 1,
        str(tmp_path / "out"),
    )  # fmt: skip


def figures(row: dict[str, object]) -> dict[str, object]:
    return {k: v for k, v in row.items() if not k.startswith("decision_us")}


def test_failures_are_told_and_spoil_nothing(unit: Unit) -> None:
    alone = run_unit(unit)
    kinds = ("Raises", "OffGrid", "Hangs", "Unmade", "Fine")
    names = ("working-set", *(f"my_controllers:{kind}" for kind in kinds))
    units = [replace(unit, controllers=names, time_limit_s=0.2, seed=seed) for seed in (1, 2)]
    results = [run_unit(one) for one in units]
    for name, row in alone["rows"].items():
        assert figures(results[0]["rows"][name]) == figures(row)
    cell = collect(units, results)[0]
    assert set(cell["controllers"]) == {BEST_STATIC, "working-set rule", "fine"}
    reasons = {name.split(":")[1]: fault["reason"] for name, fault in cell["failed"].items()}
    assert reasons == {
        "Raises": "decision 5 raised RuntimeError: no idea",
        "OffGrid": "alpha_centi of decision 1=52.5 is off the grid; allowed: whole hundredths",
        "Hangs": "decision 1 took longer than 0.2 s",
        "Unmade": "making it raised ValueError: no weights",
    }
    assert cell["failed"]["my_controllers:Raises"]["seeds"] == [2]
    assert cell["failed"]["my_controllers:Hangs"]["seeds"] == [1, 2]


def test_out_of_bounds_is_clipped_and_counted(unit: Unit) -> None:
    rows = run_unit(replace(unit, controllers=("my_controllers:Fine", "working-set")))["rows"]
    assert rows["fine"]["clipped"] == 11  # every decision of twelve epochs
    assert rows["working-set rule"]["clipped"] == 0
    record = Record.load(Path(unit.output) / rows["fine"]["record"])
    assert record.alpha_centi == [50] + [90] * 11
    assert replay(record)[1] == []


def test_the_decision_time_is_that_of_decide(unit: Unit) -> None:
    rows = run_unit(replace(unit, controllers=("my_controllers:Fine",)))["rows"]
    row = rows["fine"]
    assert 0 < row["decision_us_p50"] <= row["decision_us_p99"] < 5e6


def test_oracles_run_beside_the_controllers_and_bound_them(unit: Unit) -> None:
    names = ("working-set", "oracles")
    result = run_unit(replace(unit, controllers=names, oracles=True, star_step_centi=8))
    assert set(result["rows"]) == {
        BEST_STATIC, "working-set rule", REACHABLE, ALPHA_STAR, FORESEEN,
    }  # fmt: skip
    assert result["rows"][ALPHA_STAR]["gap"] == 0.0
    cell = collect([unit], [result])[0]
    assert cell["bound_violations"] == []
    p99 = {name: columns["p99_ms"][0] for name, columns in cell["controllers"].items()}
    assert p99[REACHABLE] <= min(p99[BEST_STATIC], p99["working-set rule"])


def test_finished_units_are_found_by_what_they_depend_on(unit: Unit) -> None:
    run_unit(unit)
    assert unit.file.is_file()
    for other in (
        replace(unit, controllers=("working-set", "pid")),
        replace(unit, seed=2),
        replace(unit, time_limit_s=1.0),
    ):
        assert other.file != unit.file
    assert replace(unit).file == unit.file


def test_workloads_by_preset_and_regime() -> None:
    assert workloads(Args()) == ("default/steady", "default/trend", "default/burst")
    args = Args(presets=("taobao", "books"), regimes=("trend", "burst"))
    assert workloads(args) == ("taobao/trend", "taobao/burst", "books/trend", "books/burst")
    assert workloads(Args(regimes=("burst",))) == ("default/burst",)
    assert workloads(Args(presets=("books",))) == ("books/steady", "books/trend", "books/burst")


def test_groups_of_controllers() -> None:
    assert resolve(("default",)) == DEFAULT
    assert resolve(("all",)) == ALL
    assert resolve(("pid", "default", "pid")) == ("pid", *DEFAULT)
    with pytest.raises(ArgumentError, match=r"--controllers='pdi' .* static, design-point, ppo"):
        resolve(("pdi",))


def test_quick_takes_all_but_leaves_what_was_named(tmp_path: Path) -> None:
    assert quick(Args()).controllers == ("all",)
    assert quick(Args(controllers=("pid",))).controllers == ("pid",)
    assert quick(Args(seeds=1)).seeds == 1 and quick(Args()).seeds == 2


def test_oracles_are_found_only_if_named() -> None:
    args = Args(workloads=("default/steady",), kv_policies=("scan_resistant",), epochs=2, seeds=1)
    assert [u.oracles for u in plan_units(args, ("folder",))] == [True]
    found = list(plan_units(replace(args, controllers=("pid",)), ("folder",)))
    assert [(u.oracles, u.policies) for u in found] == [(False, ())]
