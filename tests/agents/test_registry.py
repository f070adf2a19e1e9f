import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from agents import registry
from agents.working_set import WorkingSetRule
from hlem_env.errors import ArgumentError
from hlem_env.scenario import Scenario

ROOT = Path(__file__).resolve().parents[2]


def test_by_name_dotted_path_and_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "agents.working_set:WorkingSetRule", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    for name in ("working-set", "agents.working_set:WorkingSetRule", "theirs"):
        assert isinstance(registry.make(name), WorkingSetRule)
    assert registry.names() == (*registry.BUILT_IN, "theirs")


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_built_in_ones_follow_the_protocol(name: str) -> None:
    pytest.importorskip("xgboost", reason="needs the extra baselines")
    made = registry.make(name)
    assert made.period == 1 and made.initial_alpha_centi == 50
    made.reset(0)


@pytest.mark.parametrize(
    "name", ["unheard-of", "no.such.module:Thing", "agents.working_set:Nothing", "agents.pid:np"]
)
def test_unknown_names_are_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(ArgumentError, match="controller="):
        registry.make(name)
    if name != "agents.pid:np":
        with pytest.raises(ArgumentError, match=r"working-set, pid, .* package\.module:factory"):
            registry.factory(name)


def test_what_a_controller_s_module_lacks_is_not_taken_for_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        registry.factory("needs_more:Thing")


def test_the_node_goes_to_factories_that_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = Scenario.parse("steady", hardware="a100")
    assert registry.make("milp", scenario)._node is scenario  # type: ignore[attr-defined]
    registry.make("pid", scenario)


def test_something_else_than_a_controller_is_refused() -> None:
    with pytest.raises(ArgumentError, match="allowed: one with name, period"):
        registry.make("collections:OrderedDict")


def test_the_libraries_of_the_baselines_load_when_they_are_used() -> None:
    code = (
        "import sys, hlem_env, agents.registry, agents.bayesian, agents.milp, agents.boosted_trees\n"
        "print(*{'bayes_opt', 'optuna', 'sklearn', 'xgboost'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "" and done.returncode == 0, done.stderr
