"""The cells of a comparison: figures of all seeds, their summaries, and tables of them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.names import ALPHA_STAR, BEST_STATIC, FORESEEN, REACHABLE
from eval.ranking import ranking, verdict_sentences
from eval.statistics import iqm, ratio_of_means
from eval.unit import Unit
from hlem_env.mdp import ACTIONS_CENTI
from hlem_env.scenario import Scenario

SUMMARISED = ("p99_ms", "qos", "movement", "gap", "regret", "decision_us_p50", "decision_us_p99")
LARGEST_STEP = max(ACTIONS_CENTI) / 100
LEAST_ROOM = 0.02
"""Where the best static split leaves less room than this, room recovered is not a figure."""


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
                "failed": {},
            },
        )
        cell["seeds"].append(unit.seed)
        cell["best_static_alpha"].append(result["best_static_centi"] / 100)
        for key in ("alpha_star", "trace"):
            if key in result:
                cell.setdefault(key, result[key])
        for name, reason in result["failed"].items():
            fault = cell["failed"].setdefault(name, {"seeds": [], "reason": reason})
            fault["seeds"].append(unit.seed)
        for name, row in result["rows"].items():
            columns = cell["controllers"].setdefault(name, {})
            for key, value in row.items():
                columns.setdefault(key, []).append(value)
    for cell in cells.values():
        drop_failed(cell)
        if cell["scenario"]["trace"]:
            cell["scenario"]["trace"] = Path(cell["scenario"]["trace"]).name
            cell["scenario"]["trace_counts"] = None
        for columns in cell["controllers"].values():
            columns["summary"] = summarise(columns, cell["controllers"])
        cell["bound_violations"] = bound_violations(cell["controllers"])
    return list(cells.values())


def drop_failed(cell: dict[str, Any]) -> None:
    """Take controllers that failed on a seed out of the results: the seeds left are not the same."""
    cell["controllers"] = {
        name: columns
        for name, columns in cell["controllers"].items()
        if not cell["failed"].keys() & set(columns["entry"])
    }


def summarise(columns: dict[str, Any], controllers: dict[str, Any]) -> dict[str, Any]:
    """Interquartile means with intervals, and the comparison with the best static split."""
    p99, best = np.array(columns["p99_ms"]), np.array(controllers[BEST_STATIC]["p99_ms"])
    summary: dict[str, Any] = {"saturated": bool(np.mean(columns["saturated"]) > 0.5)}
    for name in SUMMARISED:
        if columns.get(name, [None])[0] is not None:
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
    """Step-limited controllers that beat the reachable oracle on some seed: its search was too narrow.

    Results from before the largest step was noted count as step-limited.
    """
    if REACHABLE not in controllers:
        return []
    bound = np.array(controllers[REACHABLE]["p99_ms"])
    return [
        name
        for name, columns in controllers.items()
        if name not in (ALPHA_STAR, REACHABLE, FORESEEN)
        and not max(columns.get("largest_step", [0.0])) > LARGEST_STEP
        and bool((np.array(columns["p99_ms"]) < bound).any())
    ]


def print_tables(cells: list[dict[str, Any]], console: Console) -> None:
    """A table a cell, the best controller first, and what ties or beats the best policy."""
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
            "rank",
            "controller",
            "P99 ms",
            "QoS %",
            "gap",
            "regret %",
            "P99 / best static",
            "room recovered %",
            "moves",
            "decision p50 / p99 us",
        )
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "controller" else "right")
        for place in ranking(cell):
            summary = cell["controllers"][place.name]["summary"]
            table.add_row(str(place.rank or ""), place.name, *_cells(summary))
        console.print(table)
        if verdict := verdict_sentences(cell):
            console.print(" ".join(verdict), markup=False)
        if "trace" in cell:
            skipped = cell["trace"].get("skipped", 0)
            console.print(f"{skipped} bad lines skipped; {cell['trace'].get('notes')}")
        for name, fault in cell["failed"].items():
            seeds = len(fault["seeds"])
            console.print(f"[red]{name} failed on {seeds} of {len(cell['seeds'])} seeds:", end=" ")
            console.print(fault["reason"], markup=False)
        for name in cell["bound_violations"]:
            console.print(
                f"[red]{name} beats the reachable oracle on a seed: its search is too narrow"
            )


def _cells(summary: dict[str, Any]) -> list[str]:
    if summary["saturated"]:
        return ["saturated", *[""] * 7]

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
        " / ".join(f"{summary[k]['value']:.0f}" for k in ("decision_us_p50", "decision_us_p99")),
    ]  # fmt: skip
