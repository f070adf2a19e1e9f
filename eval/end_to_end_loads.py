"""What the load has to do with it: `python -m eval.end_to_end_loads`.

The plain system (LRU, design point), the same with admission alone and the whole one, on the surrogate of a
calibrated machine at several loads: P99 and QoS over how busy the plain one is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.end_to_end import MOST_UTILISATION, SIMULATED_S, given_design, make_bench, seeds
from eval.end_to_end import Args as PlanArgs
from eval.end_to_end_bench import Bench
from eval.end_to_end_plan import LRU, REGIMES, SCAN_RESISTANT, SMART, Run, static
from eval.machine_speed import MOST_LOAD
from eval.pieces import Piece, Slice, time_left
from eval.statistics import ratio_of_means
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result

PLAIN, ADMISSION, WHOLE = "LRU, design point", "scan-resistant, design point", "SmartAllocator"


@dataclass
class Args:
    """P99 and QoS by load, of the plain system and of ours, simulated."""

    design: Path
    """report of `eval.end_to_end` of the same node and dataset: its design points are taken"""
    preset: str = "h200-8gib"
    """live preset, or the path of one"""
    dataset: str = "books"
    """workload preset"""
    profile: str = "h200-live"
    """calibrated hardware profile, or the path of one"""
    loads: tuple[float, ...] = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
    """times the preset's rates"""
    repeats: int = 8
    """seeds, the same for all that is compared"""
    epochs: int = 60
    """of a run"""
    seconds: float = 3600.0
    """of this run"""
    records: Path = Path("runs/end-to-end-loads")
    """folder of the runs; those that are there are not run again"""
    json: Path | None = None
    """file for the figures"""
    plot: Path | None = None
    """PNG file"""

    def __post_init__(self) -> None:
        require(self.seconds > 0, "seconds", self.seconds, "above 0")
        good = all(0 < load <= MOST_LOAD for load in self.loads)
        require(good, "loads", self.loads, f"above 0, up to {MOST_LOAD}")


def arms(design: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """KV policy and allocation by name."""
    return {
        PLAIN: (LRU, static(design[LRU])),
        ADMISSION: (SCAN_RESISTANT, static(design[SCAN_RESISTANT])),
        WHOLE: (SCAN_RESISTANT, SMART),
    }


def measure(args: Args, bench: Bench, plan: PlanArgs, design: Mapping[str, int]) -> list[Piece]:
    """Run what is missing; returns what is left."""
    runs = {
        f"{load:g}-{run.name}": (run, load)
        for load in args.loads for regime in REGIMES for seed in seeds(plan, bench)
        for run in (Run(regime, *arm, seed) for arm in arms(design).values())
    }  # fmt: skip
    pieces = [Piece(name, SIMULATED_S) for name in runs]
    return bench.slice.run(
        pieces, lambda piece: bench.run(runs[piece.name][0], args.epochs, runs[piece.name][1])
    )


def rows(
    args: Args, bench: Bench, plan: PlanArgs, design: Mapping[str, int]
) -> list[dict[str, Any]]:
    """One for each regime and load: means of each arm over the seeds, and the ratio of P99."""
    found = []
    for regime in REGIMES:
        for load in args.loads:
            row: dict[str, Any] = {"regime": regime, "load": load}
            for name, arm in arms(design).items():
                names = [f"{load:g}-{Run(regime, *arm, seed).name}" for seed in seeds(plan, bench)]
                records = [bench.slice.read(one) for one in names]
                row[name] = {
                    "p99_ms": [record["p99_ms"] for record in records],
                    "qos": float(np.mean([record["qos"] for record in records])),
                    "utilisation": float(np.mean([record["utilisation"] for record in records])),
                    "saturated": any(record["saturated"] for record in records),
                }
            for name in (ADMISSION, WHOLE):
                whole, plain = row[name], row[PLAIN]
                counts = not (whole["saturated"] or plain["saturated"])
                ratio = ratio_of_means(np.array(whole["p99_ms"]), np.array(plain["p99_ms"]))
                row[f"{name} over {PLAIN}"] = vars(ratio) if counts else None
            found.append(row)
    return found


def print_table(found: Sequence[Mapping[str, Any]], console: Console) -> None:
    """A line for each regime and load."""
    table = Table(title="simulated; P99 ms and QoS % by arm", title_justify="left")
    for heading in ("regime", "load", "busy % of plain", PLAIN, ADMISSION, WHOLE, "P99 over plain"):
        table.add_column(heading, justify="right")
    for row in found:
        ratio = row[f"{WHOLE} over {PLAIN}"]
        table.add_row(
            row["regime"], f"{row['load']:g}", f"{100 * row[PLAIN]['utilisation']:.0f}",
            *("saturated" if row[arm]["saturated"] else
              f"{np.mean(row[arm]['p99_ms']):.1f}, {100 * row[arm]['qos']:.1f}"
              for arm in (PLAIN, ADMISSION, WHOLE)),
            "-" if ratio is None else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]",
        )  # fmt: skip
    console.print(table)


def draw(found: Sequence[Mapping[str, Any]], slo_ms: float, path: Path) -> None:
    """P99 over how busy the plain system is, a panel a regime; saturated loads are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    for axis, regime in zip(figure.subplots(1, len(REGIMES), sharey=True), REGIMES, strict=True):
        some = [row for row in found if row["regime"] == regime and not row[PLAIN]["saturated"]]
        busy = [100 * row[PLAIN]["utilisation"] for row in some]
        for name in (PLAIN, ADMISSION, WHOLE):
            axis.plot(busy, [np.mean(row[name]["p99_ms"]) for row in some], ".-", label=name)
        axis.axhline(slo_ms, color="0.6", linewidth=1, linestyle="--", label="SLO")
        axis.axvline(100 * MOST_UTILISATION, color="0.85", linewidth=1)
        axis.set(title=regime, xlabel="plain system busy, %", yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    figure.axes[0].set_ylabel("P99, ms")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


def main(args: Args) -> int:
    """Run what is missing and show all of it."""
    plan = PlanArgs(preset=args.preset, dataset=args.dataset, records=args.records,
                    repeats=args.repeats, epochs=args.epochs, profile=args.profile)  # fmt: skip
    part = Slice(args.records, args.seconds, command("eval.end_to_end_loads"))
    bench = make_bench(plan, part)
    design = given_design(args.design, bench.dataset, bench.config)
    missing = measure(args, bench, plan, design)
    print(time_left(missing, args.seconds, 0.0))
    if missing:
        return 0
    found = rows(args, bench, plan, design)
    print_table(found, Console(width=150))
    if args.plot is not None:
        draw(found, bench.config.slo_ms, args.plot)
    if args.json is not None:
        payload = {"preset": bench.config.to_json(), "clock": bench.clock, "dataset": args.dataset,
                   "profile": args.profile, "rows": found}  # fmt: skip
        write_result(args.json, command("eval.end_to_end_loads"), payload)
    return 0


if __name__ == "__main__":
    run_command(
        "eval.end_to_end_loads", main, Args, lambda args: f"what had ended is in {args.records}"
    )
