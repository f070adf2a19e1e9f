"""Hit rates of an LRU row cache from one curve: the expected distinct rows in x draws.

For a table whose row i is drawn with probability p_i,

    D(x) = sum_i (1 - exp(-p_i x))                                        rows, x in draws.

Che's approximation says that an LRU cache of R rows holds what the last A draws touched, where
D(A) = R (H. Che, Y. Tung, Z. Wang, JSAC 2002; C. Fricker et al., ITC 2012). Then

    miss probability of a draw             = D'(A) = sum_i p_i exp(-p_i A)
    distinct rows missed by n draws        = D(A + n) - D(A)

and a cache that is not full yet is one whose A has not reached its limit: A grows with every draw
until D(A) = R. So the content's lag behind its capacity needs no equation of its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require

Floats = NDArray[np.float64]

POINTS_PER_OCTAVE = 16
_LAST_OCTAVE = 60
_EXACT_RANKS = 256
_RANKS_PER_BIN = 1.02


CURVE = np.dtype([("rows", "f8"), ("slope", "f8"), ("miss", "f8")])
"""A point of the curve: D(x), its slope per step of y = log2(x + 1), and D'(x). Cubic Hermite
between points. A table's curve is a structured array [points]."""
Curve = Any


@lru_cache(maxsize=512)
def distinct_curve(rows_per_table: int, zipf: float, hashed: bool = False) -> Curve:
    """The curve for one table with p(rank) ~ rank^-zipf.

    Ranks beyond the first 256 are binned by 2 % in rank, each with its mean probability: hit rates
    are within 1e-4 of the full sum.

    Args:
        rows_per_table: N.
        zipf: exponent.
        hashed: N items are hashed to N rows, so that some share one and others are never drawn. Each
            item is in a given row with probability 1/N, so a row is untouched by x draws with
            probability exp(-D(x) / N), D being the items' curve: D_rows(x) = N (1 - exp(-D(x) / N)).
    """
    require(rows_per_table >= 1, "rows_per_table", rows_per_table, "at least 1")
    first, count = _rank_bins(rows_per_table)
    weight = _zipf_mass(first, count, zipf)
    probability = weight / weight.sum() / count
    y = np.arange(_LAST_OCTAVE * POINTS_PER_OCTAVE + 1) / POINTS_PER_OCTAVE
    x = np.exp2(y) - 1.0
    exponent = -np.minimum(np.outer(x, probability), 700.0)
    rows = -np.expm1(exponent) @ count
    miss = np.minimum(np.exp(exponent) @ (probability * count), 1.0)  # their sum rounds
    if hashed:
        untouched = np.exp(-rows / rows_per_table)
        rows, miss = -rows_per_table * np.expm1(-rows / rows_per_table), miss * untouched
    slope = miss * (x + 1.0) * np.log(2.0) / POINTS_PER_OCTAVE
    curve = np.empty(y.size, CURVE)
    curve["rows"], curve["slope"], curve["miss"] = rows, slope, miss
    curve.flags.writeable = False
    return curve


def _rank_bins(rows: int) -> tuple[Floats, Floats]:
    """First rank and number of ranks of each bin, as floats."""
    edges = np.arange(1, min(rows, _EXACT_RANKS) + 1, dtype=np.float64)
    if rows > _EXACT_RANKS:
        octaves = np.log(rows / _EXACT_RANKS) / np.log(_RANKS_PER_BIN)
        tail = np.geomspace(_EXACT_RANKS, rows, max(int(octaves), 1) + 1)[1:]
        edges = np.unique(np.concatenate((edges, np.rint(tail))))
    edges = np.append(edges, rows + 1.0) if edges[-1] <= rows else edges
    return edges[:-1], np.diff(edges)


def _zipf_mass(first: Floats, count: Floats, zipf: float) -> Floats:
    """Sum of rank^-zipf over each bin, by the midpoint integral (exact for single ranks)."""
    low, high = first - 0.5, first + count - 0.5
    if abs(zipf - 1.0) < 1e-9:
        mass = np.log(high / low)
    else:
        mass = (high ** (1.0 - zipf) - low ** (1.0 - zipf)) / (1.0 - zipf)
    return np.where(count == 1, first**-zipf, mass)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _hermite(curve: Curve, i: int, t: float) -> float:
    """D at a share t in [0, 1] of the way from point i to the next."""
    low, high = curve[i], curve[i + 1]
    t2, t3 = t * t, t * t * t
    return float(
        (2 * t3 - 3 * t2 + 1) * low.rows
        + (t3 - 2 * t2 + t) * low.slope
        + (3 * t2 - 2 * t3) * high.rows
        + (t3 - t2) * high.slope
    )


@numba.njit(cache=True, nogil=True, error_model="numpy")
def distinct_rows(curve: Curve, draws: float) -> float:
    """D(draws), rows of one table."""
    position = min(np.log2(draws + 1.0) * POINTS_PER_OCTAVE, curve.size - 1.0)
    i = min(int(position), curve.size - 2)
    return _hermite(curve, i, position - i)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def miss_probability(curve: Curve, draws: float) -> float:
    """D'(draws): the probability that a draw misses a cache that holds what `draws` draws touched."""
    position = min(np.log2(draws + 1.0) * POINTS_PER_OCTAVE, curve.size - 1.0)
    i = min(int(position), curve.size - 2)
    return float(curve[i].miss + (position - i) * (curve[i + 1].miss - curve[i].miss))


@numba.njit(cache=True, nogil=True, error_model="numpy")
def draws_to_fill(curve: Curve, rows: float) -> float:
    """The A with D(A) = rows: how far back a full LRU cache of that many rows reaches, in draws.

    Infinite when the cache is as large as the table.
    """
    if rows <= 0.0:
        return 0.0
    last = curve.size - 1
    if rows >= curve[last].rows * (1.0 - 1e-9):
        return np.inf
    i, beyond = 0, last
    while beyond - i > 1:
        middle = (i + beyond) // 2
        if curve[middle].rows <= rows:
            i = middle
        else:
            beyond = middle
    low, high = 0.0, 1.0
    for _ in range(40):
        t = 0.5 * (low + high)
        if _hermite(curve, i, t) < rows:
            low = t
        else:
            high = t
    return float(np.exp2((i + 0.5 * (low + high)) / POINTS_PER_OCTAVE) - 1.0)
