"""What the KV cache knows of its users: a dense slot each, and the pages of those with an entry."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import BackendError, require
from hlem_env.eviction.protocol import EvictionPolicy

Slots = NDArray[np.int64]

_INITIAL_SLOTS = 1024
_FORGOTTEN_SHARE = 16
"""A full table forgets one in so many at a time: a short pause, and not with every new user."""


class EntryKind(enum.IntEnum):
    """Whose K and V an entry holds."""

    USER = 0


RECORD = np.dtype(
    [
        ("id", "i8"),
        ("kind", "i1"),
        ("in_flight", "?"),  # a request of it runs: its entry is pinned
        ("row", "i4"),  # of the page table; -1: no entry
        ("pages", "i4"),  # that the entry holds
        ("length", "i4"),  # tokens whose K and V are in the pages
        ("seen", "i4"),  # history tokens of the last request, stored or not
        ("version", "i8"),  # of the model that computed K and V
        ("prefix", "u8"),  # hash that the history came with
    ]
)


class KvEntries:
    """Records by slot and one table of pages, int32, that only entries have a row in.

    Args:
        entries: that may exist at one time.
        pages_per_entry: at most; the page table's width.
        most_users: that are remembered. When a new one finds the table full, a sixteenth of it is
            forgotten: those without an entry and not in flight whom the policy holds least worthy.

    Raises:
        ArgumentError: `most_users` is not at least twice `entries`.
    """

    def __init__(self, entries: int, pages_per_entry: int, most_users: int) -> None:
        require(
            2 * entries <= most_users <= 2**31,
            "most_users",
            most_users,
            f"twice the {entries} entries that may exist, to 2^31",
        )
        self.records: NDArray[np.void] = np.zeros(0, RECORD)
        self.table: NDArray[np.int32] = np.full((entries, pages_per_entry), -1, np.int32)
        """[entries, pages_per_entry]; only an entry's first `pages` columns mean anything."""
        self._most_users = most_users
        self._slot_of: dict[tuple[int, int], int] = {}
        self._free_slots: list[int] = []
        self._free_rows = list(range(entries - 1, -1, -1))
        self._grow(min(_INITIAL_SLOTS, most_users))

    @property
    def users(self) -> int:
        """Users that are remembered, with an entry or without."""
        return len(self._slot_of)

    def find(self, kind: EntryKind, ids: list[int]) -> Slots:
        """Slots [n], -1 where unknown. Nothing is added."""
        get, whose = self._slot_of.get, int(kind)  # an enum hashes by its name, and slowly
        return np.array([get((whose, one), -1) for one in ids], np.int64)

    def find_or_add(self, kind: EntryKind, ids: list[int], policy: EvictionPolicy) -> Slots:
        """Slots [n] of different users; unknown ones get one that remembers nothing.

        Raises:
            BackendError: there are more users in flight than may be remembered.
        """
        slots = self.find(kind, ids)
        new = np.flatnonzero(slots < 0)
        if new.size == 0:
            return slots
        while len(self._free_slots) < new.size:
            if self.records.size < self._most_users:
                self._grow(min(2 * self.records.size, self._most_users))
            else:
                self._forget(new.size, slots[slots >= 0], policy)
        for i in new.tolist():
            slots[i] = slot = self._free_slots.pop()
            self._slot_of[int(kind), ids[i]] = slot
        added = slots[new]
        self.records[added] = np.zeros((), RECORD)
        self.records["id"][added] = [ids[i] for i in new.tolist()]
        self.records["kind"][added] = kind
        self.records["row"][added] = -1
        return slots

    def add_rows(self, slots: Slots) -> None:
        """Give users without an entry an empty one."""
        for slot in slots.tolist():
            self.records["row"][slot] = self._free_rows.pop()

    def drop_rows(self, slots: Slots) -> None:
        """Take the entries away; their pages are the caller's to free."""
        self._free_rows.extend(self.records["row"][slots].tolist())
        for name, value in (("row", -1), ("pages", 0), ("length", 0)):
            self.records[name][slots] = value

    def pages_between(
        self, slots: Slots, first: NDArray[np.int32], last: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Columns first (inclusive) to last (exclusive) of the users' rows, one after the other."""
        rows, mask = self._mask(slots, first, last)
        pages: NDArray[np.int32] = self.table[rows, : mask.shape[1]][mask]
        return pages

    def set_pages_between(
        self,
        slots: Slots,
        first: NDArray[np.int32],
        last: NDArray[np.int32],
        pages: NDArray[np.int64],
    ) -> None:
        """Write what `pages_between` reads."""
        rows, mask = self._mask(slots, first, last)
        user, column = np.nonzero(mask)
        self.table[rows[user], column] = pages

    def _mask(
        self, slots: Slots, first: NDArray[np.int32], last: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Rows [n] and, [n, columns], which of their columns lie in [first, last)."""
        columns = np.arange(int(last.max(initial=0)), dtype=np.int32)
        mask = (columns >= first[:, None]) & (columns < last[:, None])
        return self.records["row"][slots], mask

    def _grow(self, slots: int) -> None:
        before = self.records.size
        self.records = np.concatenate((self.records, np.zeros(slots - before, RECORD)))
        self.records["row"][before:] = -1
        self._free_slots.extend(range(slots - 1, before - 1, -1))

    def _forget(self, needed: int, asked: Slots, policy: EvictionPolicy) -> None:
        """Free slots of users without an entry, none of `asked`: at least `needed`, or fail."""
        idle = (self.records["row"] < 0) & ~self.records["in_flight"]
        idle[asked] = False
        idle[self._free_slots] = False
        slots = np.flatnonzero(idle)
        n = max(needed - len(self._free_slots), self._most_users // _FORGOTTEN_SHARE)
        if slots.size < needed - len(self._free_slots):
            raise BackendError(
                f"{needed} new users in one batch, of {self._most_users} remembered only "
                f"{slots.size} have neither an entry nor a request in flight"
            )
        if slots.size > n:
            slots = slots[np.argpartition(policy.worth(slots, 0.0), n)[:n]]
        policy.forget(slots)
        records = self.records[slots]
        for key in zip(records["kind"].tolist(), records["id"].tolist(), strict=True):
            del self._slot_of[key]
        self._free_slots.extend(slots.tolist())
