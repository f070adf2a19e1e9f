"""How often the rollback guard is wrong, how fast it is right, and what the loop costs.

`python -m eval.bench_guards --json FILE`. On the surrogate, through the whole control loop:

    allocator        Steady, as served: any rollback is a false alarm
    to and fro       Steady at two splits whose P99 is the same within a few percent, changed every five
                     epochs: any rollback is a false alarm
    planted          one change to a bad split that then stays: the epochs until it is taken back
    dwell            P99 of the allocator by the least epochs between changes
    cost             microseconds of `tick` and `epoch`, with adapter and log beside them
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agents import smart
from agents.forecast import PRETRAINED
from eval.bench_allocator import epochs
from eval.served_surrogate import Node, config_of
from hlem_env.command_line import run_command
from hlem_env.controller import Decision
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from hlem_env.mdp import TICKS_PER_EPOCH
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests
from serving_bridge.adapter import AdapterSettings
from serving_bridge.control_loop import ControlLoop, ControlSettings, Served
from serving_bridge.epoch_log import EpochLog
from serving_bridge.guards import GuardSettings
from serving_bridge.policy import FrozenPolicy
from serving_bridge.rollback_guard import RollbackSettings

HARMLESS = {"default": (48, 64), "taobao": (44, 56), "video-games": (44, 56), "books": (26, 36)}
"""By preset: two splits (hundredths) about its best static one."""
PLANTED = {"default": (56, 10), "books": (34, 90)}
"""A good split and a bad one."""
PLANTED_AT = 20
LEARN_LITTLE = AdapterSettings(steps=4)
"""The simulation's adapter learns between decisions: 64 steps would be nine tenths of the time."""


@dataclass
class Args:
    """Measure the guards on the surrogate, and the loop's cost."""

    seeds: int = 16
    """episodes of each kind and preset"""
    epochs: int = 240
    """of an episode"""
    calls: int = 10_000
    """timed ticks; a tenth as many epochs"""
    window: int = RollbackSettings.window
    """epochs compared on either side of a change"""
    p99_margin: float = RollbackSettings.p99_margin
    """rise of P99 that is tolerated"""
    sigmas: float = RollbackSettings.sigmas
    """deviations beyond it"""
    service_sigmas: float = RollbackSettings.service_sigmas
    """deviations by which the service time must have risen"""
    parts: tuple[str, ...] = ("false", "planted", "dwell", "cost")
    """which measurements"""
    json: Path | None = None
    """write the results here"""


def settings_of(args: Args, **guards: Any) -> ControlSettings:
    """The loop's settings with the guard's from the command line."""
    rollback = RollbackSettings(
        window=args.window, p99_margin=args.p99_margin, sigmas=args.sigmas,
        service_sigmas=args.service_sigmas,
    )  # fmt: skip
    return ControlSettings(
        background=False, adapter=LEARN_LITTLE, guards=GuardSettings(rollback=rollback, **guards)
    )


def loop_of(args: Args, scenario: Scenario, **guards: Any) -> ControlLoop:
    """A loop around the shipped policy for a node of the scenario."""
    policy = FrozenPolicy.load(PRETRAINED / smart.SHIPPED)
    return ControlLoop(policy, config_of(scenario), settings_of(args, **guards))


def scripted(loop: ControlLoop, alpha_of: Callable[[int], int]) -> None:
    """Have decision number n, from 0, be `alpha_of(n)` in place of the allocator's."""
    count = itertools.count()

    def decide(observation: object, stats: EpochStats) -> Decision:
        return Decision(alpha_of(next(count)), "scripted")

    loop.allocator.decide = decide  # type: ignore[method-assign]


def false_alarms(args: Args) -> list[dict[str, Any]]:
    """Rollbacks of sound services."""
    rows = []
    for preset, (low, high) in HARMLESS.items():
        scenario = Scenario.parse(f"{preset}/steady")
        for kind in ("allocator", "to and fro"):
            alarms = 0
            p99s: list[list[float]] = [[], []]
            for seed in range(args.seeds):
                loop = loop_of(args, scenario)
                if kind == "to and fro":
                    scripted(loop, lambda n, a=low, b=high: b if n // 5 % 2 else a)  # type: ignore[misc]
                for record in Node(scenario, loop, seed).epochs(args.epochs, ticks=False):
                    alarms += "rolled back" in record.held
                    p99s[record.alpha_centi > (low + high) // 2].append(record.p99_ms)
            count = args.seeds * args.epochs
            rows.append(
                {
                    "preset": preset, "kind": kind, "epochs": count, "alarms": alarms,
                    "per_1000": 1000 * alarms / count,
                    "ln_p99_deviation": float(np.std(np.log(p99s[0] + p99s[1]))),
                    "p99_ms": [float(np.mean(p)) if p else None for p in p99s],
                }
            )  # fmt: skip
    return rows


def planted(args: Args) -> list[dict[str, Any]]:
    """Epochs until a bad change is taken back."""
    rows = []
    for preset, (good, bad) in PLANTED.items():
        scenario = Scenario.parse(f"{preset}/steady")
        delays: list[int | None] = []
        p99s: list[list[float]] = [[], []]
        for seed in range(4 * args.seeds):
            loop = loop_of(args, scenario)
            scripted(loop, lambda n, a=good, b=bad: a if n < PLANTED_AT else b)  # type: ignore[misc]
            delay = None
            for record in Node(scenario, loop, 1000 + seed).epochs(PLANTED_AT + 60, ticks=False):
                p99s[record.alpha_centi == bad].append(record.p99_ms)
                if "rolled back" in record.held:
                    delay = record.epoch - PLANTED_AT
                    break
            delays.append(delay)
        found = np.array([d for d in delays if d is not None])
        rows.append(
            {
                "preset": preset, "from_centi": good, "to_centi": bad, "planted": len(delays),
                "rolled_back": int(found.size),
                "p99_ms": [float(np.mean(p)) for p in p99s],
                "delay_epochs_median": float(np.median(found)),
                "delay_epochs_p90": float(np.percentile(found, 90)),
            }
        )  # fmt: skip
    return rows


def dwell(args: Args) -> list[dict[str, Any]]:
    """Mean P99 of the allocator by the dwell time, on the same requests."""
    rows = []
    for regime, epochs_ in itertools.product(("steady", "trend", "burst"), (0, 1, 2, 3)):
        scenario = Scenario.parse(regime)
        p99: list[float] = []
        moved = 0
        for seed in range(max(args.seeds // 4, 1)):
            loop = loop_of(args, scenario, dwell_epochs=epochs_)
            for record in Node(scenario, loop, 2000 + seed).epochs(args.epochs):
                p99.append(record.p99_ms)
                moved += record.next_alpha_centi != record.alpha_centi
        rows.append(
            {"regime": regime, "dwell_epochs": epochs_, "p99_ms": float(np.mean(p99)),
             "changes_per_epoch": moved / len(p99)}
        )  # fmt: skip
    return rows


def cost(args: Args) -> dict[str, Any]:
    """Microseconds of each call, by the wall and of the thread's own, adapter and log beside it."""
    rng = np.random.default_rng(1)
    scenario = Scenario.parse("steady")
    config = config_of(scenario)
    whole = epochs(rng, 64, 1100)
    ticks = epochs(rng, 64, 1100 // TICKS_PER_EPOCH)
    times: dict[str, list[tuple[int, int]]] = {"tick": [], "epoch": []}
    with tempfile.TemporaryDirectory() as folder:
        loop = ControlLoop(
            FrozenPolicy.load(PRETRAINED / smart.SHIPPED), config,
            ControlSettings(guards=GuardSettings()), state=Path(folder, "state"),
            log=EpochLog(Path(folder, "log"), config),
        )  # fmt: skip
        alpha_centi = loop.initial_alpha_centi
        for i in range(args.calls):
            stats = _later(ticks[i % 64], i, alpha_centi)
            alpha_centi = _timed(times["tick"], loop.tick, stats) or alpha_centi
            if i % TICKS_PER_EPOCH == TICKS_PER_EPOCH - 1:
                stats = _later(whole[i % 64], i, alpha_centi)
                served = Served(_requests(stats), 0)
                alpha_centi = _timed(times["epoch"], loop.epoch, stats, served)
                time.sleep(0.05)  # an epoch lasts seconds: what it sets off is over before the next
        loop.close()
    return {name: _summary(np.array(values)) for name, values in times.items()}


def _later(stats: EpochStats, number: int, alpha_centi: int) -> EpochStats:
    return replace(stats, arrival_s=stats.arrival_s + 5.0 * number, alpha_target=alpha_centi / 100)


def _requests(stats: EpochStats) -> Requests:
    n = stats.requests
    length = np.full(n, 10_000, np.int32)
    return Requests(stats.arrival_s, np.arange(n), length, length)


def _timed(into: list[tuple[int, int]], call: Callable[..., Any], *arguments: Any) -> Any:
    wall, own = time.perf_counter_ns(), time.thread_time_ns()
    found = call(*arguments)
    into.append((time.perf_counter_ns() - wall, time.thread_time_ns() - own))
    return found


def _summary(times_ns: NDArray[np.int64]) -> dict[str, float]:
    late = times_ns[len(times_ns) // 20 :] / 1000.0
    wall, own = (np.percentile(column, [50, 99]).tolist() for column in late.T)
    return {
        "calls": len(late), "p50_us": wall[0], "p99_us": wall[1],
        "own_p50_us": own[0], "own_p99_us": own[1],
    }  # fmt: skip


def _show(name: str, rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=name)
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=150).print(table)


def main(args: Args) -> None:
    """Measure, print, write."""
    require(1 <= args.seeds <= 10_000, "--seeds", args.seeds, "1 to 10,000")
    logging.getLogger("serving_bridge").setLevel(logging.ERROR)
    results: dict[str, Any] = {}
    for name, measure in (("false", false_alarms), ("planted", planted), ("dwell", dwell)):
        if name in args.parts:
            results[name] = measure(args)
            _show(name, results[name])
    if "cost" in args.parts:
        results["cost"] = cost(args)
        _show("cost", [{"call": name, **row} for name, row in results["cost"].items()])
    if args.json is not None:
        write_result(args.json, command("eval.bench_guards"), results)


if __name__ == "__main__":
    run_command("eval.bench_guards", main, Args)
