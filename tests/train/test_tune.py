import json
from pathlib import Path

import pytest

pytest.importorskip("optuna", reason="needs the extra baselines")

import optuna

from agents.registry import BUILT_IN
from agents.settings import tuned
from hlem_env.errors import ArgumentError
from train.tune import STUDIES, Args, courses, defaults, main


@pytest.mark.parametrize("name", STUDIES)
def test_defaults_are_in_the_space(name: str) -> None:
    study = STUDIES[name]
    values = study.space(optuna.trial.FixedTrial(defaults(study)))
    for part, chosen in values.items():
        known = vars(study.parts[part])
        assert chosen == {key: known[key] for key in chosen}


def test_every_baseline_with_settings_has_a_study() -> None:
    # A rule of one line has nothing to tune, SB3's have the settings of our own PPO, and the allocator is
    # no baseline.
    assert set(STUDIES) == set(BUILT_IN) - {"working-set", "sb3-ppo", "sb3-dqn", "allocator"}


@pytest.mark.parametrize("name", STUDIES)
def test_committed_settings_are_the_best_of_their_study(name: str) -> None:
    """All studies have had the same budget, and the package has what they found."""
    root = Path(__file__).resolve().parents[2]
    found = json.loads((root / "docs" / "results" / f"tune-{name}.json").read_text())
    assert (len(found["trials"]), found["courses"], found["epochs"]) == (
        Args().trials,
        Args().courses,
        Args().epochs,
    )
    best = min(found["trials"], key=lambda trial: trial["ratio"])
    assert best["settings"] == found["best"]
    for part, values in found["best"].items():
        settings = tuned(part, type(STUDIES[name].parts[part]))
        assert {key: getattr(settings, key) for key in values} == values


def test_a_study_goes_on_and_keeps_the_best(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    settings.write_text('{"other": {"a": 1}}')
    args = Args(
        studies=("pid",), trials=2, courses=1, epochs=4, journals=tmp_path / "journals",
        results=tmp_path, settings=settings,
    )  # fmt: skip
    main(args)
    first = json.loads((tmp_path / "tune-pid.json").read_text())
    args.trials = 3
    main(args)
    found = json.loads((tmp_path / "tune-pid.json").read_text())
    assert found["trials"][:2] == first["trials"] and len(found["trials"]) == 3
    assert found["best_ratio"] == min(trial["ratio"] for trial in found["trials"])
    assert found["trials"][0]["ratio"] == found["default_ratio"]
    kept = json.loads(settings.read_text())
    assert kept["other"] == {"a": 1} and kept["pid"] == found["best"]["pid"]


def test_courses_have_every_regime_and_repeat() -> None:
    found = list(courses(Args()))
    regimes = [scenario.regime for scenario, _ in found]
    assert {regimes.count(regime) for regime in ("steady", "trend", "burst")} == {4}
    assert found == list(courses(Args()))
    assert {scenario.preset for scenario, _ in found} <= {"taobao", "video-games"}


def test_unknown_studies_are_refused() -> None:
    with pytest.raises(ArgumentError, match="--studies='pdi'"):
        main(Args(studies=("pdi",)))
