"""One hash of 64-bit integers on any device."""

from __future__ import annotations

from torch import Tensor

MULTIPLIERS = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
STEP = 0x9E3779B97F4A7C15 - 2**64


def mix(x: Tensor) -> Tensor:
    """SplitMix64's output (Steele, Lea, Flood, OOPSLA 2014) for states int64 [...], as int64.

    Products wrap; torch shifts are arithmetic, so the sign's copies are masked off.
    """
    x = x + STEP
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * MULTIPLIERS[0]
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * MULTIPLIERS[1]
    return x ^ ((x >> 31) & ((1 << 33) - 1))
