"""Room over the best static split and what is recovered of it, from runs of `eval.end_to_end_room`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.cells import LEAST_ROOM
from eval.end_to_end_plan import PPO, SMART, WORKING_SET
from eval.end_to_end_report import shown
from eval.statistics import Floats, ratio_of_means

STATIC, FINE_STATIC = "best static", "static, by 0.02"
FORESEEN, ALPHA_STAR, REACHABLE, FREE = "foreseen", "alpha*", "reachable", "reachable, free"
CONTROLLERS = WORKING_SET, PPO, SMART
Values = Mapping[str, Any]
P99s = dict[str, Floats]
"""By name, [seeds] ms."""
SHOWN = {FORESEEN: "k--", REACHABLE: "0.6", WORKING_SET: "tab:orange", SMART: "tab:blue"}
"""In the figure, and how."""


def of_surrogate(p99_ms: P99s) -> dict[str, Any]:
    """Room of a regime and what controllers recover of it, with 95 % intervals over the seeds."""
    static, bound = p99_ms[STATIC], p99_ms[REACHABLE]
    room = float(1 - bound.mean() / static.mean())
    over = {name: asdict(ratio_of_means(of, static)) for name, of in p99_ms.items()}
    recovered = {
        name: asdict(ratio_of_means(static - p99_ms[name], static - bound)) for name in CONTROLLERS
    }
    return {
        "over_best_static": over,
        "room": room,
        "room_recovered": recovered if room >= LEAST_ROOM else {},
    }


def of_live(rows: list[Values], known: list[int], p99_ms: P99s) -> dict[str, Any]:
    """Room recovered by live controllers, of the room that the surrogate has on the same requests.

    Args:
        rows: of a regime, as `Live` has them.
        known: seeds of the simulated runs.
        p99_ms: of the regime, simulated.
    """
    measured = {row["allocation"]: dict(zip(row["seeds"], row["p99_ms"], strict=True))
                for row in rows if not any(row["saturated"])}  # fmt: skip
    rooms = dict(zip(known, 1 - p99_ms[REACHABLE] / p99_ms[STATIC], strict=True))
    found = {}
    for name in CONTROLLERS:
        ours, best = measured.get(name, {}), measured.get(STATIC, {})
        same = sorted(ours.keys() & best.keys() & rooms.keys())
        if not same:
            continue
        static, p99 = (np.array([of[seed] for seed in same]) for of in (best, ours))
        to_gain = static * np.array([rooms[seed] for seed in same])
        room = float(to_gain.sum() / static.sum())
        recovered = asdict(ratio_of_means(static - p99, to_gain)) if room >= LEAST_ROOM else None
        found[name] = {"seeds": same, "room": room, "room_recovered": recovered}
    return found


def print_tables(found: Mapping[str, Values], console: Console) -> None:
    """What sequences of alpha bring, and who recovers how much of it."""
    table = Table(title="simulated, P99 over the best of five static splits", title_justify="left")
    names = (FINE_STATIC, FORESEEN, ALPHA_STAR, REACHABLE, FREE, *CONTROLLERS)
    for heading in ("regime", *names):
        table.add_column(heading, justify="right")
    for regime, of in found.items():
        table.add_row(regime, *(shown(of["simulated"]["over_best_static"][one]) for one in names))
    console.print(table)
    table = Table(title="room recovered, %", title_justify="left")
    for heading in ("regime", "seeds", "room, %", *CONTROLLERS):
        table.add_column(heading, justify="right")
    for regime, of in found.items():
        room, recovered = of["simulated"]["room"], of["simulated"]["room_recovered"]
        table.add_row(
            f"{regime}, simulated", str(len(of["seeds"])), f"{100 * room:.1f}",
            *(percent(recovered.get(name)) for name in CONTROLLERS),
        )  # fmt: skip
        rows = of["live"]
        if rows:
            one = next(iter(rows.values()))
            table.add_row(
                f"{regime}, live", str(len(one["seeds"])), f"{100 * one['room']:.1f}",
                *(percent(rows[name]["room_recovered"]) if name in rows else "-" for name in CONTROLLERS),
            )  # fmt: skip
    console.print(table)


def draw_alphas(found: Mapping[str, Values], path: Path) -> None:
    """Alpha over the epochs, mean over the seeds, a panel a regime."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    axes = figure.subplots(1, len(found), sharey=True)
    for axis, (regime, of) in zip(axes, found.items(), strict=True):
        for name, style in SHOWN.items():
            axis.plot(of["mean_alpha"][name], style, label=name)
        axis.set(title=regime.capitalize(), xlabel="epoch", ylim=(0, 1))
        axis.grid(color="0.92")
    axes[0].set_ylabel("alpha")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SHOWN), frameon=False)
    figure.savefig(path, dpi=130)


def percent(value: Mapping[str, float] | None) -> str:
    """An estimate and its interval; a dash for none."""
    if value is None:
        return "-"
    return f"{100 * value['value']:.0f} [{100 * value['low']:.0f}, {100 * value['high']:.0f}]"
