"""What stands between a decision and the pool: settings of all guards, dwell time, enough requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from hlem_env.errors import require, require_number
from hlem_env.mdp import HOT_WINDOW_EPOCHS, TICKS_PER_EPOCH
from hlem_env.telemetry import EpochStats
from serving_bridge.rollback_guard import RollbackSettings
from serving_bridge.telemetry_guard import TelemetrySettings


@dataclass(frozen=True)
class GuardSettings:
    """Of all guards.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    rollback: RollbackSettings = field(default_factory=RollbackSettings)
    dwell_epochs: int = 2
    """Least epochs between two applied changes. The recovery controller's move in a burst may come
    sooner, and so may a rollback and an operator."""

    least_requests: int = 50
    """That a change must rest on: epochs with fewer are looked at together, from the last change on. A node
    that is asked nothing keeps its alpha."""

    def __post_init__(self) -> None:
        for name, kind in (("telemetry", TelemetrySettings), ("rollback", RollbackSettings)):
            value = getattr(self, name)
            require(isinstance(value, kind), name, value, kind.__name__)
        require_number("dwell_epochs", self.dwell_epochs, whole=True)
        require(0 <= self.dwell_epochs <= 10_000, "dwell_epochs", self.dwell_epochs, "0 to 10,000")
        require_number("least_requests", self.least_requests, whole=True)
        require(
            0 <= self.least_requests <= 10**6, "least_requests", self.least_requests, "0 to 10^6"
        )


class Gathered:
    """Epochs with few requests, taken together until there are enough to judge by.

    Args:
        least_requests: that are enough.
        most_epochs: that are taken together; then it begins anew, since older ones are of another time.
    """

    def __init__(self, least_requests: int, most_epochs: int = HOT_WINDOW_EPOCHS) -> None:
        self._least, self._most = least_requests, most_epochs
        self.clear()

    def clear(self) -> None:
        """Begin anew: alpha has changed, or telemetry was at fault."""
        self._stats: EpochStats | None = None
        self._epochs = 0

    def add(self, stats: EpochStats) -> EpochStats:
        """The epoch itself if it has enough, else all since the beginning."""
        if stats.requests >= self._least or self._epochs >= self._most:
            self.clear()
        self._stats = stats if self._stats is None else self._stats.merge(stats)
        self._epochs += 1
        return self._stats

    def wait(self) -> str:
        """Why no decision may rest on what there is, in words; empty if it may."""
        requests = 0 if self._stats is None else self._stats.requests
        if requests >= self._least:
            return ""
        return f"waits for requests: {requests} of {self._least}"


class Dwell:
    """Counts ticks since alpha last changed.

    Args:
        epochs: least epochs between changes.
    """

    def __init__(self, epochs: int) -> None:
        self._least = epochs * TICKS_PER_EPOCH
        self._since = self._least

    def pass_tick(self) -> None:
        """A tick went by."""
        self._since += 1

    def changed(self) -> None:
        """Alpha has changed now."""
        self._since = 0

    def wait(self) -> str:
        """Why alpha has to wait, in words; empty if it need not."""
        if self._since >= self._least:
            return ""
        return (
            f"dwell: {self._since / TICKS_PER_EPOCH:.1f} epochs since the last change,"
            f" at least {self._least // TICKS_PER_EPOCH}"
        )
