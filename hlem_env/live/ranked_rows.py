"""LARU, FPB and HF for embedding rows, by whole batches, where the lookups' reference runs.

That is on CPUs, and with a set-associative index.

A batch is one moment, so the rule of `hlem_env.eviction.laru` is applied once to all rows that a batch
must evict: of the candidates, the least recent rows as far as lambda says, those predicted to come last
go. Of the batch's missing rows as many as were evicted by prediction in this phase are made room for by
recency, and if there is one, lambda halves once. The bounds proved for single items do not hold.
Under FPB all rows are candidates. Under HF m victims come from the m + 3 least recent, which is what
choosing one of 4 does m times: the 3 that are requested first are left over.

Predictions come late: lookups hand their keys to a thread and take what it has said of earlier ones.
Until then a row that was fetched is expected after twice the label window. While the predictor is not
usable all victims go by recency, which is counted.

Which rows a phase has seen and evicted is kept in hashed cells. Two rows that share one may end a phase
late, or hide that one of them was mispredicted; neither is taken for the other.
"""

from __future__ import annotations

import math
import queue

import torch
from torch import Tensor

from hlem_env.errors import require_choice
from hlem_env.eviction import laru
from hlem_env.eviction.predictor import Floats, Predictor
from hlem_env.eviction.protocol import Keys
from hlem_env.live.cache_state import FOREIGN, FREE, CacheState
from hlem_env.live.kernels.lookup_reference import VictimQueue
from hlem_env.live.row_predictions import RowPredictions

_MULTIPLIER = 0x1E3779B97F4A7C15


class RankedQueue(VictimQueue):
    """Victims by prediction, in the place of the queue by recency.

    Args:
        state: of the cache, not counted.
        predictor: asked in the thread of `predictions`.
        cold_s: a row of which nothing is predicted yet comes after so many seconds.
        policy: "laru", "fpb" or "hf".

    Raises:
        ArgumentError: another policy.
    """

    def __init__(
        self, state: CacheState, predictor: Predictor, cold_s: float, policy: str = "laru"
    ) -> None:
        require_choice("policy", policy, laru.RULES)
        super().__init__(state)
        self._rule = laru.RULES[policy]
        slots, device = state.stamp.shape[0], state.stamp.device
        self.fallbacks = 0
        """Batches that evicted by recency for want of predictions."""
        self.confidence = 1.0
        self.predictions = RowPredictions(predictor, self._hear)
        self._cold_s = cold_s
        self._next = torch.full((slots,), torch.inf, dtype=torch.float64, device=device)
        cells = 1 << (4 * slots - 1).bit_length()
        self._seen = torch.zeros(cells, dtype=torch.int32, device=device)
        self._gone = torch.zeros(cells, dtype=torch.int32, device=device)
        self._gone_row = torch.full((cells,), -1, dtype=torch.int64, device=device)
        self._phase, self._distinct = 1, 0
        self._now = -math.inf
        self._serving = False
        self._by_recency = 0
        self._said: queue.SimpleQueue[tuple[Tensor, Tensor]] = queue.SimpleQueue()

    def begin(self, keys: Tensor, now: float) -> None:
        """A lookup of keys, int64 [n], starts."""
        self._now, self._serving = max(self._now, now), True
        self._take_predictions()
        rows = torch.unique(keys)
        cells = self._cells(rows)
        new = int((self._seen[cells] != self._phase).sum())
        owned = int((self.state.stamp < FOREIGN).sum())
        if new and self._distinct + new > owned:
            self.begin_phase()
            new = len(rows)
        self._seen[cells] = self._phase
        self._distinct += new
        missing = self.state.index.find(rows) < 0
        if self._rule == laru.LARU:
            gone = (self._gone[cells] == self._phase) & (self._gone_row[cells] == rows)
            self._by_recency = int((missing & gone).sum())
        if self._by_recency:
            self.confidence /= 2
        if self.predictions.has_room():
            self.predictions.ask(rows.cpu().numpy, self._now)

    def end(self, keys: Tensor) -> None:
        """The lookup is over: what is new in the cache is expected late until more is known."""
        slots = self.state.index.find(torch.unique(keys))
        slots = slots[slots >= 0]
        fresh = slots[torch.isinf(self._next[slots])]
        self._next[fresh] = self._now + self._cold_s
        self._serving = False

    def begin_phase(self) -> None:
        """Forget what the phase has seen and evicted; a resize does so, too."""
        self._phase, self._distinct, self.confidence = self._phase + 1, 0, 1.0

    def take(self, n: int, limit: int, batch: int) -> Tensor:
        """See `VictimQueue.take`. Between lookups, and for free slots, the order is that of recency."""
        first = super().take(n, limit, batch)
        free = int((self.state.stamp[first] == FREE).sum())
        if free == len(first):
            self._forget(first)
            return first
        if not (self._serving and self.predictions.usable):
            self.fallbacks += self._serving
            self._forget(first)
            return first
        owned = int((self.state.stamp < FOREIGN).sum())
        queued = super().take(free + self._candidates(owned, len(first) - free), limit, batch)
        # It may have sorted anew, and then slots that a full set of the index freed come in between.
        free = min(int((self.state.stamp[queued] == FREE).sum()), len(first))
        queued, wanted = (
            queued[: free + self._candidates(owned, len(first) - free)],
            len(first) - free,
        )
        spare, oldest, rest = queued.tensor_split([free, free + min(self._by_recency, wanted)])
        farness = (self._next[rest] - self._now).abs()
        order = farness.sort(descending=True, stable=True).indices[: wanted - len(oldest)]
        chosen = rest[order]
        self._note_gone(self.state.row_of[chosen])
        victims = torch.cat((spare, oldest, chosen))
        self._forget(victims)
        return victims

    def next_of(self, rows: Tensor) -> Tensor:
        """Predicted times, float64 [n], of resident rows: to `move` them to other slots."""
        return self._next[self.state.index.find(rows)]

    def move(self, rows: Tensor, times: Tensor) -> None:
        """Rows, int64 [n], with these times may have changed slots, or gone."""
        slots = self.state.index.find(rows)
        self._next.fill_(torch.inf)
        self._next[slots[slots >= 0]] = times[slots >= 0]

    def _note_gone(self, rows: Tensor) -> None:
        """Rows were evicted by prediction; of those that share a cell one is remembered."""
        cells = self._cells(rows)
        self._gone[cells] = self._phase
        self._gone_row[cells] = rows

    def _candidates(self, owned: int, wanted: int) -> int:
        """How many of the least recent rows may be among so many victims."""
        if self._rule == laru.LARU:
            return max(math.ceil(self.confidence * owned), wanted)
        return min(wanted + self._rule - 1, owned)

    def _forget(self, slots: Tensor) -> None:
        self._next[slots] = torch.inf

    def _cells(self, rows: Tensor) -> Tensor:
        return (rows * _MULTIPLIER >> 24) & (len(self._seen) - 1)

    def _take_predictions(self) -> None:
        while not self._said.empty():
            rows, times = self._said.get()
            slots = self.state.index.find(rows.to(self._next.device))
            there = slots >= 0
            self._next[slots[there]] = times.to(self._next.device)[there]

    def _hear(self, rows: Keys, times: Floats) -> None:
        self._said.put((torch.from_numpy(rows), torch.from_numpy(times)))
