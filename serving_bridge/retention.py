"""Keeps the histories on disk within a limit: those of users who were not here for longest are removed.

The worker chooses between batches, since it knows who has a request on its way. The committer's thread
removes, in its turn. Until that is done a chosen user counts as unknown, whatever the store still says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from serving_bridge.committer import Removal
from serving_bridge.control_loop import Histories
from serving_bridge.history_store import HistoryStore, Size, StoreError
from serving_bridge.user_table import UserTable

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""After a removal that the disk refused."""


class Retention:
    """Has histories removed while there are more of them than `limit_bytes`; the worker's thread uses it.

    Args:
        store: of the histories.
        users: are told of those that go.
        limit_bytes: above it users go, at most 32 at a time, until it is kept with a 64th to spare.
        put: hands a removal to the thread that commits.
    """

    def __init__(
        self,
        store: HistoryStore,
        users: UserTable,
        limit_bytes: int,
        put: Callable[[Removal], None],
    ) -> None:
        self._store, self._users, self._put = store, users, put
        self._limit_bytes = limit_bytes
        self._size = Size(0, 0)
        self._removal: Removal | None = None
        self._removed = 0
        self._retry_at_s = 0.0

    def step(self, now_s: float, on_their_way: Iterable[str]) -> bool:
        """See to the limit; whether there is more to do at once.

        Args:
            now_s: of the node's clock.
            on_their_way: users whose requests may not have been written yet; they stay.
        """
        try:
            if self._removal is not None and not self._settle(self._removal, now_s):
                return True
            if now_s < self._retry_at_s:
                return False
            self._size = self._store.size()
            over = self._size.n_bytes - self._limit_bytes
            if over <= 0:
                return False
            wanted = over + self._limit_bytes // 64
            names = self._store.least_recent(wanted, frozenset(on_their_way))
        except StoreError as error:
            logger.error("the limit of histories is not kept: %s", error)
            self._retry_at_s = now_s + RETRY_S
            return False
        if not names:  # all have been here since the last commit
            return False
        self._users.leave(names)
        self._removal = Removal(names)
        self._put(self._removal)
        return True

    def take(self) -> Histories:
        """What there is, and what was removed since the last call."""
        removed, self._removed = self._removed, 0
        return Histories(*self._size, removed)

    def _settle(self, removal: Removal, now_s: float) -> bool:
        """Count a removal that has been done; whether it has."""
        if not removal.done:
            return False
        self._removal = None
        self._users.leave([])
        if removal.error:
            logger.warning("old histories are not removed: %s", removal.error)
            self._retry_at_s = now_s + RETRY_S
        else:
            self._removed += len(removal.users)
        return True
