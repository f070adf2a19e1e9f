"""Throughput at the SLO: `python -m eval.throughput --controllers NAME ...`.

The highest load at which the mean over an episode's epochs of P99 meets the SLO, for every controller,
seed and regime, by bisection over a factor on the regime's offered load. At a factor and a seed all
controllers meet the same requests. The best static split in hindsight is chosen anew at every load.
Oracles are left out: each load would need plans of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from eval.compare import FIRST_SEED, design_point
from eval.guard import ControllerFault, Guarded
from eval.lineup import entries, frozen_policies, resolve, shipped_policies
from eval.names import BEST_STATIC
from eval.statistics import iqm, ratio_of_means
from eval.unit import GRID, mdp_config
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.errors import require, require_choice
from hlem_env.machine import command, write_result
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import TARGET_UTILISATION, tables_digest
from hlem_env.surrogate.optimum import Episode, hold_all, record_episode
from hlem_env.workload.regimes import PRESETS, REGIMES

CENTRE = 50
"""Stands for the best static alpha where the lineup asks for one; its entry is not used here."""


@dataclass
class Args:
    """The highest load at which each controller meets the SLO."""

    controllers: tuple[str, ...] = ("default",)
    """names as eval.compare takes them; oracles are left out"""
    policies: tuple[Path, ...] = ()
    """folders of frozen policies for the name ppo; none: the shipped ones"""
    presets: tuple[str, ...] = ("default",)
    """of the workloads"""
    regimes: tuple[str, ...] = tuple(REGIMES)
    """of every preset"""
    kv_policy: Literal["scan_resistant", "lru"] = "scan_resistant"
    """eviction policy of the KV cache"""
    hardware: str = "h100"
    """profile"""
    seeds: int = 16
    """evaluation episodes of each regime"""
    epochs: int = 240
    """epochs an episode"""
    lowest: float = 0.25
    """least factor on the regime's offered load"""
    highest: float = 1.5
    """largest factor; at 1.43 the node's best split would be busy all the time"""
    tolerance: float = 0.002
    """of the factor: the bisection ends below it"""
    jobs: int = 2
    """processes"""
    time_limit: float = 5.0
    """seconds a decision may take (an epoch)"""
    json: Path | None = None
    """file for the figures"""


class Highest(NamedTuple):
    """Where a bisection ended."""

    factor: float
    """Highest load that met the SLO, or the end of the range."""
    bound: Literal["", "below", "above"]
    """The SLO was missed at the least load, or met at the largest: the factor is a bound only."""


@dataclass(frozen=True)
class Search:
    """One controller entry on one seed of one scenario: what a process works on."""

    scenario: Scenario
    seed: int
    name: str
    """of `--controllers`, resolved, or that of the best static split"""
    design_centi: int
    policies: tuple[str, ...]
    lowest: float
    highest: float
    tolerance: float
    time_limit_s: float

    def at(self, factor: float) -> Scenario:
        """The scenario with its offered load times a factor; a factor of 1 leaves it as it is."""
        return replace(self.scenario, utilisation=self.scenario.utilisation * factor)


def highest_load(
    p99_at: Callable[[float], float], slo_ms: float, lowest: float, highest: float, tolerance: float
) -> Highest:
    """Bisection for the highest load factor whose P99 is within the SLO.

    Other loads have other arrivals, so P99 rises with the load but for a little noise: close to the
    SLO it may be crossed more than once, and one of the crossings is found.

    Args:
        p99_at: mean P99, ms, by factor.
        slo_ms: bound of P99.
        lowest, highest: the range. Its ends are tried only where the search comes to them.
        tolerance: of the factor.
    """
    low, high = lowest, highest
    while high - low > tolerance:
        middle = (low + high) / 2
        if p99_at(middle) <= slo_ms:
            low = middle
        else:
            high = middle
    if low == lowest and p99_at(lowest) > slo_ms:
        return Highest(lowest, "below")
    if high == highest and p99_at(highest) <= slo_ms:
        return Highest(highest, "above")
    return Highest(low, "")


@lru_cache(maxsize=64)
def requests_at(scenario: Scenario, seed: int) -> Episode:
    """The requests of an episode; what comes in does not depend on alpha."""
    backend = scenario.build()
    backend.reset(seed)
    return record_episode(backend, scenario.episode_epochs)


def offered_per_s(scenario: Scenario, seed: int) -> float:
    """Requests that arrive, per second, mean over the episode."""
    seconds = scenario.episode_epochs * scenario.epoch_seconds
    return requests_at(scenario, seed).whole.arrival_s.size / seconds


@lru_cache(maxsize=64)
def best_static_p99_ms(scenario: Scenario, seed: int) -> float:
    """Mean P99, ms, of the best of the static splits, chosen on these very requests."""
    held = hold_all(scenario.build(), requests_at(scenario, seed), list(GRID), jobs=1)
    return float(held.mean(axis=1).min())


def run_search(search: Search) -> list[dict[str, Any]]:
    """Rows of the entry's controllers; a row holds a figure, or the reason of a failure."""
    rows = []
    for name, p99_at in _measures(search):
        row: dict[str, Any] = {"name": name, "entry": search.name}
        try:
            found = highest_load(
                p99_at, mdp_config(search.scenario).slo_ms, search.lowest, search.highest,
                search.tolerance,
            )  # fmt: skip
            row |= found._asdict()
            row["requests_per_s"] = offered_per_s(search.at(found.factor), search.seed)
        except ControllerFault as fault:
            row["fault"] = str(fault)
        rows.append(row)
    return rows


def _measures(search: Search) -> Iterator[tuple[str, Callable[[float], float]]]:
    """Controllers' names, with what gives their mean P99 at a load factor."""
    if search.name == BEST_STATIC:
        yield BEST_STATIC, lambda factor: best_static_p99_ms(search.at(factor), search.seed)
        return
    config = mdp_config(search.scenario)
    lineup = entries((search.name,), search.scenario, CENTRE, search.design_centi, search.policies)
    for name, build in lineup:
        if name == BEST_STATIC:
            continue
        try:
            controller = Guarded(build, config, search.time_limit_s)
        except ControllerFault as error:
            yield name, _failing(error)
            continue
        yield controller.name, _playing(search, controller, config)


def _playing(search: Search, controller: Guarded, config: MdpConfig) -> Callable[[float], float]:
    def p99_at(factor: float) -> float:
        scenario = search.at(factor)
        runner = Runner(scenario.build(), config)
        episode = run_controller(runner, controller, scenario.episode_epochs, search.seed)
        return float(np.mean([stats.p99_ms for stats, _ in episode]))

    return p99_at


def _failing(fault: ControllerFault) -> Callable[[float], float]:
    def p99_at(factor: float) -> float:
        raise fault

    return p99_at


def scenarios(args: Args) -> Iterator[Scenario]:
    """Every regime of every preset."""
    for preset in args.presets:
        for regime in args.regimes:
            yield Scenario(
                preset=preset, regime=regime, kv_policy=args.kv_policy, hardware=args.hardware,
                episode_epochs=args.epochs,
            )  # fmt: skip


def plan(args: Args, policies: tuple[str, ...]) -> Iterator[Search]:
    """All searches, in the order of the tables' rows."""
    names = tuple(name for name in resolve(args.controllers) if name != "oracles")
    for scenario in scenarios(args):
        design_centi = design_point(scenario)
        for name in (BEST_STATIC, *names):
            for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
                yield Search(
                    scenario, seed, name, design_centi, policies if name == "ppo" else (),
                    args.lowest, args.highest, args.tolerance, args.time_limit,
                )  # fmt: skip


def run_all(searches: list[Search], jobs: int) -> list[list[dict[str, Any]]]:
    """Rows in the searches' order."""
    for library in ("OMP", "OPENBLAS", "MKL"):  # a process a core: more threads only lose
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(run_search, search) for search in searches]
        try:
            for future in tqdm(
                as_completed(futures), total=len(futures), unit="search", disable=None
            ):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


def collect(searches: list[Search], results: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One cell a scenario: every controller's figures, [seeds] each, and their summary."""
    cells: dict[Scenario, dict[str, Any]] = {}
    for search, rows in zip(searches, results, strict=True):
        scenario = search.scenario
        if scenario not in cells:
            cells[scenario] = {
                "workload": scenario.name,
                "scenario": scenario.to_json(),
                "design_point_alpha": search.design_centi / 100,
                "seeds": [],
                "requests_per_s_at_1": [],
                "controllers": {},
                "failed": {},
            }
        cell = cells[scenario]
        if search.seed not in cell["seeds"]:
            cell["seeds"].append(search.seed)
            cell["requests_per_s_at_1"].append(offered_per_s(scenario, search.seed))
        for row in rows:
            _add(cell, row, search.seed)
    for cell in cells.values():
        # Means over the seeds that are left could not be compared with the others'.
        for name in cell["failed"]:
            cell["controllers"].pop(name, None)
        best = np.array(cell["controllers"][BEST_STATIC]["requests_per_s"])
        for columns in cell["controllers"].values():
            columns["summary"] = _summary(columns, best)
    return list(cells.values())


def _add(cell: dict[str, Any], row: dict[str, Any], seed: int) -> None:
    name = row["name"]
    if cell["controllers"].get(name, row)["entry"] != row["entry"]:
        name += f" <{row['entry']}>"  # two entries whose controllers have one name
    if "fault" in row:
        fault = cell["failed"].setdefault(name, {"seeds": [], "reason": row["fault"]})
        fault["seeds"].append(seed)
        return
    columns = cell["controllers"].setdefault(name, {"entry": row["entry"]})
    for key in ("factor", "requests_per_s", "bound"):
        columns.setdefault(key, []).append(row[key])


def _summary(columns: dict[str, Any], best_static: Any) -> dict[str, Any]:
    rates = np.array(columns["requests_per_s"])
    return {
        "requests_per_s": asdict(iqm(rates)),
        "factor": asdict(iqm(np.array(columns["factor"]))),
        "over_best_static": asdict(ratio_of_means(rates, best_static)),
    }


def print_tables(cells: list[dict[str, Any]], slo_ms: float, console: Console) -> None:
    """A table a cell."""
    for cell in cells:
        offered = iqm(np.array(cell["requests_per_s_at_1"])).value
        table = Table(
            title=f"{cell['workload']}, KV {cell['scenario']['kv_policy']}, {len(cell['seeds'])} seeds:"
            f" highest load with mean P99 within {slo_ms:g} ms; load 1 is {offered:.0f} requests/s",
            title_justify="left",
        )
        for heading in ("controller", "requests/s", "load", "over best static", "bound"):
            table.add_column(heading, justify="left" if heading == "controller" else "right")
        for name, columns in cell["controllers"].items():
            summary = columns["summary"]
            table.add_row(
                name,
                _show(summary["requests_per_s"], 1),
                _show(summary["factor"], 3),
                _show(summary["over_best_static"], 3),
                ", ".join(
                    f"{side} on {columns['bound'].count(side)}"
                    for side in ("below", "above")
                    if side in columns["bound"]
                ),
            )
        console.print(table)
        for name, fault in cell["failed"].items():
            console.print(f"[red]{name} failed on {len(fault['seeds'])} seeds:", end=" ")
            console.print(fault["reason"], markup=False)


def _show(estimate: dict[str, float], digits: int) -> str:
    value, low, high = (f"{estimate[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def main(args: Args) -> None:
    """Search, print, write."""
    require(1 <= args.seeds <= 10_000, "--seeds", args.seeds, "1 to 10,000")
    require(args.epochs >= 1, "--epochs", args.epochs, "1 or more")
    require(1 <= args.jobs <= 1024, "--jobs", args.jobs, "1 to 1024")
    require(args.tolerance > 0, "--tolerance", args.tolerance, "above 0")
    require(args.time_limit > 0, "--time-limit", args.time_limit, "above 0 seconds")
    largest = 5 / TARGET_UTILISATION
    require(0.05 <= args.lowest < largest, "--lowest", args.lowest, f"0.05 to {largest:.1f}")
    allowed = f"above --lowest and below {largest:.1f}"
    require(args.lowest < args.highest < largest, "--highest", args.highest, allowed)
    for preset in args.presets:
        require_choice("--presets", preset, PRESETS)
    for regime in args.regimes:
        require_choice("--regimes", regime, REGIMES)
    policies = tuple(str(p) for p in args.policies) or shipped_policies()
    frozen_policies(policies)  # a policy that does not load is told of before the work
    searches = list(plan(args, policies))
    cells = collect(searches, run_all(searches, args.jobs))
    slo_ms = MdpConfig().slo_ms
    print_tables(cells, slo_ms, Console(width=150 if not os.isatty(1) else None))
    if args.json is not None:
        payload = {
            "load_tables": tables_digest(),
            "slo_ms": slo_ms,
            "tolerance": args.tolerance,
            "policies": [os.path.relpath(folder) for folder in policies],
            "cells": cells,
        }
        write_result(args.json, command("eval.throughput"), payload)


if __name__ == "__main__":
    run_command("eval.throughput", main, Args)
