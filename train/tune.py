"""Tune every baseline's settings with Optuna, each with the same budget: `python -m train.tune`.

A trial plays one controller on courses of the training domain, four of each regime, and is judged by
its mean P99 over that of a static 0.50 on the same requests. The first trial has the defaults, so tuned
settings are no worse there. Studies are kept in a journal (JSON lines): the same command goes on. The
best settings go to agents/settings.json, every trial to docs/results/tune-NAME.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from agents.bayesian import BayesianOptimisation, BayesianSettings
from agents.boosted_trees import BoostedTrees
from agents.forecast import AimSettings
from agents.lstm import FineTunedLstm, FineTuningSettings, Lstm
from agents.milp import MilpPlanner, MilpSettings
from agents.pid import Pid, PidSettings
from agents.settings import SETTINGS_FILE
from agents.static import Static
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.controller import Controller
from hlem_env.errors import require, require_choice
from hlem_env.machine import command, write_result
from hlem_env.scenario import Scenario, TrainingDomain
from hlem_env.workload.regimes import REGIMES
from serving_bridge.recovery import RecoverySettings, WithRecovery
from train.forecasters import LstmTraining, Samples, TreeTraining, split, train_lstm, train_trees
from train.labels import LabelPlan, label, mdp_config

FIRST_SEED = 60_000
"""Of the courses; the labelled ones and every evaluation have others."""
Settings = dict[str, Any]


@dataclass
class Args:
    """Tune the baselines."""

    studies: tuple[str, ...] = ()
    """names; none: all, in the order in which one needs the other"""
    trials: int = 30
    """of every study"""
    courses: int = 12
    """that every trial plays, regimes in turn"""
    epochs: int = 120
    """of a course"""
    seed: int = 1
    """of the search"""
    journals: Path = Path("runs/tune")
    """folder of the studies, to go on from"""
    results: Path = Path("docs/results")
    """folder of tune-NAME.json"""
    settings: Path = Path("agents") / SETTINGS_FILE
    """file of the best settings"""


@dataclass(frozen=True)
class Study:
    """What is searched."""

    parts: dict[str, Any]
    """Default settings by their name in settings.json."""
    space: Callable[[Any], dict[str, Settings]]
    """A trial's values, by part."""
    build: Callable[[dict[str, Any], Scenario], Controller]
    """The controller of settings by part."""


@lru_cache(maxsize=1)
def forecast_samples() -> Samples:
    """The forecasters' training samples; labels come from the cache of `train.forecasters`."""
    return split(label(LabelPlan(), jobs=2))[0]


@lru_cache(maxsize=1)
def _trees(how: TreeTraining) -> Any:
    booster = train_trees(forecast_samples(), how, seed=1)
    booster.set_param({"nthread": 1})
    return booster


@lru_cache(maxsize=1)
def _lstm(how: LstmTraining) -> Any:
    return train_lstm(forecast_samples(), how, seed=1)


def _aim(trial: Any) -> Settings:
    return {
        "share": trial.suggest_float("share", 0.2, 1.0),
        "dead_centi": trial.suggest_float("dead_centi", 0.0, 4.0),
    }


def _pid(trial: Any) -> dict[str, Settings]:
    return {
        "pid": {
            "kp": trial.suggest_float("kp", 0.5, 60.0, log=True),
            "ki": trial.suggest_float("ki", 0.5, 60.0, log=True),
            "kd": trial.suggest_float("kd", 0.0, 10.0),
            "setpoint": trial.suggest_float("setpoint", 0.2, 1.0),
            "kv_weight": trial.suggest_float("kv_weight", 0.5, 20.0, log=True),
            "band": trial.suggest_float("band", 0.02, 1.0, log=True),
        }
    }


def _bayesian(trial: Any) -> dict[str, Settings]:
    return {
        "bayesian": {
            "length_centi": trial.suggest_float("length_centi", 8.0, 80.0, log=True),
            "noise": trial.suggest_float("noise", 0.01, 1.0, log=True),
            "memory": trial.suggest_int("memory", 3, 20),
            "xi": trial.suggest_float("xi", 1e-3, 0.5, log=True),
        }
    }


def _milp(trial: Any) -> dict[str, Settings]:
    return {
        "milp": {
            "horizon": trial.suggest_int("horizon", 1, 4),
            "spacing_centi": trial.suggest_int("spacing_centi", 4, 10),
            "move_ms": trial.suggest_float("move_ms", 1e-3, 0.2, log=True),
            "trend": trial.suggest_float("trend", 0.0, 1.5),
        }
    }


def _boosted_trees(trial: Any) -> dict[str, Settings]:
    return {
        "boosted-trees": {
            "rounds": trial.suggest_int("rounds", 50, 300),
            "max_depth": trial.suggest_int("max_depth", 3, 7),
            "learning_rate": trial.suggest_float("learning_rate", 0.02, 0.3, log=True),
            "min_child_weight": trial.suggest_float("min_child_weight", 1.0, 100.0, log=True),
            "subsample": trial.suggest_float("subsample", 0.3, 1.0),
        },
        "boosted-trees-aim": _aim(trial),
    }


def _lstm_space(trial: Any) -> dict[str, Settings]:
    return {
        "lstm": {
            "hidden": trial.suggest_categorical("hidden", [16, 32, 48]),
            "learning_rate": trial.suggest_float("learning_rate", 5e-4, 1e-2, log=True),
            "passes": trial.suggest_int("passes", 3, 10),
            "batch": trial.suggest_categorical("batch", [256, 512]),
            "weight_decay": trial.suggest_float("weight_decay", 1e-6, 1e-3, log=True),
        },
        "lstm-aim": _aim(trial),
    }


def _fine_tuning(trial: Any) -> dict[str, Settings]:
    return {
        "lstm-oft": {
            "learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-2, log=True),
            "steps": trial.suggest_int("steps", 1, 8),
            "temperature": trial.suggest_float("temperature", 0.01, 0.5, log=True),
            "explore_centi": trial.suggest_float("explore_centi", 0.1, 2.0, log=True),
        }
    }


def _recovery(trial: Any) -> dict[str, Settings]:
    return {
        "lstm-oft-rc": {
            "sigma_floor_slos": trial.suggest_float("sigma_floor_slos", 0.01, 0.5, log=True),
            "calm_epochs": trial.suggest_int("calm_epochs", 1, 4),
        }
    }


STUDIES: dict[str, Study] = {
    "pid": Study({"pid": PidSettings()}, _pid, lambda s, _: Pid(s["pid"])),
    "bayesian": Study(
        {"bayesian": BayesianSettings()},
        _bayesian,
        lambda s, _: BayesianOptimisation(s["bayesian"]),
    ),
    "milp": Study(
        {"milp": MilpSettings()}, _milp, lambda s, scenario: MilpPlanner(s["milp"], scenario)
    ),
    "boosted-trees": Study(
        {"boosted-trees": TreeTraining(), "boosted-trees-aim": AimSettings()},
        _boosted_trees,
        lambda s, _: BoostedTrees(s["boosted-trees-aim"], _trees(s["boosted-trees"])),
    ),
    "lstm": Study(
        {"lstm": LstmTraining(), "lstm-aim": AimSettings()},
        _lstm_space,
        lambda s, _: Lstm(s["lstm-aim"], _lstm(s["lstm"])),
    ),
    "lstm-oft": Study(
        {"lstm-oft": FineTuningSettings()},
        _fine_tuning,
        lambda s, _: FineTunedLstm(tuning=s["lstm-oft"]),
    ),
    "lstm-oft-rc": Study(
        {"lstm-oft-rc": RecoverySettings()},
        _recovery,
        lambda s, _: WithRecovery(FineTunedLstm(), s["lstm-oft-rc"]),
    ),
}


def courses(args: Args) -> Iterator[tuple[Scenario, int]]:
    """Scenarios of the training domain with their seeds, regimes in turn."""
    domain = TrainingDomain()
    for i in range(args.courses):
        rng = np.random.default_rng(FIRST_SEED + i)
        regime = REGIMES[i % len(REGIMES)]
        base = Scenario(episode_epochs=args.epochs)
        yield replace(domain, regimes=(regime,)).sample(base, rng), FIRST_SEED + i


def mean_p99_ms(controller: Controller, scenario: Scenario, seed: int) -> float:
    """Mean over epochs of P99 of one episode."""
    runner = Runner(scenario.build(), mdp_config(scenario))
    episode = run_controller(runner, controller, scenario.episode_epochs, seed)
    return float(np.mean([stats.p99_ms for stats, _ in episode]))


def ratio(
    study: Study, values: dict[str, Settings], played: list[tuple[Scenario, int, float]]
) -> float:
    """Mean over courses of P99 over the static reference's."""
    settings = {name: replace(part, **values[name]) for name, part in study.parts.items()}
    ratios = [
        mean_p99_ms(study.build(settings, scenario), scenario, seed) / reference
        for scenario, seed, reference in played
    ]
    return float(np.mean(ratios))


def defaults(study: Study) -> Settings:
    """The defaults as a trial's values."""
    values: Settings = {}
    for part in study.parts.values():
        values |= asdict(part)
    return values


def run_study(name: str, args: Args, played: list[tuple[Scenario, int, float]]) -> dict[str, Any]:
    """Search, or go on; returns the best values and every trial."""
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    def objective(trial: Any, study: Study) -> float:
        values = study.space(trial)
        trial.set_user_attr("settings", values)
        return ratio(study, values, played)

    study = STUDIES[name]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    args.journals.mkdir(parents=True, exist_ok=True)
    search = optuna.create_study(
        study_name=f"{name}-{args.courses}-{args.epochs}-{args.seed}",
        storage=JournalStorage(JournalFileBackend(str(args.journals / f"{name}.log"))),
        sampler=optuna.samplers.TPESampler(seed=args.seed, n_startup_trials=8),
        load_if_exists=True,
    )
    if not search.trials:
        search.enqueue_trial(defaults(study))
    done = sum(trial.value is not None for trial in search.trials)
    if done < args.trials:
        search.optimize(
            partial(objective, study=study), n_trials=args.trials - done, show_progress_bar=True
        )
    finished = [trial for trial in search.trials if trial.value is not None]
    return {
        "best": search.best_trial.user_attrs["settings"],
        "best_ratio": search.best_value,
        "default_ratio": finished[0].value,
        "trials": [{"ratio": t.value, "settings": t.user_attrs["settings"]} for t in finished],
    }


def keep(settings: Path, best: dict[str, Settings]) -> None:
    """Put the best values into settings.json, the other entries as they are."""
    known = json.loads(settings.read_text()) if settings.is_file() else {}
    settings.parent.mkdir(parents=True, exist_ok=True)
    partial_file = settings.with_suffix(".part")
    partial_file.write_text(json.dumps(known | best, indent=1, sort_keys=True) + "\n")
    partial_file.replace(settings)


def main(args: Args) -> None:
    """Run the studies one after the other."""
    require(args.trials >= 1, "--trials", args.trials, "at least 1")
    require(args.courses >= 1, "--courses", args.courses, "at least 1")
    names = args.studies or tuple(STUDIES)
    for name in names:
        require_choice("--studies", name, STUDIES)
    played = [
        (scenario, seed, mean_p99_ms(Static(50), scenario, seed))
        for scenario, seed in courses(args)
    ]
    for name in names:
        found = run_study(name, args, played)
        keep(args.settings, found["best"])
        payload = {"study": name, "courses": args.courses, "epochs": args.epochs} | found
        write_result(args.results / f"tune-{name}.json", command("train.tune"), payload)
        print(
            f"{name}: P99 / static 0.50 is {found['best_ratio']:.4f}, with the defaults"
            f" {found['default_ratio']:.4f}, {len(found['trials'])} trials"
        )


if __name__ == "__main__":
    run_command("train.tune", main, Args)
