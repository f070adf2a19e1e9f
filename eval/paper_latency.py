"""P99 against alpha by history length and hot share: `python -m eval.paper_latency` (Fig. 4)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from eval import paper
from eval.figures import GRID, INK, RAMP, STYLE
from eval.shape import BASE_TOKENS, BASE_UTILISATION
from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError, require
from hlem_env.machine import command, write_result

Cell = dict[str, Any]
Floats = NDArray[np.float64]
LEAST_ALPHA = 0.10
"""The controllers' lower bound; below it P99 rises steeply."""


@dataclass
class Args:
    """Show P99 against a held alpha, by history length and by hot share."""

    result: Annotated[Path, tyro.conf.Positional] = Path("docs/results/shape.json")
    """JSON file that eval.shape wrote"""
    hot_share: float = 0.20
    """of the curves by length"""
    plot: Path | None = None
    """PNG file"""
    json: Path | None = None
    """file for the curves that are drawn"""


def load(path: Path) -> list[Cell]:
    """The scan-resistant cells at the base utilisation of a result of eval.shape.

    Raises:
        ArtefactError: missing, or something else.
    """
    try:
        cells = json.loads(path.read_text())["cells"]
        kept = [
            cell
            for cell in cells
            if cell["kv_policy"] == "scan_resistant"
            and cell["wanted_utilisation"] == BASE_UTILISATION
            and len(cell["curve"]["alpha"]) == len(cell["curve"]["p99_ms"])
        ]
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} is not a result of eval.shape ({error})") from error
    if not kept:
        raise ArtefactError(f"{path} has no scan-resistant cell at {BASE_UTILISATION}")
    return kept


def by_length(cells: Sequence[Cell], hot_share: float) -> list[Cell]:
    """The cells of one hot share, shortest histories first.

    Raises:
        ArgumentError: there is none.
    """
    shares = sorted({cell["hot_share"] for cell in cells})
    require(hot_share in shares, "--hot-share", hot_share, ", ".join(map(str, shares)))
    row = [cell for cell in cells if cell["hot_share"] == hot_share]
    return sorted(row, key=lambda cell: float(cell["mean_history_tokens"]))


def by_share(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of the base length, least hot share first."""
    row = [cell for cell in cells if cell["mean_history_tokens"] == BASE_TOKENS]
    return sorted(row, key=lambda cell: float(cell["hot_share"]))


def table(cells: Sequence[Cell]) -> str:
    """Best alpha and P99 there, by length and hot share, the paper's alphas below."""
    shares = sorted({cell["hot_share"] for cell in cells})
    lengths = sorted({cell["mean_history_tokens"] for cell in cells})
    found = {(c["mean_history_tokens"], c["hot_share"]): c for c in cells}

    def figure(cell: Cell | None) -> str:
        if cell is None:
            return paper.NONE
        if cell["saturated"]:
            return "saturated"
        low, high = cell["alpha_within_5_percent"]
        return f"{cell['best_alpha']:.2f} [{low:.2f}, {high:.2f}], {cell['best_p99_ms']:.1f} ms"

    rows = [
        [f"{n:,} tokens", *(figure(found.get((n, share))) for share in shares)] for n in lengths
    ]
    known = [paper.PAPER_ALPHA.get(share) for share in shares]
    reported = [paper.NONE if alpha is None else f"{alpha:.2f}" for alpha in known]
    rows.append([f"the paper's {paper.FULL}", *reported])
    title = "Best alpha [those whose P99 is within 5 %] and P99 there, by hot share"
    return paper.markdown(title, ["mean history", *(f"{share:.2f}" for share in shares)], rows)


def curve(cell: Cell) -> tuple[Floats, Floats]:
    """Alpha and P99 in ms, [n] each, the best alpha among them; NaN where it is saturated."""
    points = dict(zip(cell["curve"]["alpha"], cell["curve"]["p99_ms"], strict=True))
    points[cell["best_alpha"]] = cell["best_p99_ms"]
    alphas = sorted(points)
    return np.array(alphas, float), np.array([points[alpha] for alpha in alphas], float)


def draw_curves(axes: Axes, cells: Sequence[Cell], label: Callable[[Cell], str]) -> None:
    """A line a cell, a dot at its best alpha; gaps where it is saturated."""
    for i, cell in enumerate(cells):
        colour = RAMP[i % len(RAMP)]
        alpha, p99_ms = curve(cell)
        shown = alpha >= LEAST_ALPHA
        axes.plot(alpha[shown], p99_ms[shown], color=colour, lw=1.6, label=label(cell))
        if not cell["saturated"]:
            axes.plot(cell["best_alpha"], cell["best_p99_ms"], "o", color=colour, ms=5)


def draw(cells: Sequence[Cell], hot_share: float) -> Figure:
    """P99 against alpha: by history length on the left, by hot share on the right."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        draw_curves(left, by_length(cells, hot_share), lambda c: f"{c['mean_history_tokens']:,}")
        draw_curves(right, by_share(cells), lambda c: f"{c['hot_share']:.2f}")
        left.set_title(f"hot share {hot_share:.2f}, by mean history in tokens", color=INK)
        right.set_title(f"mean history {BASE_TOKENS:,} tokens, by hot share", color=INK)
        for axes in (left, right):
            axes.set_xlabel("alpha")
            axes.set_ylabel("P99, ms (dot: best alpha)")
            axes.set_xlim(0, 1)
            axes.set_ylim(0, None)
            axes.grid(axis="y", color=GRID, lw=0.6)
            axes.legend(ncols=2)
    return figure


def main(args: Args) -> None:
    """Print, write, draw."""
    cells = load(args.result)
    lengths, shares = by_length(cells, args.hot_share), by_share(cells)
    print(table(cells))
    if args.json is not None:
        curves = {"by_length": lengths, "by_hot_share": shares}
        write_result(args.json, command("eval.paper_latency"), curves)
    if args.plot is not None:
        paper.save(draw(cells, args.hot_share), args.plot, "eval.paper_latency")


if __name__ == "__main__":
    run_command("eval.paper_latency", main, Args)
