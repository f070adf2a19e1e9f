"""Random streams of requests that no workload would send, for all of the node but its rows.

Histories are edited, cut and replaced, some are empty; alpha jumps over its whole range between
runs of any length; the queue may overflow. Rows cost no time, so that nothing depends on the
surrogate's approximation and every other field of EpochStats must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from hlem_env.surrogate.hardware import HardwareProfile
from hlem_env.surrogate.node import NodeConfig, SurrogateBackend
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Catalogue, Requests
from tests.surrogate.cases import Replay, exact_node

REQUESTS = 3000
SECONDS = 60.0
APPROXIMATE = {"rows_hit", "alpha_resident"}


@dataclass(frozen=True, eq=False)
class Stream:
    """Requests, the node that gets them, and its runs."""

    workload: Replay
    requests: Requests
    node: NodeConfig
    hardware: HardwareProfile
    runs: tuple[tuple[int, float], ...]
    """(alpha_centi, seconds), the warm-up first."""
    seed: int


@dataclass(frozen=True)
class Source:
    """What a replay says of its requests."""

    persistent_users: int
    max_history_tokens: int
    mean_history_tokens: float
    catalogue: Catalogue


def draw_stream(number: int) -> Stream:
    """Stream `number`."""
    rng = np.random.default_rng(2000 + number)
    length = int(rng.integers(5, 200))
    users = int(rng.integers(5, 40))
    layers = int(rng.integers(1, 4))
    block_tokens = int(rng.choice((8, 16, 32)))
    pages, page_bytes = int(rng.integers(100, 250)), 4096
    # All users' KV is a fifth to one and a half of the pool.
    block_bytes = rng.uniform(0.2, 1.5) * pages * page_bytes * block_tokens / (users * length)
    node = NodeConfig(
        pool_bytes=pages * page_bytes,
        page_bytes=page_bytes,
        block_tokens=block_tokens,
        block_bytes=max(int(block_bytes / layers), 1),
        layers=layers,
        kv_policy=("lru", "scan_resistant")[number % 2],
        refill=False,
        # The third makes some 1000 half-lives of a minute's stream: decayed counts are rescaled.
        epoch_seconds=float(rng.choice((0.5, 0.1, 0.005))),
    )
    slowness = rng.uniform(0.3, 1.1) * 128 / length / layers
    profile = HardwareProfile(
        name="rows for nothing",
        estimate=True,
        hardware="none",
        source="drawn",
        gather_gbps=1e12,
        hbm_gbps=1e12,
        link_gbps=1.0,
        refill_slowdown=0.0,
        overhead_ms=5.0,
        recompute_tokens=(128.0, 256.0),
        recompute_layer_ms=(10 * slowness, 20 * slowness),
        append_tokens=8.0,
        append_history_tokens=(128.0, 256.0),
        append_layer_ms=(2.0 / layers, 3.0 / layers),
    )
    warmup_s = node.warmup_epochs * node.epoch_seconds
    requests = _requests(rng, users, length, -warmup_s)
    catalogue = Catalogue(2, 1000, 64, zipf=0.5, candidates=int(rng.integers(0, 30)))
    longest, mean = int(requests.history_length.max()), float(requests.history_length.mean())
    runs, now = [(int(rng.integers(0, 101)), warmup_s)], 0.0
    while now < SECONDS:
        alpha = int(rng.integers(0, 101)) if rng.random() < 0.5 else runs[-1][0]
        runs.append((alpha, float(rng.choice((0.05, 0.5, 3.0)))))
        now += runs[-1][1]
    return Stream(
        workload=Replay(requests, Source(users, longest, mean, catalogue)),
        requests=requests,
        node=node,
        hardware=profile,
        runs=tuple(runs),
        seed=number,
    )


def _requests(rng: np.random.Generator, users: int, length: int, start_s: float) -> Requests:
    """Two thirds come from `users`, the low ids more often; the rest come once."""
    arrival_s = np.sort(rng.uniform(start_s, SECONDS, REQUESTS))
    user = np.empty(REQUESTS, np.int64)
    history, new = np.empty(REQUESTS, np.int32), np.empty(REQUESTS, np.int32)
    known: dict[int, int] = {}
    for i in range(REQUESTS):
        if rng.random() < 0.3:
            user[i] = users + i
            history[i] = new[i] = rng.integers(1, 2 * length)
            continue
        user[i] = who = int(users * rng.random() ** 2)
        added = int(rng.integers(0, 20))
        if who not in known or rng.random() < 0.02:
            tokens = int(rng.integers(added, 2 * length + added + 1))
        else:
            tokens = known[who] + added
        if tokens > 3 * length:
            tokens -= tokens // 4
        known[who] = tokens
        history[i], new[i] = tokens, min(added, tokens)
    one_off = user >= users
    user[one_off] = users + np.arange(np.count_nonzero(one_off))
    return Requests(arrival_s, user, history, new)


def run_stream(
    stream: Stream, backend: type[SurrogateBackend] = SurrogateBackend
) -> Iterator[tuple[EpochStats, EpochStats]]:
    """Stats of each run, from the surrogate and from the exact simulation."""
    surrogate = backend(stream.workload, stream.node, stream.hardware)
    surrogate.reset(0)
    replay = Replay(stream.requests, stream.workload)
    start_s = -stream.runs[0][1]
    exact = exact_node(stream.node, stream.workload, stream.hardware, start_s, stream.seed)
    for alpha, seconds in stream.runs:
        arriving = replay.take(exact.now_s + seconds)
        yield surrogate.run(alpha, seconds), exact.run(arriving, alpha, seconds)


def unequal_fields(surrogate: EpochStats, exact: EpochStats) -> list[str]:
    """Names of the fields that differ, rows aside."""
    names = [field.name for field in fields(EpochStats) if field.name not in APPROXIMATE]
    return [n for n in names if not _equal(getattr(surrogate, n), getattr(exact, n))]


def _equal(mine: object, truth: object) -> bool:
    if np.shape(mine) != np.shape(truth):  # type: ignore[arg-type]
        return False
    return bool(np.allclose(mine, truth, rtol=1e-9, atol=1e-6))  # type: ignore[arg-type]
