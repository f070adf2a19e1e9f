"""Prometheus metrics of one node: its requests as they end, its epochs as they close."""

from __future__ import annotations

import math
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from serving_bridge.status import MODES, EpochRecord, StatusSource

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
STATES: Final = ("normal", "burst", "recovering")
LATENCY_BUCKETS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
DECISION_BUCKETS_S: Final = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1)

GAUGES: Final = {
    "hlem_epoch": ("Number of the last epoch.", "epoch"),
    "hlem_epoch_end_timestamp_seconds": ("When it ended; an old one tells of a stuck node.", "end_unix_s"),
    "hlem_epoch_p50_seconds": ("Median latency of the last epoch's requests.", "p50_ms"),
    "hlem_epoch_p99_seconds": ("P99 latency of the last epoch's requests.", "p99_ms"),
    "hlem_slo_seconds": ("Latency that requests are to meet.", "slo_ms"),
    "hlem_epoch_qos_ratio": ("Share of the last epoch's requests within the SLO.", "qos"),
    "hlem_hot_share_ratio": ("Share of requests from hot users.", "hot_share"),
    "hlem_kv_hit_ratio": ("Share of history tokens whose K and V were reused.", "kv_hit"),
    "hlem_embedding_hit_ratio": ("Share of embedding rows found in the pool.", "emb_hit"),
    "hlem_working_set_ratio": ("KV bytes of hot users over the pool's bytes.", "working_set"),
    "hlem_history_tokens_mean": ("Mean length of the histories.", "mean_history_tokens"),
    "hlem_utilisation_ratio": ("Share of the last epoch in which the node was busy.", "utilisation"),
    "hlem_queue_requests": ("Requests that waited at the last epoch's end.", "backlog"),
    "hlem_queue_age_seconds": ("Age of the oldest of them.", "backlog_age_s"),
    "hlem_alpha_target_ratio": ("Embedding cache's share of the pool, as decided.", "next_alpha_centi"),
    "hlem_alpha_resident_ratio": ("Embedding cache's share of the pool, as it is.", "alpha_resident"),
    "hlem_history_users": ("Users whose histories are on the disk.", "history_users"),
    "hlem_history_bytes": ("Bytes that these take.", "history_bytes"),
}  # fmt: skip
"""Metric: what it says, and the field of EpochRecord behind it."""
UNMEASURED: Final = {
    "epoch", "end_unix_s", "slo_ms", "next_alpha_centi", "history_users", "history_bytes",
}  # fmt: skip
"""Fields that an epoch without sound telemetry has, too; the other gauges are NaN then."""
COUNTERS: Final = {
    "hlem_refill_bytes": ("Bytes copied to warm new embedding pages.", "refill_bytes"),
    "hlem_prefetch_bytes": ("Bytes copied for requests that waited.", "prefetch_bytes"),
    "hlem_kv_evictions": ("KV entries evicted.", "evictions"),
    "hlem_completed_requests": ("Requests that the node completed.", "requests"),
    "hlem_histories_removed": (
        "Users' histories that were removed for want of room.",
        "histories_removed",
    ),
    "hlem_refused_requests": ("Requests that the node turned away for overload.", "refused"),
}
PAGES: Final = ("embedding", "kv", "free", "pending")


class Metrics:
    """The metrics, on a registry of their own.

    Args:
        status: where the epochs come from; None before there are any.
    """

    def __init__(self, status: StatusSource | None = None) -> None:
        self.registry = CollectorRegistry()
        self._status, self._epoch = status, -1
        registry = self.registry
        self.latency = Histogram(
            "hlem_request_seconds", "From a request's arrival to its answer, of those served.",
            ["protocol"], buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.requests = Counter(
            "hlem_requests",
            "Inference requests by how they ended.",
            ["protocol", "outcome"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "hlem_in_flight_requests", "Inference requests in the server.", registry=registry
        )
        self._gauges = {
            field: Gauge(name, text, registry=registry) for name, (text, field) in GAUGES.items()
        }
        self._counters = {
            field: Counter(name, text, registry=registry)
            for name, (text, field) in COUNTERS.items()
        }
        self._pages = Gauge(
            "hlem_pool_pages", "Pages of the pool by owner.", ["owner"], registry=registry
        )
        self._mode = Gauge("hlem_mode", "1 for the mode in force.", ["mode"], registry=registry)
        self._state = Gauge(
            "hlem_burst_state", "1 for the recovery's state.", ["state"], registry=registry
        )
        self._decision = Histogram(
            "hlem_decision_seconds", "Time of a decision, guards included.",
            buckets=DECISION_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._held = Counter(
            "hlem_decisions_held", "Decisions that were not applied.", registry=registry
        )

    def update(self) -> None:
        """Take in the epochs that closed since; at least every 1,000 epochs, or some are not counted."""
        if self._status is None:
            return
        records = self._status.recent(self._epoch)
        for record in records:
            self._add(record)
        if records:
            self._epoch = records[-1].epoch
            self._show(records[-1])

    def render(self) -> bytes:
        """Prometheus' text format, up to the last closed epoch."""
        self.update()
        return generate_latest(self.registry)

    def _add(self, record: EpochRecord) -> None:
        for field, counter in self._counters.items():
            counter.inc(max(0.0, float(getattr(record, field))))
        self._decision.observe(record.decision_us / 1e6)
        if record.held:
            self._held.inc()

    def _show(self, record: EpochRecord) -> None:
        sound = record.duration_s > 0.0
        for field, gauge in self._gauges.items():
            value = float(getattr(record, field)) if sound or field in UNMEASURED else math.nan
            gauge.set(value / _per_unit(field))
        for owner in PAGES:
            self._pages.labels(owner).set(getattr(record, f"{owner}_pages") if sound else math.nan)
        for mode in MODES:
            self._mode.labels(mode).set(record.mode == mode)
        for state in STATES:
            self._state.labels(state).set(record.state == state)


def _per_unit(field: str) -> float:
    """By what a field is divided to be in the metric's unit."""
    if field.endswith("_ms"):
        return 1e3
    return 100.0 if field.endswith("_centi") else 1.0
