"""The protocol of eviction policies: arrays of keys in, arrays of keys out, with time."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.integer[Any]]
"""[n] small whole numbers, each at most once in a call: the slots that a cache gives its items."""
Times = float | NDArray[np.float64]
"""Seconds, one for all keys of a call or one each, [n]. Any origin; it may be negative."""


class EvictionPolicy(Protocol):
    """Decides what a full cache admits and what it gives up; knows neither bytes nor pages.

    A cache tells of every access by `on_hit` or `on_miss`, of what it holds by `on_insert` and
    `on_remove`. Picking victims changes nothing: those that the cache does evict it removes. So
    where items differ in size a cache asks for more victims until they free enough.
    """

    def admit(self, keys: Keys, now: Times) -> NDArray[np.bool_]:
        """Which of the keys, accessed before, are worth the ones that a full cache would evict.

        Returns
        -------
        [n]; the key with the i-th highest worth is measured against the i-th victim, and is not
        admitted when there is none.
        """

    def describe(self, keys: Keys, sizes: NDArray[np.int64]) -> None:
        """What the keys stand for has such sizes [n], a history's length say; before their access.

        Only learned policies heed it.
        """

    def on_hit(self, keys: Keys, now: Times) -> None:
        """The keys were accessed and found in the cache."""

    def on_miss(self, keys: Keys, now: Times) -> None:
        """The keys were accessed and not found."""

    def on_insert(self, keys: Keys, now: Times) -> None:
        """The keys are in the cache from now on."""

    def on_remove(self, keys: Keys) -> None:
        """The keys are no longer in the cache; what is known of their accesses stays."""

    def pick_victims(self, n: int, incoming: Keys, now: Times) -> NDArray[np.int64]:
        """Up to n keys in the cache, first to go first; pinned ones are left out.

        Args:
            n: 1 or more.
            incoming: keys that room is made for. Only what is worth less than each of them is a
                victim. Empty: room is made for its own sake, and every key may be one.
            now: the time.

        Returns
        -------
        [n or fewer]; fewer when there are no others.
        """

    def pin(self, keys: Keys) -> None:
        """Leave the keys out of the victims, counted: as many `unpin` calls undo it."""

    def unpin(self, keys: Keys) -> None:
        """Undo one `pin`.

        Raises:
            BackendError: a key is not pinned.
        """

    def on_resize(self, capacity: int) -> None:
        """The cache holds so many pages or rows from now on."""

    def worth(self, keys: Keys, now: Times) -> NDArray[np.float64]:
        """Of each key [n], cached or not: the lowest is forgotten first.

        LRU and the scan-resistant policy also evict in this order.
        """

    def forget(self, keys: Keys) -> None:
        """Drop all that is known of keys not in the cache: whatever gets their numbers is new.

        Raises:
            BackendError: a key is in the cache or pinned.
        """

    def close(self) -> None:
        """Stop what runs in the background; nothing is asked afterwards."""
