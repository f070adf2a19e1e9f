"""Times one decision: the frozen policy beside the same network in eager torch.

    python -m eval.bench_decision --json runs/bench/decision.json

The two take turns in blocks of the same run, so that other work on the machine meets both. Each
call starts from the state as a numpy array and ends with an action index as a Python int. Without
`--policy` the network has random weights; what a decision costs does not depend on them. The allocator's
decisions follow, with its learning on a thread beside them. To give both one core, ahead of other work
(the first line where the kernel groups processes by session: niceness counts within a group alone):

    echo -20 > /proc/self/autogroup
    nice -n -20 taskset -c 1 python -m eval.bench_decision
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.actor_critic import ActorCritic
from eval.bench_allocator import PAUSE_S, epochs, time_allocator
from hlem_env.command_line import run_command
from hlem_env.errors import ArgumentError, require
from hlem_env.machine import command, machine, write_result
from hlem_env.mdp import MdpConfig, observe
from serving_bridge.policy import FrozenPolicy, export_policy

BLOCK = 100
"""Decisions of one kind in a row."""
STATES = 100_000
"""Random states on which the two must choose the same action."""
NEAR_TIE = 1e-5
"""Two best logits closer than this may be told apart differently."""
REQUESTS = 1_000
"""Requests in the epoch that `mdp.observe` reduces to a state."""
PAPER_US = 32.0
"""A decision of the paper's controller."""
PAPER_CPU_PERCENT = (32.0, 46.0)
"""Of the paper's learning loop: mean and peak."""
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99_9": 99.9}


@dataclass
class Args:
    """Times one decision of the frozen policy beside eager torch, and checks that they agree."""

    policy: Path | None = None
    """folder of the policy to time; by default a random network"""
    json: Path | None = None
    """file for the figures"""
    decisions: int = 20_000
    """timed calls of each kind"""
    seed: int = 0
    """seed of the states, and of the random network"""

    def __post_init__(self) -> None:
        require(self.decisions >= BLOCK, "decisions", self.decisions, f"{BLOCK} or more")


def main(args: Args) -> int:
    """Run the benchmark, print and write its figures; 1 if the two disagree on an action."""
    rng = np.random.default_rng(args.seed)
    policy = random_policy(args.seed) if args.policy is None else FrozenPolicy.load(args.policy)
    n_features = len(policy.feature_names)
    torch.set_num_threads(1)
    network = ActorCritic(n_features, len(policy.actions_centi))
    try:
        network.load_actor_weights(policy.weights)
    except ArgumentError as error:
        raise SystemExit(f"only policies of the shape of ActorCritic are timed: {error}") from error

    def eager(state: NDArray[np.float32]) -> int:
        return int(network.act(torch.from_numpy(state)))

    states = rng.random((STATES, n_features), dtype=np.float32)
    with torch.inference_mode():
        times_ns = time_in_turns(policy.act, eager, states, args.decisions)
        agreement = compare_actions(policy, network, states)
    allocator_ns, learning = time_allocator(policy, args.decisions, args.seed, REQUESTS)
    observe_ns = time_observe(rng, policy.mdp_config, max(args.decisions // 10, BLOCK))
    figures_us = {
        "act": percentiles_us(times_ns[0]),
        "torch_eager": percentiles_us(times_ns[1]),
        "observe": percentiles_us(observe_ns),
        "timer": percentiles_us(times_ns[2]),
        **{f"allocator_{kind}": percentiles_us(spent) for kind, spent in allocator_ns.items()},
    }
    ratio = {
        name: round(figures_us["torch_eager"][name] / figures_us["act"][name], 2)
        for name in PERCENTILES
    }

    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores, one thread; {args.decisions:,} decisions")
    print(
        f"{'microseconds':<34}" + "".join(f"{name.replace('_', '.'):>10}" for name in PERCENTILES)
    )
    for label, values in (
        ("decision of the policy", figures_us["act"]),
        ("decision, eager torch", figures_us["torch_eager"]),
        ("ratio", ratio),
        (f"mdp.observe, {REQUESTS:,} requests", figures_us["observe"]),
        ("timer alone, included above", figures_us["timer"]),
        ("allocator, no adapter", figures_us["allocator_decide"]),
        ("allocator, learning beside", figures_us["allocator_decide_learning"]),
        (f"the same, {1000 * PAUSE_S:g} ms between two", figures_us["allocator_decide_paced"]),
        ("an epoch's ticks and decision", figures_us["allocator_epoch"]),
        ("allocator, a tick", figures_us["allocator_tick"]),
        ("a tick after the pause", figures_us["allocator_tick_paced"]),
        ("allocator, learning itself", figures_us["allocator_learn"]),
    ):
        print(f"{label:<34}" + "".join(f"{value:>10.2f}" for value in values.values()))
    print(
        f"actions: {agreement['equal']:,} of {agreement['states']:,} equal, "
        f"{agreement['different_near_ties']:,} differ with two best logits within {NEAR_TIE:g} "
        f"({agreement['near_ties']:,} such states), {agreement['different']:,} differ otherwise"
    )
    print(
        f"the paper's decision: {PAPER_US:g} us; learning beside, {learning['pause_ms']:g} ms between two "
        f"epochs: {learning['cpu_ms_an_epoch']:.2f} ms of CPU an epoch, {learning['cpu_percent']:.1f} % "
        f"of a core, {learning['cpu_percent_peak_second']:.1f} % in its busiest second (the paper's "
        f"{PAPER_CPU_PERCENT[0]:g} and {PAPER_CPU_PERCENT[1]:g} %); with epochs of 5 s "
        f"{learning['cpu_percent_at_epochs_of_5_s']:.3f} %; without the pause its thread came to learn "
        f"{100 * learning['learnt_of_decisions_without_pause']:.2f} % of the epochs"
    )
    if args.json is not None:
        payload: dict[str, Any] = {
            "policy": "random" if args.policy is None else args.policy.name,
            "features": policy.mdp_config.features,
            "layers": policy.metadata["layers"],
            "decisions": args.decisions,
            "torch_threads": torch.get_num_threads(),
            "observe_requests": REQUESTS,
            "microseconds": figures_us,
            "learning": learning,
            "paper": {"decision_us": PAPER_US, "cpu_percent": PAPER_CPU_PERCENT},
            "priority": {"nice": os.getpriority(os.PRIO_PROCESS, 0), "cores": here["cores"]},
            "ratio_torch_eager_to_act": ratio,
            "actions": agreement,
        }
        write_result(args.json, command("eval.bench_decision"), payload)
    return 1 if agreement["different"] else 0


def random_policy(seed: int) -> FrozenPolicy:
    """A policy with the seven features of the paper and random weights, by way of its files."""
    config = MdpConfig()
    generator = torch.Generator().manual_seed(seed)
    network = ActorCritic(len(config.feature_names), generator=generator)
    inputs, logits = network.parity_vectors(np.random.default_rng(seed))
    with tempfile.TemporaryDirectory() as folder:
        export_policy(
            folder,
            network.actor_weights(),
            mdp_config=config,
            parity_inputs=inputs,
            parity_logits=logits,
            env_spec={},
            training_command="none: random weights",
            seed=seed,
            git_revision="none",
        )
        return FrozenPolicy.load(folder)


def time_in_turns(
    act: Callable[[NDArray[np.float32]], int],
    eager: Callable[[NDArray[np.float32]], int],
    states: NDArray[np.float32],
    decisions: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Nanoseconds of calls of `act`, of `eager` and of the timer alone: int64 [decisions] each.

    Args:
        act: takes a state, float32 [n_features].
        eager: the same.
        states: float32 [n, n_features], used in turn.
        decisions: calls of each; the first block of each is run once more before, untimed.
    """
    kinds: tuple[Callable[[NDArray[np.float32]], object], ...] = (act, eager, lambda state: None)
    times_ns = np.zeros((len(kinds), decisions), np.int64)
    clock = time.perf_counter_ns
    for start in (-BLOCK, *range(0, decisions, BLOCK)):
        rows = range(max(start, 0), min(max(start, 0) + BLOCK, decisions))
        block = [states[row % len(states)] for row in rows]
        for kind, call in enumerate(kinds):
            for row, state in zip(rows, block, strict=True):
                before = clock()
                call(state)
                times_ns[kind, row] = clock() - before
    return times_ns[0], times_ns[1], times_ns[2]


def compare_actions(
    policy: FrozenPolicy, network: ActorCritic, states: NDArray[np.float32]
) -> dict[str, int]:
    """Count the states [n, n_features] on which both choose alike; torch takes them as a batch."""
    expected = network.act(torch.from_numpy(states)).numpy()
    best = network.logits(torch.from_numpy(states)).topk(2).values.numpy()
    near_tie = best[:, 0] - best[:, 1] < NEAR_TIE
    equal = np.array([policy.act(state) for state in states]) == expected
    return {
        "states": len(states),
        "equal": int(np.count_nonzero(equal)),
        "near_ties": int(np.count_nonzero(near_tie)),
        "different_near_ties": int(np.count_nonzero(~equal & near_tie)),
        "different": int(np.count_nonzero(~equal & ~near_tie)),
    }


def time_observe(rng: np.random.Generator, config: MdpConfig, calls: int) -> NDArray[np.int64]:
    """Nanoseconds of calls of `mdp.observe` on an epoch of 1,000 requests: int64 [calls].

    Stats remember what was derived from them, so every call gets its own.
    """
    stats = epochs(rng, 1, REQUESTS)[0]
    observe(stats, config)
    times_ns = np.zeros(calls, np.int64)
    for call in range(calls):
        fresh = dataclasses.replace(stats)
        before = time.perf_counter_ns()
        observe(fresh, config)
        times_ns[call] = time.perf_counter_ns() - before
    return times_ns


def percentiles_us(times_ns: NDArray[np.int64]) -> dict[str, float]:
    """P50, P99 and P99.9 of the times [n], in microseconds."""
    return {
        name: round(float(np.percentile(times_ns, share)) / 1000, 3)
        for name, share in PERCENTILES.items()
    }


if __name__ == "__main__":
    run_command("eval.bench_decision", main, Args)
