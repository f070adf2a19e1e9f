"""How soon and how surely bursts are seen: `python -m eval.bench_burst_watch`.

Both detectors of the recovery controller watch the same episodes, with the frozen policy inside it:
Burst, whose bursts the workload labels, and Steady of every preset, where any alarm is false.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agents import smart
from eval.compare import FIRST_SEED
from eval.unit import mdp_config
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from hlem_env.mdp import TICKS_PER_EPOCH
from hlem_env.scenario import Scenario
from hlem_env.workload.regimes import PRESETS
from serving_bridge.recovery import RecoverySettings, State, Transition

DETECTORS = ("p99", "workload")


@dataclass
class Args:
    """Counts bursts seen, their delay, and false alarms, for both detectors."""

    seeds: int = 16
    """episodes of each workload"""
    epochs: int = 240
    """of an episode"""
    jobs: int = 2
    """processes"""
    json: Path | None = None
    """file for the figures"""


@dataclass(frozen=True)
class Episode:
    """What a detector did in one episode."""

    bursts: int
    delays: tuple[float, ...]
    """Epochs from the burst's first request to the alarm, of the bursts that were seen."""
    false_alarms: int
    quiet_epochs: int


def alarms_of(transitions: list[Transition]) -> list[float]:
    """Times of alarms, epochs since the episode's start.

    A transition of decision d comes after d epochs, one of a tick so many ticks later.
    """
    return [t.epoch + t.tick / TICKS_PER_EPOCH for t in transitions if t.after is State.BURST]


def judge(alarms: list[float], burst: NDArray[np.int64]) -> Episode:
    """Alarms against the labels [epochs], 0 between bursts.

    A burst is seen by the first alarm from its start to the end of the epoch after it. Alarms that no
    burst explains are false.
    """
    delays, explained = [], set()
    numbers = [number for number in np.unique(burst) if number]
    for number in numbers:
        epochs = np.flatnonzero(burst == number)
        begin, end = float(epochs[0]), float(epochs[-1]) + 2.0
        found = [alarm for alarm in alarms if begin < alarm <= end]
        if found:
            delays.append(found[0] - begin)
            explained.update(found)
    quiet = int((burst == 0).sum())
    return Episode(len(numbers), tuple(delays), len(set(alarms) - explained), quiet)


def watch(scenario: Scenario, detector: str, seed: int) -> Episode:
    """One episode."""
    allocator = smart.build(recovery=RecoverySettings(detector=detector))
    backend = scenario.build()
    runner = Runner(backend, mdp_config(scenario))
    for _ in run_controller(runner, allocator, scenario.episode_epochs, seed):
        pass
    path = backend.workload.path  # type: ignore[attr-defined]
    return judge(alarms_of(allocator.transitions), path.burst)


def summarise(episodes: list[Episode], epochs: int) -> dict[str, Any]:
    """Figures of one workload and detector."""
    bursts = sum(episode.bursts for episode in episodes)
    delays = [delay for episode in episodes for delay in episode.delays]
    false = sum(episode.false_alarms for episode in episodes)
    quiet = sum(episode.quiet_epochs for episode in episodes)
    return {
        "bursts": bursts,
        "seen": len(delays),
        "share_seen": len(delays) / bursts if bursts else None,
        "median_delay_epochs": float(np.median(delays)) if delays else None,
        "largest_delay_epochs": max(delays) if delays else None,
        "false_alarms": false,
        "quiet_epochs": quiet,
        "false_alarms_per_240_quiet_epochs": 240 * false / quiet,
        "episode_epochs": epochs,
    }


def main(args: Args) -> None:
    """Run, print, write."""
    require(args.seeds >= 1, "seeds", args.seeds, "1 or more")
    require(args.epochs >= 12, "epochs", args.epochs, "12 or more")
    require(args.jobs >= 1, "jobs", args.jobs, "1 or more")
    workloads = [f"{preset}/steady" for preset in PRESETS]
    workloads += [f"{preset}/burst" for preset in PRESETS] + ["default/trend"]
    seeds = range(FIRST_SEED, FIRST_SEED + args.seeds)
    rows: list[dict[str, Any]] = []
    table = Table(title=f"{args.seeds} seeds of {args.epochs} epochs", title_justify="left")
    headings = ("workload", "detector", "bursts seen", "median delay, epochs", "largest",
                "false alarms in 240 quiet epochs")  # fmt: skip
    for heading in headings:
        table.add_column(heading)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        for workload in workloads:
            scenario = Scenario.parse(workload, episode_epochs=args.epochs)
            for detector in DETECTORS:
                n = len(seeds)
                episodes = list(pool.map(watch, [scenario] * n, [detector] * n, seeds))
                row = summarise(episodes, args.epochs)
                rows.append({"workload": workload, "detector": detector, **row})
                delay, largest = row["median_delay_epochs"], row["largest_delay_epochs"]
                table.add_row(
                    workload, detector,
                    f"{row['seen']} of {row['bursts']}" if row["bursts"] else "-",
                    "-" if delay is None else f"{delay:.1f}",
                    "-" if largest is None else f"{largest:.1f}",
                    f"{row['false_alarms_per_240_quiet_epochs']:.2f} ({row['false_alarms']} in all)",
                )  # fmt: skip
    Console(width=120).print(table)
    if args.json is not None:
        payload = {
            "seeds": list(seeds),
            "settings": {name: asdict(RecoverySettings(detector=name)) for name in DETECTORS},
            "rows": rows,
        }
        write_result(args.json, command("eval.bench_burst_watch"), payload)


if __name__ == "__main__":
    run_command("eval.bench_burst_watch", main, Args)
