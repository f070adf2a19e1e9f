"""Times the decisions of controllers on one recorded episode, apart from the simulation.

    taskset -c 1 python -m eval.bench_controllers --json docs/results/bench_controllers.json

Every controller sees the same stream of states and stats, one epoch after another, as a node would give
them. A decision is a call of `decide` that chooses anew: of Bayesian optimisation and MILP, which walk to
their choice for 12 epochs, every twelfth call. What an epoch costs on average is given beside it.
Controllers take turns, an episode each, so that other work on the machine meets all of them. Run it on
one core (`taskset`), or libraries use as many threads as there are cores.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agents import bayesian, milp
from agents.static import Static
from agents.working_set import WorkingSetRule
from eval.guard import SET_UP_LIMIT_S, ControllerFault, watched
from eval.lineup import entries, resolve, shipped_policies
from eval.names import BEST_STATIC
from eval.unit import mdp_config
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.controller import Controller
from hlem_env.errors import require
from hlem_env.machine import command, machine, write_result
from hlem_env.mdp import MdpConfig, observe
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats

CHOOSES_EVERY = {"bayesian": bayesian.WINDOW_EPOCHS, "milp": milp.WINDOW_EPOCHS}
"""Calls of `decide` from one choice to the next; 1 for all others."""
ENOUGH = {"p50": 10, "p99": 200, "p99_9": 2_000}
"""Samples below which a percentile is not given: two values beyond it at least."""
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99_9": 99.9}
PASS_LIMIT_S = 600.0
"""For one episode of a controller."""
SAMPLE_ALPHA = 50


@dataclass
class Args:
    """Times the decisions of controllers on a recorded episode."""

    controllers: tuple[str, ...] = ("all",)
    """names as eval.compare takes them; the static splits are one, oracles do not decide"""
    policies: tuple[Path, ...] = ()
    """folders of frozen policies for the name ppo; none: the shipped ones"""
    workload: str = "default/trend"
    """of the episode, which the working-set rule plays"""
    epochs: int = 240
    """of the episode"""
    seed: int = 20_000
    """of the episode"""
    decisions: int = 10_000
    """timed choices of each controller"""
    seconds: float = 120.0
    """for each controller; a slower one has fewer choices"""
    json: Path | None = None
    """file for the figures"""


@dataclass
class Timed:
    """A controller and the nanoseconds of its calls."""

    entry: str
    controller: Controller
    chooses_every: int
    choices_ns: list[int] = field(default_factory=list)
    """Of the calls that chose anew."""
    epochs: int = 0
    """Of all passes, the first one, which is not timed, left out."""
    total_ns: int = 0
    """Of all their calls."""
    fault: str | None = None

    def play(self, stream: list[EpochStats], config: MdpConfig) -> None:
        """Decide on the stream from its start, with the controller's own period."""
        period, clock = self.controller.period, time.perf_counter_ns
        self.controller.reset(0)
        for call, first in enumerate(range(0, len(stream) - period + 1, period), start=1):
            # As the runner does: fresh stats, of which the observation has been derived.
            seen = dataclasses.replace(stream[first])
            for stats in stream[first + 1 : first + period]:
                seen = seen.merge(stats)
            observation = observe(seen, config)
            before = clock()
            self.controller.decide(observation, seen)
            taken = clock() - before
            self.epochs += period
            self.total_ns += taken
            if call % self.chooses_every == 0:
                self.choices_ns.append(taken)

    def forget(self) -> None:
        """Drop what was timed."""
        self.choices_ns, self.epochs, self.total_ns = [], 0, 0

    def figures(self) -> dict[str, Any]:
        """Microseconds of a choice and of an epoch; None for a percentile of too few samples."""
        samples = len(self.choices_ns)
        decision = {
            name: round(float(np.percentile(self.choices_ns, share)) / 1000, 3)
            if samples >= ENOUGH[name]
            else None
            for name, share in PERCENTILES.items()
        }
        return {
            "entry": self.entry,
            "decides_every_epochs": self.controller.period * self.chooses_every,
            "decisions": samples,
            "decision_us": decision,
            "epoch_us_mean": round(self.total_ns / self.epochs / 1000, 3) if self.epochs else None,
        }


def record_stream(scenario: Scenario, config: MdpConfig, seed: int) -> list[EpochStats]:
    """An episode of the working-set rule, whose alpha moves with the workload."""
    runner = Runner(scenario.build(), config)
    episode = run_controller(runner, WorkingSetRule(), scenario.episode_epochs, seed)
    return [stats for stats, _ in episode]


def lineup(args: Args, scenario: Scenario) -> list[tuple[str, str, Callable[[], Controller]]]:
    """Names of `--controllers`, names for messages, and what makes the controllers."""
    policies = tuple(str(folder) for folder in args.policies) or shipped_policies()
    found: list[tuple[str, str, Callable[[], Controller]]] = []
    for name in resolve(args.controllers):
        if name == "static":
            found.append((name, name, lambda: Static(SAMPLE_ALPHA)))
        elif name not in ("design-point", "oracles"):
            made = entries((name,), scenario, SAMPLE_ALPHA, SAMPLE_ALPHA, policies)
            found += [(name, label, build) for label, build in made if label != BEST_STATIC]
    return found


def time_all(
    args: Args, scenario: Scenario, stream: list[EpochStats], config: MdpConfig
) -> dict[str, Timed | str]:
    """Every controller by name; the reason in place of one that cannot be made."""
    timed: dict[str, Timed | str] = {}
    for entry, label, build in lineup(args, scenario):
        try:
            with watched("making it", SET_UP_LIMIT_S):
                controller = build()
                name = str(controller.name)
        except ControllerFault as fault:
            timed[label] = str(fault)
            continue
        if name in timed:
            name += f" <{label}>"
        timed[name] = Timed(entry, controller, CHOOSES_EVERY.get(entry, 1))
    going = [one for one in timed.values() if isinstance(one, Timed)]
    for one in tqdm(going, desc="warming up", unit="controller", disable=None):
        _pass(one, stream, config)
        one.forget()  # libraries load and kernels compile in the first calls
    total = args.decisions * len(going)
    with tqdm(total=total, unit="decision", disable=None) as bar:
        while going := [one for one in going if not _done(one, args)]:
            for one in going:
                before = len(one.choices_ns)
                _pass(one, stream, config)
                bar.update(min(len(one.choices_ns), args.decisions) - min(before, args.decisions))
    return timed


def _done(one: Timed, args: Args) -> bool:
    if one.fault is not None or len(one.choices_ns) >= args.decisions:
        return True
    return one.total_ns >= 1e9 * args.seconds


def _pass(one: Timed, stream: list[EpochStats], config: MdpConfig) -> None:
    """One episode. The timer is set around it and not around each call, whose time it would be in."""
    try:
        with watched("an episode of decisions", PASS_LIMIT_S):
            one.play(stream, config)
    except ControllerFault as fault:
        one.fault = str(fault)


def timer_us() -> dict[str, float]:
    """What two readings of the clock take, which is in every figure."""
    clock = time.perf_counter_ns
    taken = []
    for _ in range(10_000):
        before = clock()
        taken.append(clock() - before)
    return {
        name: round(float(np.percentile(taken, share)) / 1000, 3)
        for name, share in PERCENTILES.items()
    }


def main(args: Args) -> int:
    """Record, time, print, write; 1 if a controller failed."""
    require(args.decisions >= 1, "--decisions", args.decisions, "1 or more")
    require(args.epochs >= 24, "--epochs", args.epochs, "24 or more: some choose every 12")
    require(args.seconds > 0, "--seconds", args.seconds, "above 0")
    scenario = Scenario.parse(args.workload, episode_epochs=args.epochs)
    config = mdp_config(scenario)
    torch.set_num_threads(1)
    stream = record_stream(scenario, config, args.seed)
    timed = time_all(args, scenario, stream, config)
    figures = {n: t.figures() for n, t in timed.items() if isinstance(t, Timed) and not t.fault}
    failed = {
        n: t if isinstance(t, str) else str(t.fault) for n, t in timed.items() if n not in figures
    }
    timer = timer_us()
    _print(figures, timer, args)
    for name, reason in failed.items():
        print(f"{name} failed: {reason}")
    if args.json is not None:
        payload = {
            "workload": scenario.name,
            "epochs": args.epochs,
            "requests_per_epoch": round(float(np.mean([stats.requests for stats in stream])), 1),
            "torch_threads": torch.get_num_threads(),
            "timer_us": timer,
            "controllers": figures,
            "failed": failed,
        }
        write_result(args.json, command("eval.bench_controllers"), payload)
    return 1 if failed else 0


def _print(figures: dict[str, Any], timer: dict[str, float], args: Args) -> None:
    here = machine()
    table = Table(
        title=f"{here['cpu']}, {here['cores']} cores; microseconds; the timer's"
        f" {timer['p50']:.2f} (p50) is in all",
        title_justify="left",
    )
    headings = ("controller", "decides every", "decisions", "p50", "p99", "p99.9", "mean an epoch")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "controller" else "right")
    for name, row in figures.items():
        every = row["decides_every_epochs"]
        mean = row["epoch_us_mean"]
        table.add_row(
            name,
            "epoch" if every == 1 else f"{every} epochs",
            f"{row['decisions']:,}",
            *("-" if value is None else f"{value:,.1f}" for value in row["decision_us"].values()),
            "-" if mean is None else f"{mean:,.1f}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    run_command("eval.bench_controllers", main, Args)
