"""What the two caches are worth to a node, told from its own requests: where alpha should be.

    knee       1 - W                          the KV of the users who come back just fits
    balance    1.4 (1 - k) g W / (h s)        a little more of either cache saves as much
    target     the larger of the two

W is the working set over the pool, h the hot share, k the KV hit rate. A share d of the pool, given to KV,
has h d / W more of the requests reuse their history, as long as there are users whose KV does not fit; each
of them saves the share s of a miss's time. Given to the embedding cache, it shortens the 1 - k misses by the
share g d / alpha. The first is the same at every alpha above the knee and nothing below, the second falls
with alpha: their sum is best at the knee, or above it where they balance. So when the working set outgrows
the pool, or its users come seldom, more KV is worth less than the rows that it takes the place of.

Learnt, from service times alone, which tell hits from misses (no rates of the hardware are needed):

    unseen     W over the working set measured, 1 or more: users who come seldom are not always seen as hot.
               Where hot requests miss, KV holds only a part of W, and W = (1 - alpha) / share that hits
    saved      s: service time of hits against that of cold requests
    gain       g: regression of the logarithm of the cold requests' service time on that of alpha
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np
from numba.extending import register_jitable
from numpy.typing import NDArray

from hlem_env.telemetry import EpochStats

FEWEST = 20
"""Hot and cold requests that an epoch must have to tell anything."""
_WEIGHT = 0.1
"""Of the last epoch in means."""
_FITS = 0.97
"""With such a share of hits among hot requests the working set fits: a few always miss."""
_TELLS = 0.5
"""Times tell hits from misses where at most so many times as large a share of the cold requests is as fast as
of the hot ones. Otherwise it is something else that they tell."""
_KEPT = 0.98
"""Of the regression's sums, an epoch: it goes back 50."""
_GAIN = 0.06
"""g before anything is learnt: about that of the workloads of training."""
_GAIN_REQUESTS = 80.0
"""What that counts for, in requests an e-fold of alpha apart: their deviation is 0.13, its own 0.015."""
_GAIN_BOUNDS = (0.01, 0.3)
_LONG = 1.4
"""A millisecond off a miss counts for so many off a hit: P99 is made of long requests (the second moment in
Pollaczek and Khinchine's mean wait), and a hot user's miss finds some of its rows resident."""


class Seen(NamedTuple):
    """What an epoch tells."""

    alpha: float
    working_set: float
    hot: int
    """Hot requests."""
    cold: int
    reused: float
    """Share of the hot requests that took a hit's time."""
    hit_ms: float
    """Mean service time of those."""
    miss_ms: float
    """Mean service time of cold requests."""
    as_fast: float
    """Share of the cold requests that took a hit's time."""


def seen(stats: EpochStats) -> Seen:
    """An epoch's stats, reduced."""
    return Seen(stats.alpha_target, stats.working_set, *by_kind(stats.service_ms, stats.is_hot))


@numba.njit(cache=True, nogil=True)
def by_kind(service_ms, is_hot):  # type: ignore[no-untyped-def]
    """The last six of `Seen`, from service times and flags, [n] each; no times of fewer than FEWEST.

    The fast tenth of the hot requests are hits, and those up to a third of the way from there to a cold one.
    """
    hot, cold = service_ms[is_hot], service_ms[~is_hot]
    if hot.size < FEWEST or cold.size < FEWEST:
        return hot.size, cold.size, 0.0, 0.0, 0.0, 0.0
    miss_ms = cold.mean()
    fast_ms = np.partition(hot, hot.size // 10)[hot.size // 10]
    most_ms = max(fast_ms, fast_ms + (miss_ms - fast_ms) / 3.0)
    hits = hot[hot <= most_ms]
    as_fast = (cold <= most_ms).mean()
    return hot.size, cold.size, hits.size / hot.size, hits.mean(), miss_ms, as_fast


class Worth(NamedTuple):
    """What is learnt. A decision reads it while the next is being learnt; nothing changes it."""

    unseen: float = 1.0
    saved: float = 0.0
    """0 before anything is learnt: then the target is the knee."""
    gain: float = _GAIN


@register_jitable
def target(worth: Worth, working_set: float, hot_share: float, kv_hit: float) -> tuple[float, bool]:
    """Where alpha should be, and whether that is the balance, above the knee.

    Args:
        worth: what is learnt.
        working_set: KV bytes of the hot users over the pool.
        hot_share, kv_hit: of the epoch.
    """
    whole = worth.unseen * working_set
    knee, hit_worth = 1.0 - whole, hot_share * worth.saved
    if hit_worth <= 0.0:
        return knee, False
    balance = _LONG * (1.0 - kv_hit) * worth.gain * whole / hit_worth
    return (balance, True) if balance > knee else (knee, False)


class WorthLearner:
    """Learns what the caches are worth, epoch by epoch."""

    def __init__(self) -> None:
        self.worth = Worth()
        # Mean shares of hot and of cold requests that took a hit's time.
        self._fast = (0.0, 0.0)
        # Of the regression: requests, means of ln alpha and ln miss, sums of squares and products.
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)

    def take(self, epoch: Seen) -> None:
        """Learn from an epoch, unless its times tell nothing."""
        if not 0.0 < epoch.hit_ms < epoch.miss_ms:
            return
        now_fast = epoch.reused, epoch.as_fast
        hot, cold = map(_towards, self._fast, now_fast) if self._fast[0] else now_fast
        self._fast = hot, cold
        if cold > _TELLS * hot:
            return
        unseen, saved, _ = self.worth
        now = 1.0 - epoch.hit_ms / epoch.miss_ms
        saved = _towards(saved, now) if saved else now
        self.worth = Worth(_unseen(unseen, epoch), saved, self._gain(epoch))

    def numbers(self) -> NDArray[np.float64]:
        """All that was learnt, [10]."""
        return np.array([*self.worth, *self._fast, *self._sums])

    def restore(self, numbers: NDArray[np.float64]) -> None:
        """Go on from what `numbers` gave."""
        values = numbers.tolist()
        self.worth, self._fast, self._sums = (
            Worth(*values[:3]),
            tuple(values[3:5]),
            tuple(values[5:]),
        )

    def _gain(self, epoch: Seen) -> float:
        """Ridge regression about the gain known before, requests of late for the more (West's recursion)."""
        requests, alpha, miss, square, product = self._sums
        requests = _KEPT * requests + epoch.cold
        share = epoch.cold / requests
        away = math.log(max(epoch.alpha, 0.01)) - alpha
        longer = math.log(epoch.miss_ms) - miss
        new = epoch.cold * (1.0 - share) * away
        square = _KEPT * square + new * away
        product = _KEPT * product + new * longer
        self._sums = requests, alpha + share * away, miss + share * longer, square, product
        gain = (_GAIN_REQUESTS * _GAIN - product) / (_GAIN_REQUESTS + square)
        return min(max(gain, _GAIN_BOUNDS[0]), _GAIN_BOUNDS[1])


def _unseen(before: float, epoch: Seen) -> float:
    """Measured where hot requests miss; where all hit, W is at most what KV has."""
    if epoch.working_set <= 0.0:
        return before
    measured = (1.0 - epoch.alpha) / (epoch.reused * epoch.working_set)
    if epoch.reused < _FITS:
        return max(_towards(before, measured), 1.0)
    return max(min(before, measured), 1.0)


def _towards(mean: float, value: float) -> float:
    return mean + _WEIGHT * (value - mean)
