"""What stands between a decision and the pool: settings of all guards, and the dwell time."""

from __future__ import annotations

from dataclasses import dataclass, field

from hlem_env.errors import require, require_number
from hlem_env.mdp import TICKS_PER_EPOCH
from serving_bridge.rollback_guard import RollbackSettings
from serving_bridge.telemetry_guard import TelemetrySettings


@dataclass(frozen=True)
class GuardSettings:
    """Of the three guards.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    rollback: RollbackSettings = field(default_factory=RollbackSettings)
    dwell_epochs: int = 2
    """Least epochs between two applied changes. The recovery controller's move in a burst may come
    sooner, and so may a rollback and an operator."""

    def __post_init__(self) -> None:
        for name, kind in (("telemetry", TelemetrySettings), ("rollback", RollbackSettings)):
            value = getattr(self, name)
            require(isinstance(value, kind), name, value, kind.__name__)
        require_number("dwell_epochs", self.dwell_epochs, whole=True)
        require(0 <= self.dwell_epochs <= 10_000, "dwell_epochs", self.dwell_epochs, "0 to 10,000")


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
