"""The telemetry guard: measurements that cannot be what the node did are no ground for a move.

It looks at every field of an epoch's (or a tick's) stats and says in words what is wrong with the
first that is: missing, not a number, out of range, stale. What it passes is safe to decide on, to
learn from and to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hlem_env.errors import require, require_number
from hlem_env.telemetry import EpochStats

_MOST_TOKENS = 10**15
"""Of a count: far beyond any epoch, far from an overflow."""
_ROUNDING = 1e-6


@dataclass(frozen=True)
class TelemetrySettings:
    """What is too old and what is too large.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    max_age_s: float = 15.0
    """Stats that ended longer ago are stale: three epochs of 5 s."""
    max_latency_s: float = 3600.0
    """No request takes longer."""
    max_epoch_s: float = 7200.0
    """No epoch does."""

    def __post_init__(self) -> None:
        for name in ("max_age_s", "max_latency_s", "max_epoch_s"):
            value = getattr(self, name)
            require_number(name, value)
            require(0 < value <= 1e6, name, value, "above 0, at most 1e6 seconds")


class TelemetryGuard:
    """Finds the fault in stats. One for the epochs, one for the ticks: each remembers its last.

    Args:
        settings: see there.
    """

    def __init__(self, settings: TelemetrySettings | None = None) -> None:
        self.settings = settings or TelemetrySettings()
        longest_s = self.settings.max_epoch_s
        self._scalars: dict[str, tuple[float, float]] = {
            "duration_s": (1e-6, longest_s),
            "alpha_target": (0.0, 1.0),
            "alpha_resident": (0.0, 1.0 + _ROUNDING),
            "utilisation": (0.0, 1.0 + _ROUNDING),
            "pool_bytes": (1, 2**60),
            "working_set_bytes": (0.0, 2.0**62),
            "backlog": (0, 10**9),
            "backlog_age_s": (0.0, 1e9),
            **dict.fromkeys(("history_tokens", "reused_tokens"), (0, _MOST_TOKENS)),
            **dict.fromkeys(("rows_looked_up", "rows_hit"), (0, _MOST_TOKENS)),
            **dict.fromkeys(("computed_tokens", "evictions"), (0, _MOST_TOKENS)),
            **dict.fromkeys(("refill_bytes", "prefetch_bytes"), (0.0, 2.0**62)),
            **dict.fromkeys(
                ("embedding_pages", "kv_pages", "free_pages", "pending_pages"), (0, 2**50)
            ),
        }
        longest_ms = 1000.0 * self.settings.max_latency_s
        self._arrays = {
            "latency_ms": (0.0, longest_ms),
            "service_ms": (0.0, longest_ms),
            "arrival_s": (-1e12, 1e12),
        }
        self.forget()

    def forget(self) -> None:
        """Begin anew: the next stats have no predecessor."""
        self._last: EpochStats | None = None
        self._newest_s = -np.inf

    def fault(self, stats: EpochStats | None, age_s: float = 0.0, served: int | None = None) -> str:
        """What is wrong, in words; empty if nothing is.

        Args:
            stats: None where none came.
            age_s: seconds since they ended.
            served: requests that are known to have completed, from elsewhere; None: not known.
        """
        found = self._wrong_value(stats)
        if found:
            return found
        assert stats is not None
        found = self._stale(stats, age_s, served)
        self._last = stats
        return found

    def _wrong_value(self, stats: EpochStats | None) -> str:
        if stats is None:
            return "telemetry is missing"
        if not isinstance(stats, EpochStats):
            return f"telemetry is missing: a {type(stats).__name__} came in its place"
        for name, (low, high) in self._scalars.items():
            value: Any = getattr(stats, name, None)
            try:
                good = bool(low <= value <= high)  # NaN is not within anything
            except (TypeError, ValueError):
                good = False
            if not good:
                return _said(name, value, low, high)
        return self._wrong_array(stats) or _contradiction(stats)

    def _wrong_array(self, stats: EpochStats) -> str:
        hot: Any = getattr(stats, "is_hot", None)
        if not isinstance(hot, np.ndarray) or hot.dtype != np.bool_ or hot.ndim != 1:
            return _said_array("is_hot", hot, "booleans [requests]")
        for name, (low, high) in self._arrays.items():
            values: Any = getattr(stats, name, None)
            if (
                not isinstance(values, np.ndarray)
                or values.dtype != np.float64
                or values.shape != hot.shape
            ):
                return _said_array(name, values, f"float64 {list(hot.shape)}, as is_hot")
            # min and max of an array with a NaN are NaN
            if values.size and not low <= values.min() <= values.max() <= high:
                bad = values[~((values >= low) & (values <= high))]
                return f"{_said(name, float(bad[0]), low, high)} ({bad.size} of {values.size})"
        return ""

    def _stale(self, stats: EpochStats, age_s: float, served: int | None) -> str:
        if not age_s <= self.settings.max_age_s:
            return f"telemetry is stale: {age_s:.1f} s old, at most {self.settings.max_age_s:g}"
        if stats is self._last or _same_requests(stats, self._last):
            return "telemetry is stale: the same epoch came twice"
        if served and not stats.requests:
            return f"telemetry is stale: {served} requests completed and none is in it"
        if not stats.requests:
            return ""
        # Whatever the order of service, what completes later has a later completion.
        newest_s = float((stats.arrival_s + 0.001 * stats.latency_ms).max())
        before_s, self._newest_s = self._newest_s, newest_s
        if newest_s <= before_s:
            return (
                f"telemetry is stale: its clock stood still or went back, the last completion is at"
                f" {newest_s:.3f} s, before it was at {before_s:.3f} s"
            )
        return ""


def _same_requests(stats: EpochStats, last: EpochStats | None) -> bool:
    """Whether both measured the very same requests: no two epochs have equal times of any."""
    if last is None or not stats.requests or stats.requests != last.requests:
        return False
    if stats.latency_ms[0] != last.latency_ms[0]:
        return False
    return np.array_equal(stats.latency_ms, last.latency_ms) and np.array_equal(
        stats.arrival_s, last.arrival_s
    )


def _contradiction(stats: EpochStats) -> str:
    """A part that is larger than the whole."""
    for part, whole in (("reused_tokens", "history_tokens"), ("rows_hit", "rows_looked_up")):
        some, every = getattr(stats, part), getattr(stats, whole)
        if some > every * (1.0 + _ROUNDING):
            return f"telemetry is out of range: {part} {some} is more than {whole} {every}"
    return ""


def _said(name: str, value: object, low: float, high: float) -> str:
    if value is None:
        return f"telemetry is missing: {name}"
    if isinstance(value, int | float | np.number) and not np.isfinite(value):
        return f"telemetry is not a number: {name} is {value}"
    shown = value if isinstance(value, int | float | np.number) else f"a {type(value).__name__}"
    return f"telemetry is out of range: {name} is {shown}, allowed {low:g} to {high:g}"


def _said_array(name: str, values: object, allowed: str) -> str:
    if values is None:
        return f"telemetry is missing: {name}"
    shown = f"a {type(values).__name__}"
    if isinstance(values, np.ndarray):
        shown = f"{values.dtype} {list(values.shape)}"
    return f"telemetry is out of range: {name} is {shown}, allowed {allowed}"
