"""Live runs of `eval.end_to_end` beside the surrogate: `python -m eval.end_to_end_twin --records FOLDER`.

The surrogate serves the requests of each record, at the alpha of each of its epochs and as fast as the host
then was, with a calibrated profile that knows nothing of these runs. So a controller's alphas are compared
as well as a static split, and what the host makes of two runs does not count as the surrogate's error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.end_to_end_plan import LRU
from eval.end_to_end_replay import (
    Epochs,
    Replay,
    folder_of,
    mean_over,
    node_profile,
    read,
    typical_by_folder,
)
from eval.host_slowness import is_disturbed, slow_epochs
from eval.sim_to_real_report import rank_correlation
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.machine_state import with_queue
from hlem_env.machine import command, write_result
from hlem_env.surrogate.hardware import NodeProfile

LEAST_ALPHAS = 3
"""For a rank correlation."""
FIGURES = ("p99_ms", "mean_service_ms", "utilisation", "kv_hit", "emb_hit")


@dataclass
class Args:
    """P99, service time and hit rates of live runs beside the surrogate's on the same requests."""

    records: tuple[Path, ...]
    """folders of `eval.end_to_end`"""
    profile: str = "h200-live"
    """calibrated hardware profile, or the path of one"""
    draws: int = 4
    """runs of the surrogate for each record, of which the mean counts; they differ in the profile's jitter"""
    host_speed: bool = True
    """as fast as the host was in each epoch; otherwise as it was in the calibration"""
    json: Path | None = None
    """file for the comparison"""
    plot: Path | None = None
    """PNG file"""

    def __post_init__(self) -> None:
        require(self.draws > 0, "draws", self.draws, "above 0")


def simulate(
    record: Mapping[str, Any], profile: NodeProfile, kept: Epochs, args: Args
) -> dict[str, float]:
    """What the surrogate measures in the epochs of a record that are kept, [epochs]."""
    replay = Replay(record, profile)
    slowness = replay.slowness(kept) if args.host_speed else np.ones(1 + kept.size)
    served = [replay.serve(slowness, draw) for draw in range(args.draws)]
    return {
        name: float(np.mean([mean_over(epochs, attrgetter(name), kept) for epochs in served]))
        for name in FIGURES
    }


def live_figures(record: Mapping[str, Any], kept: Epochs) -> dict[str, float]:
    """The record's own, likewise; but the service time is that of all epochs: it is not told of each."""
    epochs = record["epochs"]
    return {
        name: float(np.mean(epochs[name], where=kept)) if name in epochs else float(record[name])
        for name in FIGURES
    }


def compare(
    records: Mapping[str, Mapping[str, Any]], profile: NodeProfile, args: Args
) -> list[dict[str, Any]]:
    """A row for each live run, by folder and file. A host is slow beside the others of its folder."""
    typical_ms = typical_by_folder(records)
    rows = []
    for name, record in records.items():
        slow = slow_epochs(record["machine_state"], typical_ms[folder_of(name)])
        disturbed = is_disturbed(slow)
        kept = np.ones_like(slow) if disturbed else ~with_queue(slow)
        live, sim = live_figures(record, kept), simulate(record, profile, kept, args)
        about = {"name": name, "run": record["run"], "load": record["load"], "disturbed": disturbed,
                 "saturated": bool(record["saturated"]), "epochs": int(kept.size),
                 "epochs_left_out": int((~kept).sum())}  # fmt: skip
        rows.append(about | {"live": live, "sim": sim, "error": errors(live, sim)})
    return rows


def errors(live: Mapping[str, float], sim: Mapping[str, float]) -> dict[str, float]:
    """Of times over the live ones, of shares in points."""
    shares = ("utilisation", "kv_hit", "emb_hit")
    relative = {name: sim[name] / live[name] - 1 for name in FIGURES if name not in shares}
    return relative | {f"{name}_points": 100 * (sim[name] - live[name]) for name in shares}


def over_alpha(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Static splits of one folder, requests and policy, where three or more of them count."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        run = row["run"]
        if not row["disturbed"] and run["allocation"].startswith("static-"):
            folder = folder_of(row["name"])
            key = run["regime"], run["kv_policy"], run["seed"], row["load"], folder
            groups.setdefault(key, []).append(row)
    found = []
    for (regime, policy, seed, load, folder), some in groups.items():
        alphas = [int(row["run"]["allocation"].removeprefix("static-")) / 100 for row in some]
        live, sim = (np.array([row[which]["p99_ms"] for row in some]) for which in ("live", "sim"))
        if len(some) >= LEAST_ALPHAS:
            best = alphas[int(live.argmin())], alphas[int(sim.argmin())]
            found.append({
                "folder": folder, "regime": regime, "kv_policy": policy, "seed": seed, "load": load,
                "alphas": alphas,
                "rank_correlation": rank_correlation(live, sim), "best_alpha_live": best[0],
                "best_alpha_sim": best[1], "regret": float(live[sim.argmin()] / live.min() - 1),
            })  # fmt: skip
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the runs that count: neither disturbed nor saturated."""
    counted = [row for row in rows if not row["disturbed"] and not row["saturated"]]
    require(bool(counted), "records", "none that counts", "a run that is not disturbed")
    found = {
        name: np.array([row["error"][name] for row in counted]) for name in counted[0]["error"]
    }
    p99 = np.abs(found["p99_ms"])
    unsaturated = [row["error"]["p99_ms"] for row in rows if not row["saturated"]]
    with_disturbed = np.abs(unsaturated)
    return {
        "runs": len(rows),
        "counted": len(counted),
        "disturbed": sum(row["disturbed"] for row in rows),
        "saturated": sum(row["saturated"] for row in rows),
        "busy_0.6_or_more": sum(row["live"]["utilisation"] >= 0.6 for row in counted),
        "median_p99_error": float(np.median(p99)),
        "p90_p99_error": float(np.quantile(p99, 0.9)),
        "largest_p99_error": float(p99.max()),
        "mean_p99_error": float(found["p99_ms"].mean()),
        "median_p99_error_with_disturbed": float(np.median(with_disturbed)),
        "p90_p99_error_with_disturbed": float(np.quantile(with_disturbed, 0.9)),
        "largest_p99_error_with_disturbed": float(with_disturbed.max()),
        "median_service_error": float(np.median(np.abs(found["mean_service_ms"]))),
        "median_kv_hit_points": float(np.median(np.abs(found["kv_hit_points"]))),
        "median_emb_hit_points": float(np.median(np.abs(found["emb_hit_points"]))),
    }


def print_table(
    rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any], console: Console
) -> None:
    """A line a run, then the summary."""
    table = Table(title="live | surrogate, the same requests and alphas", title_justify="left")
    for heading in (
        "run",
        "load",
        "P99 ms",
        "error %",
        "service ms",
        "busy %",
        "KV hit",
        "emb. hit",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        live, sim = row["live"], row["sim"]

        def both(name: str, scale: float, digits: int, a: Any = live, b: Any = sim) -> str:
            return f"{scale * a[name]:.{digits}f} | {scale * b[name]:.{digits}f}"

        error = "disturbed" if row["disturbed"] else f"{100 * row['error']['p99_ms']:+.0f}"
        table.add_row(
            row["name"], f"{row['load']:g}", both("p99_ms", 1, 1), error, both("mean_service_ms", 1, 2),
            both("utilisation", 100, 0), both("kv_hit", 1, 3), both("emb_hit", 1, 3),
        )  # fmt: skip
    console.print(table)
    for name, value in found.items():
        shown = f"{value:.3f}" if isinstance(value, float) else str(value)
        console.print(f"{name.replace('_', ' ')}: {shown}")


def print_groups(groups: Sequence[Mapping[str, Any]]) -> None:
    """A line for each."""
    for group in groups:
        print(
            f"{group['folder']}: {group['regime']}, {group['kv_policy']}, seed {group['seed']},"
            f" {len(group['alphas'])} alphas: rank correlation {group['rank_correlation']:.2f}, best"
            f" {group['best_alpha_live']:.2f} | {group['best_alpha_sim']:.2f},"
            f" regret {100 * group['regret']:.1f} %"
        )


def kind(run: Mapping[str, Any]) -> str:
    """Which dots of the figure a run belongs to."""
    if run["kv_policy"] == LRU:
        return "plain LRU"
    static = run["allocation"].startswith("static-")
    return "scan-resistant, static" if static else "scan-resistant, controller"


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Simulated over live P99, a dot a run that counts, with a band of 10 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axis = figure.subplots()
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not row["disturbed"] and not row["saturated"]:
            point = row["live"]["p99_ms"], row["sim"]["p99_ms"]
            points.setdefault(kind(row["run"]), []).append(point)
    every = np.array([point for some in points.values() for point in some])
    ends = np.array([0.95 * every.min(), 1.05 * every.max()])
    axis.fill_between(ends, 0.9 * ends, 1.1 * ends, color="0.9", label="within 10 %")
    axis.plot(ends, ends, color="0.6", linewidth=1)
    for label in sorted(points):
        axis.plot(*np.array(points[label]).T, "o", markersize=5, label=label)
    axis.set(xlabel="live P99, ms", ylabel="surrogate's P99, ms", xscale="log", yscale="log")
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_formatter("{x:g}")
        side.set_minor_formatter("{x:g}")
    axis.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)


def main(args: Args) -> int:
    """Compare what there is."""
    profile = node_profile(args.profile)
    rows = compare(read(args.records), profile, args)
    found, groups = summary(rows), over_alpha(rows)
    print_table(rows, found, Console(width=140))
    print_groups(groups)
    if args.plot is not None:
        draw(rows, args.plot)
    if args.json is not None:
        payload = {
            "device": profile.hardware,
            "profile": profile.to_json(),
            "summary": found,
            "over_alpha": groups,
            "rows": rows,
        }
        write_result(args.json, command("eval.end_to_end_twin"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.end_to_end_twin", main, Args)
