"""Times an access under each caching policy, and a decision of the predictor: one core.

    python -m eval.bench_eviction --json docs/results/bench_eviction.json

LRU and LARU take turns on the same requests, so that other work on the machine meets both; times are
CPU time of the thread, and the best of the rounds counts. Predictions are made beforehand and not
timed: an access is all that the policy does. The predictor's part is timed on its own: 64 candidates
predicted again by a trained model, and one access.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.eviction.online import OnlinePredictor
from hlem_env.eviction.replay import Floats, Keys, next_requests, replay
from hlem_env.machine import command, machine, write_result

LEAST_MILLIONS = 2.0
"""LARU accesses a second."""
MOST_TIMES_LRU = 4.0
DECISION_MS = 2.0
CANDIDATES = 64


@dataclass
class Args:
    """Accesses a second of LRU, LARU and the others, and the predictor's time a decision."""

    json: Path | None = None
    """file for the figures"""
    capacity: int = 100_000
    """items that fit"""
    requests: int = 2_000_000
    """timed in each round"""
    rounds: int = 5
    """of all policies in turn"""

    def __post_init__(self) -> None:
        require(self.capacity >= 1, "capacity", self.capacity, "1 or more")
        require(self.requests >= 1000, "requests", self.requests, "1,000 or more")
        require(self.rounds >= 1, "rounds", self.rounds, "1 or more")


def streams(args: Args) -> dict[str, Keys]:
    """Requests over ten times as many keys as fit, by a bounded Zipf law, and over twice as many alike."""
    rng = np.random.default_rng(1)
    found = {}
    for exponent in (1.2, 0.9, 0.7):
        weight = np.arange(1, 10 * args.capacity + 1) ** -exponent
        ranks = np.searchsorted(np.cumsum(weight) / weight.sum(), rng.random(args.requests))
        keys = rng.permutation(10 * args.capacity)[np.minimum(ranks, weight.size - 1)]
        found[f"Zipf {exponent}, 10 x capacity"] = keys
    found["uniform, 2 x capacity"] = rng.integers(0, 2 * args.capacity, args.requests)
    return found


def predictions(keys: Keys) -> dict[str, Floats]:
    """True next requests, and the same gaps off by a factor that is lognormal with sigma 2."""
    true = next_requests(keys)
    now = np.arange(keys.size)
    noise = np.exp(2.0 * np.random.default_rng(2).standard_normal(keys.size))
    return {"true": true, "noisy": now + (true - now) * noise}


def main(args: Args) -> int:
    """Time, print, write; 1 if a bar is missed."""
    lines = [line for name, keys in streams(args).items() for line in timed(name, keys, args)]
    decision = decision_ms()
    print(f"{machine()['cpu']}, one core, capacity {args.capacity:,}")
    print(f"{'requests':<28}{'policy':<16}{'predictions':<13}{'miss':>7}{'M/s':>8}{'x LRU':>8}")
    for line in lines:
        print(
            f"{line['stream']:<28}{line['policy']:<16}{line['predictions'] or '':<13}"
            f"{line['miss_ratio']:>7.3f}{line['million_per_s']:>8.2f}{line['times_lru']:>8.2f}"
        )
    for name, value in decision.items():
        print(f"{name}: {value:.3f} ms")
    of_laru = [line for line in lines if line["policy"] == "laru"]
    good = {
        "million_per_s": min(line["million_per_s"] for line in of_laru) >= LEAST_MILLIONS,
        "times_lru": max(line["times_lru"] for line in of_laru) <= MOST_TIMES_LRU,
        "decision_ms": decision[f"{CANDIDATES} candidates predicted again"] <= DECISION_MS,
    }
    for name, met in good.items():
        print(f"bar of {name}: {'met' if met else 'MISSED'}")
    if args.json is not None:
        payload = {"capacity": args.capacity, "lines": lines, "decision": decision, "bars": good}
        write_result(args.json, command("eval.bench_eviction"), payload)
    return 0 if all(good.values()) else 1


def timed(name: str, keys: Keys, args: Args) -> list[dict[str, Any]]:
    """A line a policy on one stream."""
    given: dict[tuple[str, str | None], Floats | None] = {
        ("lru", None): None,
        ("scan_resistant", None): None,
    }
    for source, predicted in predictions(keys).items():
        given |= {(policy, source): predicted for policy in ("laru", "fpb", "hf")}
    best: dict[tuple[str, str | None], tuple[float, float]] = {}
    for _ in range(args.rounds):
        for key, times in given.items():
            result = replay(key[0], keys, args.capacity, times)
            before = best.get(key, (np.inf, 0.0))[0]
            best[key] = (min(before, result.seconds), result.miss_ratio)
    lru = best["lru", None][0]
    return [
        {
            "stream": name,
            "policy": policy,
            "predictions": source,
            "miss_ratio": round(miss_ratio, 4),
            "million_per_s": round(keys.size / seconds * 1e-6, 3),
            "times_lru": round(seconds / lru, 2),
        }
        for (policy, source), (seconds, miss_ratio) in best.items()
    ]


def decision_ms() -> dict[str, float]:
    """Median milliseconds of what the predictor adds to a request on the KV path."""
    rng = np.random.default_rng(3)
    predictor = OnlinePredictor(5_000.0, background=False)
    users = rng.zipf(1.3, 30_000) % 3_000
    for first in range(0, users.size, 500):
        part = users[first : first + 500]
        predictor.access(part, first + np.arange(part.size, dtype=np.float64))
    keys = np.arange(CANDIDATES)
    one, now = keys[:1], float(users.size)
    return {
        f"{CANDIDATES} candidates predicted again": median_ms(lambda: predictor.again(keys, 4e4)),
        "one access": median_ms(lambda: predictor.access(one, np.array([now]))),
    }


def median_ms(call: Callable[[], object]) -> float:
    """Of 300 calls."""
    times = np.empty(300)
    for i in range(times.size):
        began = time.thread_time()
        call()
        times[i] = 1e3 * (time.thread_time() - began)
    return float(np.median(times))


if __name__ == "__main__":
    run_command("eval.bench_eviction", main, Args)
