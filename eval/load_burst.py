"""A burst over any workload: for a while some of the requests come from users who were never seen before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hlem_env.errors import require
from hlem_env.workload.requests import Requests

FIRST_USER = 2**40
"""Above the users of any workload."""


@dataclass(frozen=True)
class Burst:
    """When it is, and who comes.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    start_s: float
    seconds: float
    share: float
    """Of the requests, those that come from the burst's users."""
    users: int
    load: float
    """Factor on the rate of requests."""
    mean_history_tokens: float
    max_history_tokens: int
    new_items: int
    """At most, at each visit."""

    def __post_init__(self) -> None:
        require(self.seconds >= 0, "burst seconds", self.seconds, "0 or more")
        require(0 <= self.share <= 1, "burst share", self.share, "0 to 1")
        require(self.users >= 1, "burst users", self.users, "1 or more")
        require(0 < self.load <= 100, "burst load", self.load, "above 0, at most 100")

    def runs(self, at_s: float) -> bool:
        """Whether it runs at a time."""
        return self.start_s <= at_s < self.start_s + self.seconds


class BurstMix:
    """Puts the burst's users in the place of others. Their histories grow from visit to visit.

    Args:
        burst: see there.
        rng: draws who is replaced, and by whom.
    """

    def __init__(self, burst: Burst, rng: np.random.Generator) -> None:
        self.burst, self._rng = burst, rng
        mean, longest = burst.mean_history_tokens, burst.max_history_tokens
        first = rng.uniform(0.8 * mean, 1.2 * mean, burst.users).astype(np.int32)
        self._lengths = np.clip(first, 1, longest)

    def mixed(self, requests: Requests) -> Requests:
        """The requests [n], some of them the burst's."""
        burst, n = self.burst, len(requests)
        taken = np.flatnonzero(self._rng.random(n) < burst.share)
        number = self._rng.integers(0, burst.users, taken.size)
        user, length = requests.user.copy(), requests.history_length.copy()
        new = requests.new_items.copy()
        added = self._rng.integers(1, burst.new_items + 1, taken.size)
        for place, who, more in zip(taken, number, added, strict=True):
            # Beyond the longest the oldest quarter goes at once, as in the regimes.
            grown = self._lengths[who] + more
            if grown > burst.max_history_tokens:
                grown -= grown // 4
            self._lengths[who] = length[place] = grown
            user[place], new[place] = FIRST_USER + who, more
        return Requests(requests.arrival_s, user, length, new)
