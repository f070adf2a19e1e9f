"""Whether the online adapter mends a mismatch: `python -m eval.bench_adapter`.

Workloads and nodes that the frozen policy was not trained for, judged over the second half of the
episode. Beside the adapter stand constant residuals, the best of them chosen in hindsight: about what
a residual within the bound can gain at all. `--bounds` adds, on the same requests, what knows them all (the
best static split and the reachable oracle with its steps of 0.06) and the working-set rule: how much of the
regret any policy could remove.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agents.forecast import PRETRAINED
from agents.smart import SHIPPED
from agents.working_set import WorkingSetRule
from eval.compare import FIRST_SEED
from eval.statistics import Estimate, ratio_of_means
from eval.unit import mdp_config
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.controller import Controller
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from hlem_env.scenario import Scenario
from hlem_env.surrogate.optimum import alpha_star, hold_all, reachable, record_episode
from serving_bridge.adapted_step import Memory, Proposed, on_grid
from serving_bridge.adapter import FEATURES, AdapterSettings, OnlineAdapter
from serving_bridge.allocator import AdaptedPolicy
from serving_bridge.policy import FrozenPolicy

MISMATCHES: dict[str, dict[str, Any]] = {
    "population x2": {"population_factor": 2.0},
    "14k tokens": {"mean_history_tokens": 14_000.0},
    "25 tables": {"tables": 25},
    "half gather": {"gather_scale": 0.5},
    "a100": {"hardware": "a100"},
    "books": {"preset": "books"},
    "none": {},
}
"""Held out of training, and the default beside them."""
REGIMES = ("steady", "trend")
CONSTANTS = (-0.02, -0.01, -0.005, 0.005, 0.01, 0.02)


@dataclass
class Args:
    """Compares the policy with and without the adapter where the policy does not fit."""

    seeds: int = 8
    """episodes of each"""
    epochs: int = 240
    """of an episode; the second half counts"""
    repeats: int = 16
    """drawings of the arrivals for alpha*; 0: no regret"""
    bounds: bool = False
    """also best static split, reachable oracle and working-set rule; some 20 s an episode"""
    jobs: int = 2
    """processes"""
    json: Path | None = None
    """file for the figures"""


class Constant(OnlineAdapter):
    """Always the same residual."""

    def __init__(self, value: float) -> None:
        super().__init__(AdapterSettings(explore=0.0, steps=0, pull=0.0))
        self.value = value

    def step(
        self, memory: Memory, slo_ms: float, alpha_centi: int, base_centi: int, *epoch: float
    ) -> tuple[int, float, Proposed, Memory]:
        """The policy's step and the residual, on the grid."""
        residual_centi = 100 * self.value
        step, carry = on_grid(base_centi, residual_centi, memory[2])
        proposed = ((0.0,) * len(FEATURES), self.value, self.value)
        return step, residual_centi, proposed, (*memory[:2], carry)


def second_half(scenario: Scenario, adapter: OnlineAdapter | None, seed: int) -> float:
    """Mean P99 over the second half, ms."""
    policy = FrozenPolicy.load(PRETRAINED / SHIPPED)
    config = replace(policy.mdp_config, reward="busy_time")
    return played(scenario, AdaptedPolicy(policy, adapter, config), seed)


def played(scenario: Scenario, controller: Controller, seed: int) -> float:
    """Mean P99 over the second half with a controller, ms."""
    runner = Runner(scenario.build(), mdp_config(scenario))
    run = run_controller(runner, controller, scenario.episode_epochs, seed)
    p99 = [stats.p99_ms for stats, _ in run]
    return float(np.mean(p99[len(p99) // 2 :]))


def bounds_ms(scenario: Scenario, seed: int) -> dict[str, float]:
    """Mean P99 over the second half, ms, of the two that know the requests and of the rule.

    The static split is the best of the second half; the oracle plans for the whole episode, and its search is
    not exhaustive: the split may be below it.
    """
    backend, half = scenario.build(), scenario.episode_epochs // 2
    backend.reset(seed)
    episode = record_episode(backend, scenario.episode_epochs)
    static = hold_all(backend, episode, range(10, 91, 2), jobs=1)[:, half:].mean(axis=1).min()
    _, planned = reachable(backend, mdp_config(scenario), episode, jobs=1, ways=1)
    return {
        "best static split": float(static),
        "reachable oracle": float(planned[half:].mean()),
        "working-set rule": played(scenario, WorkingSetRule(), seed),
    }


def star_p99_ms(scenario: Scenario, seed: int, repeats: int) -> float:
    """Mean P99 at alpha* over the second half, ms."""
    backend = scenario.build()
    backend.reset(seed)
    star = alpha_star(
        backend,
        mdp_config(scenario),
        scenario.episode_epochs,
        step_centi=2,
        repeats=repeats,
        jobs=1,
    )
    return float(star.best_p99_ms[scenario.episode_epochs // 2 :].mean())


def row_of(scenario: Scenario, seeds: list[int], repeats: int, bounds: bool) -> dict[str, Any]:
    """Figures of one workload."""

    def play(make: Any) -> NDArray[np.float64]:
        return np.array([second_half(scenario, make(), seed) for seed in seeds])

    alone = play(lambda: None)
    with_adapter = play(OnlineAdapter)
    adapted: Estimate = ratio_of_means(with_adapter, alone)
    star = (
        float(np.mean([star_p99_ms(scenario, seed, repeats) for seed in seeds])) if repeats else 0
    )
    known = [bounds_ms(scenario, seed) for seed in seeds] if bounds else []
    constants = {}
    for value in CONSTANTS:
        constants[value] = float(play(lambda value=value: Constant(value)).mean() / alone.mean())
    best = min(constants, key=lambda value: constants[value])
    return {
        "policy_p99_ms": float(alone.mean()),
        "by_seed_ms": {"policy": alone.tolist(), "adapter": with_adapter.tolist()},
        "adapter_over_policy": vars(adapted),
        "policy_regret": float(alone.mean()) / star - 1 if star else None,
        "adapter_regret": float(with_adapter.mean()) / star - 1 if star else None,
        "best_constant": best,
        "best_constant_over_policy": constants[best],
        "bounds_over_policy": {
            name: float(np.mean([ms[name] for ms in known]) / alone.mean())
            for name in (known[0] if known else ())
        },
        "constants": {f"{value:+.3f}": ratio for value, ratio in constants.items()},
    }


def mean_regrets(rows: dict[str, Any]) -> dict[str, Any]:
    """Means over the workloads with a mismatch, and what the adapter leaves of the policy's regret."""
    off = [row for name, row in rows.items() if not name.startswith("none,")]
    policy = np.array([row["policy_regret"] for row in off])
    ratio = [row["adapter_over_policy"]["value"] for row in off]
    return {
        "policy": float(policy.mean()),
        "adapter": float(np.mean([row["adapter_regret"] for row in off])),
        "adapter_over_policy": float(np.mean(ratio)),
        "regret_left": vars(ratio_of_means(*(_by_seed(off, who) for who in ("adapter", "policy")))),
        **{
            name: float(
                np.mean((1 + policy) * [row["bounds_over_policy"][name] for row in off] - 1)
            )
            for name in off[0]["bounds_over_policy"]
        },
    }


def _by_seed(rows: list[dict[str, Any]], who: str) -> NDArray[np.float64]:
    """Regret [seeds], the mean of the rows, each against its own mean P99 at alpha*."""
    star_ms = [row["policy_p99_ms"] / (1 + row["policy_regret"]) for row in rows]
    p99_ms = np.array([row["by_seed_ms"][who] for row in rows])
    regret: NDArray[np.float64] = (p99_ms / np.array(star_ms)[:, None]).mean(axis=0) - 1
    return regret


def main(args: Args) -> None:
    """Run, print, write."""
    require(args.seeds >= 1, "seeds", args.seeds, "1 or more")
    require(args.epochs >= 2, "epochs", args.epochs, "2 or more")
    require(args.repeats >= 0, "repeats", args.repeats, "0 or more")
    require(args.jobs >= 1, "jobs", args.jobs, "1 or more")
    scenarios = {
        f"{mismatch}, {regime}": Scenario(regime=regime, episode_epochs=args.epochs, **fields)
        for mismatch, fields in MISMATCHES.items()
        for regime in REGIMES
    }
    seeds = list(range(FIRST_SEED, FIRST_SEED + args.seeds))
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        found = pool.map(
            partial(row_of, seeds=seeds, repeats=args.repeats, bounds=args.bounds),
            scenarios.values(),
        )
        rows = dict(zip(scenarios, found, strict=True))
    title = f"P99 over the second half against the policy's, {args.seeds} seeds"
    table = Table(title=title, title_justify="left")
    headings = (
        "mismatch", "policy, ms", "with adapter", "best constant residual", "regret %, then with adapter",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading)
    for name, row in rows.items():
        ratio = row["adapter_over_policy"]
        table.add_row(
            name,
            f"{row['policy_p99_ms']:.2f}",
            f"{ratio['value']:.4f} [{ratio['low']:.4f}, {ratio['high']:.4f}]",
            f"{row['best_constant_over_policy']:.4f} ({row['best_constant']:+.3f})",
            "-" if not args.repeats
            else f"{100 * row['policy_regret']:+.2f}, {100 * row['adapter_regret']:+.2f}",
        )  # fmt: skip
    Console(width=110).print(table)
    for name, row in rows.items() if args.bounds else ():
        bounds = row["bounds_over_policy"].items()
        print(f"{name}: P99 over the policy's: {', '.join(f'{k} {v:.4f}' for k, v in bounds)}")
    mean = mean_regrets(rows) if args.repeats else None
    if mean is not None:
        left = mean["regret_left"]
        print("mean regrets over the mismatches, %: " + ", ".join(
            f"{name} {100 * value:.2f}" for name, value in mean.items()
            if name not in ("adapter_over_policy", "regret_left")
        ))  # fmt: skip
        print(
            f"the adapter leaves {left['value']:.3f} [{left['low']:.3f}, {left['high']:.3f}] of the policy's "
            f"regret; its P99 is {mean['adapter_over_policy']:.4f} of the policy's"
        )
    if args.json is not None:
        write_result(args.json, command("eval.bench_adapter"), {
            "seeds": seeds, "repeats": args.repeats, "rows": rows, "mean_over_mismatches": mean,
        })  # fmt: skip


if __name__ == "__main__":
    run_command("eval.bench_adapter", main, Args)
