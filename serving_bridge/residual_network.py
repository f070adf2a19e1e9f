"""The adapter's network (paper, Eq. 6): 5-16-1, bounded, zero until it has learnt. numpy only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INPUTS, HIDDEN = 5, 16
LARGEST_WEIGHT = 10.0
"""Of a snapshot: tanh is flat long before."""


class Weights(NamedTuple):
    """residual = bound x tanh(output . tanh(hidden x + hidden_bias) + output_bias)."""

    hidden: Floats
    """[16, 5]"""
    hidden_bias: Floats
    """[16]"""
    output: Floats
    """[16]"""
    output_bias: Floats
    """[1]"""


def initial_weights(rng: np.random.Generator) -> Weights:
    """Random hidden layer (uniform in +-1 / sqrt(5)), output layer of zeros: the residual is 0."""
    limit = 1.0 / np.sqrt(INPUTS)
    return frozen(
        Weights(
            rng.uniform(-limit, limit, (HIDDEN, INPUTS)),
            rng.uniform(-limit, limit, HIDDEN),
            np.zeros(HIDDEN),
            np.zeros(1),
        )
    )


def frozen(weights: Weights) -> Weights:
    """The weights, clipped, read-only: what a decision may hold while learning goes on."""
    for array in weights:
        np.clip(array, -LARGEST_WEIGHT, LARGEST_WEIGHT, out=array)
        array.flags.writeable = False
    return weights


def residual(weights: Weights, features: Floats, bound: float) -> Floats:
    """Residual [n] of features [n, 5], within +-bound."""
    hidden = np.tanh(features @ weights.hidden.T + weights.hidden_bias)
    value: Floats = bound * np.tanh(hidden @ weights.output + weights.output_bias[0])
    return value


def copied(weights: Weights) -> Weights:
    """A copy that `ascend` may change."""
    return Weights(*(array.copy() for array in weights))


def ascend(
    weights: Weights, features: Floats, slope: Callable[[Floats], Floats], rate: float
) -> None:
    """One step of gradient ascent, in place, on the mean of what `slope` is the derivative of.

    Args:
        weights: changed.
        features: [n, 5].
        slope: takes residuals over the bound, [n], and gives the derivatives by them, [n].
        rate: of learning.
    """
    hidden = np.tanh(features @ weights.hidden.T + weights.hidden_bias)
    out = np.tanh(hidden @ weights.output + weights.output_bias)
    at_output = slope(out) * (1.0 - out * out) * (rate / len(out))
    at_hidden = at_output[:, None] * weights.output * (1.0 - hidden * hidden)
    steps = at_hidden.T @ features, at_hidden.sum(axis=0), at_output @ hidden, at_output.sum()
    for array, step in zip(weights, steps, strict=True):
        array += step
