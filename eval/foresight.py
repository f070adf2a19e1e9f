"""How much of the reachable oracle's gain needs foresight of arrivals: `python -m eval.foresight`.

The reachable oracle plans alpha on the very requests that are evaluated. Its plan for one seed, played
on another seed's requests, keeps what the course of the workload is worth and loses what the arrivals
were. So does the mean of the other seeds' plans, in which the arrivals average out. What neither keeps,
no controller can gain.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agents.oracle import Planned
from eval.compare import FIRST_SEED
from eval.statistics import Estimate, ratio_of_means
from eval.unit import GRID, mdp_config
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from hlem_env.scenario import Scenario
from hlem_env.surrogate.optimum import hold_all, reachable, record_episode

Floats = NDArray[np.float64]


@dataclass
class Args:
    """Plays the oracle's plans on requests that they were not made for."""

    workload: str = "default/trend"
    """as in eval.compare"""
    population_factor: float = 1.0
    """on the number of hot users"""
    epochs: int = 240
    """of an episode"""
    seeds: int = 8
    """episodes; each plan is played on each"""
    jobs: int = 2
    """processes"""
    json: Path | None = None
    """file for the figures"""


@dataclass(frozen=True)
class Planning:
    """One seed's requests: the best static split and the best plan."""

    seed: int
    best_static_ms: float
    plan: tuple[int, ...]
    """Hundredths, [epochs]."""
    planned_ms: float


def plan_for(scenario: Scenario, seed: int) -> Planning:
    """Best static split and reachable oracle of one seed."""
    backend = scenario.build()
    backend.reset(seed)
    episode = record_episode(backend, scenario.episode_epochs)
    static_ms = hold_all(backend, episode, list(GRID), jobs=1).mean(axis=1).min()
    plan, p99_ms = reachable(backend, mdp_config(scenario), episode, jobs=1)
    return Planning(seed, float(static_ms), tuple(plan.tolist()), float(p99_ms.mean()))


def play(scenario: Scenario, seed: int, plans: list[NDArray[np.int64]]) -> list[float]:
    """Mean P99, ms, of each plan on one seed's requests."""
    config, backend, results = mdp_config(scenario), scenario.build(), []
    for plan in plans:
        run = run_controller(
            Runner(backend, config), Planned(plan, "plan"), scenario.episode_epochs, seed
        )
        results.append(float(np.mean([stats.p99_ms for stats, _ in run])))
    return results


def cross_play(scenario: Scenario, seeds: list[int], jobs: int) -> dict[str, Floats]:
    """Mean P99, ms, [seeds]: best static, own plan, others' plans, mean of the others' plans."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        plannings = list(
            tqdm(
                pool.map(plan_for, [scenario] * len(seeds), seeds),
                total=len(seeds), unit="plan", disable=None,
            )
        )  # fmt: skip
        plans = np.array([planning.plan for planning in plannings])
        others = [np.delete(plans, i, axis=0) for i in range(len(seeds))]
        to_play = [[*rest, np.rint(rest.mean(axis=0)).astype(np.int64)] for rest in others]
        played = list(
            tqdm(
                pool.map(play, [scenario] * len(seeds), seeds, to_play),
                total=len(seeds), unit="episode", disable=None,
            )
        )  # fmt: skip
    return {
        "best static": np.array([p.best_static_ms for p in plannings]),
        "own plan": np.array([p.planned_ms for p in plannings]),
        "others' plans": np.array([np.mean(row[:-1]) for row in played]),
        "mean of others' plans": np.array([row[-1] for row in played]),
    }


def main(args: Args) -> int:
    """Plan, play, print, write."""
    require(args.seeds >= 2, "seeds", args.seeds, "2 or more")
    require(args.epochs >= 1, "epochs", args.epochs, "1 or more")
    require(args.jobs >= 1, "jobs", args.jobs, "1 or more")
    scenario = Scenario.parse(
        args.workload, population_factor=args.population_factor, episode_epochs=args.epochs
    )
    seeds = list(range(FIRST_SEED, FIRST_SEED + args.seeds))
    p99_ms = cross_play(scenario, seeds, args.jobs)
    static = p99_ms.pop("best static")
    room = 1.0 - ratio_of_means(p99_ms["own plan"], static).value
    title = f"{scenario.name}, population x{args.population_factor:g}, {args.seeds} seeds"
    table = Table(title=title, title_justify="left")
    for heading in ("plan", "P99 / best static", "of the room"):
        table.add_column(heading, justify="right")
    rows = {}
    for name, values in p99_ms.items():
        ratio: Estimate = ratio_of_means(values, static)
        recovered = (1.0 - ratio.value) / room
        rows[name] = {
            "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "recovered": recovered,
        }  # fmt: skip
        table.add_row(
            name, f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", f"{recovered:.0%}"
        )
    Console(width=100).print(table)
    if args.json is not None:
        payload = {"scenario": scenario.to_json(), "seeds": seeds, "plans": rows}
        write_result(args.json, command("eval.foresight"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.foresight", main, Args)
