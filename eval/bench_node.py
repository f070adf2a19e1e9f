"""Times a live node as a whole: `python -m eval.bench_node --preset cpu-small --json FILE`.

Three parts: batches of single requests of every kind from an idle device to their completion; moves of
alpha on the host; and what refill does to requests that are served meanwhile, under open-loop load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from eval.node_timing import MoveTime, Service, Visitors, time_moves, time_services
from eval.refill_under_load import Outcome, Plan, measure_refill
from eval.statistics import Estimate
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.machine import command, machine, write_result


@dataclass
class Args:
    """Service times, moves of alpha, and P99 while refill runs."""

    preset: str = "cpu-small"
    """live preset, or the path of one"""
    json: Path | None = None
    """file for the figures"""
    alpha: float = 0.3
    """embedding share from which alpha moves up; a multiple of 0.01, at most 0.9"""
    warm_requests: int = 100
    """users who come once, before anything is timed"""
    repeats: int = 40
    """timed batches of each kind"""
    move_repeats: int = 20
    """timed moves of each size in each direction"""
    utilisation: float = 0.6
    """share of time that the load of the last part keeps the node busy while alpha stays"""
    hot_share: float = 0.3
    """of its requests, Steady"""
    refill_moves: int = 30
    """moves up by 0.10 under it, for each of: no refill, throttled, unthrottled"""
    warm_s: float = 8.0
    """seconds of load before them, twice: once to set the rate"""
    settle_s: float = 0.6
    """seconds between a move down and the next up"""
    observe_s: float = 0.5
    """seconds after each move up"""
    pause: bool = False
    """let throttled refill pause while P99 is near the SLO, as the node does in service"""
    kv_policy: str = "scan_resistant"
    """or lru"""
    seed: int = 1
    """of requests and rows"""

    def __post_init__(self) -> None:
        centi = round(100 * self.alpha)
        require(
            abs(100 * self.alpha - centi) < 1e-6 and 0 <= centi <= 90,
            "alpha",
            self.alpha,
            "a multiple of 0.01 from 0 to 0.9",
        )
        for name in ("warm_requests", "repeats", "move_repeats", "refill_moves"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("utilisation", "hot_share"):
            require(0 < getattr(self, name) < 1, name, getattr(self, name), "above 0, below 1")
        for name in ("warm_s", "settle_s", "observe_s"):
            require(0 < getattr(self, name) <= 600, name, getattr(self, name), "above 0 to 600")

    @property
    def plan(self) -> Plan:
        """Of the part under load."""
        low = round(100 * self.alpha)
        return Plan(
            self.utilisation, self.hot_share, low, low + 10, self.refill_moves, self.warm_s,
            self.settle_s, self.observe_s, self.pause, self.seed,
        )  # fmt: skip


def main(args: Args) -> int:
    """Measure, print, write."""
    config = LiveConfig.load(args.preset)
    console = Console(width=130)
    node = LiveNode(config, args.kv_policy)
    try:
        where = str(machine()["cpu"])
        if node.device.type == "cuda":
            where = torch.cuda.get_device_name(node.device)
        link = "" if config.emulated_link_gbps is None else ", emulated link"
        console.print(f"{config.name} on {where}{link}")
        visitors = Visitors(node, round(100 * args.alpha), args.seed)
        for _ in range(args.warm_requests):
            visitors.execute(visitors.strangers(1))
        services = time_services(visitors, args.repeats)
        print_services(services, node, console)
        moves = time_moves(visitors, round(100 * args.alpha), args.move_repeats)
        print_moves(moves, console)
        outcome = measure_refill(node, args.plan, first_rate(services, args))
        print_outcome(outcome, args, console)
    finally:
        node.close()
    if args.json is not None:
        payload = {
            "device": where,
            "emulated_link": config.emulated_link_gbps is not None,
            "preset": config.to_json(),
            "services": [asdict(row) for row in services],
            "moves": [asdict(row) for row in moves],
            "refill": outcome.to_json(),
        }
        write_result(args.json, command("eval.bench_node"), payload)
    return 0


def first_rate(services: list[Service], args: Args) -> float:
    """Requests a second at which single requests of these times would keep the node so busy."""
    time_ms = {row.kind: row.p50_ms for row in services if not row.waiting}
    mean_ms = args.hot_share * time_ms["hot"] + (1 - args.hot_share) * time_ms["cold"]
    return 1000.0 * args.utilisation / mean_ms


def print_services(rows: list[Service], node: LiveNode, console: Console) -> None:
    """A line for each kind of batch."""
    table = Table(title="From an idle device to completion, host included", title_justify="left")
    for heading in ("batch", "next one known", "samples", "p50 ms", "p90 ms", "history", "reused %",
                    "rows hit %"):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "batch" else "right")
    for row in rows:
        table.add_row(
            row.kind, "yes" if row.waiting else "no", str(row.samples), f"{row.p50_ms:.2f}",
            f"{row.p90_ms:.2f}", f"{row.history_tokens:.0f}", f"{100 * row.reused:.1f}",
            f"{100 * row.rows_hit:.1f}",
        )  # fmt: skip
    console.print(table)
    if node.device.type == "cpu":
        console.print("Rows of the next batch are fetched ahead on a GPU only.")


def print_moves(rows: list[MoveTime], console: Console) -> None:
    """A line for each size and direction."""
    table = Table(title="Moves of alpha, host time, both caches full before", title_justify="left")
    for heading in (
        "alpha by",
        "samples",
        "median ms",
        "max ms",
        "entries evicted",
        "rows evicted",
    ):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row.step_centi / 100:+.2f}", str(row.samples), f"{row.median_ms:.2f}",
            f"{row.max_ms:.2f}", f"{row.evicted_entries:.1f}", f"{row.evicted_rows:,.0f}",
        )  # fmt: skip
    console.print(table)


def print_outcome(outcome: Outcome, args: Args, console: Console) -> None:
    """A line for each arm and window, then what the arms cost."""
    title = (
        f"Requests while refill runs, {outcome.requests_per_s:.1f}/s, busy"
        f" {100 * outcome.utilisation:.0f} %, moves from {args.alpha:.2f} to {args.alpha + 0.1:.2f}"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("refill", "arrived", "requests", "P50 ms", "P99 ms"):
        table.add_column(heading, justify="left" if heading in ("refill", "arrived") else "right")
    arrived = {
        "before": "as long before the move",
        "during": "while it ran",
        "no refill": "as long after moves without refill",
    }
    for row in outcome.windows:
        table.add_row(
            row.arm, arrived[row.window], str(row.requests), shown(row.p50_ms), shown(row.p99_ms)
        )
    console.print(table)
    for arm, over_before in outcome.p99_over_before.items():
        console.print(
            f"{arm}: P99 {shown(over_before, 2)} times that before,"
            f" {shown(outcome.p99_over_no_refill[arm], 2)} times that without refill;"
            f" {outcome.refill_mb[arm]:.1f} MB in {outcome.refill_ms[arm]:.0f} ms,"
            f" {100 * outcome.finished[arm]:.0f} % done within {args.observe_s:g} s",
            soft_wrap=True,
        )
    console.print(f"95 % intervals over {args.refill_moves} moves each.")
    for name, (median, most) in outcome.move_ms.items():
        console.print(f"Moves {name}, host: median {median:.2f} ms, largest {most:.2f} ms")


def shown(estimate: Estimate | None, digits: int = 1) -> str:
    """Value and interval."""
    if estimate is None:
        return "-"
    numbers: Iterable[float] = (estimate.value, estimate.low, estimate.high)
    value, low, high = (f"{number:.{digits}f}" for number in numbers)
    return f"{value} [{low}, {high}]"


if __name__ == "__main__":
    run_command("eval.bench_node", main, Args)
