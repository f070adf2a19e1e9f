"""Means over seeds with bootstrap intervals: the same resamples of seeds for everything compared.

Likewise percentiles of values that come in groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require

Floats = NDArray[np.float64]
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % bootstrap interval over seeds."""

    value: float
    low: float
    high: float


def resample(seeds: int, draw: int = 0) -> NDArray[np.int64]:
    """Indices [RESAMPLES, seeds] of bootstrap samples; always the same ones for the same draw."""
    return np.random.default_rng(draw).integers(0, seeds, (RESAMPLES, seeds))


def interquartile_mean(values: Floats) -> Floats:
    """Mean of the middle half along the last axis; with fewer than 4 values, the mean."""
    n = values.shape[-1]
    cut = n // 4
    ordered = np.sort(values, axis=-1)
    middle: Floats = ordered[..., cut : n - cut].mean(axis=-1)
    return middle


def iqm(values: Floats) -> Estimate:
    """Interquartile mean over seeds [seeds]."""
    samples = interquartile_mean(values[resample(values.size)])
    return _estimate(float(interquartile_mean(values)), samples)


def ratio_of_means(numerator: Floats, denominator: Floats) -> Estimate:
    """mean(numerator) / mean(denominator) over seeds, paired ([seeds] each)."""
    index = resample(numerator.size)
    samples = numerator[index].mean(axis=-1) / denominator[index].mean(axis=-1)
    return _estimate(float(numerator.mean() / denominator.mean()), samples)


def difference_of_means(left: Floats, right: Floats) -> Estimate:
    """mean(left) - mean(right) over seeds, paired ([seeds] each)."""
    samples = (left - right)[resample(left.size)].mean(axis=-1)
    return _estimate(float(left.mean() - right.mean()), samples)


def pooled_percentile(groups: Sequence[Floats], share: float) -> Estimate:
    """Percentile of all values of all groups; the interval draws whole groups anew.

    Args:
        groups: of values that belong together, [n] each, some of them empty.
        share: in [0, 1]; 0.99 gives P99.

    Raises:
        ArgumentError: all groups are empty.
    """
    require(any(group.size for group in groups), "groups", "all empty", "some values")
    return _estimate(*_pooled(groups, share))


def ratio_of_separate_means(numerator: Floats, denominator: Floats) -> Estimate:
    """mean(numerator) / mean(denominator), [n] and [m] values that are no pairs."""
    above = numerator[resample(numerator.size)].mean(axis=-1)
    below = denominator[resample(denominator.size, 1)].mean(axis=-1)
    return _estimate(float(numerator.mean() / denominator.mean()), above / below)


def ratio_of_pooled_percentiles(
    numerator: Sequence[Floats],
    denominator: Sequence[Floats],
    share: float,
    *,
    paired: bool = True,
) -> Estimate:
    """The same percentile of two sets of groups as a ratio.

    Args:
        numerator: groups, [n] values each.
        denominator: groups.
        share: as `pooled_percentile`.
        paired: groups of one place are drawn together.

    Raises:
        ArgumentError: the numbers of pairs differ, or all groups of one are empty.
    """
    same = len(numerator) == len(denominator) or not paired
    require(same, "groups", len(numerator), str(len(denominator)))
    for groups in (numerator, denominator):
        require(any(group.size for group in groups), "groups", "all empty", "some values")
    above, above_samples = _pooled(numerator, share)
    below, below_samples = _pooled(denominator, share, 0 if paired else 1)
    return _estimate(above / below, above_samples / below_samples)


def _pooled(groups: Sequence[Floats], share: float, draw: int = 0) -> tuple[float, Floats]:
    """Percentile of the groups' values, and of bootstrap samples of groups, [RESAMPLES].

    NaN where a sample has only empty groups.
    """
    values = np.concatenate(groups)
    group = np.repeat(np.arange(len(groups)), [g.size for g in groups])
    order = np.argsort(values)
    values, group = values[order], group[order]
    drawn = resample(len(groups), draw)
    times = np.stack([(drawn == g).sum(axis=1) for g in range(len(groups))], axis=1)
    times = np.vstack([np.ones_like(times[:1]), times])
    reached = times[:, group].cumsum(axis=1)  # values up to this one, as often as their group is
    total = reached[:, -1]
    rank = share * (total - 1)
    low = np.floor(rank)
    parts = []
    for place in (low, np.minimum(low + 1, total - 1)):
        found = (reached <= place[:, None]).sum(axis=1)
        parts.append(values[np.minimum(found, values.size - 1)])
    samples = np.where(total > 0, parts[0] + (rank - low) * (parts[1] - parts[0]), np.nan)
    return float(samples[0]), samples[1:]


def _estimate(value: float, samples: Floats) -> Estimate:
    low, high = np.nanpercentile(samples, [2.5, 97.5])
    return Estimate(value, float(low), float(high))
