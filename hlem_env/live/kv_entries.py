# mypy: disallow-untyped-calls=False
"""What the KV cache knows of its users: a dense slot each, and the pages of those with an entry."""

from __future__ import annotations

import enum
from typing import Any

import numba
import numpy as np
from numba import types
from numpy.typing import NDArray

from hlem_env.errors import BackendError, require
from hlem_env.eviction.protocol import EvictionPolicy

Slots = NDArray[np.int64]

_INITIAL_INTS = 1024
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


ABSENT, STALE, HIT = range(3)
"""What `KvEntries.visit` finds: no entry, one that the request cannot reuse, one that it can."""


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
        self._stamp: NDArray[np.int64] = np.zeros(0, np.int64)
        self._slot_of: dict[tuple[int, int], int] = {}
        self._free_slots: list[int] = []
        self._free_rows = list(range(entries - 1, -1, -1))
        self._enlarge(min(_INITIAL_INTS, most_users))

    @property
    def users(self) -> int:
        """Users that are remembered, with an entry or without."""
        return len(self._slot_of)

    def find(self, kind: EntryKind, ids: list[int]) -> Slots:
        """Slots [n], -1 where unknown. Nothing is added."""
        get, whose = self._slot_of.get, int(kind)  # an enum hashes by its name, and slowly
        return np.array([get((whose, one), -1) for one in ids], np.int64)

    def busy(self, slots: Slots) -> int:
        """Place of the first of slots [n], -1 among them, that is in flight; -1 for none."""
        return int(_first_in_flight(self.records, slots))

    def add(self, kind: EntryKind, ids: list[int], slots: Slots, policy: EvictionPolicy) -> None:
        """Give those of different users whose slot is -1 one that remembers nothing; `slots` is written.

        Raises:
            BackendError: there are more users in flight than may be remembered.
        """
        if -1 not in slots.tolist():
            return
        new = np.flatnonzero(slots < 0)
        while len(self._free_slots) < new.size:
            if self.records.size < self._most_users:
                self._enlarge(min(2 * self.records.size, self._most_users))
            else:
                self._forget(new.size, slots[slots >= 0], policy)
        for i in new.tolist():
            slots[i] = slot = self._free_slots.pop()
            self._slot_of[int(kind), ids[i]] = slot
        _add_users(self.records, slots[new], np.array([ids[i] for i in new.tolist()]), int(kind))

    def visit(
        self,
        slots: Slots,
        lengths: NDArray[np.int64],
        new: NDArray[np.int64],
        prefixes: NDArray[np.uint64],
        version: int,
    ) -> NDArray[np.int8]:
        """What requests [n] find, int8 [n]: ABSENT, STALE or HIT. They are their users' last ones now.

        Args:
            slots: [n], of different users.
            lengths: [n] history tokens.
            new: [n] of those, appended since the last request.
            prefixes: [n] hashes.
            version: of the model.
        """
        found: NDArray[np.int8] = _visit(self.records, slots, lengths, new, prefixes, version)
        return found

    def grow(
        self,
        slots: Slots,
        more: NDArray[np.int64],
        pages: NDArray[np.int64],
        prefixes: NDArray[np.uint64],
        version: int,
    ) -> None:
        """Append pages, the first `more[0]` of them to the first entry and so on, for these histories."""
        _grow(self.records, self.table, slots, more, pages, prefixes, version)

    def add_rows(self, slots: Slots) -> None:
        """Give users without an entry an empty one."""
        for slot in slots.tolist():
            self.records["row"][slot] = self._free_rows.pop()

    def drop_rows(self, slots: Slots) -> int:
        """Take the entries away; their pages are the caller's to free. Returns the tokens that they held."""
        rows, tokens = _drop_rows(self.records, slots)
        self._free_rows.extend(rows.tolist())
        return int(tokens)

    def first_to_free(self, slots: Slots, pages: int) -> tuple[int, bool]:
        """Whether so many pages can be freed, least worthy first.

        Returns
        -------
        How many of the entries [n] it takes, n + 1 where all are too few; and whether all n are different
        entries without a request in flight.
        """
        count, good = _first_to_free(self.records, self._stamp, slots, pages)
        return int(count), bool(good)

    def pages_from(self, slots: Slots, first: NDArray[np.int32]) -> NDArray[np.int64]:
        """Pages of entries [n], each from its page number `first` on, one after the other."""
        pages: NDArray[np.int64] = _pages_from(self.records, self.table, slots, first)
        return pages

    def page_table(self, slots: Slots) -> NDArray[np.int32]:
        """Pages int32 [n, pages_per_entry] of the users' entries, -1 beyond."""
        table: NDArray[np.int32] = _page_table(self.records, self.table, slots)
        return table

    def _enlarge(self, slots: int) -> None:
        before = self.records.size
        self.records = np.concatenate((self.records, np.zeros(slots - before, RECORD)))
        self.records["row"][before:] = -1
        self._stamp = np.zeros(slots, np.int64)
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


_RECORDS = numba.from_dtype(RECORD)[::1]
_TABLE = types.int32[:, ::1]
_INTS = types.Array(types.int64, 1, "C", readonly=True)
_HASHES = types.Array(types.uint64, 1, "C", readonly=True)
_FIRST = types.Array(types.int32, 1, "C", readonly=True)


@numba.njit([types.int64(_RECORDS, _INTS)], cache=True)
def _first_in_flight(records: Any, slots: Any) -> int:
    for i in range(slots.size):
        if slots[i] >= 0 and records[slots[i]].in_flight:
            return i
    return -1


@numba.njit([types.void(_RECORDS, _INTS, _INTS, types.int64)], cache=True)
def _add_users(records: Any, slots: Any, ids: Any, kind: int) -> None:
    """Users without an entry, of whom nothing is known yet."""
    for i in range(slots.size):
        one = records[slots[i]]
        one.id, one.kind, one.row = ids[i], kind, -1
        one.in_flight = False
        one.pages = one.length = one.seen = 0
        one.version = one.prefix = 0


@numba.njit([types.Tuple((types.int64[::1], types.int64))(_RECORDS, _INTS)], cache=True)
def _drop_rows(records: Any, slots: Any) -> tuple[NDArray[np.int64], int]:
    """Rows [n] that the entries had, and the tokens in them."""
    rows, tokens = np.empty(slots.size, np.int64), 0
    for i in range(slots.size):
        one = records[slots[i]]
        rows[i] = one.row
        tokens += one.length
        one.row, one.pages, one.length = -1, 0, 0
    return rows, tokens


@numba.njit(
    [types.Tuple((types.int64, types.b1))(_RECORDS, types.int64[::1], _INTS, types.int64)],
    cache=True,
)  # fmt: skip
def _first_to_free(records: Any, stamp: Any, slots: Any, pages: int) -> tuple[int, bool]:
    """Of `KvEntries.first_to_free`. Changes `stamp` alone."""
    good, count, freed = True, slots.size + 1, 0
    for i in range(slots.size):
        if slots[i] < 0 or slots[i] >= records.size:
            return count, False
        one = records[slots[i]]
        good &= one.row >= 0 and not one.in_flight
        stamp[slots[i]] = i  # of one that stands there twice only the last stays
        freed += one.pages
        if freed >= pages and count > i:
            count = i + 1
    for i in range(slots.size):
        good &= stamp[slots[i]] == i
    return count, good


@numba.njit([types.int8[::1](_RECORDS, _INTS, _INTS, _INTS, _HASHES, types.int64)], cache=True)
def _visit(
    records: Any, slots: Any, lengths: Any, new: Any, prefixes: Any, version: int
) -> NDArray[np.int8]:
    found = np.full(slots.size, ABSENT, np.int8)
    for i in range(slots.size):
        one = records[slots[i]]
        if one.row >= 0:
            same = one.version == version and one.prefix == prefixes[i]
            found[i] = HIT if same and one.seen <= lengths[i] - new[i] else STALE
        one.seen = lengths[i]
    return found


@numba.njit(
    [types.void(_RECORDS, _TABLE, _INTS, _INTS, _INTS, _HASHES, types.int64)],
    cache=True,
)  # fmt: skip
def _grow(
    records: Any, table: Any, slots: Any, more: Any, pages: Any, prefixes: Any, version: int
) -> None:
    taken = 0
    for i in range(slots.size):
        one = records[slots[i]]
        for page in pages[taken : taken + more[i]]:
            table[one.row, one.pages] = page
            one.pages += 1
        taken += more[i]
        one.version, one.prefix = version, prefixes[i]


@numba.njit([types.int64[::1](_RECORDS, _TABLE, _INTS, _FIRST)], cache=True)
def _pages_from(records: Any, table: Any, slots: Any, first: Any) -> NDArray[np.int64]:
    total = 0
    for i in range(slots.size):
        total += max(records[slots[i]].pages - first[i], 0)
    pages = np.empty(total, np.int64)
    at = 0
    for i in range(slots.size):
        one = records[slots[i]]
        for column in range(first[i], one.pages):
            pages[at] = table[one.row, column]
            at += 1
    return pages


@numba.njit([_TABLE(_RECORDS, _TABLE, _INTS)], cache=True)
def _page_table(records: Any, table: Any, slots: Any) -> NDArray[np.int32]:
    pages = np.full((slots.size, table.shape[1]), -1, np.int32)
    for i in range(slots.size):
        one = records[slots[i]]
        for column in range(one.pages):  # numba compiles an assigned slice ten times as long
            pages[i, column] = table[one.row, column]
    return pages
