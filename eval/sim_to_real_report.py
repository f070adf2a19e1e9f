"""The comparison of live node and surrogate: errors, ranks over alpha, best alpha; table and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table


def compare(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows, groups over alpha, and a summary; saturated rows count in no percentage, disturbed ones nowhere.

    Args:
        rows: run, live and sim, as `eval.sim_to_real.simulate` gives them.
    """
    rows = [row | {"error": _errors(row["live"], row["sim"])} for row in rows]
    counted = [row for row in rows if not row["disturbed"]]
    keys = dict.fromkeys(
        (row["run"]["layers"], row["run"]["regime"], row["run"]["seed"]) for row in counted
    )
    groups = [
        _group(key, [row for row in counted if key == (
            row["run"]["layers"], row["run"]["regime"], row["run"]["seed"]
        )])
        for key in keys
    ]  # fmt: skip
    summary = {"runs": len(rows), "disturbed": len(rows) - len(counted)} | _summary(counted, groups)
    return {"summary": summary, "groups": groups, "rows": rows}


def _errors(live: dict[str, Any], sim: dict[str, Any]) -> dict[str, Any]:
    saturated = live["saturated"] or sim["saturated"]
    return {
        "saturated": saturated,
        "p99": None if saturated or not live["p99_ms"] else sim["p99_ms"] / live["p99_ms"] - 1,
        "service": sim["mean_service_ms"] / max(live["mean_service_ms"], 1e-9) - 1,
        "utilisation_points": 100 * (sim["utilisation"] - live["utilisation"]),
        "kv_hit_points": 100 * (sim["kv_hit"] - live["kv_hit"]),
        "emb_hit_points": 100 * (sim["emb_hit"] - live["emb_hit"]),
    }


def _group(key: tuple[int, str, int], rows: list[dict[str, Any]]) -> dict[str, Any]:
    layers, regime, seed = key
    alphas = [row["run"]["alpha_centi"] for row in rows]
    live = np.array([row["live"]["p99_ms"] for row in rows])
    sim = np.array([row["sim"]["p99_ms"] for row in rows])
    best_live, best_sim = int(live.argmin()), int(sim.argmin())
    return {
        "layers": layers,
        "regime": regime,
        "seed": seed,
        "alphas": [alpha / 100 for alpha in alphas],
        "live_p99_ms": live.tolist(),
        "sim_p99_ms": sim.tolist(),
        "saturated": [row["error"]["saturated"] for row in rows],
        "rank_correlation": rank_correlation(live, sim),
        "best_alpha_live": alphas[best_live] / 100,
        "best_alpha_sim": alphas[best_sim] / 100,
        "best_alpha_difference": abs(alphas[best_live] - alphas[best_sim]) / 100,
        "regret": float(live[best_sim] / live[best_live] - 1) if live[best_live] > 0 else None,
    }


def rank_correlation(left: Any, right: Any) -> float | None:
    """Spearman's, without ties in mind; None for fewer than three points."""
    if len(left) < 3:
        return None
    ranks = np.stack([np.argsort(np.argsort(values)).astype(float) for values in (left, right)])
    return float(np.corrcoef(ranks)[0, 1])


def _summary(rows: list[dict[str, Any]], groups: list[dict[str, Any]]) -> dict[str, Any]:
    def middle(values: list[Any]) -> float | None:
        known = [abs(value) for value in values if value is not None]
        return float(np.median(known)) if known else None

    errors = [row["error"] for row in rows]
    ranks = [group["rank_correlation"] for group in groups if group["rank_correlation"] is not None]
    return {
        "saturated": sum(error["saturated"] for error in errors),
        "median_p99_error": middle([error["p99"] for error in errors]),
        "largest_p99_error": max(
            (abs(error["p99"]) for error in errors if error["p99"] is not None), default=None
        ),
        "median_service_error": middle([error["service"] for error in errors]),
        "median_kv_hit_points": middle([error["kv_hit_points"] for error in errors]),
        "median_emb_hit_points": middle([error["emb_hit_points"] for error in errors]),
        "mean_rank_correlation": float(np.mean(ranks)) if ranks else None,
        "mean_best_alpha_difference": float(
            np.mean([group["best_alpha_difference"] for group in groups])
        ) if groups else None,
        "mean_regret": float(
            np.mean([g["regret"] for g in groups if g["regret"] is not None])
        ) if groups else None,
        "live_p99_noise": _noise(rows),
    }  # fmt: skip


def _noise(rows: list[dict[str, Any]]) -> float | None:
    """Median difference of the live P99 of two seeds from their mean's, as a ratio; None with one seed."""
    cells: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        run = row["run"]
        if not row["error"]["saturated"]:
            key = run["layers"], run["regime"], run["alpha_centi"]
            cells.setdefault(key, []).append(row["live"]["p99_ms"])
    pairs = [abs(a / b - 1) for a, b, *_ in (v for v in cells.values() if len(v) >= 2)]
    return float(np.median(pairs)) if pairs else None


def print_tables(compared: dict[str, Any], console: Console) -> None:
    """A line a run, a line a group, the summary."""
    table = Table(title="live | surrogate, the same requests", title_justify="left")
    for heading in ("layers", "regime", "alpha", "seed", "P99 ms", "error %", "service ms", "KV hit",
                    "emb. hit", "busy %", "prefetch MB", "refill MB"):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in compared["rows"]:
        run, live, sim, error = row["run"], row["live"], row["sim"], row["error"]

        def both(key: str, scale: float, digits: int, a: Any = live, b: Any = sim) -> str:
            return f"{scale * a[key]:.{digits}f} | {scale * b[key]:.{digits}f}"

        table.add_row(
            str(run["layers"]), run["regime"], f"{run['alpha_centi'] / 100:.2f}", str(run["seed"]),
            both("p99_ms", 1, 1),
            "disturbed" if row["disturbed"] else
            "saturated" if error["p99"] is None else f"{100 * error['p99']:+.0f}",
            both("mean_service_ms", 1, 2), both("kv_hit", 1, 3), both("emb_hit", 1, 3),
            both("utilisation", 100, 0), both("prefetch_bytes", 1e-6, 0),
            both("refill_bytes", 1e-6, 0),
        )  # fmt: skip
    console.print(table)
    groups = Table(title="over alpha", title_justify="left")
    for heading in ("layers", "regime", "seed", "rank correlation", "best alpha", "regret %"):
        groups.add_column(heading, justify="right")
    for group in compared["groups"]:
        rank, regret = group["rank_correlation"], group["regret"]
        groups.add_row(
            str(group["layers"]), group["regime"], str(group["seed"]),
            "-" if rank is None else f"{rank:.2f}",
            f"{group['best_alpha_live']:.2f} | {group['best_alpha_sim']:.2f}",
            "-" if regret is None else f"{100 * regret:.1f}",
        )  # fmt: skip
    console.print(groups)
    for name, value in compared["summary"].items():
        shown = "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
        console.print(f"{name.replace('_', ' ')}: {shown}")


def draw(compared: dict[str, Any], path: Path) -> None:
    """P99 against alpha, a panel for each depth and regime: dots live, lines surrogate."""
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys((g["layers"], g["regime"]) for g in compared["groups"]))
    columns = len(dict.fromkeys(regime for _, regime in keys)) or 1
    rows = -(-len(keys) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (layers, regime) in zip(axes, keys, strict=False):
        for group in compared["groups"]:
            if (group["layers"], group["regime"]) == (layers, regime):
                axis.plot(group["alphas"], group["live_p99_ms"], "o", color="C0", label="live")
                axis.plot(group["alphas"], group["sim_p99_ms"], "-", color="C1", label="surrogate")
        axis.set(title=f"{layers} layers, {regime}", xlabel="alpha", ylabel="P99, ms", yscale="log")
        for side in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            side("{x:g}")
    handles, labels = axes[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=130)
