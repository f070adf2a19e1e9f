"""Requests within the SLO by regime: `python -m eval.paper_slo [RESULT.json]` (the paper's Fig. 12)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

from eval import paper
from eval.figures import GRID, INK, LIMIT, MUTED, SERIES, STATIC, STYLE
from eval.names import ORACLES, is_static
from eval.paper_control import RESULT, Cells, metric_table, summary_of
from eval.summary import load
from hlem_env.command_line import run_command
from hlem_env.machine import command, write_result


@dataclass
class Args:
    """Show the share of requests within the SLO for every controller and regime."""

    result: Annotated[Path, tyro.conf.Positional] = RESULT
    """JSON file that eval.compare wrote"""
    plot: Path | None = None
    """PNG file"""
    json: Path | None = None
    """file for the bars"""


def bars(cells: Cells) -> dict[str, dict[str, dict[str, float]]]:
    """By regime and controller: value, low and high, percent. Saturated ones are left out."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for regime, cell in cells.items():
        summaries = {name: summary_of(cell, name) for name in cell["controllers"]}
        found[regime] = {
            name: {key: 100 * summary["qos"][key] for key in ("value", "low", "high")}
            for name, summary in summaries.items()
            if "qos" in summary
        }
    return found


def colour_of(name: str) -> str:
    """Static splits grey, oracles dark, the others blue."""
    if name in ORACLES:
        return INK
    return STATIC if is_static(name) else SERIES[0]


def draw(shares: dict[str, dict[str, dict[str, float]]], slo_ms: Any) -> Figure:
    """A bar for each controller, a panel for each regime; the axis does not begin at 0."""
    names = list(dict.fromkeys(name for row in shares.values() for name in row))
    lows = [bar["low"] for row in shares.values() for bar in row.values()]
    least = min(*lows, *(100 * paper.PAPER_QOS[regime] for regime in shares))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 1.4 + 0.24 * len(names)), layout="constrained")
        panels = figure.subplots(1, len(shares), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (regime, row) in zip(panels, shares.items(), strict=True):
            places = [names.index(name) for name in row]
            value, low, high = (
                np.array([bar[key] for bar in row.values()]) for key in ("value", "low", "high")
            )
            axes.barh(
                places, value, height=0.7, color=[colour_of(name) for name in row],
                xerr=np.maximum([value - low, high - value], 0),
                error_kw={"ecolor": MUTED, "elinewidth": 0.8},
            )  # fmt: skip
            reported = 100 * paper.PAPER_QOS[regime]
            axes.axvline(reported, color=LIMIT, lw=1, ls=(0, (4, 3)))
            axes.set_title(
                f"{regime.capitalize()}; dashed: the paper's\n{paper.FULL}, {reported:.1f} %",
                color=INK,
            )
            axes.set_xlabel(f"% of requests within {slo_ms:g} ms")
            axes.set_xlim(np.floor(least - 0.5), 100)
            axes.grid(axis="x", color=GRID, lw=0.6)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.5, -0.5)
    return figure


def main(args: Args) -> None:
    """Print, write, draw."""
    result = load(args.result)
    cells = paper.regimes_of(result)
    print(metric_table(cells, "QoS, % of requests within the SLO", "qos", 100, 2))
    shares = bars(cells)
    if args.json is not None:
        write_result(args.json, command("eval.paper_slo"), {"qos_percent": shares})
    if args.plot is not None:
        paper.save(draw(shares, result["slo_ms"]), args.plot, "eval.paper_slo")


if __name__ == "__main__":
    run_command("eval.paper_slo", main, Args)
