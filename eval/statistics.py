"""Means over seeds with bootstrap intervals: the same resamples of seeds for everything compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 2000


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % bootstrap interval over seeds."""

    value: float
    low: float
    high: float


def resample(seeds: int) -> NDArray[np.int64]:
    """Indices [RESAMPLES, seeds] of bootstrap samples; always the same ones."""
    return np.random.default_rng(0).integers(0, seeds, (RESAMPLES, seeds))


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


def _estimate(value: float, samples: Floats) -> Estimate:
    low, high = np.percentile(samples, [2.5, 97.5])
    return Estimate(value, float(low), float(high))
