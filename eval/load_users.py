"""What a client of a served node knows: its users, their items, and what the node has acknowledged of them.

A workload says who comes, how long the history is and how much of it is new; which items those are is
drawn here, by a hash of user and position, so that a history need not be kept to be sent again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require

Items = NDArray[np.int64]
Bits = NDArray[np.uint64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_CANDIDATES = np.uint64(1) << np.uint64(63)
"""Sets a request's candidates apart from users' histories."""


class Catalogue:
    """Items that users touch: p(rank) ~ rank^-zipf, by the continuous distribution's inverse.

    Args:
        items: how many there are.
        zipf: exponent, 0 to 3.
        seed: of which item a user touches when.
    """

    def __init__(self, items: int, zipf: float, seed: int) -> None:
        require(1 <= items < 2**62, "items", items, "1 to 2^62")
        require(0 <= zipf <= 3, "zipf", zipf, "0 to 3")
        self.items, self._power = items, 1.0 - zipf
        self._seed = np.uint64(seed)

    def history(self, user: int, first: int, end: int) -> Items:
        """Items [end - first] of a user's life, from position `first` on."""
        return self._drawn(np.uint64(user), np.arange(first, end, dtype=np.uint64))

    def candidates(self, request: int, n: int) -> Items:
        """Items [n] to score in a request, by its number."""
        return self._drawn(_CANDIDATES | np.uint64(request), np.arange(n, dtype=np.uint64))

    def _drawn(self, stream: np.uint64, position: Bits) -> Items:
        with np.errstate(over="ignore"):
            bits = _mixed(_mixed(np.array([stream ^ self._seed])) + position)
        uniform = (bits >> np.uint64(11)).astype(np.float64) / 2**53
        if abs(self._power) < 1e-9:
            rank = (self.items + 1.0) ** uniform
        else:
            rise = (self.items + 1.0) ** self._power - 1.0
            rank = (1.0 + uniform * rise) ** (1.0 / self._power)
        return np.clip(rank.astype(np.int64) - 1, 0, self.items - 1)


def _mixed(x: Bits) -> Bits:
    """SplitMix64's output (Steele, Lea, Flood, OOPSLA 2014) for states x [n]."""
    with np.errstate(over="ignore"):
        x = x + _STEP
        x = (x ^ (x >> np.uint64(30))) * _MULTIPLIERS[0]
        x = (x ^ (x >> np.uint64(27))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))


class Visit(NamedTuple):
    """A history as positions in its user's life."""

    first: int
    end: int


@dataclass
class User:
    """One user."""

    last: Visit
    """The history of the last visit that was drawn."""
    stored: Visit | None
    """What the node acknowledged last; None: not known. A node may have a history all the same."""

    def unsent(self, visit: Visit) -> int | None:
        """Where the items begin that the node has not got; None: it needs the whole history.

        Of two visits close together the later may be sent first; then the earlier brings nothing new.
        """
        if self.stored is None or self.stored.first != visit.first:
            return None
        return self.stored.end


class Users:
    """The users that a client has met, by number.

    Args:
        persistent: numbers below it come back; the others are forgotten at once.
    """

    def __init__(self, persistent: int) -> None:
        self._persistent = persistent
        self._met: dict[int, User] = {}

    def visit(self, number: int, length: int, new: int) -> tuple[User, Visit]:
        """A user comes with a history of this length, of which so many items are new.

        One whom this client meets with more than new items has been with the node before, by another
        client: new items are tried first.
        """
        user = self._met.get(number)
        if user is None:
            user = User(Visit(0, length), Visit(0, length - new) if new < length else None)
            if number < self._persistent:
                self._met[number] = user
            return user, user.last
        # While it grows it begins where it began, though a burst may have taken a visit's place in
        # between; one that was cut begins later.
        first = user.last.first
        end = max(user.last.end + new, first + length)
        user.last = Visit(end - length, end)
        return user, user.last
