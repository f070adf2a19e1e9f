"""Random small nodes, run by the surrogate and by the exact simulation on identical requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hlem_env.surrogate.hardware import HardwareProfile
from hlem_env.surrogate.node import NodeConfig, SurrogateBackend
from hlem_env.telemetry import EpochStats
from hlem_env.workload.regimes import (
    HOT_USERS_POOL_BYTES,
    LoadCurve,
    RegimeConfig,
    SyntheticWorkload,
)
from hlem_env.workload.requests import Catalogue, Requests, Workload
from tests.surrogate.exact_simulation import ExactConfig, ExactNode

EPOCH_SECONDS = 5.0
WARMUP_EPOCHS = 24
COLD_EPOCHS = 6
MEASURED_REQUESTS = 4500
PILOT_REQUESTS = 1200
ALPHA_BOUNDS = (15, 85)


@dataclass(frozen=True, eq=False)
class Case:
    """A small node, its workload, and the embedding share over time."""

    name: str
    workload: SyntheticWorkload
    node: NodeConfig
    hardware: HardwareProfile
    alpha_centi: tuple[int, ...]
    """One for each measured epoch; the first also holds during the warm-up."""
    seed: int

    @property
    def warmup_s(self) -> float:
        """Seconds before the measured period."""
        return WARMUP_EPOCHS * EPOCH_SECONDS

    @property
    def measured_s(self) -> float:
        """Seconds of the measured period."""
        return len(self.alpha_centi) * EPOCH_SECONDS


class Replay:
    """A workload that gives out requests made before."""

    def __init__(self, requests: Requests, source: Workload) -> None:
        self._requests = requests
        self._next = 0
        self.persistent_users = source.persistent_users
        self.max_history_tokens = source.max_history_tokens
        self.mean_history_tokens = source.mean_history_tokens
        self.catalogue = source.catalogue

    def reset(self, rng: np.random.Generator, start_s: float) -> None:
        """Back to the first request."""
        self._next = 0

    def take(self, until_s: float) -> Requests:
        """Requests from where the last call ended to before `until_s`."""
        first = self._next
        self._next = int(np.searchsorted(self._requests.arrival_s, until_s, side="left"))
        return self._requests[first : self._next]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"kind": "replay"}


def draw_case(number: int) -> Case:
    """Case `number`: sizes from wide ranges, then a rate that no alpha of the case overloads.

    (In overload P99 is that of one long queue, and differs by 5 to 10 % between two exact
    simulations that draw other items for the same requests.) Time is that of the full-size node,
    epochs of 5 s and a hot window of 60 s; a request takes tens of milliseconds, so a hot user
    comes a few times in the window.
    """
    rng = np.random.default_rng(1000 + number)
    regime = ("steady", "trend", "burst")[number % 3]
    policy = ("scan_resistant", "lru")[number // 3 % 2]
    moves = ("none", "steps", "jumps")[number // 6 % 3]

    mean_length = float(rng.integers(100, 280))
    candidates = int(rng.integers(20, 60))
    tables = int(rng.integers(1, 4))
    alpha = int(rng.integers(20, 81))
    extremes = (alpha,) if moves == "none" else ALPHA_BOUNDS
    # Even at the smallest share the embedding cache holds five requests' batches, yet no table.
    least_rows = 5 * (mean_length + candidates)
    rows_per_table = int(np.exp(rng.uniform(np.log(max(2 * least_rows, 2000)), np.log(30_000))))
    zipf = float(rng.uniform(0, 1.2))
    hot_share = float(rng.uniform(0.1, 0.8))
    population = float(rng.uniform(0.1, 0.2))  # 15 to 80 hot users
    pool_pages = int(rng.integers(300, 800))
    page_bytes = 65_536
    layers = int(rng.integers(1, 4))
    block_tokens = int(rng.choice((8, 16, 32)))

    highest_utilisation = float(rng.uniform(0.6, 0.8))
    # Rows of one table that the whole pool could hold.
    pool_rows = max(rng.uniform(0.2, 1.2) * rows_per_table, 100 * least_rows / extremes[0])
    row_bytes = max(int(pool_pages * page_bytes / (pool_rows * tables)), 1)
    # The hot users' KV takes this share of the pool.
    hot_tokens = 260 * population * mean_length * 1.2
    kv_share = rng.uniform(0.1, 0.9)
    block_bytes = int(kv_share * pool_pages * page_bytes * block_tokens / hot_tokens / layers)

    config = RegimeConfig(
        regime=regime,
        steady_hot_share=hot_share,
        mean_history_tokens=mean_length,
        history_spread=float(rng.uniform(0.1, 0.5)),
        new_items=int(rng.integers(1, 9)),
        max_history_tokens=int(1.5 * mean_length),
        warm_share=float(rng.uniform(0.05, 0.3)),
        warm_users=int(rng.integers(50, 300)),
        burst_users=str(rng.choice(("new", "existing"))),
        pool_bytes=int(population * HOT_USERS_POOL_BYTES),
        epoch_seconds=EPOCH_SECONDS,
        catalogue=Catalogue(tables, rows_per_table, row_bytes, zipf, candidates),
    )
    node = NodeConfig(
        pool_bytes=pool_pages * page_bytes,
        page_bytes=page_bytes,
        block_tokens=block_tokens,
        block_bytes=block_bytes,
        layers=layers,
        kv_policy=policy,
        refill=False,
        warmup_epochs=WARMUP_EPOCHS,
        epoch_seconds=EPOCH_SECONDS,
    )
    profile = HardwareProfile(
        name="small",
        estimate=True,
        hardware="none",
        source="drawn",
        gather_gbps=(mean_length + candidates) * tables * row_bytes / rng.uniform(15, 50) * 1e-6,
        hbm_gbps=(mean_length + candidates) * tables * row_bytes * 1e-6,
        link_gbps=1.0,
        refill_slowdown=0.0,
        overhead_ms=float(rng.uniform(1, 5)),
        recompute_tokens=(128.0, 256.0, 512.0),
        recompute_layer_ms=tuple(v / layers for v in (12.0, 26.0, 60.0)),
        append_tokens=16.0,
        append_history_tokens=(128.0, 512.0),
        append_layer_ms=tuple(v / layers for v in (4.0, 8.0)),
    )
    shares = (config.steady_hot_share,) if regime == "steady" else (0.05, 0.6)
    service_s = [
        max(_mean_service_s(config, node, profile, share, at, number) for at in extremes)
        for share in shares
    ]
    load = LoadCurve(shares, tuple(highest_utilisation / mean_s for mean_s in service_s))
    rate = float(np.mean(load(np.array([0.15 if regime == "burst" else np.mean(shares)]))))
    epochs = int(np.ceil(MEASURED_REQUESTS / rate / EPOCH_SECONDS))
    config = replace(config, episode_epochs=epochs)
    return Case(
        name=f"{number:02d}-{regime}-{policy}-{moves}",
        workload=SyntheticWorkload(config, load),
        node=node,
        hardware=profile,
        alpha_centi=_moves(moves, alpha, epochs, rng),
        seed=number,
    )


def _moves(kind: str, alpha: int, epochs: int, rng: np.random.Generator) -> tuple[int, ...]:
    """An embedding share for each epoch: constant, a walk of 0.06, or a jump every 12 epochs."""
    if kind == "none":
        return (alpha,) * epochs
    alphas = [alpha]
    for epoch in range(1, epochs):
        if kind == "steps":
            alpha = int(np.clip(alpha + rng.choice((-6, 0, 6)), *ALPHA_BOUNDS))
        elif epoch % 12 == 0:
            alpha = int(rng.integers(*ALPHA_BOUNDS, endpoint=True))
        alphas.append(alpha)
    return tuple(alphas)


def exact_node(
    node: NodeConfig, workload: Workload, profile: HardwareProfile, start_s: float, seed: int
) -> ExactNode:
    """The exact simulation of a node; `seed` draws the items."""
    catalogue = workload.catalogue
    config = ExactConfig(
        pool_pages=node.pool_bytes // node.page_bytes,
        page_bytes=node.page_bytes,
        layers=node.layers,
        block_tokens=node.block_tokens,
        block_bytes=node.block_bytes,
        overhead_ms=profile.overhead_ms,
        gather_gbps=profile.gather_gbps,
        hbm_gbps=profile.hbm_gbps,
        kv_policy=node.kv_policy,
        half_life_s=12 * node.epoch_seconds,
        hot_window_s=12 * node.epoch_seconds,
    )

    full = _line(profile.recompute_tokens, profile.recompute_layer_ms)
    few = _line(profile.append_history_tokens, profile.append_layer_ms)

    def compute_ms(tokens: int, context: int) -> float:
        """`full` when all is new, `few` up to `append_tokens` new ones, a line between."""
        if tokens >= context:
            return node.layers * full(context)
        if tokens <= profile.append_tokens:
            return node.layers * few(context)
        between = (profile.append_tokens, context), (few(context), full(context))
        return node.layers * float(np.interp(tokens, *between))

    return ExactNode(config, catalogue, compute_ms, np.random.default_rng([seed, 2]), start_s)


def _line(tokens: tuple[float, ...], layer_ms: tuple[float, ...]) -> Callable[[float], float]:
    """Piecewise linear from 0 through the points, on beyond the last with the last slope."""
    slope = (layer_ms[-1] - layer_ms[-2]) / (tokens[-1] - tokens[-2])
    at = (0.0, *tokens, tokens[-1] + 1e6)
    ms = (0.0, *layer_ms, layer_ms[-1] + 1e6 * slope)
    return lambda x: float(np.interp(x, at, ms))


def _mean_service_s(
    config: RegimeConfig,
    node: NodeConfig,
    profile: HardwareProfile,
    hot_share: float,
    alpha_centi: int,
    seed: int,
) -> float:
    """Mean service time at a steady hot share, by a short exact run."""
    steady = replace(config, regime="steady", steady_hot_share=hot_share)
    workload = SyntheticWorkload(steady, LoadCurve((0.0,), (10.0,)))
    workload.reset(np.random.default_rng([seed, 3]), 0.0)
    seconds = PILOT_REQUESTS / 10.0
    pilot = exact_node(node, workload, profile, 0.0, seed)
    pilot.run(workload.take(seconds / 2), alpha_centi, seconds / 2)
    return pilot.run(workload.take(seconds), alpha_centi, seconds / 2).mean_service_ms / 1e3


def draw_requests(case: Case) -> Requests:
    """The case's requests, warm-up included."""
    rng = np.random.default_rng([case.seed, 1])
    case.workload.reset(rng, -case.warmup_s)
    return case.workload.take(case.measured_s)


def run_exact(case: Case, requests: Requests) -> list[EpochStats]:
    """Stats of every epoch, the warm-up's first."""
    node = exact_node(case.node, case.workload, case.hardware, -case.warmup_s, case.seed)
    replay = Replay(requests, case.workload)
    return [
        node.run(replay.take(node.now_s + EPOCH_SECONDS), alpha, EPOCH_SECONDS)
        for alpha in _every_alpha(case)
    ]


def run_surrogate(
    case: Case, requests: Requests, backend: type[SurrogateBackend] = SurrogateBackend
) -> list[EpochStats]:
    """Stats of every epoch, the warm-up's first."""
    surrogate = backend(Replay(requests, case.workload), case.node, case.hardware)
    surrogate.reset(case.seed)
    return [surrogate.run(alpha, EPOCH_SECONDS) for alpha in _every_alpha(case)]


def _every_alpha(case: Case) -> tuple[int, ...]:
    return (case.alpha_centi[0],) * WARMUP_EPOCHS + case.alpha_centi


def merged(epochs: list[EpochStats]) -> EpochStats:
    """Stats of all epochs as one run."""
    total = epochs[0]
    for epoch in epochs[1:]:
        total = total.merge(epoch)
    return total


@dataclass(frozen=True)
class Difference:
    """Surrogate less exact over the measured period, and once over the start of the warm-up."""

    requests: int
    utilisation: float
    """Of the exact simulation, as are the next three."""
    kv_hit: float
    emb_hit: float
    p99_ms: float
    kv_points: float
    emb_points: float
    p99_percent: float
    utilisation_percent: float
    hot_flags: int
    """Requests whose `is_hot` differs."""
    emb_points_by_epoch: float
    """Mean absolute difference of an epoch's embedding hit rate; the exact one's noise included."""
    cold_emb_points: float
    """Of the first 30 s, while the embedding cache fills."""
    working_set_percent: float
    """Mean absolute difference at the end of an epoch. A request that starts just before the end in
    one and just after it in the other makes a difference there."""


def difference(surrogate: list[EpochStats], exact: list[EpochStats]) -> Difference:
    """Compare the two runs of one case."""
    cold = merged(surrogate[:COLD_EPOCHS]).emb_hit - merged(exact[:COLD_EPOCHS]).emb_hit
    surrogate, exact = surrogate[WARMUP_EPOCHS:], exact[WARMUP_EPOCHS:]
    mine, truth = merged(surrogate), merged(exact)
    common, at_mine, at_truth = np.intersect1d(
        mine.arrival_s, truth.arrival_s, assume_unique=True, return_indices=True
    )
    pairs = list(zip(surrogate, exact, strict=True))
    sets = np.array([(s.working_set_bytes, e.working_set_bytes) for s, e in pairs])
    return Difference(
        requests=truth.requests,
        utilisation=truth.utilisation,
        kv_hit=truth.kv_hit,
        emb_hit=truth.emb_hit,
        p99_ms=truth.p99_ms,
        kv_points=100 * (mine.kv_hit - truth.kv_hit),
        emb_points=100 * (mine.emb_hit - truth.emb_hit),
        p99_percent=100 * (mine.p99_ms / truth.p99_ms - 1),
        utilisation_percent=100 * (mine.utilisation / truth.utilisation - 1),
        hot_flags=int(np.count_nonzero(mine.is_hot[at_mine] != truth.is_hot[at_truth])),
        emb_points_by_epoch=100 * float(np.mean([abs(s.emb_hit - e.emb_hit) for s, e in pairs])),
        cold_emb_points=100 * cold,
        working_set_percent=100 * float(np.abs(sets[:, 0] - sets[:, 1]).mean() / sets[:, 1].mean()),
    )
