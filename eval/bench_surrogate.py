"""Times the surrogate on one core: simulated requests a second, with the KV cache's full state.

    python -m eval.bench_surrogate --json docs/results/bench_surrogate.json

The bar is on the node alone, epoch by epoch: every request through both caches and the queue, the
epoch's statistics and its P99 included. Whole episodes in one call, as the oracles run them, give the
P99 of each epoch only. Other rows add what an environment needs: the requests' generation,
the state and the reward. Rows take turns, so that other work on the machine meets all of them; how
much of the core this process got in each is given beside it, and what a request takes in CPU time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.command_line import run_command
from hlem_env.env import HBMPartitionEnv, HBMPartitionVectorEnv
from hlem_env.errors import require
from hlem_env.machine import command, machine, write_result
from hlem_env.mdp import ACTIONS_CENTI
from hlem_env.scenario import Scenario
from hlem_env.surrogate.optimum import record_episode
from hlem_env.workload.regimes import SyntheticWorkload

REQUESTS = 512
"""Requests in an epoch, on average; the default workload has about 1,100 in its 5 seconds."""
ALPHA_CENTI = 50
"""Held, where no actions are taken."""
EPISODE_EPOCHS = 240
ENVS = 16
ACTIONS = 4096
"""Random actions, used in turn."""
LONG_EPISODE_EPOCHS = 10**5
"""Epochs of an environment's episode, so long that resets do not count."""

BAR = 12e6
GOAL = 20e6
"""Requests a second of the node alone, Steady, scan-resistant."""
BAR_ROW = "node alone, steady"
"""Epoch by epoch, with each epoch's full statistics."""

Work = Callable[[], tuple[int, int]]
"""Runs a batch of epochs; returns epochs and requests."""


@dataclass
class Args:
    """Times the surrogate on one core, in simulated requests a second."""

    json: Path | None = None
    """file for the figures"""
    seconds: float = 1.0
    """least time of a repetition"""
    repetitions: int = 5
    """of each row"""
    compile: bool = True
    """also time the first call in new processes: compiling, and from numba's cache"""

    def __post_init__(self) -> None:
        require(0 < self.seconds <= 600, "seconds", self.seconds, "above 0, at most 600")
        require(1 <= self.repetitions <= 1000, "repetitions", self.repetitions, "1 to 1000")


@dataclass(frozen=True)
class Row:
    """What one row measured."""

    name: str
    requests_per_epoch: float
    best: float
    """Requests a second in the fastest repetition."""
    median: float
    """Requests a second."""
    epochs_per_s: float
    """Median."""
    cpu_ns_per_request: float
    """Nanoseconds of CPU time, median: what counts when other work shares the core."""
    core_share: float
    """CPU time over the time that passed, all repetitions."""

    @property
    def ns_per_request(self) -> float:
        """Nanoseconds that passed, in the median repetition."""
        return 1e9 / self.median

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name,
            "requests_per_epoch": round(self.requests_per_epoch, 1),
            "best_requests_per_s": round(self.best),
            "median_requests_per_s": round(self.median),
            "median_ns_per_request": round(self.ns_per_request, 2),
            "median_epochs_per_s": round(self.epochs_per_s),
            "median_cpu_ns_per_request": round(self.cpu_ns_per_request, 2),
            "core_share": round(self.core_share, 3),
        }


def main(args: Args) -> int:
    """Time every row in turn, print and write the figures."""
    first_s = first_call_times_s() if args.compile else None
    here = machine()
    with one_core() as pinned:
        rows = time_rows(benchmarks(), args.seconds, args.repetitions)
    print(
        f"{here['cpu']}, one core{'' if pinned else ' (not pinned)'};"
        f" {args.repetitions} repetitions of {args.seconds:g} s or more"
    )
    print(
        f"{'':<56}{'requests':>9}{'million requests/s':>20}{'epochs':>9}{'ns a request':>16}"
        f"{'of':>6}"
    )
    print(
        f"{'':<56}{'an epoch':>9}{'best':>11}{'median':>9}{'a second':>9}{'passed':>9}{'CPU':>7}"
        f"{'core':>6}"
    )
    for row in rows:
        print(
            f"{row.name:<56}{row.requests_per_epoch:>9.0f}{row.best / 1e6:>11.2f}"
            f"{row.median / 1e6:>9.2f}{row.epochs_per_s:>9,.0f}{row.ns_per_request:>9.1f}"
            f"{row.cpu_ns_per_request:>7.1f}{row.core_share:>6.0%}"
        )
    if first_s is not None:
        print(
            "First epoch of a new process, not in the rows:"
            f" {first_s['compiling']:.1f} s when numba compiles, {first_s['cached']:.1f} s from its"
            " cache."
        )
    node = next(row for row in rows if row.name == BAR_ROW)
    print(
        f"Bar of {BAR / 1e6:.0f} million requests/s ({BAR_ROW}):"
        f" {'met' if node.median >= BAR else 'missed'} by the median,"
        f" {'met' if node.best >= BAR else 'missed'} by the best;"
        f" goal of {GOAL / 1e6:.0f}: {'met' if node.median >= GOAL else 'missed'} by the median."
    )
    if args.json is not None:
        payload: dict[str, Any] = {
            "pinned_to_one_core": pinned,
            "repetitions": args.repetitions,
            "seconds": args.seconds,
            "bar": {
                "row": BAR_ROW,
                "requests_per_s": BAR,
                "median_met": node.median >= BAR,
                "best_met": node.best >= BAR,
            },
            "goal_requests_per_s": GOAL,
            "first_epoch_s": first_s,
            "rows": [row.to_json() for row in rows],
        }
        write_result(args.json, command("eval.bench_surrogate"), payload)
    return 0


def benchmarks() -> dict[str, Work]:
    """What is timed, by its name, ready to run."""
    steady = with_requests(Scenario(regime="steady"), REQUESTS)
    trend = with_requests(Scenario(regime="trend"), REQUESTS)
    burst = with_requests(Scenario(regime="burst"), REQUESTS)
    usual = Scenario(regime="steady")
    return {
        "node alone, episode in one call, steady": episode_in_one_call(steady),
        "node alone, episode in one call, steady, plain LRU": episode_in_one_call(
            replace(steady, kv_policy="lru")
        ),
        BAR_ROW: node_alone(steady),
        "node alone, trend": node_alone(trend),
        "node alone, burst": node_alone(burst),
        "node alone, steady, plain LRU": node_alone(replace(steady, kv_policy="lru")),
        "node and requests' generation, steady": generated(steady),
        "node and requests' generation, trend": generated(trend),
        "node and requests' generation, burst": generated(burst),
        "HBMPartitionEnv.step, steady": env_steps(steady),
        f"HBMPartitionVectorEnv.step, {ENVS} environments, steady": vector_steps(steady),
        "node alone, steady, default epoch": node_alone(usual),
        "node and requests' generation, default epoch": generated(usual),
        "HBMPartitionEnv.step, default epoch": env_steps(usual),
    }


def with_requests(scenario: Scenario, requests: float) -> Scenario:
    """The scenario with epochs just long enough for so many requests on average."""
    for _ in range(3):
        # The rate itself depends on the length of an epoch: another one has no simulated table.
        scenario = replace(
            scenario, epoch_seconds=requests / mean_requests_per_s(scenario.workload())
        )
    return scenario


def mean_requests_per_s(workload: Any) -> float:
    """Over the epochs of one drawing of the regime."""
    assert isinstance(workload, SyntheticWorkload)
    workload.reset(np.random.default_rng(0), 0.0)
    return float(workload.load(workload.path.hot_share).mean())


def node_alone(scenario: Scenario) -> Work:
    """`SurrogateBackend.serve` and P99 on recorded requests, again and again from warm caches."""
    backend = scenario.build()
    backend.reset(0)
    episode = record_episode(backend, EPISODE_EPOCHS)
    backend.serve(episode.warmup, ALPHA_CENTI, episode.warmup_s)
    warm = backend.save()
    requests = sum(len(taken) for taken in episode.epochs)

    def work() -> tuple[int, int]:
        backend.restore(warm)
        for taken in episode.epochs:
            assert backend.serve(taken, ALPHA_CENTI, episode.epoch_seconds).p99_ms > 0
        return len(episode.epochs), requests

    return work


def episode_in_one_call(scenario: Scenario) -> Work:
    """`SurrogateBackend.hold`: every epoch's P99 at one alpha, on recorded requests, caches warm."""
    backend = scenario.build()
    backend.reset(0)
    episode = record_episode(backend, EPISODE_EPOCHS)
    backend.serve(episode.warmup, ALPHA_CENTI, episode.warmup_s)
    warm = backend.save()

    def work() -> tuple[int, int]:
        backend.restore(warm)
        p99_ms = backend.hold(
            episode.whole, ALPHA_CENTI, episode.epoch_seconds, len(episode.epochs)
        )
        assert p99_ms.min() > 0
        return len(episode.epochs), len(episode.whole)

    return work


def generated(scenario: Scenario) -> Work:
    """`SurrogateBackend.run` and P99, the requests drawn as they come."""
    backend = scenario.build()
    backend.reset(0)
    backend.run(ALPHA_CENTI, backend.warmup_s)

    def work() -> tuple[int, int]:
        requests = 0
        for _ in range(EPISODE_EPOCHS):
            stats = backend.run(ALPHA_CENTI, scenario.epoch_seconds)
            assert stats.p99_ms > 0
            requests += stats.requests
        return EPISODE_EPOCHS, requests

    return work


def env_steps(scenario: Scenario) -> Work:
    """`HBMPartitionEnv.step` with random actions."""
    env = HBMPartitionEnv(**env_arguments(scenario))
    env.reset(seed=0)
    actions = random_actions(1)[:, 0]

    def work() -> tuple[int, int]:
        requests = 0
        for action in actions[:EPISODE_EPOCHS]:
            requests += env.step(action)[4]["requests"]
        actions[:] = np.roll(actions, -EPISODE_EPOCHS)
        return EPISODE_EPOCHS, requests

    return work


def vector_steps(scenario: Scenario) -> Work:
    """`HBMPartitionVectorEnv.step` with random actions."""
    envs = HBMPartitionVectorEnv(ENVS, **env_arguments(scenario))
    envs.reset(seed=0)
    actions = random_actions(ENVS)
    steps = EPISODE_EPOCHS // ENVS

    def work() -> tuple[int, int]:
        requests = 0
        for row in actions[:steps]:
            requests += int(envs.step(row)[4]["requests"].sum())
        actions[:] = np.roll(actions, -steps, axis=0)
        return steps * ENVS, requests

    return work


def env_arguments(scenario: Scenario) -> dict[str, Any]:
    """Arguments of an environment of the scenario with a long episode."""
    return {
        "workload": scenario,
        "epoch_seconds": scenario.epoch_seconds,
        "episode_epochs": LONG_EPISODE_EPOCHS,
    }


def random_actions(envs: int) -> NDArray[np.int64]:
    """Actions [ACTIONS, envs]."""
    return np.random.default_rng(0).integers(len(ACTIONS_CENTI), size=(ACTIONS, envs))


def time_rows(works: dict[str, Work], seconds: float, repetitions: int) -> list[Row]:
    """Repetitions of at least `seconds` of each, all of them in turn; one batch of each before."""
    for work in works.values():
        work()
    timed: dict[str, list[tuple[float, float, int, int]]] = {name: [] for name in works}
    for _ in range(repetitions):
        for name, work in works.items():
            timed[name].append(repetition(work, seconds))
    rows = []
    for name, parts in timed.items():
        took_s, cpu_s, epochs, requests = np.array(parts, np.float64).T
        rows.append(
            Row(
                name=name,
                requests_per_epoch=float(requests.sum() / epochs.sum()),
                best=float((requests / took_s).max()),
                median=float(np.median(requests / took_s)),
                epochs_per_s=float(np.median(epochs / took_s)),
                cpu_ns_per_request=float(np.median(1e9 * cpu_s / requests)),
                core_share=float(cpu_s.sum() / took_s.sum()),
            )
        )
    return rows


def repetition(work: Work, seconds: float) -> tuple[float, float, int, int]:
    """Whole batches for at least `seconds`: seconds that passed and of CPU, epochs, requests."""
    epochs = requests = 0
    start_cpu_s = time.process_time()
    start_s = time.perf_counter()
    passed_s = 0.0
    while passed_s < seconds:
        more_epochs, more_requests = work()
        epochs += more_epochs
        requests += more_requests
        passed_s = time.perf_counter() - start_s
    return passed_s, time.process_time() - start_cpu_s, epochs, requests


@contextmanager
def one_core() -> Iterator[bool]:
    """Keep this process on one core of those it may use; yields whether the system can do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield False
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield True
    finally:
        os.sched_setaffinity(0, before)


def first_call_times_s() -> dict[str, float]:
    """Seconds to a node's first epoch in a new process: with numba's cache empty, then filled."""
    code = "from eval.bench_surrogate import first_epoch_s; print(first_epoch_s())"
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        times_s = {}
        for name in ("compiling", "cached"):
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            times_s[name] = round(float(done.stdout), 2)
    return times_s


def first_epoch_s() -> float:
    """Seconds to build a node, reset it and run an epoch; imports are not counted."""
    start_s = time.perf_counter()
    backend = Scenario().build()
    backend.reset(0)
    assert backend.run(ALPHA_CENTI, backend.node.epoch_seconds).p99_ms > 0
    return time.perf_counter() - start_s


if __name__ == "__main__":
    run_command("eval.bench_surrogate", main, Args)
