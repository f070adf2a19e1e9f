"""The rollback guard: takes back a change of alpha that the service got worse by.

After every epoch each change of the last `window` epochs is on trial: the epochs before it against
those after it, the first one left out, while caches refill. It is taken back if all of this holds:

    P99       the mean of ln P99 rose by more than ln(1 + p99_margin), by `sigmas` deviations more;
              or QoS fell by more than qos_margin in the same way
    service   the mean service time rose, by `service_sigmas` deviations: alpha acts on latency only
              through it, and it varies by a few percent between epochs where P99 varies by a fifth
    workload  hot share, request rate and history length are what they were: else nothing can be said
    change    alpha is still away from where it was by `least_change_centi`, and P99 is worth a worry

so that neither a noisy P99 nor a workload that moved is taken for the change's doing.
docs/guards.md has the measured rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require, require_number
from hlem_env.telemetry import EpochStats


@dataclass(frozen=True)
class RollbackSettings:
    """When a change counts as bad, and what follows.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    enabled: bool = True
    window: int = 18
    """Epochs before a change, and after it, that are compared at most."""
    least_before: int = 4
    """Epochs before a change without which it is not judged."""
    least_after: int = 2
    """Epochs after a change, the first left out, from which on it is judged."""
    p99_margin: float = 0.10
    """Rise of P99 that is tolerated."""
    qos_margin: float = 0.02
    """Fall of the share within the SLO that is tolerated."""
    sigmas: float = 1.0
    """Of the difference's deviation, by which it must be clear of the margin."""
    service_sigmas: float = 4.0
    """Of the service time's difference, by which it must be clear of 0."""
    p99_noise: float = 0.20
    """Least deviation of ln P99 from epoch to epoch: that of a steady service."""
    p99_floor_slos: float = 0.5
    """A P99 below this many SLOs is nobody's trouble."""
    least_change_centi: int = 4
    """Hundredths: smaller changes cannot be told from noise."""
    hot_share_tolerance: float = 0.05
    """Difference of the hot share beyond which the workload has moved."""
    rate_tolerance: float = 0.15
    """Of the request rate, relative."""
    length_tolerance: float = 0.10
    """Of the mean history length, relative."""
    hold_epochs: int = 6
    """Epochs for which alpha stays where it was put back to; a burst's move may pass."""
    cool_down_epochs: int = 24
    """Epochs for which the adapter neither proposes nor learns."""

    def __post_init__(self) -> None:
        require(isinstance(self.enabled, bool), "enabled", self.enabled, "True or False")
        for name, low, high in (
            ("window", 2, 1000), ("least_before", 2, self.window), ("least_after", 1, self.window),
            ("least_change_centi", 1, 100), ("hold_epochs", 0, 10_000),
            ("cool_down_epochs", 0, 100_000),
        ):  # fmt: skip
            value = getattr(self, name)
            require_number(name, value, whole=True)
            require(low <= value <= high, name, value, f"{low} to {high}")
        for name, most in (
            ("p99_margin", 10.0), ("qos_margin", 1.0), ("sigmas", 100.0), ("service_sigmas", 100.0),
            ("p99_noise", 10.0), ("p99_floor_slos", 100.0), ("hot_share_tolerance", 1.0),
            ("rate_tolerance", 10.0), ("length_tolerance", 10.0),
        ):  # fmt: skip
            number = getattr(self, name)
            require_number(name, number)
            require(0 <= number <= most, name, number, f"0 to {most:g}")


class Rollback(NamedTuple):
    """A change to take back."""

    alpha_centi: int
    """In force before it."""
    reason: str


_SHARE, _RATE, _LENGTH, _QOS = 4, 5, 6, 7
_LEAST_SERVICE_NOISE = 0.01
_LEAST_QOS_NOISE = 0.005


class RollbackGuard:
    """Judges the changes of the last epochs.

    Args:
        settings: see there.
        slo_ms: of the service.
    """

    def __init__(self, settings: RollbackSettings, slo_ms: float) -> None:
        self.settings, self._slo_ms = settings, slo_ms
        self._rows = np.zeros((2 * settings.window + 1, 9))
        self._alphas = np.zeros(len(self._rows), np.int64)
        self._held = 0

    def clear(self) -> None:
        """Compare with nothing before now."""
        self._held = 0

    def see(self, stats: EpochStats, next_centi: int) -> Rollback | None:
        """Take an epoch in; the change to take back, if any.

        Args:
            stats: a sound epoch outside bursts; its `alpha_target` was in force during it.
            next_centi: alpha in force now, hundredths.
        """
        if not self.settings.enabled or not stats.requests or stats.p99_ms <= 0.0:
            return None
        p99, service = math.log(stats.p99_ms), math.log(max(stats.mean_service_ms, 1e-9))
        qos = stats.qos(self._slo_ms)
        rate = math.log(stats.requests / stats.duration_s)
        length = math.log(max(stats.mean_history_tokens, 1.0))
        if self._held == len(self._rows):
            self._rows[:-1], self._alphas[:-1] = self._rows[1:], self._alphas[1:]
            self._held -= 1
        self._rows[self._held] = (
            p99, service, p99 * p99, service * service, stats.hot_share, rate, length, qos, qos * qos
        )  # fmt: skip
        self._alphas[self._held] = round(100 * stats.alpha_target)
        self._held += 1
        return self._judge(next_centi)

    def _judge(self, now_centi: int) -> Rollback | None:
        settings, n = self.settings, self._held
        alphas = self._alphas[:n]
        # Candidates: the first epochs with another alpha than the one before.
        first = max(settings.least_before, n - settings.window - 1)
        last = n - 1 - settings.least_after  # the epoch of the change itself is left out
        if last < first:
            return None
        at = first + np.flatnonzero(alphas[first : last + 1] != alphas[first - 1 : last])
        at = at[self._is_away(alphas, at, now_centi)]
        if not at.size:
            return None
        sums = np.zeros((n + 1, self._rows.shape[1]))
        self._rows[:n].cumsum(axis=0, out=sums[1:])
        start = np.maximum(at - settings.window, 0)
        n_before, n_after = at - start, n - at - 1
        before = (sums[at] - sums[start]) / n_before[:, None]
        after = (sums[n] - sums[at + 1]) / n_after[:, None]
        spread = 1.0 / n_before + 1.0 / n_after
        weights = n_before / (n_before + n_after)
        evidence = self._evidence(before, after, np.sqrt(spread), weights)
        best = int(evidence.argmax())
        if evidence[best] <= 0.0:
            return None
        return self._verdict(int(alphas[at[best] - 1]), now_centi, before[best], after[best],
                             int(n_before[best]), int(n_after[best]))  # fmt: skip

    def _is_away(
        self, alphas: NDArray[np.int64], at: NDArray[np.int64], now_centi: int
    ) -> NDArray[np.bool_]:
        """Changes whose direction alpha is still away in, by the least change."""
        moved = now_centi - alphas[at - 1]
        same_way = np.sign(moved) == np.sign(alphas[at] - alphas[at - 1])
        away: NDArray[np.bool_] = same_way & (np.abs(moved) >= self.settings.least_change_centi)
        return away

    def _evidence(
        self,
        before: NDArray[np.float64],
        after: NDArray[np.float64],
        spread: NDArray[np.float64],
        weights: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """How far beyond what is tolerated each change is, in deviations; 0 or less: not bad."""
        settings, rise = self.settings, after - before
        within = weights[:, None] * before + (1.0 - weights[:, None]) * after
        means_squared = (
            weights[:, None] * before**2 + (1.0 - weights[:, None]) * after**2
        )  # variance within the two windows: mean of squares less the windows' squared means

        def deviation(square: int, mean: int, least: float) -> NDArray[np.float64]:
            variance = within[:, square] - means_squared[:, mean]
            found: NDArray[np.float64] = np.sqrt(np.maximum(variance, least**2)) * spread
            return found

        p99 = (rise[:, 0] - math.log1p(settings.p99_margin)) / deviation(2, 0, settings.p99_noise)
        qos = (-rise[:, _QOS] - settings.qos_margin) / deviation(8, _QOS, _LEAST_QOS_NOISE)
        matters = after[:, 0] > math.log(max(settings.p99_floor_slos * self._slo_ms, 1e-9))
        evidence = np.maximum(np.where(matters, p99, -np.inf), qos) - settings.sigmas
        slower = rise[:, 1] > settings.service_sigmas * deviation(3, 1, _LEAST_SERVICE_NOISE)
        same = (
            (np.abs(rise[:, _SHARE]) <= settings.hot_share_tolerance)
            & (np.abs(rise[:, _RATE]) <= math.log1p(settings.rate_tolerance))
            & (np.abs(rise[:, _LENGTH]) <= math.log1p(settings.length_tolerance))
        )
        return np.where(slower & same, evidence, -np.inf)

    def _verdict(
        self,
        back_centi: int,
        now_centi: int,
        before: NDArray[np.float64],
        after: NDArray[np.float64],
        n_before: int,
        n_after: int,
    ) -> Rollback:
        reason = (
            f"rolled back from {now_centi / 100:.2f} to {back_centi / 100:.2f}: P99 went from"
            f" {math.exp(before[0]):.1f} to {math.exp(after[0]):.1f} ms, QoS from"
            f" {100 * before[_QOS]:.1f} to {100 * after[_QOS]:.1f} %, over {n_before} epochs before"
            f" the change and {n_after} after it, of the same workload"
        )
        self.clear()
        return Rollback(back_centi, reason)
