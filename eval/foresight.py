"""How much of the reachable oracle's gain needs foresight of arrivals: `python -m eval.foresight`.

The reachable oracle plans alpha on the very requests that are evaluated. Its plan for one seed, played
on another seed's requests, keeps what the course of the workload is worth and loses what the arrivals
were. So does the mean of the other seeds' plans, in which the arrivals average out. What neither keeps,
no controller can gain. Where the courses of seeds differ, as in Burst, `--draws` draws each seed's arrivals
anew on its own course.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from eval.compare import FIRST_SEED
from eval.statistics import Estimate, ratio_of_means
from eval.unit import GRID, mdp_config
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from hlem_env.mdp import ACTIONS_CENTI
from hlem_env.scenario import Scenario
from hlem_env.surrogate.node import SurrogateBackend
from hlem_env.surrogate.optimum import WAYS, Episode, hold_all, reachable, record_episode

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
    reach: int = max(ACTIONS_CENTI)
    """largest step of an epoch, hundredths"""
    ways: int = WAYS
    """to each alpha that the oracle tries; more take longer and find a little more"""
    draws: int = 1
    """drawings of each seed's arrivals on its own course: from 2 on a plan is played on the others of its
    course, and not on other seeds, whose bursts are at other times"""
    first_seed: int = FIRST_SEED
    """of the episodes"""
    seeds: int = 8
    """episodes; each plan is played on each"""
    jobs: int = 2
    """processes"""
    json: Path | None = None
    """file for the figures"""


@dataclass(frozen=True)
class Course:
    """Requests: a seed's course, with its own arrivals (drawing 0) or others."""

    scenario: Scenario
    seed: int
    draw: int = 0

    def record(self) -> tuple[SurrogateBackend, Episode]:
        """A node and the episode's requests."""
        backend = self.scenario.build()
        backend.reset(self.seed)
        if self.draw:
            workload: Any = backend.workload
            workload.redraw(np.random.default_rng([self.draw, 0xA1]), -backend.warmup_s)
        return backend, record_episode(backend, self.scenario.episode_epochs)


@dataclass(frozen=True)
class Planning:
    """The best static split and the best plan for some requests."""

    best_static_ms: float
    plan: tuple[int, ...]
    """Hundredths, [epochs]."""
    planned_ms: float


def plan_for(course: Course, reach: int, ways: int) -> Planning:
    """Best static split and reachable oracle."""
    backend, episode = course.record()
    static_ms = hold_all(backend, episode, list(GRID), jobs=1).mean(axis=1).min()
    config = mdp_config(course.scenario)
    plan, p99_ms = reachable(backend, config, episode, jobs=1, reach_centi=reach, ways=ways)
    return Planning(float(static_ms), tuple(plan.tolist()), float(p99_ms.mean()))


def play(course: Course, plans: list[NDArray[np.int64]]) -> list[float]:
    """Mean P99, ms, of each plan on some requests."""
    node, episode = course.record()
    results = []
    for plan in plans:
        node.empty()
        if episode.warmup_s > 0:
            node.serve(episode.warmup, int(plan[0]), episode.warmup_s)
        p99_ms = [
            node.serve(requests, int(alpha), episode.epoch_seconds).p99_ms
            for requests, alpha in zip(episode.epochs, plan, strict=True)
        ]
        results.append(float(np.mean(p99_ms)))
    return results


def cross_play(
    scenario: Scenario,
    seeds: list[int],
    jobs: int,
    draws: int = 1,
    reach: int = max(ACTIONS_CENTI),
    ways: int = WAYS,
) -> dict[str, Floats]:
    """Mean P99, ms, [courses]: best static, own plan, others' plans, mean of the others' plans."""
    courses = [Course(scenario, seed, draw) for seed in seeds for draw in range(draws)]
    together = draws if draws > 1 else len(courses)  # plans that may be played for each other
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        planner = partial(plan_for, reach=reach, ways=ways)
        plannings = list(
            tqdm(pool.map(planner, courses), total=len(courses), unit="plan", disable=None)
        )
        plans = np.array([planning.plan for planning in plannings])
        to_play = []
        for i in range(len(courses)):
            first = i - i % together
            rest = np.delete(plans[first : first + together], i - first, axis=0)
            to_play.append([*rest, np.rint(rest.mean(axis=0)).astype(np.int64)])
        played = list(
            tqdm(
                pool.map(play, courses, to_play),
                total=len(courses), unit="episode", disable=None,
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
    require(args.draws >= 1, "draws", args.draws, "1 or more")
    least = 1 if args.draws > 1 else 2
    require(args.seeds >= least, "seeds", args.seeds, f"{least} or more")
    require(args.epochs >= 1, "epochs", args.epochs, "1 or more")
    require(args.jobs >= 1, "jobs", args.jobs, "1 or more")
    scenario = Scenario.parse(
        args.workload, population_factor=args.population_factor, episode_epochs=args.epochs
    )
    seeds = list(range(args.first_seed, args.first_seed + args.seeds))
    p99_ms = cross_play(scenario, seeds, args.jobs, args.draws, args.reach, args.ways)
    static = p99_ms.pop("best static")
    room = 1.0 - ratio_of_means(p99_ms["own plan"], static).value
    title = (
        f"{scenario.name}, population x{args.population_factor:g}, {args.seeds} seeds, {args.draws} "
        f"drawings of each, steps of {args.reach / 100:g}"
    )
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
        payload = {
            "scenario": scenario.to_json(), "seeds": seeds, "draws": args.draws,
            "reach_centi": args.reach, "ways": args.ways, "plans": rows,
        }  # fmt: skip
        write_result(args.json, command("eval.foresight"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.foresight", main, Args)
