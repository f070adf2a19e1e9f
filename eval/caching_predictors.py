"""Predictions of every request's next one, for whole sequences: from the literature, learned, spoilt.

Each function takes keys [n], whole numbers from 0, and gives the number of the request at which each
key is expected again, [n]. None of them depends on a cache, so one sequence serves all sizes.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from hlem_env.errors import require
from hlem_env.eviction.online import OnlinePredictor, Schedule
from hlem_env.eviction.replay import Floats, Keys, next_requests

CHUNK = 250
"""Requests that a learned predictor sees at a time: a model is swapped between two of them."""


def popu(keys: Keys) -> Floats:
    """A key seen c times in t requests comes again after t / c (A. Antoniadis et al., ICML 2020)."""
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    count = np.empty(keys.size, np.int64)
    count[order] = np.arange(keys.size) - np.repeat(starts, np.diff(starts, append=keys.size)) + 1
    t = np.arange(1, keys.size + 1)
    expected: Floats = t + t / count
    return expected


def pleco(keys: Keys) -> Floats:
    """Recency and frequency (A. Anderson et al., WWW 2014) with the constants fitted to BrightKite.

    A past request d requests back weighs (d + 10)^-1.8 exp(-d / 670); a key comes again after the
    total weight over its own. Quadratic in the requests of a key.
    """
    d = np.arange(1, keys.size + 1, dtype=np.float64)
    weight = (d + 10.0) ** -1.8 * np.exp(-d / 670.0)
    previous = np.full(keys.size, -1, np.int64)
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    previous[order[1:][same]] = order[:-1][same]
    expected: Floats = _pleco(weight, np.cumsum(weight), previous)
    return expected


@numba.njit(cache=True)
def _pleco(weight: Any, total: Any, previous: Any) -> Any:
    out = np.empty(weight.size)
    for t in range(weight.size):
        own, i = 0.0, t
        while i >= 0:
            own += weight[t - i]
            i = previous[i]
        out[t] = t + total[t] / own
    return out


def learned(
    keys: Keys, kind: str, label_window: float, schedule: Schedule | None = None
) -> tuple[Floats, OnlinePredictor]:
    """By a predictor that sees each request once, in order, and is trained on the way.

    Before its first model every key is expected after twice the label window.

    Args:
        keys: the requests.
        kind: "users" or "rows": which features.
        label_window: in requests.
        schedule: of the training.

    Returns
    -------
    (predictions, the predictor at the end).
    """
    predictor = OnlinePredictor(label_window, kind, schedule, background=False)
    times = np.arange(keys.size, dtype=np.float64)
    out = np.empty(keys.size)
    for first in range(0, keys.size, CHUNK):
        part = slice(first, first + CHUNK)
        out[part] = times[part] + predictor.access(keys[part], times[part])
    return out, predictor


def spoilt(keys: Keys, predicted: Floats, probability: float, rng: np.random.Generator) -> Floats:
    """The predictions with each one replaced by its worst case with a probability.

    The worst case turns the order around: the sooner a key comes again, the later it is expected, and
    one that does not is expected at once.
    """
    require(0 <= probability <= 1, "probability", probability, "0 to 1")
    times = np.arange(keys.size)
    gap = np.minimum(next_requests(keys) - times, keys.size)
    worst = times + 2.0 * (keys.size - gap)
    return np.where(rng.random(keys.size) < probability, worst, predicted)


def error(keys: Keys, predicted: Floats, label_window: float) -> float:
    """Mean of |log((1 + predicted gap) / (1 + true gap))|, gaps cut to twice the label window."""
    times, most = np.arange(keys.size), 2.0 * label_window
    gaps = [np.clip(at - times, 0.0, most) for at in (predicted, next_requests(keys))]
    return float(np.abs(np.log1p(gaps[0]) - np.log1p(gaps[1])).mean())
