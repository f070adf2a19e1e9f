"""The adapter's network (paper, Eq. 6): 5-16-1, bounded, zero until it has learnt.

Compiled, since a decision waits for it: one call of numba is cheaper than five of numpy. Learning runs
without the interpreter's lock, so that decisions beside it go on; a decision keeps the lock for its
microsecond, since to give it up would let the learning have it first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
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
        np.maximum(array, -LARGEST_WEIGHT, out=array)  # without what `np.clip` puts around it
        np.minimum(array, LARGEST_WEIGHT, out=array)
        array.flags.writeable = False
    return weights


def copied(weights: Weights) -> Weights:
    """A copy that `ascend` may change."""
    return Weights(*(array.copy() for array in weights))


def packed(weights: Weights) -> Floats:
    """The weights as `propose` takes them, a new read-only [17, 7]: to pass four arrays takes twice as long.

    A row for each hidden unit: its weights, its bias, its weight in the output; the output's bias is the
    last row's last.
    """
    rows = np.zeros((HIDDEN + 1, INPUTS + 2))
    rows[:HIDDEN, :INPUTS] = weights.hidden
    rows[:HIDDEN, INPUTS] = weights.hidden_bias
    rows[:HIDDEN, INPUTS + 1] = weights.output
    rows[HIDDEN, INPUTS + 1] = weights.output_bias[0]
    rows.flags.writeable = False
    return rows


@numba.njit(cache=True)
def propose(rows, features, bound, noise, most):  # type: ignore[no-untyped-def]
    """Residual of one state with noise added, and without, both within +-bound; 0 for no sensible state.

    Args:
        rows: [17, 7], from `packed`.
        features: five numbers, a tuple or [5].
        bound: of the residual.
        noise: added to the first.
        most: a state whose magnitudes do not sum below it is not sensible.
    """
    magnitude = 0.0
    for j in range(INPUTS):
        magnitude += abs(features[j])
    if not magnitude < most:  # NaN is not below anything
        return 0.0, 0.0
    total = rows[HIDDEN, INPUTS + 1]
    for i in range(HIDDEN):
        value = rows[i, INPUTS]
        for j in range(INPUTS):
            value += rows[i, j] * features[j]
        total += rows[i, INPUTS + 1] * math.tanh(value)
    mean = bound * math.tanh(total)
    return min(max(mean + noise, -bound), bound), mean


@numba.njit(cache=True, nogil=True)
def forward(weights, features, hidden):  # type: ignore[no-untyped-def]
    """Residuals over the bound, [n], of features [n, 5]; leaves the hidden layer in `hidden`, [n, 16]."""
    out = np.empty(len(features))
    for k in range(len(features)):
        total = weights.output_bias[0]
        for i in range(HIDDEN):
            value = weights.hidden_bias[i]
            for j in range(INPUTS):
                value += weights.hidden[i, j] * features[k, j]
            hidden[k, i] = math.tanh(value)
            total += weights.output[i] * hidden[k, i]
        out[k] = math.tanh(total)
    return out


@numba.njit(cache=True, nogil=True)
def ascend(weights, features, hidden, out, slopes, rate):  # type: ignore[no-untyped-def]
    """One step of gradient ascent, in place, on the mean of what `slopes` are the derivatives of.

    Args:
        weights: changed.
        features: [n, 5].
        hidden: [n, 16], from `forward`.
        out: [n], from `forward`.
        slopes: derivatives by the residuals over the bound, [n].
        rate: of learning.
    """
    at_output = slopes * (1.0 - out * out) * (rate / len(out))
    at_hidden = np.empty((len(out), HIDDEN))
    for k in range(len(out)):
        for i in range(HIDDEN):
            through = 1.0 - hidden[k, i] * hidden[k, i]
            at_hidden[k, i] = at_output[k] * weights.output[i] * through
    for k in range(len(out)):
        weights.output_bias[0] += at_output[k]
        for i in range(HIDDEN):
            weights.output[i] += at_output[k] * hidden[k, i]
            weights.hidden_bias[i] += at_hidden[k, i]
            for j in range(INPUTS):
                weights.hidden[i, j] += at_hidden[k, i] * features[k, j]
