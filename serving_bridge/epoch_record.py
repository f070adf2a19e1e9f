"""The part of an EpochRecord that is measured, as plain finite values."""

from __future__ import annotations

from typing import Any

from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats, percentile


def describe(stats: EpochStats | None, config: MdpConfig) -> dict[str, Any]:
    """The measured fields of an epoch's record; all 0, and QoS 0, without sound telemetry."""
    if stats is None:
        return {
            "duration_s": 0.0, "requests": 0, "p50_ms": 0.0, "p99_ms": 0.0, "slo_ms": config.slo_ms,
            "qos": 0.0, "hot_share": 0.0, "kv_hit": 0.0, "emb_hit": 0.0, "working_set": 0.0,
            "mean_history_tokens": 0.0, "utilisation": 0.0, "backlog": 0, "backlog_age_s": 0.0,
            "alpha_resident": 0.0, "embedding_pages": 0, "kv_pages": 0, "free_pages": 0,
            "pending_pages": 0, "refill_bytes": 0.0, "prefetch_bytes": 0.0, "evictions": 0,
        }  # fmt: skip
    return {
        "duration_s": float(stats.duration_s),
        "requests": stats.requests,
        "p50_ms": float(percentile(stats.latency_ms, 0.5)) if stats.requests else 0.0,
        "p99_ms": stats.p99_ms,
        "slo_ms": config.slo_ms,
        "qos": stats.qos(config.slo_ms),
        "hot_share": stats.hot_share,
        "kv_hit": float(stats.kv_hit),
        "emb_hit": min(float(stats.emb_hit), 1.0),
        "working_set": float(stats.working_set),
        "mean_history_tokens": float(stats.mean_history_tokens),
        "utilisation": float(stats.utilisation),
        "backlog": int(stats.backlog),
        "backlog_age_s": float(stats.backlog_age_s),
        "alpha_resident": float(stats.alpha_resident),
        "embedding_pages": int(stats.embedding_pages),
        "kv_pages": int(stats.kv_pages),
        "free_pages": int(stats.free_pages),
        "pending_pages": int(stats.pending_pages),
        "refill_bytes": float(stats.refill_bytes),
        "prefetch_bytes": float(stats.prefetch_bytes),
        "evictions": int(stats.evictions),
    }
