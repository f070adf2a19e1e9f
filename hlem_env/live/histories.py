"""What users' histories hold, item by item, computed when it is asked for and stored nowhere.

Item j that user u ever appended is a draw from the catalogue's popularity by a hash of (seed, u, j): the
same at every visit, so that cached K and V stay true, and different between users. A workload says how
long a history is; this keeps which of the user's items it holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from hlem_env.live.hashing import mix
from hlem_env.live.popularity import Popularity

Ints = NDArray[np.int64]
USER_STEP = 0x9E3779B9
"""Between the states that two seeds give a user."""


class Window(NamedTuple):
    """The part of a user's items that a request's history holds, [requests] each."""

    first: Ints
    """Index of the oldest item, counted over all that the user ever appended."""
    edits: Ints
    """How often the user's history was cut. K and V of an earlier edit are of other positions."""


class Histories:
    """Windows of all users, and the items in them.

    Args:
        persistent_users: ids below it come back; at or above it a user comes once.
        items: size of the catalogue.
        zipf: exponent of the items' popularity, p(rank) ~ rank^-zipf.
        seed: of the items.
    """

    def __init__(self, persistent_users: int, items: int, zipf: float, seed: int) -> None:
        self.persistent_users = persistent_users
        self.popularity, self.seed = Popularity(items, zipf), seed
        self.reset()

    def reset(self) -> None:
        """Forget all windows."""
        self._first = np.zeros(self.persistent_users, np.int64)
        self._length = np.zeros(self.persistent_users, np.int64)
        self._edits = np.zeros(self.persistent_users, np.int64)

    def window(self, users: Ints, lengths: Ints, new_items: Ints) -> Window:
        """Windows of requests of different users, as they will be when the requests are served.

        A history that is shorter than the last one with the new items has lost its oldest items.

        Args:
            users: [n] ids, each once.
            lengths: [n] tokens of history, the new items included.
            new_items: [n] of those, appended since the last visit.
        """
        window = Window(np.zeros(users.size, np.int64), np.zeros(users.size, np.int64))
        _find(self._first, self._edits, self._length, users, lengths, new_items, *window)
        return window

    def visit(self, users: Ints, lengths: Ints, new_items: Ints) -> Window:
        """Advance the users' windows to these requests, as in `window`."""
        window = self.window(users, lengths, new_items)
        _advance(self._first, self._edits, self._length, users, *window, lengths)
        return window

    def draw(self, users: Tensor, index: Tensor) -> Tensor:
        """Catalogue ids int64 [n], 0 the most popular, of items `index` of `users` (int64 [n] each)."""
        bits = mix(mix(users + self.seed * USER_STEP) + index)
        uniform = ((bits >> 11) & ((1 << 53) - 1)).to(torch.float64) * 2.0**-53
        return self.popularity.rank(uniform)


_STATE = types.int64[::1]
_GIVEN = types.Array(types.int64, 1, "C", readonly=True)


@numba.njit([types.void(*[_STATE] * 3, *[_GIVEN] * 3, *[_STATE] * 2)], cache=True)
def _find(
    first: Any, edits: Any, length: Any, users: Any, lengths: Any, new: Any, starts: Any, cuts: Any
) -> None:
    """Write first items and edits of the windows of users that come back."""
    for i in range(users.size):
        user = users[i]
        if user < length.size:
            lost = length[user] + new[i] - lengths[i]
            cut = length[user] > 0 and lost > 0
            starts[i] = first[user] + (lost if cut else 0)
            cuts[i] = edits[user] + cut


@numba.njit([types.void(*[_STATE] * 3, _GIVEN, *[_STATE] * 2, _GIVEN)], cache=True)
def _advance(
    first: Any, edits: Any, length: Any, users: Any, starts: Any, cuts: Any, lengths: Any
) -> None:
    """Make these windows the state of the users that come back."""
    for i in range(users.size):
        user = users[i]
        if user < length.size:
            first[user], edits[user], length[user] = starts[i], cuts[i], lengths[i]
