"""The adapter's network (paper, Eq. 6): 5-16-1, bounded, zero until it has learnt. numpy only."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INPUTS, HIDDEN = 5, 16
LARGEST_WEIGHT = 10.0
"""Weights are clipped here: tanh is flat long before."""


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
    """The same weights, read-only: what a decision may hold while learning goes on."""
    for array in weights:
        array.flags.writeable = False
    return weights


def residual(weights: Weights, features: Floats, bound: float) -> Floats:
    """Residual [n] of features [n, 5], within +-bound."""
    hidden = np.tanh(features @ weights.hidden.T + weights.hidden_bias)
    value: Floats = bound * np.tanh(hidden @ weights.output + weights.output_bias[0])
    return value


def ascend(
    weights: Weights, features: Floats, slopes: Floats, bound: float, rate: float
) -> Weights:
    """One step of gradient ascent on mean(slope x residual / bound).

    Args:
        weights: not changed.
        features: [n, 5].
        slopes: [n] derivative of what is to grow by the residual, in residuals of `bound`.
        bound: of the residual.
        rate: of learning.

    Returns:
        New weights, read-only.
    """
    hidden = np.tanh(features @ weights.hidden.T + weights.hidden_bias)
    out = np.tanh(hidden @ weights.output + weights.output_bias[0])
    at_output = slopes * (1.0 - out**2) / len(slopes)
    at_hidden = np.outer(at_output, weights.output) * (1.0 - hidden**2)
    steps = (
        at_hidden.T @ features,
        at_hidden.sum(axis=0),
        hidden.T @ at_output,
        at_output.sum(keepdims=True),
    )
    moved = (
        np.clip(array + rate * step, -LARGEST_WEIGHT, LARGEST_WEIGHT)
        for array, step in zip(weights, steps, strict=True)
    )
    return frozen(Weights(*moved))
