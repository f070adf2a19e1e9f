"""Where a row is resident: an exact map where the rows are few enough, else a hashed one of fixed size.

Both answer for arrays of rows on any device. Rows handed to `insert` and `remove` are distinct.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

ABSENT = -1
WAYS = 16
_HASH = 0x9E3779B97F4A7C1  # odd, below 2^63
DENSE_ROWS_MAX = 2**31 - 2


class RowIndex(Protocol):
    """Rows to slots."""

    def find(self, rows: Tensor) -> Tensor:
        """Slots of rows, int64 [n] -> int64 [n]; -1 where a row is not resident."""

    def insert(self, rows: Tensor, slots: Tensor, stamp: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Add rows, int64 [n], in slots, int64 [n].

        Args:
            rows: none of them resident; negative ones are ignored.
            slots: theirs from now on.
            stamp: int32 [all slots], when each was last used.
            now: rows with this stamp may not make room.

        Returns:
            Which rows were taken, bool [n], and the slots of rows that had to make room for them.
        """

    def remove(self, rows: Tensor) -> None:
        """Forget rows, int64 [n]; negative ones are ignored."""


class DenseIndex:
    """One int32 for every row that exists: exact, four bytes a row.

    Args:
        n_rows: rows that exist.
        device: of the map.
    """

    def __init__(self, n_rows: int, device: torch.device) -> None:
        self.slot_of = torch.full((n_rows + 1,), ABSENT, dtype=torch.int32, device=device)
        """int32 [n_rows + 1]; the last one stands for no row."""

    def find(self, rows: Tensor) -> Tensor:
        """Slots of rows, int64 [n]; -1 where a row is not resident."""
        return self.slot_of[rows].long()

    def insert(self, rows: Tensor, slots: Tensor, stamp: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Add rows in slots: all are taken and nobody makes room."""
        self.slot_of[rows] = slots.int()
        self.slot_of[-1:].fill_(ABSENT)  # where negative ones went
        return torch.ones_like(rows, dtype=torch.bool), rows[:0]

    def remove(self, rows: Tensor) -> None:
        """Forget rows, int64 [n]; -1 is ignored."""
        # An assignment of a number would wait for the device. Place -1 stands for no row.
        self.slot_of.index_fill_(0, rows, ABSENT)


class SetAssociativeIndex:
    """A hash table of sets of 16 rows, twice as large as the slots that there can be.

    A row that finds its set full takes the place of the set's least recently used one, so recency is
    exact within a set; at half load that is rare.

    Args:
        slots: that can be in use at once.
        device: of the table.
        ways: rows in a set.
    """

    def __init__(self, slots: int, device: torch.device, ways: int = WAYS) -> None:
        self.sets = 1 << max(2 * slots // ways - 1, 0).bit_length()
        self.ways = ways
        self.tags = torch.full((self.sets, ways), ABSENT, dtype=torch.int64, device=device)
        self.slots = torch.full((self.sets, ways), ABSENT, dtype=torch.int32, device=device)

    def find(self, rows: Tensor) -> Tensor:
        """Slots of rows, int64 [n]; -1 where a row is not resident."""
        where = self._set_of(rows)
        match = self.tags[where] == rows[:, None]
        return torch.where(match, self.slots[where], ABSENT).amax(1).long()

    def insert(self, rows: Tensor, slots: Tensor, stamp: Tensor, now: int) -> tuple[Tensor, Tensor]:
        """Add rows in slots; a full set gives up its least recently used row, or takes none.

        Negative rows are not taken.
        """
        real = rows >= 0
        if not bool(real.all()):
            real[real.clone()], displaced = self.insert(rows[real], slots[real], stamp, now)
            return real, displaced
        if rows.numel() == 0:
            return real, rows
        where = self._set_of(rows)
        # The r-th new row of a set takes its r-th way in order of last use, empty ones first.
        order = torch.argsort(where, stable=True)
        sorted_set = where[order]
        begin = torch.searchsorted(sorted_set, sorted_set)
        rank = torch.empty_like(order)
        rank[order] = torch.arange(len(rows), device=rows.device) - begin
        held = self.slots[where]
        used = torch.where(held >= 0, stamp[held.long().clamp(min=0)], ABSENT)
        in_order, way = used.sort(dim=1, stable=True)
        column = rank.clamp(max=self.ways - 1)[:, None]
        taken = (rank < self.ways) & (in_order.gather(1, column)[:, 0] < now)
        where, way = where[taken], way.gather(1, column)[taken, 0]
        displaced = self.slots[where, way].long()
        self.tags[where, way] = rows[taken]
        self.slots[where, way] = slots[taken].int()
        return taken, displaced[displaced >= 0]

    def remove(self, rows: Tensor) -> None:
        """Forget rows, int64 [n]; negative ones are ignored."""
        rows = rows[rows >= 0]
        where = self._set_of(rows)
        match = self.tags[where] == rows[:, None]
        found, way = match.any(1), match.int().argmax(1)
        self.tags[where[found], way[found]] = ABSENT
        self.slots[where[found], way[found]] = ABSENT

    def _set_of(self, rows: Tensor) -> Tensor:
        return ((rows * _HASH) >> 32) & (self.sets - 1)
