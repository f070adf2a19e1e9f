"""Alpha over four hours against alpha*: `python -m eval.paper_tracking` (the paper's Fig. 15).

One Trend is spread over the whole time, so that the hot share changes little from epoch to epoch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

from eval import paper
from eval.compare import FIRST_SEED
from eval.figures import GRID, INK, LIMIT, MUTED, SERIES, STATIC, STYLE
from eval.names import BEST_STATIC
from eval.tracking import track
from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError, require
from hlem_env.machine import command, write_result


@dataclass
class Args:
    """Runs the shipped policies and the working-set rule over hours, or draws what was run."""

    from_: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """draw this file, which --json wrote, in place of running"""
    workload: str = "books/trend"
    """preset and regime"""
    minutes: int = 240
    """of the episode, and period of the regime; 12 epochs of 5 s each"""
    alpha_step: float = 0.02
    """grid of alpha*"""
    repeats: int = 16
    """drawings of the arrivals for alpha*"""
    seed: int = FIRST_SEED
    """of the episode"""
    jobs: int = 2
    """threads"""
    json: Path | None = None
    """file for the courses by the minute"""
    plot: Path | None = None
    """PNG file"""

    def __post_init__(self) -> None:
        require(self.minutes >= 2, "minutes", self.minutes, "2 or more")
        require(0.01 <= self.alpha_step <= 0.4, "alpha_step", self.alpha_step, "0.01 to 0.40")
        require(self.jobs >= 1, "jobs", self.jobs, "1 or more")


def load(path: Path) -> dict[str, Any]:
    """Read what --json wrote.

    Raises:
        ArtefactError: missing, or something else.
    """
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        sizes = {len(course["alpha"]) for course in values["controllers"].values()}
        if sizes != {len(values["alpha_star"])}:
            raise ValueError("courses of different lengths")
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{path} is not a result of eval.paper_tracking ({error})") from error
    return values


def table(values: dict[str, Any]) -> str:
    """Gap, P99 and QoS of every controller, the paper's gap in Trend beside."""
    rows = []
    for name, course in values["controllers"].items():
        like = paper.counterpart(name)
        figures = [f"{course[key]:.3f}" for key in ("gap", "gap_to_epoch_star")]
        figures.append(f"{paper.PAPER_GAP['trend'][like]:.3f}" if like else paper.NONE)
        figures += [f"{course['mean_p99_ms']:.2f}", f"{100 * course['qos']:.2f}"]
        rows.append([name, *figures, f"{course['movement']:.1f}"])
    rows.append(
        [
            f"the paper's {paper.FULL}",
            paper.NONE,
            paper.NONE,
            f"{paper.PAPER_GAP['trend']['full']:.3f}",
        ]
        + [paper.NONE] * 3
    )
    scenario = values["scenario"]
    title = f"{scenario['preset']}/{scenario['regime']}, {len(values['alpha_star'])} minutes"
    headings = (
        "controller", r"gap to alpha\* of the minute", "of the epoch", "the paper's gap",
        "P99 ms", "QoS %", "sum of steps",
    )  # fmt: skip
    return paper.markdown(title, headings, rows)


def draw(values: dict[str, Any]) -> Figure:
    """Alpha against alpha*, P99 against the SLO, and the hot share, over hours."""
    hours = (np.arange(len(values["alpha_star"])) + 0.5) / 60
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 6.6), layout="constrained")
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(4, 3, 1.2))
        top.plot(hours, values["alpha_star"], color=INK, lw=3, alpha=0.35, label="alpha*")
        middle.plot(hours, values["best_p99_ms"], color=INK, lw=3, alpha=0.35)
        for i, (name, course) in enumerate(values["controllers"].items()):
            colour = STATIC if name == BEST_STATIC else SERIES[(i - 1) % len(SERIES)]
            top.plot(hours, course["alpha"], color=colour, lw=1.3, label=name)
            middle.plot(hours, course["p99_ms"], color=colour, lw=0.9)
        middle.axhline(values["slo_ms"], color=LIMIT, lw=1, ls=(0, (4, 3)))
        bottom.plot(hours, values["hot_share"], color=MUTED, lw=1)
        for axes, title in (
            (top, "alpha, mean over each minute"),
            (middle, f"P99, ms, mean over each minute (dashed: SLO, {values['slo_ms']:g} ms)"),
            (bottom, "hot share of requests"),
        ):
            axes.set_title(title, color=INK)
            axes.grid(axis="y", color=GRID, lw=0.6)
        top.set_ylim(0, 1)
        bottom.set_ylim(0, None)
        bottom.set_xlabel("hours")
        figure.legend(loc="outside upper left", ncols=4)
    return figure


def main(args: Args) -> None:
    """Run or read; print, write, draw."""
    if args.from_ is not None:
        values = load(args.from_)
    else:
        values = track(
            args.workload, args.minutes, args.seed, round(100 * args.alpha_step),
            args.repeats, args.jobs,
        )  # fmt: skip
    print(table(values))
    if args.json is not None and args.from_ is None:
        write_result(args.json, command("eval.paper_tracking"), values)
    if args.plot is not None:
        paper.save(draw(values), args.plot, "eval.paper_tracking")


if __name__ == "__main__":
    run_command("eval.paper_tracking", main, Args)
