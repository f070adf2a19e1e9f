"""The frozen actor's forward pass, compiled: one call of a few microseconds, safe for any thread.

It keeps the interpreter's lock: to give it up for so short would let another thread have it first.
"""

from __future__ import annotations

import numba
import numpy as np

UNFIT, STRIDED = -1, -2
"""No actions of `best`."""
_FAST = {"reassoc", "contract"}
"""Sums may be reordered, so that they go several at a time; NaN stays NaN."""


@numba.njit(cache=True, error_model="numpy", fastmath=_FAST)
def forward(layers, state):  # type: ignore[no-untyped-def]
    """Logits, float32 [n_actions].

    Args:
        layers: a tuple of float32 [out, in + 1], the bias last, with tanh between them.
        state: float32 [n_features].
    """
    last = len(layers) - 1
    values = state
    for k in range(last):
        values = _dense(layers[k], values)
        _tanh(values)
    return _dense(layers[last], values)


@numba.njit(cache=True, error_model="numpy", fastmath=_FAST)
def best(layers, state, most):  # type: ignore[no-untyped-def]
    """Index of the largest logit, the first of equals.

    UNFIT if `state` is of another length, or its magnitudes sum to `most`; STRIDED if its numbers are not
    one after the other.
    """
    if state.size != layers[0].shape[1] - 1:
        return UNFIT
    if state.strides[0] != state.itemsize:
        return STRIDED
    total = np.float32(0.0)
    for value in state:
        total += abs(value)
    if not total < most:  # NaN is not below anything
        return UNFIT
    return forward(layers, state).argmax()


@numba.njit(cache=True, error_model="numpy", fastmath=_FAST)
def _dense(layer, values):  # type: ignore[no-untyped-def]
    """Weights x values + bias."""
    out = np.empty(layer.shape[0], np.float32)
    for j in range(layer.shape[0]):
        row = layer[j]
        total = row[values.size]
        for i in range(values.size):
            total += row[i] * values[i]
        out[j] = total
    return out


@numba.njit(cache=True, error_model="numpy")
def _tanh(values):  # type: ignore[no-untyped-def]
    """Hyperbolic tangent in place, to 2e-7, eight at a time: the library's goes one by one.

    Lambert's continued fraction to seven terms at a quarter of the argument, then twice
    tanh 2y = 2 tanh y / (1 + tanh^2 y), which also takes back the fraction's overshoot far out.
    """
    for i in range(values.size):
        y = min(max(values[i], np.float32(-20.0)), np.float32(20.0)) * np.float32(0.25)
        s = y * y
        above = np.float32(135135.0) + s * (np.float32(17325.0) + s * (np.float32(378.0) + s))
        below = np.float32(62370.0) + s * (np.float32(3150.0) + s * np.float32(28.0))
        t = y * above / (np.float32(135135.0) + s * below)
        t = (t + t) / (np.float32(1.0) + t * t)
        values[i] = (t + t) / (np.float32(1.0) + t * t)
