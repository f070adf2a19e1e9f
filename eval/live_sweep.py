"""Sweep alpha over hot shares on a live node: `python -m eval.live_sweep --preset cpu-small`.

Every request is executed. Prints P99, hit rates and utilisation, and the best alpha per hot share. With
`--workload trace:FILE` the requests are recorded ones, the same for every alpha, and the hot share is theirs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.live.serving import LiveBackend
from hlem_env.live_scenario import live_workload
from hlem_env.machine import command, write_result
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats

DRAINED_EPOCHS = 0.1
"""A queue whose oldest request is younger than this is no longer another alpha's."""


@dataclass
class Args:
    """P99 of a live node by alpha and hot share."""

    preset: str = "cpu-small"
    """live preset, or the path of one"""
    workload: str = "steady"
    """steady, PRESET/steady, or trace:FILE"""
    trace_counts: str | None = None
    """per-user counts for the trace's synthetic base histories"""
    on_bad_line: Literal["raise", "skip"] = "raise"
    """a bad line of the trace is an error, or is left out and counted"""
    hot_shares: tuple[float, ...] = (0.1, 0.3, 0.6)
    """of Steady; a trace has its own"""
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """embedding shares, multiples of 0.01"""
    epoch_seconds: float | None = None
    """instead of the preset's"""
    load: float = 1.0
    """factor on the preset's request rate"""
    settle_epochs: int = 8
    """after each move, not measured; up to twice as many while a queue is left"""
    epochs: int = 20
    """measured at each alpha"""
    seed: int = 1
    """of requests and warm-up"""
    kv_policy: str = "scan_resistant"
    """or lru, laru, hf, fpb"""
    row_policy: str = "lru"
    """of the embedding cache; or scan_resistant, laru, hf, fpb"""
    json: Path | None = None
    """file for the figures"""
    plot: Path | None = None
    """PNG file: P99 against alpha, a line for each hot share"""


@dataclass(frozen=True)
class Row:
    """One alpha at one hot share."""

    hot_share: float
    """Steady's; a trace's as measured while warming up."""
    alpha: float
    requests: int
    requests_per_s: float
    p99_ms: float
    """Mean of the epochs' P99."""
    p99_all_ms: float
    """Of all requests of all epochs together."""
    mean_service_ms: float
    qos: float
    kv_hit: float
    emb_hit: float
    working_set: float
    utilisation: float
    saturated: bool
    """Utilisation above 0.95, or a backlog that grew."""


def sweep(args: Args, config: LiveConfig, node: LiveNode, speed: float) -> list[Row]:
    """All rows, hot share by hot share: caches are emptied between hot shares, not between alphas.

    A trace starts over for every alpha, with empty caches, so that all serve the same part of it.
    """
    rows = []
    scenarios = cells(args, config)
    with tqdm(total=len(scenarios) * len(args.alphas), unit="cell", disable=None) as bar:
        for scenario in scenarios:
            backend = LiveBackend(
                live_workload(scenario, config, node.entries_in_pool, speed), node
            )
            hot_share = scenario.steady_hot_share
            for alpha in args.alphas:
                if scenario.trace is not None or alpha == args.alphas[0]:
                    backend.reset(args.seed)
                    warm = backend.run(round(100 * alpha), backend.warmup_s)
                    hot_share = warm.hot_share if hot_share is None else hot_share
                assert hot_share is not None
                rows.append(measure(backend, hot_share, alpha, args, config))
                bar.update()
    return rows


def cells(args: Args, config: LiveConfig) -> list[Scenario]:
    """Steady at each hot share, or the trace."""
    scenario = Scenario.parse(
        args.workload,
        kv_policy=args.kv_policy,
        utilisation=config.utilisation * args.load,
        trace_counts=args.trace_counts,
        trace_on_bad_line=args.on_bad_line,
    )
    if scenario.trace is not None:
        return [scenario]
    require(scenario.regime == "steady", "workload", args.workload, "a Steady, or trace:FILE")
    return [replace(scenario, steady_hot_share=share) for share in args.hot_shares]


def measure(backend: Any, hot_share: float, alpha: float, args: Args, config: LiveConfig) -> Row:
    """Move to an alpha, let the caches settle, and measure."""
    centi, seconds = round(100 * alpha), config.epoch_seconds
    before: EpochStats = backend.run(centi, args.settle_epochs * seconds)
    for _ in range(args.settle_epochs):  # of the alpha before, or of cold caches
        if before.backlog_age_s < DRAINED_EPOCHS * seconds:
            break
        before = backend.run(centi, seconds)
    epochs: list[EpochStats] = [backend.run(centi, seconds) for _ in range(args.epochs)]
    whole = epochs[0]
    for epoch in epochs[1:]:
        whole = whole.merge(epoch)
    grew = whole.backlog > before.backlog + 0.2 * whole.requests
    return Row(
        hot_share=hot_share,
        alpha=alpha,
        requests=whole.requests,
        requests_per_s=whole.requests / whole.duration_s,
        p99_ms=float(np.mean([epoch.p99_ms for epoch in epochs])),
        p99_all_ms=whole.p99_ms,
        mean_service_ms=whole.mean_service_ms,
        qos=whole.qos(config.slo_ms),
        kv_hit=whole.kv_hit,
        emb_hit=whole.emb_hit,
        working_set=float(np.mean([epoch.working_set for epoch in epochs])),
        utilisation=whole.utilisation,
        saturated=whole.utilisation > 0.95 or grew,
    )


def print_table(rows: list[Row], config: LiveConfig, console: Console) -> None:
    """A line a cell; the best alpha of each hot share by P99 is marked."""
    link = "" if config.emulated_link_gbps is None else ", emulated link"
    table = Table(title=f"{config.name}{link}, SLO {config.slo_ms:g} ms", title_justify="left")
    for heading in ("hot share", "alpha", "requests/s", "P99 ms", "of all", "service ms", "QoS %",
                    "KV hit", "emb. hit", "working set", "busy %"):  # fmt: skip
        table.add_column(heading, justify="right")
    for row in rows:
        best = row.p99_ms == min(r.p99_ms for r in rows if r.hot_share == row.hot_share)
        mark = " *" if best else "  "
        table.add_row(
            f"{row.hot_share:.2f}", f"{row.alpha:.2f}{mark}", f"{row.requests_per_s:.1f}",
            f"{row.p99_ms:.1f}", f"{row.p99_all_ms:.1f}", f"{row.mean_service_ms:.2f}",
            f"{100 * row.qos:.1f}", f"{row.kv_hit:.3f}", f"{row.emb_hit:.3f}",
            f"{row.working_set:.2f}", f"{100 * row.utilisation:.0f}{'!' if row.saturated else ''}",
        )  # fmt: skip
    console.print(table)
    console.print("* lowest P99 of its hot share.  ! saturated: no comparison")


def draw(rows: list[Row], config: LiveConfig, path: Path) -> None:
    """P99 against alpha."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for hot_share in dict.fromkeys(row.hot_share for row in rows):
        part = [row for row in rows if row.hot_share == hot_share]
        axes.plot([r.alpha for r in part], [r.p99_ms for r in part], "o-", label=f"{hot_share:.2f}")
    axes.axhline(config.slo_ms, color="grey", linestyle=":", label="SLO")
    link = "" if config.emulated_link_gbps is None else " (emulated link)"
    axes.set(xlabel="alpha", ylabel="P99, ms", title=f"{config.name}{link}")
    axes.legend(title="hot share")
    figure.savefig(path, dpi=150)


def main(args: Args) -> int:
    """Sweep, print, write."""
    config = LiveConfig.load(args.preset)
    if args.epoch_seconds is not None:
        config = replace(config, epoch_seconds=args.epoch_seconds)
    require(args.epochs >= 1, "epochs", args.epochs, "1 or more")
    require(args.settle_epochs >= 1, "settle_epochs", args.settle_epochs, "1 or more")
    require(args.load > 0, "load", args.load, "above 0")
    for alpha in args.alphas:
        require(0 <= alpha <= 1, "alphas", alpha, "0 to 1")
    node = LiveNode(config, args.kv_policy, row_policy=args.row_policy)
    try:
        probe_ms = node.probe_ms()
        rows = sweep(args, config, node, config.probe_ms / probe_ms)
    finally:
        node.close()
    print_table(rows, config, Console(width=140))
    if args.plot is not None:
        draw(rows, config, args.plot)
    if args.json is not None:
        payload = {
            "preset": config.to_json(),
            "probe_ms": probe_ms,
            "emulated_link": config.emulated_link_gbps is not None,
            "rows": [asdict(row) for row in rows],
        }
        write_result(args.json, command("eval.live_sweep"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.live_sweep", main, Args)
