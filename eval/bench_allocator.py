"""Times the allocator's decisions while it learns beside: part of `python -m eval.bench_decision`."""

from __future__ import annotations

import time
from dataclasses import replace

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
) -> dict[str, NDArray[np.int64]]:
    """Nanoseconds by kind: "decide", "decide_learning" and "tick", int64 [decisions], "learn" fewer.

    "decide" is of the allocator without adapter, "decide_learning" of the whole one, one decision right
    after the other, so that the thread learns during each of them: on a node an epoch is between two.
    "tick" is a look of the burst watch. "learn" is a decision that learns itself: what the thread spares.
    """
    rng = np.random.default_rng(seed)
    whole = epochs(rng, 256, requests)
    ticks = epochs(rng, 64, max(requests // TICKS_PER_EPOCH, 1))
    recovery = RecoverySettings(detector="workload")
    alone = SmartAllocator(policy, None, recovery)
    beside = SmartAllocator(policy, AdapterSettings(), recovery, background=True)
    itself = SmartAllocator(policy, AdapterSettings(), recovery)
    made = {
        "decide": time_decide(alone, decisions, whole),
        "decide_learning": time_decide(beside, decisions, whole),
        "learn": time_decide(itself, max(decisions // 100, 50), whole),
        "tick": np.zeros(decisions, np.int64),
    }
    beside.close()
    state = observe(whole[0], alone.config)
    for i in range(decisions):
        before = time.perf_counter_ns()
        alone.on_tick(ticks[i % len(ticks)])
        made["tick"][i] = time.perf_counter_ns() - before
        if i % TICKS_PER_EPOCH == TICKS_PER_EPOCH - 1:
            alone.decide(state, whole[0])
    return made


def time_decide(
    allocator: SmartAllocator, decisions: int, whole: list[EpochStats]
) -> NDArray[np.int64]:
    """Nanoseconds of decisions, int64 [decisions], each on an epoch at the alpha decided before."""
    times, alpha_centi = np.zeros(decisions, np.int64), allocator.initial_alpha_centi
    allocator.reset(0)
    for i in range(decisions):
        stats = replace(whole[i % len(whole)], alpha_target=alpha_centi / 100)
        state = observe(stats, allocator.config)
        before = time.perf_counter_ns()
        decision = allocator.decide(state, stats)
        times[i] = time.perf_counter_ns() - before
        alpha_centi = decision.alpha_centi
    return times
