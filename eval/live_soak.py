"""Load a live node for minutes or hours while alpha moves: `python -m eval.live_soak --minutes 10`.

Prints, minute by minute, resident memory, P99, requests and whether the backlog grew. What the process
needs at first (compiled kernels, the allocator's reserve, users as they become known) is there after a
few minutes; what grows after that is a leak. Ctrl-C ends it early and still writes what was measured.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.live_scenario import live_backend
from hlem_env.machine import command, write_result
from hlem_env.mdp import ACTIONS_CENTI
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Args:
    """Resident memory and P99 of a live node under long load."""

    preset: str = "cpu-small"
    """live preset, or the path of one"""
    minutes: int = 10
    """of load, after the warm-up; a line each"""
    minute_s: float = 60.0
    """seconds of one"""
    hot_share: float = 0.3
    """of Steady"""
    load: float = 0.8
    """factor on the preset's request rate"""
    kv_policy: str = "scan_resistant"
    """or lru"""
    seed: int = 1
    """of requests, warm-up and moves"""
    json: Path | None = None
    """file for the figures"""


@dataclass(frozen=True)
class Minute:
    """One minute of load."""

    resident_mb: float
    """At its end, 10^6 bytes."""
    requests: int
    p99_ms: float
    backlog: int
    """Requests that had arrived and not completed at its end."""


def resident_bytes() -> int:
    """Memory of this process that is in RAM (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def soak(args: Args, config: LiveConfig) -> list[Minute]:
    """Run; alpha takes a random step of the policy's at every epoch, within 0.1 and 0.9."""
    scenario = Scenario(
        steady_hot_share=args.hot_share,
        kv_policy=args.kv_policy,
        utilisation=config.utilisation * args.load,
    )
    backend = live_backend(scenario, config)
    rng = np.random.default_rng(args.seed)
    epochs = max(round(args.minute_s / config.epoch_seconds), 1)
    alpha, minutes = 50, []
    try:
        backend.reset(args.seed)
        backend.run(alpha, backend.warmup_s)
        for _ in tqdm(range(args.minutes), unit="min", disable=None):
            whole: EpochStats | None = None
            for _ in range(epochs):
                alpha = int(np.clip(alpha + rng.choice(ACTIONS_CENTI), 10, 90))
                stats = backend.run(alpha, config.epoch_seconds)
                whole = stats if whole is None else whole.merge(stats)
            assert whole is not None
            minutes.append(
                Minute(resident_bytes() / 1e6, whole.requests, whole.p99_ms, whole.backlog)
            )
    except KeyboardInterrupt:
        print("\nInterrupted: what was measured follows.", file=sys.stderr)
    finally:
        backend.close()
    return minutes


def main(args: Args) -> int:
    """Run, print, write."""
    require(args.minutes >= 1, "minutes", args.minutes, "1 or more")
    for name in ("load", "minute_s"):
        require(getattr(args, name) > 0, name, getattr(args, name), "above 0")
    config = LiveConfig.load(args.preset)
    minutes = soak(args, config)
    link = "" if config.emulated_link_gbps is None else ", emulated link"
    table = Table(title=f"{config.name}{link}", title_justify="left")
    for heading in ("minute", "resident MB", "requests", "P99 ms", "backlog"):
        table.add_column(heading, justify="right")
    for i, minute in enumerate(minutes):
        table.add_row(
            str(i + 1), f"{minute.resident_mb:.1f}", f"{minute.requests}",
            f"{minute.p99_ms:.1f}", f"{minute.backlog}",
        )  # fmt: skip
    Console(width=100).print(table)
    half = minutes[len(minutes) // 2 :]
    if len(half) > 1:
        grown = half[-1].resident_mb - half[0].resident_mb
        print(f"resident memory over the second half: {grown:+.1f} MB in {len(half) - 1} minutes")
    if args.json is not None:
        payload = {"preset": config.to_json(), "minutes": [asdict(minute) for minute in minutes]}
        write_result(args.json, command("eval.live_soak"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.live_soak", main, Args)
