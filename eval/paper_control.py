"""Control strategies beside the paper's Table III: `python -m eval.paper_control [RESULT.json]`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from eval import paper
from eval.names import BEST_STATIC, ORACLES
from eval.summary import load, show
from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError
from hlem_env.machine import command, write_result

RESULT = Path("docs/results/compare-controllers-default.json")
TIMED = (
    f"Decision times were measured while other work ran on the same cores; the paper's {paper.FULL}"
    f" takes {paper.PAPER_DECISION_US} us."
)

Cells = dict[str, dict[str, Any]]


@dataclass
class Args:
    """Print gap to alpha*, QoS, P99 and decision times of all controllers, scan-resistant KV."""

    result: Annotated[Path, tyro.conf.Positional] = RESULT
    """JSON file that eval.compare wrote"""
    json: Path | None = None
    """file for the tables"""


def summary_of(cell: dict[str, Any], name: str) -> dict[str, Any]:
    """A controller's summary, empty where it has none or was saturated."""
    summary: dict[str, Any] = cell["controllers"].get(name, {}).get("summary", {})
    return {} if summary.get("saturated") else summary


def shown(cell: dict[str, Any], name: str, metric: str, scale: float, digits: int) -> str:
    """A summarised figure with its interval, a dash, or "saturated"."""
    if cell["controllers"].get(name, {}).get("summary", {}).get("saturated"):
        return "saturated"
    return show(summary_of(cell, name), metric, scale, digits)


def closest(cell: dict[str, Any]) -> str:
    """The controller with the smallest gap to alpha*, of those that do not know the future.

    Raises:
        ArtefactError: none has a gap.
    """
    gaps: dict[str, float] = {
        name: summary_of(cell, name)["gap"]["value"]
        for name in cell["controllers"]
        if name not in (*ORACLES, BEST_STATIC) and "gap" in summary_of(cell, name)
    }
    if not gaps:
        raise ArtefactError(f"{cell['workload']} has no gap to alpha*: eval.compare needs oracles")
    return min(gaps, key=lambda name: gaps[name])


def gap_table(cells: Cells) -> str:
    """Ours and the paper's gap, by regime; the smallest of ours is bold."""
    best = {regime: closest(cell) for regime, cell in cells.items()}

    def ours(regime: str, name: str) -> str:
        value = shown(cells[regime], name, "gap", 1, 3)
        return f"**{value}**" if best[regime] == name else value

    def row(name: str, like: str | None) -> list[str]:
        return [name] + [
            figure
            for regime in cells
            for figure in (
                ours(regime, name),
                f"{paper.PAPER_GAP[regime][like]:.3f}" if like else paper.NONE,
            )
        ]

    names = paper.controllers_of(cells)
    rows = [row(name, paper.counterpart(name)) for name in names]
    if "full" not in map(paper.counterpart, names):
        rows.append(row(f"the paper's {paper.FULL}", "full"))
    headings = ["controller", *(h for r in cells for h in (r.capitalize(), "paper"))]
    return paper.markdown(r"Gap to alpha\*", headings, rows)


def metric_table(cells: Cells, title: str, metric: str, scale: float, digits: int) -> str:
    """A summarised figure by controller and regime."""
    rows = [
        [name, *(shown(cell, name, metric, scale, digits) for cell in cells.values())]
        for name in paper.controllers_of(cells)
    ]
    if metric == "qos":
        reported = [f"{100 * paper.PAPER_QOS[regime]:.1f}" for regime in cells]
        rows.append([f"the paper's {paper.FULL}", *reported])
    return paper.markdown(title, ["controller", *map(str.capitalize, cells)], rows)


def time_table(cells: Cells) -> str:
    """Median and P99 of the decision times, interquartile means over episodes."""

    def both(summary: dict[str, Any]) -> str:
        keys = ("decision_us_p50", "decision_us_p99")
        if any(key not in summary for key in keys):
            return paper.NONE
        return " / ".join(f"{summary[key]['value']:,.0f}" for key in keys)

    rows = [
        [name, *(both(summary_of(cell, name)) for cell in cells.values())]
        for name in paper.controllers_of(cells)
        if name not in ORACLES
    ]
    headings = ["controller", *map(str.capitalize, cells)]
    return paper.markdown("Decision, us, p50 / p99", headings, rows) + f"\n{TIMED}\n"


def main(args: Args) -> None:
    """Print every table."""
    cells = paper.regimes_of(load(args.result))
    tables = [
        gap_table(cells),
        metric_table(cells, "P99, ms, mean over epochs", "p99_ms", 1, 2),
        metric_table(cells, "QoS, % of requests within the SLO", "qos", 100, 2),
        time_table(cells),
    ]
    print("\n".join(tables))
    if args.json is not None:
        write_result(args.json, command("eval.paper_control"), {"tables": tables})


if __name__ == "__main__":
    run_command("eval.paper_control", main, Args)
