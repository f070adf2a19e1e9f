"""What refill does to the requests that are served meanwhile: with the token bucket, and without.

Requests arrive open loop. In turns, and with each arm after each other, alpha goes down so that KV has
more room, then up, so that the embedding cache gets pages to refill; and what requests took is looked up
by when they arrived: while refill ran, for as long just before the move, and for as long after a move
whose pages were left to fill by themselves, without even the search for the rows missed most.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from eval.statistics import Estimate, pooled_percentile, ratio_of_pooled_percentiles
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.live.partition import Move
from hlem_env.live.refill import Refill, TokenBucket
from hlem_env.live.serving import LiveBackend
from hlem_env.live_scenario import live_workload
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats

Floats = NDArray[np.float64]

NO_REFILL, THROTTLED, UNTHROTTLED = ARMS = ("no refill", "throttled", "unthrottled")
GAP_S = 0.1
"""Before a move: requests of this time may still wait when it happens, and count nowhere."""
WINDOWS = ("before", "during", "no refill")
DRAINED_S = 0.05
"""Measuring begins when nobody has waited for longer, or after ten times the warm-up."""


@dataclass(frozen=True)
class Plan:
    """How the load is made and how often alpha moves."""

    utilisation: float
    """While alpha stays."""
    hot_share: float
    low_centi: int
    high_centi: int
    moves: int
    """Of each arm."""
    warm_s: float
    settle_s: float
    """At the low alpha, before each move up."""
    observe_s: float
    """At the high alpha, after it."""
    pause: bool
    """Whether throttled refill also pauses while P99 is near the SLO."""
    seed: int


@dataclass(frozen=True)
class Cycle:
    """One move up."""

    arm: str
    move_s: float
    """On the workload's clock, as `ended_s`."""
    ended_s: float
    """When its pages were refilled, or observation ended."""
    finished: bool
    refill_bytes: float


@dataclass(frozen=True)
class Window:
    """Requests that arrived in one kind of window, over all moves of an arm."""

    arm: str
    window: str
    requests: int
    p50_ms: Estimate | None
    p99_ms: Estimate | None
    """None without requests."""


@dataclass(frozen=True)
class Outcome:
    """Refill under load."""

    requests_per_s: float
    utilisation: float
    """Measured, moves and refill included."""
    windows: list[Window]
    p99_over_before: dict[str, Estimate | None]
    """By arm: P99 during refill over that before."""
    p99_over_no_refill: dict[str, Estimate | None]
    refill_ms: dict[str, float]
    """By arm: mean time that it took."""
    refill_mb: dict[str, float]
    """By arm: mean of what it moved."""
    finished: dict[str, float]
    """By arm: share of moves after which it ended within the time observed."""
    move_ms: dict[str, list[float]]
    """"up" and "down": what `LiveNode.move` took on the host under this load, median and largest."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class WatchedRefill(Refill):
    """Refill that can be left out, and that says when it was done."""

    enabled = True
    ended_s: float | None = None

    def refill(self, n_rows: int) -> None:
        """As `Refill.refill`; nothing when it is left out."""
        self.ended_s = None
        super().refill(n_rows if self.enabled else 0)

    def step(self, now: float, p99_ms: float | Callable[[], float] | None = None) -> int:
        """As `Refill.step`."""
        begun = super().step(now, p99_ms)
        if self.ended_s is None and not self.refilling:
            self.ended_s = now
        return begun


@dataclass
class Served:
    """A backend on its clock, and everything that it served."""

    backend: LiveBackend
    now_s: float
    arrival_s: list[Floats] = field(default_factory=list)
    latency_ms: list[Floats] = field(default_factory=list)
    busy_s: float = 0.0

    def run(self, alpha_centi: int, seconds: float) -> EpochStats:
        """Serve at an alpha."""
        stats = self.backend.run(alpha_centi, seconds)
        self.now_s += seconds
        self.busy_s += stats.utilisation * seconds
        self.arrival_s.append(stats.arrival_s)
        self.latency_ms.append(stats.latency_ms)
        return stats


def measure_refill(node: LiveNode, plan: Plan, requests_per_s: float) -> Outcome:
    """All moves of all arms, in turns.

    Args:
        node: what serves.
        plan: load and moves.
        requests_per_s: a first guess; corrected by what a warm-up at it measures.
    """
    trial = start(node, plan, requests_per_s)
    trial.run(plan.low_centi, plan.warm_s / 2)
    busy = trial.run(plan.low_centi, plan.warm_s / 2).utilisation
    requests_per_s *= plan.utilisation / max(busy, plan.utilisation / 4)
    served = start(node, plan, requests_per_s)
    served.run(plan.low_centi, plan.warm_s)
    for _ in range(round(9 * plan.warm_s / plan.settle_s)):  # cold caches have made a queue
        if served.run(plan.low_centi, plan.settle_s).backlog_age_s < DRAINED_S:
            break
    begin_s, served.busy_s = served.now_s, 0.0
    refill, moves = watch(node), watch_moves(node, plan)
    cycles = []
    for turn in tqdm(range(plan.moves), unit="round", disable=None):
        for k in range(len(ARMS)):
            arm = ARMS[(turn + k * (1 + turn % 2)) % len(ARMS)]
            cycles.append(one_cycle(served, refill, arm, plan))
    utilisation = served.busy_s / (served.now_s - begin_s)
    served.run(plan.low_centi, plan.settle_s)  # what still waits
    move_ms = {name: [float(np.median(ms)), max(ms)] for name, ms in moves.items()}
    return summarise(served, cycles, requests_per_s, utilisation, move_ms)


def start(node: LiveNode, plan: Plan, requests_per_s: float) -> Served:
    """A backend with empty caches under Steady at this rate."""
    config: LiveConfig = replace(
        node.config, hot_share=(plan.hot_share,), requests_per_s=(requests_per_s,)
    )
    scenario = Scenario(steady_hot_share=plan.hot_share, utilisation=config.utilisation)
    workload = live_workload(scenario, config, node.entries_in_pool, speed=1.0)
    backend = LiveBackend(workload, node)
    backend.reset(plan.seed)
    return Served(backend, -backend.warmup_s)


def watch(node: LiveNode) -> WatchedRefill:
    """Give the node a refill that is watched, when the old one has no copy under way."""
    if node.device.type == "cuda":
        torch.cuda.synchronize(node.device)
    bucket = TokenBucket(node.config.refill_gbps * 1e9)
    node.refill = refill = WatchedRefill(node.embedding, bucket)
    node.take_ahead_bytes()
    return refill


def watch_moves(node: LiveNode, plan: Plan) -> dict[str, list[float]]:
    """Note what moves between the two alphas take from now on, milliseconds, "up" and "down"."""
    taken_ms: dict[str, list[float]] = {"up": [], "down": []}
    move, at = node.move, [plan.low_centi]

    def timed(alpha_centi: int) -> Move:
        start_s = time.perf_counter()
        moved = move(alpha_centi)
        if alpha_centi != at[0]:
            name = "up" if alpha_centi > at[0] else "down"
            taken_ms[name].append(1e3 * (time.perf_counter() - start_s))
        at[0] = alpha_centi
        return moved

    setattr(node, "move", timed)  # noqa: B010 - of this node alone
    return taken_ms


def one_cycle(served: Served, refill: WatchedRefill, arm: str, plan: Plan) -> Cycle:
    """Down, settle, up, observe."""
    node = served.backend.node
    bucket = refill.bucket
    refill.enabled = False
    refill.refill(0)  # what is left from the last move
    served.run(plan.low_centi, plan.settle_s)
    refill.enabled = arm != NO_REFILL
    refill.bucket = None if arm == UNTHROTTLED else bucket
    refill.slo_ms = node.config.slo_ms if arm == THROTTLED and plan.pause else None
    move_s = served.now_s
    stats = served.run(plan.high_centi, plan.observe_s)
    ended_s = refill.ended_s
    refill.bucket, refill.slo_ms = bucket, None
    return Cycle(
        arm=arm,
        move_s=move_s,
        ended_s=served.now_s if ended_s is None else min(ended_s, served.now_s),
        finished=ended_s is not None,
        refill_bytes=stats.refill_bytes,
    )


def summarise(
    served: Served,
    cycles: list[Cycle],
    requests_per_s: float,
    utilisation: float,
    move_ms: dict[str, list[float]],
) -> Outcome:
    """Percentiles by arm and window; moves are drawn anew as a whole."""
    arrival_s, latency_ms = np.concatenate(served.arrival_s), np.concatenate(served.latency_ms)
    order = np.argsort(arrival_s)
    arrival_s, latency_ms = arrival_s[order], latency_ms[order]

    def within(begin_s: float, end_s: float) -> Floats:
        first, last = np.searchsorted(arrival_s, [begin_s, end_s])
        return latency_ms[first:last]

    by_arm = {arm: [cycle for cycle in cycles if cycle.arm == arm] for arm in ARMS}
    windows, over_before, over_none = [], {}, {}
    for arm in (THROTTLED, UNTHROTTLED):
        groups: dict[str, list[Floats]] = {name: [] for name in WINDOWS}
        for cycle, without in zip(by_arm[arm], by_arm[NO_REFILL], strict=True):
            length_s, before_s = cycle.ended_s - cycle.move_s, cycle.move_s - GAP_S
            groups["before"].append(within(before_s - length_s, before_s))
            groups["during"].append(within(cycle.move_s, cycle.ended_s))
            groups["no refill"].append(within(without.move_s, without.move_s + length_s))
        windows += [window_of(arm, name, groups[name]) for name in WINDOWS]
        over_before[arm] = ratio_of(groups["during"], groups["before"])
        over_none[arm] = ratio_of(groups["during"], groups["no refill"])
    refilled = {arm: by_arm[arm] for arm in (THROTTLED, UNTHROTTLED)}
    return Outcome(
        requests_per_s=requests_per_s,
        utilisation=utilisation,
        windows=windows,
        p99_over_before=over_before,
        p99_over_no_refill=over_none,
        refill_ms={a: mean(1e3 * (c.ended_s - c.move_s) for c in r) for a, r in refilled.items()},
        refill_mb={a: mean(c.refill_bytes / 1e6 for c in r) for a, r in refilled.items()},
        finished={a: mean(float(c.finished) for c in r) for a, r in refilled.items()},
        move_ms=move_ms,
    )


def window_of(arm: str, name: str, groups: list[Floats]) -> Window:
    """Percentiles of one window over the moves, [requests] each."""
    requests = sum(group.size for group in groups)
    estimates = [pooled_percentile(groups, share) if requests else None for share in (0.5, 0.99)]
    return Window(arm, name, requests, *estimates)


def ratio_of(during: list[Floats], other: list[Floats]) -> Estimate | None:
    """P99 over P99; None where one of them has no requests."""
    if not all(any(group.size for group in groups) for groups in (during, other)):
        return None
    return ratio_of_pooled_percentiles(during, other, 0.99)


def mean(values: Any) -> float:
    """Of numbers, one at least."""
    return float(np.mean(list(values)))
