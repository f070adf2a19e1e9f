"""Compare controllers on the same requests: `python -m eval.compare --policies DIR ...`.

For every scenario, KV policy and seed: the static family, the best static split in hindsight and the
one tuned at the design point, the working-set rule, frozen PPO policies, and both oracles. Writes
records that `eval.replay` reproduces, results.json and report.html. What is done is kept: the same
command goes on where it was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agents.oracle import Planned
from agents.ppo_only import PpoOnly
from agents.static import Static
from agents.working_set import WorkingSetRule
from eval.figures import alpha_star_summary
from eval.records import Record, run_record
from eval.report import write_report
from eval.statistics import iqm, ratio_of_means
from hlem_env.controller import Controller
from hlem_env.errors import HlemError, require
from hlem_env.machine import command, write_result
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import tables_digest
from hlem_env.surrogate.optimum import (
    AlphaStar,
    alpha_star,
    foreseen,
    hold_all,
    reachable,
    record_episode,
)
from hlem_env.workload.traces import TraceWorkload
from serving_bridge.policy import FrozenPolicy

FIRST_SEED = 20_000
"""Evaluation seeds; training uses others."""
DESIGN_SEEDS = range(30_000, 30_004)
STATIC_CENTI = (10, 30, 50, 70, 90)
GRID = range(10, 91, 2)
BEST_STATIC, DESIGN_POINT = "best static in hindsight", "design-point static"
ALPHA_STAR, REACHABLE, FORESEEN = "alpha* oracle", "reachable oracle", "foreseen oracle"
LEAST_ROOM = 0.02
"""Where the best static split leaves less room than this, room recovered is not a figure."""


@dataclass
class Args:
    """Compare controllers on the same requests."""

    policies: tuple[Path, ...] = ()
    """folders of frozen policies; none: the shipped ones"""
    output: Path = Path("runs/compare")
    """folder of records, results.json and report.html"""
    workloads: tuple[str, ...] = ("default/steady", "default/trend", "default/burst")
    """PRESET/REGIME, or trace:PATH"""
    trace_counts: str | None = None
    """per-user counts for the traces' synthetic base histories"""
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
    json: Path | None = None
    """write the results here as well"""
    title: str = "HLEM comparison"
    """of the report"""


@dataclass(frozen=True)
class Unit:
    """One seed of one scenario: what a process works on."""

    scenario: Scenario
    seed: int
    design_centi: int
    policies: tuple[str, ...]
    oracles: bool
    star_step_centi: int
    repeats: int
    output: str

    @property
    def key(self) -> str:
        """Hash of all that the result depends on."""
        files = [
            hashlib.sha256((Path(p) / "policy.json").read_bytes()).hexdigest()
            for p in self.policies
        ]
        values = asdict(self) | {"policies": files, "output": "", "load": tables_digest()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def file(self) -> Path:
        """Where the unit's result is kept."""
        return Path(self.output) / "units" / f"{self.key}.json"


def mdp_config(scenario: Scenario) -> MdpConfig:
    """State and reward of the comparison: eight features, of which policies take what they need."""
    return MdpConfig(
        max_history_tokens=scenario.max_history_tokens,
        epoch_seconds=scenario.epoch_seconds,
        features="working_set",
    )


def frozen_policies(folders: tuple[str, ...]) -> list[PpoOnly]:
    """Controllers of the folders, named by features and training reward.

    Where two have the same name their folders are added.
    """
    controllers = [PpoOnly(FrozenPolicy.load(folder)) for folder in folders]
    for controller in controllers:
        if controller.policy.mdp_config.reward == "eq5":
            controller.name += " [Eq. 5]"
    names = [controller.name for controller in controllers]
    for controller, folder in zip(controllers, folders, strict=True):
        if names.count(controller.name) > 1:
            controller.name += f" <{relative(folder)}>"
    return controllers


def _slug(*parts: str) -> str:
    """A name of a file or folder."""
    return "-".join("".join(c if c.isalnum() or c in ".-" else "-" for c in p) for p in parts)


def run_unit(unit: Unit) -> dict[str, Any]:
    """Every controller on one seed. Writes its records; returns and keeps the figures."""
    scenario, config = unit.scenario, mdp_config(unit.scenario)
    backend = scenario.build()
    backend.reset(unit.seed)
    episode = record_episode(backend, scenario.episode_epochs)
    grid_p99 = hold_all(backend, episode, list(GRID), jobs=1).mean(axis=1)
    best_centi = GRID[int(grid_p99.argmin())]
    controllers: list[Controller] = [Static(alpha) for alpha in STATIC_CENTI]
    controllers += [
        Static(best_centi, BEST_STATIC),
        Static(unit.design_centi, DESIGN_POINT),
        WorkingSetRule(),
    ]
    controllers += frozen_policies(unit.policies)
    star: AlphaStar | None = None
    if unit.oracles:
        plan, _ = reachable(backend, config, episode, jobs=1)
        controllers.append(Planned(plan, REACHABLE))
        star = _alpha_star(unit, jobs=1)
        controllers.append(Planned(star.alpha_centi, ALPHA_STAR))
        controllers.append(Planned(foreseen(star), FORESEEN))
    rows = {}
    for controller in controllers:
        record = run_record(controller, backend, scenario, config, unit.seed)
        folder = _slug(scenario.name, scenario.kv_policy, scenario.digest())
        path = Path("records") / folder / _slug(controller.name) / f"{unit.seed}.json"
        record.save(Path(unit.output) / path)
        rows[controller.name] = _figures(record, star) | {"record": str(path)}
    result: dict[str, Any] = {"rows": rows, "best_static_centi": best_centi}
    if isinstance(backend.workload, TraceWorkload):
        about = backend.workload.trace.metadata
        result["trace"] = {k: v for k, v in about.items() if k != "path"}
    if star is not None:
        # All controllers see the same requests, so any record has the course's hot share.
        result["alpha_star"] = alpha_star_summary(star.alphas_centi, star.p99_ms, record.hot_share)
    unit.file.parent.mkdir(parents=True, exist_ok=True)
    partial = unit.file.with_suffix(".part")
    partial.write_text(json.dumps(result))
    partial.replace(unit.file)
    return result


def _alpha_star(unit: Unit, jobs: int) -> AlphaStar:
    backend = unit.scenario.build()
    backend.reset(unit.seed)
    return alpha_star(
        backend, mdp_config(unit.scenario), unit.scenario.episode_epochs, unit.star_step_centi,
        unit.repeats, jobs, cache=Path(unit.output) / "alpha-star",
    )  # fmt: skip


def _figures(record: Record, star: AlphaStar | None) -> dict[str, Any]:
    """One episode's figures."""
    figures: dict[str, Any] = {
        "p99_ms": record.mean_p99_ms,
        "qos": record.mean_qos,
        "movement": record.movement,
        "utilisation": float(np.mean(record.utilisation)),
        "saturated": record.saturated,
        "gap": None,
        "regret": None,
    }
    if star is not None:
        gap = np.abs(np.array(record.alpha_centi) - star.alpha_centi) / 100
        figures["gap"] = float(gap.mean())
        figures["regret"] = float(record.mean_p99_ms / star.best_p99_ms.mean() - 1)
    return figures


def design_point(scenario: Scenario) -> int:
    """The best static alpha (hundredths) on Steady of the same preset: what an operator would set."""
    steady = replace(scenario, regime="steady", trace=None)
    backend = steady.build()
    total = np.zeros(len(GRID))
    for seed in DESIGN_SEEDS:
        backend.reset(seed)
        episode = record_episode(backend, min(steady.episode_epochs, 120))
        total += hold_all(backend, episode, list(GRID), jobs=2).mean(axis=1)
    return GRID[int(total.argmin())]


def plan_units(args: Args, policies: tuple[str, ...]) -> Iterator[Unit]:
    """All units, in the order in which they run."""
    for kv_policy in args.kv_policies:
        for workload in args.workloads:
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
                trace_on_bad_line=args.on_bad_line,
                trace_jitter=True,
            )
            design_centi = design_point(scenario)
            for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
                yield Unit(
                    scenario, seed, design_centi, policies, kv_policy in args.oracles,
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
            _alpha_star(unit, jobs)


def collect(units: list[Unit], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One cell for each scenario: figures of every controller, [seeds] each, and their summary."""
    cells: dict[Scenario, dict[str, Any]] = {}
    for unit, result in zip(units, results, strict=True):
        cell = cells.setdefault(
            unit.scenario,
            {
                "workload": unit.scenario.name,
                "kv_policy": unit.scenario.kv_policy,
                "scenario": unit.scenario.to_json(),
                "design_point_alpha": unit.design_centi / 100,
                "best_static_alpha": [],
                "seeds": [],
                "controllers": {},
            },
        )
        cell["seeds"].append(unit.seed)
        cell["best_static_alpha"].append(result["best_static_centi"] / 100)
        for key in ("alpha_star", "trace"):
            if key in result:
                cell.setdefault(key, result[key])
        for name, row in result["rows"].items():
            columns = cell["controllers"].setdefault(name, {})
            for key, value in row.items():
                columns.setdefault(key, []).append(value)
    for cell in cells.values():
        if cell["scenario"]["trace"]:
            cell["scenario"]["trace"] = Path(cell["scenario"]["trace"]).name
            cell["scenario"]["trace_counts"] = None
        for columns in cell["controllers"].values():
            columns["summary"] = summarise(columns, cell["controllers"])
        cell["bound_violations"] = bound_violations(cell["controllers"])
    return list(cells.values())


def summarise(columns: dict[str, Any], controllers: dict[str, Any]) -> dict[str, Any]:
    """Interquartile means with intervals, and the comparison with the best static split."""
    p99, best = np.array(columns["p99_ms"]), np.array(controllers[BEST_STATIC]["p99_ms"])
    summary: dict[str, Any] = {"saturated": bool(np.mean(columns["saturated"]) > 0.5)}
    for name in ("p99_ms", "qos", "movement", "gap", "regret"):
        if columns[name][0] is not None:
            summary[name] = asdict(iqm(np.array(columns[name])))
    references = [controllers[name] for name in (BEST_STATIC, REACHABLE) if name in controllers]
    if any(np.mean(c["saturated"]) > 0.5 for c in (columns, *references)):
        return summary
    summary["p99_over_best_static"] = asdict(ratio_of_means(p99, best))
    if REACHABLE in controllers:
        bound = np.array(controllers[REACHABLE]["p99_ms"])
        summary["room"] = float(1 - bound.mean() / best.mean())
        if summary["room"] >= LEAST_ROOM:
            summary["room_recovered"] = asdict(ratio_of_means(best - p99, best - bound))
    if FORESEEN in controllers:
        known = np.array(controllers[FORESEEN]["p99_ms"])
        summary["foreseen_room"] = float(1 - known.mean() / best.mean())
    return summary


def bound_violations(controllers: dict[str, Any]) -> list[str]:
    """Step-limited controllers that beat the reachable oracle on some seed: its search was too narrow."""
    if REACHABLE not in controllers:
        return []
    bound = np.array(controllers[REACHABLE]["p99_ms"])
    return [
        name
        for name, columns in controllers.items()
        if name not in (ALPHA_STAR, REACHABLE, FORESEEN)
        and bool((np.array(columns["p99_ms"]) < bound).any())
    ]


def print_tables(cells: list[dict[str, Any]], console: Console) -> None:
    """A table a cell."""
    for cell in cells:
        reach = cell["controllers"].get(REACHABLE)
        room = ""
        if reach and "room" in reach["summary"]:
            room = f", room {100 * reach['summary']['room']:.1f} %"
        if reach and "foreseen_room" in reach["summary"]:
            room += (
                f" ({100 * reach['summary']['foreseen_room']:.1f} % without foresight of arrivals)"
            )
        table = Table(
            title=f"{cell['workload']}, KV {cell['kv_policy']}, {len(cell['seeds'])} seeds{room}",
            title_justify="left",
        )
        headings = (
            "controller",
            "P99 ms",
            "QoS %",
            "gap",
            "regret %",
            "P99 / best static",
            "room recovered %",
            "moves",
        )
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "controller" else "right")
        for name, columns in cell["controllers"].items():
            table.add_row(name, *_cells(columns["summary"]))
        console.print(table)
        if "trace" in cell:
            skipped = cell["trace"].get("skipped", 0)
            console.print(f"{skipped} bad lines skipped; {cell['trace'].get('notes')}")
        for name in cell["bound_violations"]:
            console.print(
                f"[red]{name} beats the reachable oracle on a seed: its search is too narrow"
            )


def _cells(summary: dict[str, Any]) -> list[str]:
    if summary["saturated"]:
        return ["saturated", *[""] * 6]

    def show(name: str, scale: float, digits: int) -> str:
        e = summary.get(name)
        if e is None:
            return "-"
        value, low, high = (f"{scale * e[k]:.{digits}f}" for k in ("value", "low", "high"))
        return f"{value} [{low}, {high}]"

    return [
        show("p99_ms", 1, 2), show("qos", 100, 2), show("gap", 1, 3), show("regret", 100, 1),
        show("p99_over_best_static", 1, 4), show("room_recovered", 100, 0),
        f"{summary['movement']['value']:.1f}",
    ]  # fmt: skip


def shipped_policies() -> tuple[str, ...]:
    """Folders of the policies in the package."""
    root = Path(__file__).resolve().parent.parent / "agents" / "pretrained"
    return tuple(sorted(str(p.parent) for p in root.glob("*/policy.json")))


def relative(folder: str) -> str:
    """The folder as seen from here, so that results carry no absolute paths."""
    return os.path.relpath(folder)


def main(args: Args) -> None:
    """Run the comparison, print its tables, write results and report."""
    require(1 <= args.seeds <= 10_000, "--seeds", args.seeds, "1 to 10,000")
    require(1 <= args.jobs <= 1024, "--jobs", args.jobs, "1 to 1024")
    require(round(100 * args.alpha_step) >= 1, "--alpha-step", args.alpha_step, "0.01 and above")
    policies = tuple(str(p) for p in args.policies) or shipped_policies()
    frozen_policies(policies)  # a policy that does not load is told of before the work
    units = list(plan_units(args, policies))
    cells = collect(units, run_units(units, args.jobs))
    print_tables(cells, Console(width=150 if not sys.stdout.isatty() else None))
    payload = {
        "title": args.title,
        "load_tables": tables_digest(),
        "slo_ms": MdpConfig().slo_ms,
        "policies": [relative(folder) for folder in policies],
        "cells": cells,
    }
    results = args.output / "results.json"
    for path in {results, args.json or results}:
        write_result(path, command("eval.compare"), payload)
    report = write_report(args.output, results, policies)
    print(f"Results in {results}, report in {report}")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    try:
        main(arguments)
    except HlemError as error:
        raise SystemExit(f"eval.compare: {error}") from error
    except KeyboardInterrupt:
        print(f"\nInterrupted; the same command goes on from {arguments.output}.", file=sys.stderr)
        raise SystemExit(130) from None
