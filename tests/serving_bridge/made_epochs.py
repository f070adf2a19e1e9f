"""Epochs for tests of what keeps them, made up from their number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hlem_env import mdp
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests
from serving_bridge.control_loop import Entry, Served
from serving_bridge.epoch_record import describe
from serving_bridge.status import EpochRecord

CONFIG = MdpConfig(features="working_set")


def stats_of(epoch: int = 0, requests: int = 100, **changed: object) -> EpochStats:
    """Sound stats of a steady service at alpha 0.50."""
    rng = np.random.default_rng(epoch)
    latency_ms = rng.gamma(4.0, 2.5, requests)
    values = {
        "duration_s": 5.0, "latency_ms": latency_ms, "service_ms": latency_ms / 2,
        "arrival_s": np.sort(rng.uniform(5.0 * epoch, 5.0 * epoch + 4.0, requests)),
        "is_hot": np.arange(requests) % 5 == 0,
        "history_tokens": 10_000 * requests, "reused_tokens": 2_000 * requests,
        "rows_looked_up": 5_000 * requests, "rows_hit": 4_000.0 * requests,
        "computed_tokens": 8_000 * requests, "refill_bytes": 1e6, "prefetch_bytes": 0.0,
        "evictions": 100, "alpha_target": 0.5, "alpha_resident": 0.5, "embedding_pages": 15_000,
        "kv_pages": 14_000, "free_pages": 1_000, "pending_pages": 0, "pool_bytes": 60_000_000_000,
        "working_set_bytes": 2e10, "backlog": 3, "backlog_age_s": 0.01, "utilisation": 0.7,
    }  # fmt: skip
    return EpochStats(**{**values, **changed})  # type: ignore[arg-type]


def served_of(stats: EpochStats) -> Served:
    """The requests of such stats: 40 users who come back."""
    n = stats.requests
    user = np.arange(n, dtype=np.int64) % 40
    length, new = np.full(n, 10_000, np.int32), np.full(n, 10, np.int32)
    return Served(Requests(stats.arrival_s, user, length, new), 0)


@lru_cache(maxsize=64)
def entry(epoch: int) -> Entry:
    """What is logged of the epoch."""
    stats = stats_of(epoch)
    record = EpochRecord(
        epoch=epoch, end_unix_s=1.7e9 + 5 * epoch, refused=0, alpha_centi=50, next_alpha_centi=52,
        wanted_alpha_centi=52, reason="policy +0.02", held="", parts={"policy": 2.0},
        **describe(stats, CONFIG),
    )  # fmt: skip
    return Entry(record, mdp.observe(stats, CONFIG), stats, served_of(stats))
