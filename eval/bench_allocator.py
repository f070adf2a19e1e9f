"""Times the allocator's decisions while it learns beside: part of `python -m eval.bench_decision`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env.mdp import TICKS_PER_EPOCH, observe
from hlem_env.telemetry import EpochStats
from serving_bridge.adapter import AdapterSettings
from serving_bridge.allocator import SmartAllocator
from serving_bridge.policy import FrozenPolicy
from serving_bridge.recovery import RecoverySettings

SPREAD_MS = 8.0
"""Deviation of the epochs' P99, so that there is something to learn."""
PAUSE_S = 0.005
"""Between two paced decisions; a node has an epoch of seconds."""


def epochs(rng: np.random.Generator, count: int, requests: int) -> list[EpochStats]:
    """Steady epochs of random latencies."""
    flags = np.arange(requests) < requests // 5
    made = []
    for p99 in np.maximum(rng.normal(25.0, SPREAD_MS, count), 5.0):
        latency_ms = rng.gamma(4.0, p99 / 10.0, requests)
        made.append(
            EpochStats(
                duration_s=5.0, latency_ms=latency_ms, service_ms=latency_ms / 2,
                arrival_s=np.sort(rng.uniform(0.0, 5.0, requests)), is_hot=flags,
                history_tokens=10_000 * requests, reused_tokens=2_000 * requests,
                rows_looked_up=5_000 * requests, rows_hit=4_000.0 * requests,
                computed_tokens=8_000 * requests, refill_bytes=0.0, prefetch_bytes=0.0,
                evictions=100, alpha_target=0.5, alpha_resident=0.5, embedding_pages=15_000,
                kv_pages=14_000, free_pages=1_000, pending_pages=0, pool_bytes=60_000_000_000,
                working_set_bytes=2e10, backlog=3, backlog_age_s=0.01, utilisation=0.7,
            )
        )  # fmt: skip
    return made


def time_allocator(
    policy: FrozenPolicy, decisions: int, seed: int, requests: int
) -> tuple[dict[str, NDArray[np.int64]], dict[str, float]]:
    """Nanoseconds by kind, int64 [n], and what the learning thread took.

    "decide" is of the allocator without adapter, "decide_learning" of the whole one, both with one
    decision right after the other, so that the thread learns during each of them. "epoch" is of the whole
    one: an epoch's ticks and its decision, which leaves some of its work to the next tick. "decide_paced"
    is of the whole one with a pause before the epoch's last tick, which is how a node decides, if much
    faster: it has seconds between two. "tick" is a look of the burst watch, "tick_paced" the one after the
    pause. "learn" is a decision that learns itself: what the thread spares.
    """
    rng = np.random.default_rng(seed)
    whole = epochs(rng, 256, requests)
    ticks = epochs(rng, 64, max(requests // TICKS_PER_EPOCH, 1))
    recovery = RecoverySettings(detector="workload")
    alone = SmartAllocator(policy, None, recovery)
    beside = SmartAllocator(policy, AdapterSettings(), recovery, background=True)
    itself = SmartAllocator(policy, AdapterSettings(), recovery)
    some = max(decisions // 5, 50)
    with quiet_collector():
        made = {"decide": time_decide(alone, decisions, whole, ticks)[0].decide}
        learning_beside = time_decide(beside, decisions, whole, ticks)[0]
        made["decide_learning"], made["epoch"] = learning_beside.decide, learning_beside.epoch
        assert beside.adapter is not None
        learnt = beside.adapter.learner.seen
        made["learn"] = time_decide(itself, max(decisions // 100, 50), whole, ticks)[0].decide
        started_s, learnt_s = time.perf_counter(), beside_s(beside)
        paced, loads = time_decide(beside, some, whole, ticks, PAUSE_S)
        made["decide_paced"], made["tick_paced"] = paced.decide, paced.tick
        spent_s = time.perf_counter() - started_s
        made["tick"] = time_ticks(alone, decisions, whole[0], ticks)
    beside.close()
    busy_s = beside_s(beside) - learnt_s
    learning = {
        "learnt_of_decisions_without_pause": learnt / decisions,
        "pause_ms": 1000 * PAUSE_S,
        "cpu_ms_an_epoch": 1000 * busy_s / some,
        "cpu_percent": 100 * busy_s / spent_s,
        "cpu_percent_peak_second": 100 * max(loads),
        "cpu_percent_at_epochs_of_5_s": 100 * busy_s / some / 5.0,
    }
    return made, learning


def beside_s(allocator: SmartAllocator) -> float:
    """CPU seconds of the allocator's learning thread so far."""
    assert allocator.adapter is not None
    return allocator.adapter.busy_s


@contextmanager
def quiet_collector() -> Iterator[None]:
    """What was loaded before is not searched for garbage, as in a server that has started."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Times(NamedTuple):
    """Nanoseconds, int64 [epochs]."""

    decide: NDArray[np.int64]
    tick: NDArray[np.int64]
    """The last one before the decision."""
    epoch: NDArray[np.int64]
    """All ticks and the decision."""


def time_decide(
    allocator: SmartAllocator,
    decisions: int,
    whole: list[EpochStats],
    ticks: list[EpochStats],
    pause_s: float = 0.0,
) -> tuple[Times, list[float]]:
    """Times of decisions and of the ticks before them; loads.

    Each decision is on an epoch at the alpha decided before, after an epoch's ticks, of which the last
    comes after the pause, as on a node. The loads are the learning thread's, in each second.
    """
    times = Times(*np.zeros((3, decisions), np.int64))
    alpha_centi, clock = allocator.initial_alpha_centi, time.perf_counter_ns
    loads, second_s, learnt_s = [0.0], time.perf_counter(), 0.0
    allocator.reset(0)
    for i in range(decisions):
        before = clock()
        for j in range(TICKS_PER_EPOCH - 1):
            allocator.on_tick(ticks[(i + j) % len(ticks)])
        times.epoch[i] = clock() - before
        if pause_s:
            time.sleep(pause_s)
        before = clock()
        allocator.on_tick(ticks[(i - 1) % len(ticks)])
        times.tick[i] = clock() - before
        stats = replace(whole[i % len(whole)], alpha_target=alpha_centi / 100)
        state = observe(stats, allocator.config)
        before = clock()
        decision = allocator.decide(state, stats)
        times.decide[i] = clock() - before
        alpha_centi = decision.alpha_centi
        if allocator.adapter is not None and time.perf_counter() - second_s >= 1.0:
            loads.append((allocator.adapter.busy_s - learnt_s) / (time.perf_counter() - second_s))
            second_s, learnt_s = time.perf_counter(), allocator.adapter.busy_s
    times.epoch[:] += times.tick + times.decide
    return times, loads[1:] or [0.0]


def time_ticks(
    allocator: SmartAllocator, count: int, whole: EpochStats, ticks: list[EpochStats]
) -> NDArray[np.int64]:
    """Nanoseconds of ticks, int64 [count], with a decision after each epoch's."""
    times, state = np.zeros(count, np.int64), observe(whole, allocator.config)
    for i in range(count):
        before = time.perf_counter_ns()
        allocator.on_tick(ticks[i % len(ticks)])
        times[i] = time.perf_counter_ns() - before
        if i % TICKS_PER_EPOCH == TICKS_PER_EPOCH - 1:
            allocator.decide(state, whole)
    return times
