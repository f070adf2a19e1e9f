"""The users that a node knows now: their numbers, and what their histories are, bounded in number.

A number is never given twice: what a cache holds of a user that was forgotten is nobody's. Histories
that are on their way to the disk stay here until they have arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np

from hlem_env.errors import require
from serving_bridge.history_store import Change, HistoryStore, Items, StoredHistory


@dataclass(eq=False, slots=True)
class Writing:
    """A change on its way to the disk."""

    change: Change
    start: int
    """Where its items are in the history."""
    done: bool = False
    """Set by the thread that commits."""


@dataclass(eq=False, slots=True)
class User:
    """A user that is known. There are many: an instance is kept small."""

    name: str
    number: int
    """Of nobody else, ever."""
    slot: int
    """Below the table's capacity; another user's after this one is forgotten."""
    history: StoredHistory | None
    """As of the last request that was executed."""
    edits: int = 0
    """How often the history was replaced."""
    writing: list[Writing] = field(default_factory=list)
    """What may not be on the disk yet, oldest first."""
    lost: bool = False
    """What is known here is wrong: a change was not written, as the thread that commits says, or the
    history is being removed."""

    def settle(self) -> None:
        """Forget what has been written."""
        while self.writing and self.writing[0].done:
            del self.writing[0]

    def items(self, store: HistoryStore, first: int) -> Items:
        """The history from `first` on. Raises StoreError."""
        assert self.history is not None
        self.settle()
        written = self.writing[0].start if self.writing else self.history.length
        parts = [one.change.items[max(first - one.start, 0) :] for one in self.writing]
        if first < written:
            parts.insert(0, store.read(self.history, first, written))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)


class UserTable:
    """The last `capacity` users; one thread uses it.

    Args:
        store: where users are looked up that are not known.
        capacity: more than can have changes on their way at one time.
        on_slot: is told of a slot that has a new user.
    """

    def __init__(
        self, store: HistoryStore, capacity: int, on_slot: Callable[[int], None] = lambda slot: None
    ) -> None:
        require(1 <= capacity <= 2**31, "capacity", capacity, "1 to 2^31")
        self._store, self._capacity, self._on_slot = store, capacity, on_slot
        self._users: OrderedDict[str, User] = OrderedDict()
        self._leaving: frozenset[str] = frozenset()
        self._numbers = 0

    def find(self, name: str) -> User | None:
        """A user that is known here or to the store. Raises StoreError."""
        user = self._users.get(name)
        if user is not None and not user.lost:
            self._users.move_to_end(name)
            return user
        history = None if name in self._leaving else self._store.find(name)
        return None if history is None else self.add(name, history)

    def leave(self, names: Collection[str]) -> None:
        """These users' histories are being removed, all others' are as the store says.

        None of them may have changes on their way.
        """
        self._leaving = frozenset(names)
        for user in filter(None, map(self._users.get, names)):
            user.lost = True

    def add(self, name: str, history: StoredHistory | None = None) -> User:
        """A user as new, in place of one of that name or of the one that was asked for least lately."""
        before = self._users.pop(name, None)
        if before is None and len(self._users) == self._capacity:
            before = self._forget()
        slot = len(self._users) if before is None else before.slot
        self._on_slot(slot)
        user = User(name, self._numbers, slot, history)
        self._numbers += 1
        self._users[name] = user
        return user

    def _forget(self) -> User:
        """The one that was asked for least lately, of those whose history is on the disk."""
        for user in self._users.values():
            user.settle()
            if not user.writing or user.lost:
                return self._users.pop(user.name)
        raise AssertionError("more users have changes on their way than the table holds")
