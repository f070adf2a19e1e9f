"""A hash of a history that goes on where it stopped, so that a prefix is recognised without its items.

Each step is a bijection of the state for any item and of the item for any state: two histories that
differ in one item never agree, others by chance, one in 2^64. Without the key nobody can make them.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

_MULTIPLIER = np.uint64(0x9FB21C651E98DF25)
_WORDS = types.Array(types.uint64, 1, "C", readonly=True)


def prefix_hash(items: NDArray[np.int64], state: int) -> int:
    """The hash after `items`, contiguous int64 [n].

    Args:
        items: those that follow.
        state: the hash before them; at the start of a history a key, 0 to 2^64 - 1.
    """
    return int(_extended(np.uint64(state), items.view(np.uint64)))


@numba.njit([types.uint64(types.uint64, _WORDS)], cache=True, nogil=True)
def _extended(state: np.uint64, words: NDArray[np.uint64]) -> np.uint64:
    for word in words:
        state = (state ^ word) * _MULTIPLIER
        state ^= state >> np.uint64(29)
    return state
