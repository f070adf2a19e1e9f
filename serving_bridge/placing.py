"""What a request means for its user's history: what it must be, what is new, what is cached of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hlem_env.live.prefix_hash import prefix_hash
from serving_bridge.history_store import Change, HistoryStore, Items, StoredHistory
from serving_bridge.scoring import Limits, ScoreRequest, UnknownUser
from serving_bridge.user_table import User, UserTable, Writing


class Placed(NamedTuple):
    """A request at its place in its user's history, until another request of the user is executed."""

    user: User
    change: Change
    edits: int
    """Of the history with this request."""
    new_items: int
    """Tokens after what the user's last request had; all of a history that was replaced."""
    read: Callable[[int], Items]
    """The history from an item on."""

    @property
    def length(self) -> int:
        """Of the history with this request."""
        return self.change.after.length

    def executed(self) -> Writing:
        """The history is as this request has it, and its change must be written."""
        user, change = self.user, self.change
        replaced = self.edits != user.edits
        if replaced:
            user.edits = self.edits
            user.writing.clear()
        writing = Writing(change, 0 if user.history is None or replaced else user.history.length)
        user.history = change.after
        user.writing.append(writing)
        return writing


def place(request: ScoreRequest, users: UserTable, store: HistoryStore, limits: Limits) -> Placed:
    """Where a request belongs. It changes no history.

    Raises:
        UnknownUser: new items of a user without a history.
            StoreError: what is stored cannot be read.
    """
    user = users.find(request.user)
    if request.history is not None:
        return _given(request.user, request.history, user or users.add(request.user), store)
    assert request.new_items is not None
    if user is None or user.history is None:
        raise UnknownUser("there is no history of this user: send it whole")
    return _continued(user, request.new_items, store, limits)


def _given(name: str, history: Items, user: User, store: HistoryStore) -> Placed:
    base = user.history
    if base is not None and history.size >= base.length:
        known = history[: base.length]
        if prefix_hash(known, store.hash_key) == base.hash:
            more = history[base.length :]
            after = StoredHistory(base.id, history.size, prefix_hash(more, base.hash))
            return Placed(
                user, Change(name, base, after, more), user.edits, more.size, lambda i: history[i:]
            )
    return _replaced(user, history, store)


def _continued(user: User, new: Items, store: HistoryStore, limits: Limits) -> Placed:
    base = user.history
    assert base is not None

    def read(first: int) -> Items:
        if first >= base.length:
            return new[first - base.length :]
        return np.concatenate((user.items(store, first), new))

    length = base.length + new.size
    if length > limits.history_tokens:
        return _replaced(user, _newest(length, read, limits), store)
    after = StoredHistory(base.id, length, prefix_hash(new, base.hash))
    return Placed(user, Change(user.name, base, after, new), user.edits, new.size, read)


def _newest(length: int, read: Callable[[int], Items], limits: Limits) -> Items:
    """What stays of a history that has grown too long: the oldest quarter goes at once.

    One recompute, then reuse again; token by token every visit would be a recompute.
    """
    kept = limits.history_tokens - limits.history_tokens // 4
    return read(length - kept)


def _replaced(user: User, history: Items, store: HistoryStore) -> Placed:
    """Another history in place of the one that there is, if any: nothing cached is of use."""
    base = user.history
    after = StoredHistory(store.new_id(), history.size, prefix_hash(history, store.hash_key))
    edits = user.edits + (base is not None)
    change = Change(user.name, base, after, history)
    return Placed(user, change, edits, history.size, lambda first: history[first:])
