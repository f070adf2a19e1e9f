"""The burst watch: sees a burst in the workload, at every tick between decisions.

Two Page charts (CUSUM of log-likelihood ratios, clipped at 0) against a baseline that only quiet
epochs teach:

    hot share    x of n requests are hot:  S += x ln(p1 / p0) + (n - x) ln((1 - p1) / (1 - p0)),
                 p0 the baseline, p1 = p0 + least jump
    working set  it grew by d in the tick: S += (g / s^2) (d - m - g / 2),
                 m and s the usual growth and its deviation, g the least growth

Either above h = ln(2 x ticks between false alarms) is a burst: a chart of likelihood ratios under
its own model is above h once in e^h ticks at most (Lorden 1971), whatever the number of requests. That
number sets how far one tick moves the chart instead: twice the requests, twice the step. Requests of
one user come in clusters, so both charts divide by the dispersion that they have measured. Where requests
are few, one of them or one user more says much about a chart's model and little about the service: no
tick moves a chart by more than a third of h, and the baseline goes back over 300 requests at least.

P99 is not looked at: it varies by a fifth between epochs of a steady service, hot share by what n
draws vary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from hlem_env.errors import require
from hlem_env.mdp import TICKS_PER_EPOCH
from hlem_env.telemetry import EpochStats

_SHARE_BOUNDS = (0.005, 0.95)
"""Of a baseline share: with none of n hot so far, one hot request would be infinitely unlikely."""
_LEAST_SPREAD = 1e-3
"""Least s, pools: on a working set that never moved every byte would be a burst."""
_LEAST_TICKS = 3.0
"""That it takes for an alarm, whatever each of them says."""


@dataclass(frozen=True)
class WatchSettings:
    """What counts as a burst, and how seldom a quiet service may look like one.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    least_jump: float = 0.10
    """Of the hot share: smaller jumps take longer to see, or are not seen."""
    least_growth: float = 0.015
    """Of the working set in a tick, in pools."""
    false_alarm_epochs: float = 24_000.0
    """Mean epochs between false alarms, at least, if the quiet epochs are as the charts assume. Real
    ones drift, and the baseline lags: a hundred times the 240 that are wanted costs a tick."""
    end_odds: float = 150.0
    """A burst is over when its end is so much likelier than its going on."""
    baseline_epochs: float = 3.0
    """Quiet epochs that the baseline averages over (exponentially)."""
    least_requests: int = 300
    """That the hot share's baseline averages over, in however many epochs."""

    def __post_init__(self) -> None:
        require(0 < self.least_jump < 1, "least_jump", self.least_jump, "above 0, below 1")
        require(self.least_growth > 0, "least_growth", self.least_growth, "above 0")
        require(
            self.false_alarm_epochs >= 1, "false_alarm_epochs", self.false_alarm_epochs, "1 or more"
        )
        require(self.end_odds > 1, "end_odds", self.end_odds, "above 1")
        require(self.baseline_epochs >= 1, "baseline_epochs", self.baseline_epochs, "1 or more")
        require(self.least_requests >= 1, "least_requests", self.least_requests, "1 or more")


class _Tick(NamedTuple):
    """What the charts look at."""

    requests: int
    hot: int
    growth: float


@dataclass(slots=True)
class _Sums:
    """Over ticks with requests, against the baseline in force."""

    ticks: int = 0
    requests: int = 0
    hot: int = 0
    square: float = 0.0
    """Squared distances of the hot requests to their mean, over the binomial variance."""
    growth: float = 0.0
    spread: float = 0.0
    """Squared distances of the growth to the usual one."""

    def clear(self) -> None:
        """Back to no ticks."""
        self.ticks = self.requests = self.hot = 0
        self.square = self.growth = self.spread = 0.0


class BurstWatch:
    """Both charts, their baseline, and the chart that says that a burst is over.

    Args:
        settings: see there.
    """

    def __init__(self, settings: WatchSettings | None = None) -> None:
        self.settings = settings or WatchSettings()
        ticks = 2 * TICKS_PER_EPOCH * self.settings.false_alarm_epochs
        self.threshold = math.log(ticks)
        """h, for either chart."""
        self._most = self.threshold / _LEAST_TICKS
        self._end_threshold = math.log(self.settings.end_odds)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.share = -1.0
        """Baseline of the hot share; negative before anything is learnt."""
        self._counted = self._counted_hot = 0.0  # requests behind it, older ones for less
        self.dispersion = 1.0
        """Variance of the hot requests of a tick over the binomial one, 1 or more."""
        self.growth_mean, self.growth_variance = 0.0, (3 * _LEAST_SPREAD) ** 2
        self.share_chart = self.growth_chart = self.end_chart = 0.0
        self._working_set = -1.0
        self._sums = _Sums()

    def see(self, stats: EpochStats) -> bool:
        """Take a tick into the charts; whether a burst has begun. Before a baseline never."""
        tick = self._take(stats)
        if self.share < 0.0:
            return False
        share, growth = self._share_evidence(tick), self._growth_evidence(tick)
        self.share_chart = max(self.share_chart + share, 0.0)
        self.growth_chart = max(self.growth_chart + min(growth, self._most), 0.0)
        return max(self.share_chart, self.growth_chart) > self.threshold

    def see_end(self, stats: EpochStats) -> bool:
        """Take a tick of a burst in; whether the burst is over.

        The chart of the hot share, turned round. A working set stays up for the hot window, so
        that a burst seen in it alone is over when the hot share is where it was.
        """
        tick = self._take(stats)
        self.end_chart = max(self.end_chart - self._share_evidence(tick), 0.0)
        return self.end_chart > self._end_threshold

    def clear(self) -> None:
        """Set the charts to 0, at the begin and the end of a burst."""
        self.share_chart = self.growth_chart = self.end_chart = 0.0

    def learn(self) -> None:
        """Take the ticks since the last call into the baseline: they were quiet."""
        sums = self._sums
        if not sums.ticks:
            return
        weight = min(sums.ticks / TICKS_PER_EPOCH / self.settings.baseline_epochs, 1.0)
        slow = weight / 4.0  # a variance needs more ticks than a mean
        if self.share >= 0.0:
            square = sums.square / sums.ticks
            self.dispersion = max(self.dispersion + slow * (square - self.dispersion), 1.0)
        self._learn_share(sums, weight)
        self.growth_mean += weight * (sums.growth / sums.ticks - self.growth_mean)
        self.growth_variance += slow * (sums.spread / sums.ticks - self.growth_variance)
        sums.clear()

    def _learn_share(self, sums: _Sums, weight: float) -> None:
        """Requests of late for the more, older ones only as long as they are needed to be enough."""
        kept = 1.0 - weight
        if self._counted > 0.0:
            needed = self.settings.least_requests / self._counted
            if needed > kept:
                kept = needed if needed < 1.0 else 1.0
        self._counted = kept * self._counted + sums.requests
        self._counted_hot = kept * self._counted_hot + sums.hot
        # With one hot and one cold more: of few, none hot does not mean that none ever is.
        self.share = _bounded((self._counted_hot + 1.0) / (self._counted + 2.0))

    def drop(self) -> None:
        """Forget the ticks since the last `learn`: they were not quiet."""
        self._sums.clear()

    def relearn(self) -> None:
        """Take the ticks since the last `learn` as the new level: the burst has come to stay."""
        self.share, self._counted, self._counted_hot = -1.0, 0.0, 0.0
        self.learn()

    def _take(self, stats: EpochStats) -> _Tick:
        requests, working_set = stats.requests, stats.working_set
        hot = round(stats.hot_share * requests)
        growth = working_set - self._working_set if self._working_set >= 0.0 else 0.0
        self._working_set = working_set
        if requests:
            sums = self._sums
            sums.ticks += 1
            sums.requests += requests
            sums.hot += hot
            if self.share >= 0.0:
                sums.square += _square(requests, hot, self.share)
            sums.growth += growth
            sums.spread += (growth - self.growth_mean) ** 2
        return _Tick(requests, hot, growth)

    def _share_evidence(self, tick: _Tick) -> float:
        """Log-likelihood ratio of the tick's requests: burst against baseline."""
        usual = self.share
        raised = min(usual + self.settings.least_jump, (1.0 + usual) / 2.0)
        cold = tick.requests - tick.hot
        ratio = tick.hot * math.log(raised / usual)
        ratio += cold * math.log((1.0 - raised) / (1.0 - usual))
        return ratio / self.dispersion

    def _growth_evidence(self, tick: _Tick) -> float:
        """Log-likelihood ratio of the tick's growth: burst against baseline."""
        least = self.settings.least_growth
        variance = max(self.growth_variance, _LEAST_SPREAD**2)
        usual = max(self.growth_mean, 0.0)  # when it has shrunk, staying is no growth
        return least / variance * (tick.growth - usual - least / 2.0)


def _bounded(share: float) -> float:
    low, high = _SHARE_BOUNDS
    if share < low:
        return low
    return high if share > high else share


def _square(requests: int, hot: int, share: float) -> float:
    """Squared distance of the hot requests to their mean, over the binomial variance."""
    return (hot - requests * share) ** 2 / (requests * share * (1.0 - share))
