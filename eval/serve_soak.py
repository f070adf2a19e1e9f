"""Load a served node for an hour and watch it: `python -m eval.serve_soak --minutes 60`.

The node is a process of its own and is asked over HTTP, as by `eval.load_generator`, with one burst in the
middle. Minute by minute: its memory, its threads and open files, what its folder of data takes,
and how requests ended. `--burst-load 10 --burst-seconds 60` sends ten times the load for a minute. Ctrl-C
ends it early and still writes what was measured.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from eval import load_generator
from eval.load_generator import Generator, stop_on_signal
from eval.load_totals import OUTCOMES, Totals
from eval.node_process import node_process
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result

MEBI: Final = 2**20
SHIPPED: Final = "agents/pretrained/working_set"


@dataclass
class Args:
    """A served node under load for long."""

    policy: Path = Path(__file__).resolve().parents[1] / SHIPPED
    """folder of the policy that decides"""
    preset: str = "cpu-small"
    """of the node"""
    minutes: int = 60
    """of load, a line each"""
    utilisation: float = 0.5
    """of the node outside the burst"""
    rate: float | None = None
    """requests a second instead"""
    burst_seconds: float = 20.0
    """in the middle; 0: none"""
    burst_load: float = 1.25
    """factor on the rate in the burst"""
    workload: str = "steady"
    """a regime, PRESET/REGIME, or trace:FILE"""
    output: Path = Path("runs/serve-soak")
    """folder of the node's data and its log"""
    json: Path | None = None
    """file for the figures"""


@dataclass(frozen=True)
class Minute:
    """One minute, at its end or in it."""

    resident_mib: float
    own_mib: float
    """Of it, what is no file's: the store's file is mapped, so that it counts in the former as it grows."""
    threads: int
    open_files: int
    data_mib: float
    """What histories, log and adapter's state take on disk."""
    sent: int
    served: int
    refused: int
    failed: int
    lost: int


def look(pid: int, data: Path, total: Totals, before: Totals) -> Minute:
    """The node's process and folder now, and how requests ended since `before`."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return Minute(
        resident_mib=int(fields["VmRSS"].split()[0]) / 1024,
        own_mib=int(fields["RssAnon"].split()[0]) / 1024,
        threads=int(fields["Threads"]),
        open_files=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        data_mib=sum(p.stat().st_blocks * 512 for p in data.rglob("*") if p.is_file()) / MEBI,
        sent=total.sent - before.sent,
        **{name: total.outcomes[name] - before.outcomes[name] for name in OUTCOMES},
    )


async def soak(args: Args, load: load_generator.Args, pid: int) -> tuple[Totals, list[Minute]]:
    """Load the node and look at it once a minute."""
    stop = stop_on_signal()
    generator, minutes = Generator(load), list[Minute]()

    async def watch() -> None:
        before = Totals()
        while len(minutes) < args.minutes:
            await asyncio.sleep(1.0)
            if generator.passed_s >= 60.0 * (len(minutes) + 1) - 1.0:
                total = generator.total
                minutes.append(look(pid, args.output / "node", total, before))
                before = Totals()
                before.sent, before.outcomes = total.sent, total.outcomes.copy()

    watching = asyncio.create_task(watch())
    total = await generator.run(stop)
    watching.cancel()
    return total, minutes


def print_table(minutes: list[Minute]) -> None:
    """A line a minute."""
    table = Table()
    for heading in (
        "minute",
        "resident MiB",
        "own MiB",
        "threads",
        "files",
        "data MiB",
        "sent",
        *OUTCOMES,
    ):
        table.add_column(heading, justify="right")
    for i, minute in enumerate(minutes):
        table.add_row(
            str(i + 1), f"{minute.resident_mib:.1f}", f"{minute.own_mib:.1f}",
            str(minute.threads), str(minute.open_files), f"{minute.data_mib:.1f}", str(minute.sent),
            *(str(getattr(minute, name)) for name in OUTCOMES),
        )  # fmt: skip
    Console(width=110).print(table)


def main(args: Args) -> int:
    """Run, print, write."""
    require(1 <= args.minutes <= 10_000, "minutes", args.minutes, "1 to 10,000")
    arguments = [
        "--policy", str(args.policy), "--preset", args.preset, "--data", str(args.output / "node"),
        "--port", "0", "--grpc-port", "0",
    ]  # fmt: skip
    with node_process(arguments, args.output / "node.log") as node:
        load = load_generator.Args(
            url=node.url, workload=args.workload, preset=args.preset, seconds=60.0 * args.minutes,
            utilisation=args.utilisation, rate=args.rate, burst_seconds=args.burst_seconds,
            burst_load=args.burst_load, report_seconds=60.0,
        )  # fmt: skip
        total, minutes = asyncio.run(soak(args, load, node.pid))
    print_table(minutes)
    half = [minute.own_mib for minute in minutes[len(minutes) // 2 :]]
    if len(half) > 2:
        slope = float(np.polyfit(np.arange(len(half)), half, 1)[0])
        print(f"own memory over the second half: {slope:+.3f} MiB a minute")
    if args.json is not None:
        payload: dict[str, Any] = load_generator.result(load, total)
        payload["minutes"] = [asdict(minute) for minute in minutes]
        write_result(args.json, command("eval.serve_soak"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.serve_soak", main, Args)
