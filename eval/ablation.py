"""What each layer of the allocator adds: `python -m eval.ablation` (the paper's Fig. 14).

The frozen policy alone, with the adapter, with recovery by P99 (Eq. 8), and with recovery by the
workload, on the same requests, through `eval.compare` and its records. The reachable oracle is read
from a comparison of the same seeds: arrivals do not depend on who decides. What is done is kept in
`--output`; the same command goes on.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from eval import compare, paper
from eval.cells import collect
from eval.figures import GRID, LIMIT, MUTED, SERIES, STATIC, STYLE
from eval.names import BEST_STATIC, REACHABLE
from eval.records import Record
from eval.statistics import iqm, ratio_of_means
from eval.unit import Unit, star_of
from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError, require
from hlem_env.machine import command, write_result
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import tables_digest
from hlem_env.surrogate.optimum import AlphaStar
from hlem_env.workload.regimes import REGIMES

LAYERS = ("allocator-ppo", "allocator-adapter", "allocator-p99", "allocator")
PAPER_PEAK_MS = (46.0, 34.0, 31.0)
"""Peak P99 in a burst: the policy alone, with the adapter, with adapter and recovery."""
PAPER_PEAK_OF = {
    "allocator-ppo": PAPER_PEAK_MS[0],
    "allocator-adapter": PAPER_PEAK_MS[1],
    "allocator-p99": PAPER_PEAK_MS[2],
    "allocator": PAPER_PEAK_MS[2],
}


@dataclass
class Args:
    """Runs the allocator and its parts over the regimes."""

    preset: str = "default"
    """of the workloads"""
    regimes: tuple[str, ...] = REGIMES
    """of the workloads"""
    seeds: int = 16
    """evaluation episodes of a regime"""
    epochs: int = 240
    """epochs an episode"""
    references: Path = Path("docs/results/compare-controllers-default.json")
    """a result of eval.compare with the oracles, on these workloads and seeds"""
    repeats: int = 16
    """drawings of the arrivals for alpha*; 0: no gaps"""
    alpha_step: float = 0.02
    """grid of alpha*"""
    jobs: int = 2
    """processes"""
    output: Path = Path("runs/ablation")
    """folder of the records"""
    json: Path | None = None
    """file for the figures"""
    plot: Path | None = None
    """PNG file of Burst"""


def run(args: Args) -> list[dict[str, Any]]:
    """The comparison's cells, one a regime, with gaps and the reachable oracle put in."""
    compared = compare.Args(
        controllers=LAYERS,
        workloads=tuple(f"{args.preset}/{regime}" for regime in args.regimes),
        kv_policies=("scan_resistant",),
        seeds=args.seeds, epochs=args.epochs, repeats=args.repeats, alpha_step=args.alpha_step,
        jobs=args.jobs, output=args.output,
    )  # fmt: skip
    units = list(compare.plan_units(compared, ()))
    results = compare.run_units(units, args.jobs)
    if args.repeats:
        stars = dict(zip(units, star_of_all(units, args.jobs), strict=True))
        for unit, result in zip(units, results, strict=True):
            for row in result["rows"].values():
                row["gap"] = Record.load(args.output / row["record"]).gap(stars[unit].alpha_centi)
    for unit, result in zip(units, results, strict=True):
        known = reachable_row(args.references, unit)
        if known is not None:
            result["rows"][REACHABLE] = known
    return collect(units, results)


def star_of_all(units: list[Unit], jobs: int) -> list[AlphaStar]:
    """alpha* of each unit's course, from the cache where it is there."""
    return [star_of(unit, jobs) for unit in tqdm(units, unit="course", desc="alpha*", disable=None)]


def reachable_row(path: Path, unit: Unit) -> dict[str, Any] | None:
    """The reachable oracle's figures for a unit's requests; None where the result has none.

    Raises:
        ArtefactError: the file is not a result of eval.compare.
    """
    try:
        result = json.loads(path.read_text())
        if result["load_tables"] != tables_digest():
            return None
        for cell in result["cells"]:
            columns = cell["controllers"].get(REACHABLE)
            same = Scenario.parse(cell["scenario"]) == unit.scenario
            if same and columns is not None and unit.seed in cell["seeds"]:
                i = cell["seeds"].index(unit.seed)
                row = {k: v[i] for k, v in columns.items() if isinstance(v, list)}
                row["record"] = None
                return row
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{path} is not a result of eval.compare ({error!r})") from error
    return None


def bursts_of(scenario: Scenario, seed: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Epochs of each burst of a seed."""
    backend = scenario.build()
    backend.reset(seed)
    burst = backend.workload.path.burst  # type: ignore[attr-defined]
    return [np.flatnonzero(burst == number) for number in np.unique(burst) if number]


def peaks(cell: dict[str, Any], output: Path) -> dict[str, list[float]]:
    """Mean over a seed's bursts of the largest P99 in each, ms, by controller: [seeds with a burst]."""
    scenario = Scenario.parse(cell["scenario"])
    bursts = [bursts_of(scenario, seed) for seed in cell["seeds"]]
    found: dict[str, list[float]] = {}
    for name, columns in cell["controllers"].items():
        found[name] = []
        for path, epochs in zip(columns["record"], bursts, strict=True):
            if epochs and path is not None:
                p99 = np.array(Record.load(output / path).p99_ms)
                found[name].append(float(np.mean([p99[burst].max() for burst in epochs])))
    return found


def summarise(cell: dict[str, Any], output: Path) -> dict[str, Any]:
    """Figures of a regime by controller."""
    summary = {
        name: {"entry": columns["entry"][0], **columns["summary"]}
        for name, columns in cell["controllers"].items()
        if columns["entry"][0] in LAYERS or name in (BEST_STATIC, REACHABLE)
    }
    if cell["scenario"]["regime"] == "burst":
        by_name = peaks(cell, output)
        best = np.array(by_name[BEST_STATIC])
        for name, row in summary.items():
            peak = np.array(by_name[name])
            if not peak.size:
                continue
            row["peak_p99_ms"] = asdict(iqm(peak))
            row["peak_over_best_static"] = asdict(ratio_of_means(peak, best))
    return summary


def table(regime: str, rows: dict[str, Any]) -> str:
    """A regime's figures, the paper's beside."""
    lines = []
    for name, row in rows.items():
        line = [name]
        for key, scale, digits in (
            ("p99_ms", 1, 2), ("p99_over_best_static", 1, 4), ("room_recovered", 100, 0),
            ("qos", 100, 2), ("gap", 1, 3), ("peak_p99_ms", 1, 1),
        ):  # fmt: skip
            line.append(_shown(row.get(key), scale, digits))
        peak = PAPER_PEAK_OF.get(row["entry"]) if regime == "burst" else None
        kind = {"allocator-ppo": "ppo", "allocator": "full", BEST_STATIC: "static"}.get(
            row["entry"]
        )
        gap = paper.PAPER_GAP[regime].get(kind) if kind else None
        line.insert(6, paper.NONE if gap is None else f"{gap:.3f}")
        line.append(paper.NONE if peak is None else f"{peak:.0f}")
        lines.append(line)
    headings = (
        "controller", "P99 ms", "P99 / best static", "room recovered %", "QoS %", r"gap to alpha\*",
        "the paper's gap", "peak P99 in a burst, ms", "the paper's peak",
    )  # fmt: skip
    return paper.markdown(regime.capitalize(), headings, lines)


def _shown(estimate: dict[str, float] | None, scale: float, digits: int) -> str:
    if estimate is None:
        return paper.NONE
    value, low, high = (f"{scale * estimate[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def draw(rows: dict[str, Any], slo_ms: float) -> Figure:
    """Peak P99 in a burst by layer, the paper's beside."""
    names = [BEST_STATIC, *(name for name in rows if rows[name]["entry"] in LAYERS)]
    bars = [rows[name]["peak_p99_ms"] for name in names]
    value, low, high = (np.array([bar[key] for bar in bars]) for key in ("value", "low", "high"))
    reported = [PAPER_PEAK_OF.get(rows[name]["entry"], np.nan) for name in names]
    places = np.arange(len(names))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.subplots()
        colours = [SERIES[0] if rows[name]["entry"] in LAYERS else STATIC for name in names]
        axes.barh(
            places, value, height=0.6, color=colours,
            xerr=np.maximum([value - low, high - value], 0), error_kw={"ecolor": MUTED},
        )  # fmt: skip
        axes.plot(reported, places, "D", color=SERIES[1], label="the paper's, 32 nodes with A100")
        axes.axvline(slo_ms, color=LIMIT, lw=1, ls=(0, (4, 3)), label=f"SLO, {slo_ms:g} ms")
        axes.set_yticks(places, names)
        axes.invert_yaxis()
        axes.set_xlabel("peak P99 in a burst, ms (largest epoch P99, mean over bursts)")
        axes.grid(axis="x", color=GRID, lw=0.6)
        figure.legend(loc="outside upper left", ncols=2)
    return figure


def main(args: Args) -> None:
    """Run, print, write, draw."""
    require(1 <= args.seeds <= 10_000, "--seeds", args.seeds, "1 to 10,000")
    require(args.epochs >= 12, "--epochs", args.epochs, "12 or more")
    cells = run(args)
    rows = {cell["scenario"]["regime"]: summarise(cell, args.output) for cell in cells}
    for regime, row in rows.items():
        print(table(regime, row))
    for cell in cells:
        for name, fault in cell["failed"].items():
            print(f"{name} failed: {fault['reason']}")
    if args.json is not None:
        write_result(
            args.json, command("eval.ablation"),
            {
                "preset": args.preset, "seeds": cells[0]["seeds"], "references": str(args.references),
                "regimes": rows,
            },
        )  # fmt: skip
    if args.plot is not None and "burst" in rows:
        paper.save(draw(rows["burst"], MdpConfig().slo_ms), args.plot, "eval.ablation")


if __name__ == "__main__":
    run_command("eval.ablation", main, Args, lambda a: f"the same command goes on from {a.output}")
