"""Which users are hot, and how much KV their histories take: the live node's side of mdp.HOT_REQUESTS."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hlem_env.mdp import HOT_REQUESTS


class HotUsers:
    """The last arrivals of every user that may come back.

    Args:
        persistent_users: ids at or above it come once and are never hot.
        window_s: a user with `HOT_REQUESTS` requests in this time is hot.
    """

    def __init__(self, persistent_users: int, window_s: float) -> None:
        self.persistent_users, self.window_s = persistent_users, window_s
        self.reset()

    def reset(self) -> None:
        """Forget all users."""
        self._arrivals = np.full((self.persistent_users, HOT_REQUESTS), -np.inf)
        self._pages = np.zeros(self.persistent_users, np.int64)

    def visit(self, user: int, arrival_s: float, pages: int) -> bool:
        """Record a request, whose history takes `pages`; returns whether its user is hot with it."""
        if user >= self.persistent_users:
            return False
        last = self._arrivals[user]
        last[1:] = last[:-1]
        last[0] = arrival_s
        self._pages[user] = pages
        return bool(arrival_s - last[-1] <= self.window_s)

    def forget(self, user: int) -> None:
        """The number is another user's from now on."""
        self._arrivals[user] = -np.inf

    def pages(self, now_s: float) -> int:
        """KV pages that the histories of the users that are hot at `now_s` take or would take."""
        hot: NDArray[np.bool_] = now_s - self._arrivals[:, -1] <= self.window_s
        return int(self._pages[hot].sum())
