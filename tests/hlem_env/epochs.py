"""Epochs' stats from the few fields that a test is about, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hlem_env.telemetry import EpochStats


def make_stats(latency_ms: Sequence[float] = (), **fields: Any) -> EpochStats:
    """Stats of requests with these latencies; what is not named is 0, arrays are of zeros."""
    n = len(latency_ms)
    values: dict[str, Any] = {
        "duration_s": 5.0,
        "latency_ms": np.array(latency_ms, np.float64),
        "service_ms": np.zeros(n),
        "arrival_s": np.zeros(n),
        "is_hot": np.zeros(n, np.bool_),
        "history_tokens": 0,
        "reused_tokens": 0,
        "rows_looked_up": 0,
        "rows_hit": 0.0,
        "computed_tokens": 0,
        "refill_bytes": 0.0,
        "prefetch_bytes": 0.0,
        "evictions": 0,
        "alpha_target": 0.5,
        "alpha_resident": 0.5,
        "embedding_pages": 0,
        "kv_pages": 0,
        "free_pages": 0,
        "pending_pages": 0,
        "pool_bytes": 60_000_000_000,
        "working_set_bytes": 0.0,
        "backlog": 0,
        "backlog_age_s": 0.0,
        "utilisation": 0.0,
    }
    assert values.keys() >= fields.keys()
    for name, value in fields.items():
        values[name] = np.array(value) if isinstance(value, list) else value
    return EpochStats(**values)


@st.composite
def epochs(draw: st.DrawFn) -> EpochStats:
    """Any stats that a node may report. Floats are multiples of 1/8: their sums are exact."""

    def count(most: int = 10**6) -> int:
        return draw(st.integers(0, most))

    def eighths(most: int = 10**5) -> float:
        return count(8 * most) / 8

    n = count(6)
    history, looked_up = count() if n else 0, count() if n else 0
    backlog = count(5)
    return make_stats(
        [eighths() for _ in range(n)],
        duration_s=0.125 + eighths(10),
        service_ms=[eighths() for _ in range(n)],
        arrival_s=[eighths() for _ in range(n)],
        is_hot=np.array([draw(st.booleans()) for _ in range(n)], np.bool_),
        history_tokens=history,
        reused_tokens=count(history),
        rows_looked_up=looked_up,
        rows_hit=eighths(looked_up),
        computed_tokens=count(),
        refill_bytes=eighths(),
        prefetch_bytes=eighths(),
        evictions=count(),
        alpha_target=count(100) / 100,
        alpha_resident=count(8) / 8,
        embedding_pages=count(),
        kv_pages=count(),
        free_pages=count(),
        pending_pages=count(),
        pool_bytes=count(),
        working_set_bytes=eighths(),
        backlog=backlog,
        backlog_age_s=eighths() if backlog else 0.0,
        utilisation=count(8) / 8,
    )
