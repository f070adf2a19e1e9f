"""What a node tells of itself, epoch by epoch: for metrics, the page and the log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

MODES = ("active", "shadow", "frozen")
"""Decide and apply; decide and log only; hold alpha."""


@dataclass(frozen=True)
class EpochRecord:
    """One epoch of a served node, and the decision that was made at its end. Plain values throughout."""

    epoch: int
    """Counted from the node's start, 0 first."""
    end_unix_s: float
    """When it ended, by the system's clock: for people. Durations come from a clock that never jumps."""
    duration_s: float
    requests: int
    """That completed."""
    refused: int
    """That were turned away for overload."""
    p50_ms: float
    p99_ms: float
    slo_ms: float
    qos: float
    """Share of requests within the SLO."""
    hot_share: float
    kv_hit: float
    emb_hit: float
    working_set: float
    mean_history_tokens: float
    utilisation: float
    backlog: int
    backlog_age_s: float
    alpha_centi: int
    """In force at its end, hundredths."""
    alpha_resident: float
    """Share of the pool that holds rows."""
    embedding_pages: int
    kv_pages: int
    free_pages: int
    pending_pages: int
    refill_bytes: float
    prefetch_bytes: float
    evictions: int
    next_alpha_centi: int
    """In force after the decision."""
    wanted_alpha_centi: int
    """What the allocator decided; differs where a guard, a hold or the mode kept it from being applied."""
    reason: str
    """Of the decision, in words."""
    held: str
    """Why what was wanted was not applied; empty if it was."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Hundredths by layer: policy, adapter, recovery."""
    state: str = "normal"
    """Of the recovery controller: normal, burst, recovering."""
    mode: str = "active"
    decision_us: float = 0.0
    """Time of the decision, guards included."""
    hold_centi: int | None = None
    """Alpha that an operator held at its end, hundredths; None: none."""
    history_users: int = 0
    """Whose histories were on the disk at its end."""
    history_bytes: int = 0
    """That these took."""
    histories_removed: int = 0
    """Users' histories, for want of room."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class StatusSource(Protocol):
    """Where metrics and the page read. Any thread may call it; nothing waits for the node."""

    def recent(self, after_epoch: int = -1) -> list[EpochRecord]:
        """The last epochs, at most 1,000, oldest first: those after `after_epoch`."""
