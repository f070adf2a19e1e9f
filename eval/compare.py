"""Compare controllers on the same requests: `python -m eval.compare --controllers NAME ...`.

For every scenario, KV policy and seed: the controllers named, the best static split in hindsight, and
the oracles. Writes records that `eval.replay` reproduces, results.json and report.html. What is done
is kept: the same command goes on where it was interrupted. A controller that raises, answers something
that is no decision, or takes too long is reported as failed, and the others' results stand.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from tqdm import tqdm

from eval.cells import collect, print_tables
from eval.lineup import frozen_policies, resolve, shipped_policies
from eval.report import write_report
from eval.unit import GRID, Unit, run_unit, star_of
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, git_revision, write_result
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import tables_digest
from hlem_env.surrogate.optimum import hold_all, record_episode
from hlem_env.workload.regimes import REGIMES

FIRST_SEED = 20_000
"""Evaluation seeds; training uses others."""
DESIGN_SEEDS = range(30_000, 30_004)


@dataclass
class Args:
    """Compare controllers on the same requests."""

    controllers: tuple[str, ...] = ("default",)
    """names: static, design-point, ppo, oracles, those of agents/registry.py, package.module:factory;
    "default" and "all" are groups"""
    policies: tuple[Path, ...] = ()
    """folders of frozen policies for the name ppo; none: the shipped ones"""
    output: Path = Path("runs/compare")
    """folder of records, results.json and report.html"""
    workloads: tuple[str, ...] = ("default/steady", "default/trend", "default/burst")
    """PRESET/REGIME, or trace:PATH"""
    presets: tuple[str, ...] = ()
    """with --regimes, in place of --workloads: every regime of every preset; none: default"""
    regimes: tuple[str, ...] = ()
    """with --presets, in place of --workloads; none: all three"""
    trace_counts: str | None = None
    """per-user counts for the traces' synthetic base histories"""
    trace_histories: Literal["base", "native"] = "base"
    """native: the traces' own lengths, as in those of an epoch log"""
    on_bad_line: Literal["raise", "skip"] = "raise"
    """a bad line of a trace is an error, or is left out and counted"""
    population_factor: float = 1.0
    """hot population"""
    mean_history_tokens: float = 10_000
    """history length"""
    tables: int = 10
    """embedding tables"""
    gather_scale: float = 1.0
    """gather bandwidth"""
    hardware: str = "h100"
    """profile"""
    kv_policies: tuple[Literal["scan_resistant", "lru"], ...] = ("scan_resistant", "lru")
    """eviction policies of the KV cache"""
    oracles: tuple[Literal["scan_resistant", "lru"], ...] = ("scan_resistant",)
    """KV policies under which the oracles are found (they take most of the time)"""
    seeds: int = 16
    """evaluation episodes a cell"""
    epochs: int = 240
    """epochs an episode"""
    alpha_step: float = 0.01
    """grid of alpha for alpha*"""
    repeats: int = 16
    """drawings of the arrivals for alpha*"""
    jobs: int = 2
    """processes"""
    time_limit: float = 5.0
    """seconds a decision may take (an epoch); a controller that needs more is reported as failed"""
    quick: bool = False
    """a first look: every controller unless some are named, 2 seeds, coarse oracles"""
    json: Path | None = None
    """write the results here as well"""
    title: str = "HLEM comparison"
    """of the report"""


def design_point(scenario: Scenario) -> int:
    """The best static alpha (hundredths) on Steady of the same preset: what an operator would set."""
    return _best_static(replace(scenario, regime="steady", trace=None))


@lru_cache
def _best_static(steady: Scenario) -> int:
    backend = steady.build()
    total = np.zeros(len(GRID))
    for seed in DESIGN_SEEDS:
        backend.reset(seed)
        episode = record_episode(backend, min(steady.episode_epochs, 120))
        total += hold_all(backend, episode, list(GRID), jobs=2).mean(axis=1)
    return GRID[int(total.argmin())]


def workloads(args: Args) -> tuple[str, ...]:
    """The workloads that the arguments name."""
    if not args.presets and not args.regimes:
        return args.workloads
    presets, regimes = args.presets or ("default",), args.regimes or tuple(REGIMES)
    return tuple(f"{preset}/{regime}" for preset in presets for regime in regimes)


def plan_units(args: Args, policies: tuple[str, ...]) -> Iterator[Unit]:
    """All units, in the order in which they run."""
    controllers = resolve(args.controllers)
    for kv_policy in args.kv_policies:
        oracles = kv_policy in args.oracles and "oracles" in controllers
        for workload in workloads(args):
            scenario = Scenario.parse(
                workload,
                kv_policy=kv_policy,
                episode_epochs=args.epochs,
                population_factor=args.population_factor,
                mean_history_tokens=args.mean_history_tokens,
                tables=args.tables,
                gather_scale=args.gather_scale,
                hardware=args.hardware,
                trace_counts=args.trace_counts,
                trace_histories=args.trace_histories,
                trace_on_bad_line=args.on_bad_line,
                trace_jitter=True,
            )
            design_centi = design_point(scenario)
            for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
                yield Unit(
                    scenario, seed, design_centi, controllers,
                    policies if "ppo" in controllers else (), args.time_limit, oracles,
                    round(100 * args.alpha_step), args.repeats, str(args.output),
                )  # fmt: skip


def run_units(units: list[Unit], jobs: int) -> list[dict[str, Any]]:
    """Results in the units' order; finished ones are read from disk."""
    results: dict[int, dict[str, Any]] = {}
    todo = []
    for i, unit in enumerate(units):
        if unit.file.is_file():
            results[i] = json.loads(unit.file.read_text())
        else:
            todo.append(i)
    if todo:
        _label_shared_courses([units[i] for i in todo], jobs)
        for library in ("OMP", "OPENBLAS", "MKL"):  # a process a core: more threads only lose
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(run_unit, units[i]): i for i in todo}
            try:
                for future in tqdm(
                    as_completed(futures), total=len(todo), unit="episode", disable=None
                ):
                    results[futures[future]] = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return [results[i] for i in range(len(units))]


def _label_shared_courses(units: list[Unit], jobs: int) -> None:
    """Find alpha* where all seeds share it, on all cores, before the episodes ask for it."""
    seen = set()
    for unit in units:
        if unit.oracles and unit.scenario.regime != "burst" and unit.scenario not in seen:
            seen.add(unit.scenario)
            print(f"alpha* of {unit.scenario.name} ({unit.repeats} repeats)", file=sys.stderr)
            star_of(unit, jobs)


def relative(folder: str) -> str:
    """The folder as seen from here, so that results carry no absolute paths."""
    return os.path.relpath(folder)


def quick(args: Args) -> Args:
    """The arguments of a first look."""
    named = args.controllers != Args().controllers
    return replace(
        args,
        controllers=args.controllers if named else ("all",),
        seeds=min(args.seeds, 2),
        repeats=min(args.repeats, 4),
        alpha_step=max(args.alpha_step, 0.04),
    )


def main(args: Args) -> None:
    """Run the comparison, print its tables, write results and report."""
    require(1 <= args.seeds <= 10_000, "--seeds", args.seeds, "1 to 10,000")
    require(1 <= args.jobs <= 1024, "--jobs", args.jobs, "1 to 1024")
    require(round(100 * args.alpha_step) >= 1, "--alpha-step", args.alpha_step, "0.01 and above")
    require(args.time_limit > 0, "--time-limit", args.time_limit, "above 0 seconds")
    if args.quick:
        args = quick(args)
    policies = tuple(str(p) for p in args.policies) or shipped_policies()
    frozen_policies(policies)  # a policy that does not load is told of before the work
    units = list(plan_units(args, policies))
    cells = collect(units, run_units(units, args.jobs))
    print_tables(cells, Console(width=150 if not sys.stdout.isatty() else None))
    payload = {
        "title": args.title,
        "revision": git_revision(),
        "load_tables": tables_digest(),
        "slo_ms": MdpConfig().slo_ms,
        "policies": [relative(folder) for folder in policies],
        "cells": cells,
    }
    results = args.output / "results.json"
    for path in {results, args.json or results}:
        write_result(path, command("eval.compare"), payload)
    report = args.output / "report.html"
    write_report(results, report, policies)
    print(f"Results in {results}, report in {report}")


if __name__ == "__main__":
    run_command(
        "eval.compare",
        main,
        Args,
        lambda arguments: f"the same command goes on from {arguments.output}",
    )
