"""What an embedding cache remembers of its slots, and the order in which it gives them up.

A slot is a row of the whole pool. Its stamp is the number of the batch that used it last; FREE slots
are below every stamp and slots of other owners (FOREIGN) above, so that one comparison finds victims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hlem_env.errors import require
from hlem_env.live.row_index import RowIndex

FREE = -1
FOREIGN = 2**31 - 1
SKETCH_MULTIPLIERS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)
SKETCH_SHIFT = 36
SKETCH_CELLS_MAX = 2**24

LOOKED_UP, MISSED, UNIQUE, INSERTED, EVICTED, WARMED, INVALID = range(7)
LAST_UNIQUE, SHRUNK, VALID_UNTIL, QUEUE_NUMBER = 7, 8, 9, 10
MISPREDICTED, MISPREDICTED_BEFORE, DISTRUSTED, LEFT, PHASE, RECENT, RECENT_OF = range(11, 18)
COUNTERS = 18
"""Places in `counters`: keys, keys not resident at the start of their batch, distinct ones of those,
rows inserted by lookups, rows evicted by anything, rows inserted ahead, keys that do not exist; the
last batch's distinct misses; rows evicted by shrinking; what the last batch with misses knew of the
victim queue that it used (`BackgroundQueue`), and that queue's number.

Of LARU (`RankedBackgroundQueue`): missing rows that the phase had evicted by prediction, those of the
batches before the last, batches of the phase that had some, rows that the phase has seen and evicted, its
number; rows that it has seen and that were resident when a queue was begun, and that queue's number."""


@dataclass(frozen=True)
class CacheCounters:
    """What the cache did since it was made."""

    looked_up: int
    """Keys."""
    hit: int
    """Keys whose row was resident when their batch began."""
    unique_misses: int
    """Rows fetched for lookups: of each batch's keys that did not hit, the distinct ones."""
    inserted: int
    """Of those, the ones that took a slot."""
    warmed: int
    """Rows inserted ahead of their use."""
    evicted: int
    evicted_by_shrinking: int
    """Part of `evicted`."""
    fetched_bytes: int
    """Over the link, for lookups."""

    def __sub__(self, before: CacheCounters) -> CacheCounters:
        """What was done since `before`."""
        mine, theirs = vars(self), vars(before)
        return CacheCounters(**{name: mine[name] - theirs[name] for name in mine})


class CacheState:
    """The slots of a cache, on its device.

    Under "lru" the score of a slot is its stamp. Under "scan_resistant" it is the row's decayed
    number of lookups, kept forward (hlem_env.eviction.recency): a lookup at time t adds
    2^((t - origin) / half-life). Rows that are not resident have theirs in a sketch of two hashed
    rows of cells, of which the smaller counts: bounded memory, and rows that share both cells are
    counted together, so a score may be too high, never too low. The sketch keeps 4 cells for every
    slot, at most 2^24.

    Args:
        slab: [slots, dim], the pool as rows.
        index: rows to slots.
        counted: whether rows have decayed counts.
        ring_rows: rows missed lately to remember, a power of two.
    """

    def __init__(
        self, slab: Tensor, index: RowIndex, counted: bool, ring_rows: int = 2**20
    ) -> None:
        slots, device = slab.shape[0], slab.device
        require(slots < FOREIGN, "slots", slots, f"below {FOREIGN}")
        self.slab, self.index, self.counted = slab, index, counted
        self.row_of = torch.full((slots,), -1, dtype=torch.int64, device=device)
        """int64 [slots], -1 where no row is."""
        self.stamp = torch.full((slots,), FOREIGN, dtype=torch.int32, device=device)
        """int32 [slots]."""
        self.counters = torch.zeros(COUNTERS, dtype=torch.int64, device=device)
        require(
            ring_rows >= 1 and ring_rows & (ring_rows - 1) == 0,
            "ring_rows",
            ring_rows,
            "a power of two",
        )
        self.ring = torch.full((ring_rows,), -1, dtype=torch.int64, device=device)
        """int64 [ring_rows], each batch's missing rows; the next one goes to place UNIQUE mod its size."""
        cells = min(1 << (4 * slots - 1).bit_length(), SKETCH_CELLS_MAX) if counted else 1
        self.count = torch.full(
            (slots if counted else 1,), torch.inf, dtype=torch.float32, device=device
        )
        """float32 [slots] where counted: -inf of a free slot, inf of another owner's."""
        self.sketch = torch.zeros(2, cells, dtype=torch.float32, device=device)
        """float32 [2, cells]."""

    @property
    def score(self) -> Tensor:
        """[slots], int32 or float32; the lowest goes first."""
        return self.count if self.counted else self.stamp

    def cells(self, rows: Tensor) -> list[Tensor]:
        """Cells of rows, int64 [n], in each of the sketch's two rows."""
        mask = self.sketch.shape[1] - 1
        return [(rows * factor >> SKETCH_SHIFT) & mask for factor in SKETCH_MULTIPLIERS]

    def sketched(self, rows: Tensor) -> Tensor:
        """Scores, float32 [n], of rows that are not resident."""
        first, second = self.cells(rows)
        return torch.minimum(self.sketch[0, first], self.sketch[1, second])

    def note_missed(self, rows: Tensor, weight: float) -> None:
        """Add a lookup of each of the rows, int64 [n], which may repeat."""
        for row, cells in zip(self.sketch, self.cells(rows), strict=True):
            row.index_add_(0, cells, torch.full_like(cells, weight, dtype=torch.float32))

    def remember(self, rows: Tensor, counts: Tensor) -> None:
        """Keep the scores [n] of rows that are evicted."""
        for row, cells in zip(self.sketch, self.cells(rows), strict=True):
            row.scatter_reduce_(0, cells, counts, "amax")

    def hottest_missed(self, k: int) -> Tensor:
        """The k rows missed in most batches of late that are not resident now, int64 [k].

        In order of their numbers; -1 where there are fewer. Nothing waits for the device.
        """
        rows = self.ring.sort().values
        place = torch.arange(len(rows), device=rows.device)
        fresh = torch.ones_like(rows, dtype=torch.bool)
        fresh[1:] = rows[1:] != rows[:-1]
        last = torch.ones_like(fresh)
        last[:-1] = fresh[1:]
        times = place - torch.where(fresh, place, 0).cummax(0).values + 1
        absent = (rows >= 0) & (self.index.find(rows.clamp(min=0)) < 0)
        top = torch.topk(torch.where(last & absent, times, 0), min(k, len(rows)))
        return torch.where(top.values > 0, rows[top.indices], -1).sort().values

    def rescale(self, factor: float) -> None:
        """Move the origin of the decayed counts: all are multiplied, their order stays."""
        self.count *= factor
        self.sketch *= factor
