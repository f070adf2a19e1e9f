# mypy: disallow-untyped-calls=False
"""The victim queue on CUDA: sorted on a stream of its own while lookups run.

`lookup_reference.VictimQueue` says why an old queue is still right: an entry whose score has changed
is passed over, and every other one comes before all that is not queued. What an old queue can be is
too short; rows that find no victim are then served and not inserted. For batches of up to 65,536
keys that cannot happen: the queue is sorted anew, if need be on the path, before it can run short.
For larger ones the length follows the misses of late, four times over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hlem_env.live.cache_state import CacheState

EXACT_KEYS = 2**16
LENGTH_MIN = 2**18
CAPACITY_SHARE = 8
"""The queue holds at least 1/8 of the slots."""
SORT_ALL_SLOTS = 2**22
"""Below so many slots all are sorted, and equal scores come in order of the slot."""
COUNTED_BATCHES = 16
"""Decayed counts: batches until rows inserted since may be victims."""


class BackgroundQueue:
    """Builds queues in the background, and hands over the latest.

    Args:
        state: of the cache.
        chain: of kernels, which reads `queue_slot` and `queue_score`.
    """

    def __init__(self, state: CacheState, chain: Any) -> None:
        self.state, self.chain = state, chain
        self.stream = torch.cuda.Stream(state.stamp.device)
        self.builds = 0
        self._pending: tuple[Tensor, Tensor, torch.cuda.Event] | None = None
        self._must = False
        self._sure = 0  # entries that are valid whatever happened since the queue in use was begun
        self._sure_pending = 0
        self._age = 0
        self._peak = 0.0
        self._low = 2**62

    def observe(self, unique: int, valid: int) -> None:
        """Learn the distinct misses of a batch of late, and the entries that were valid then."""
        self._peak = max(float(unique), 0.9 * self._peak)
        self._low = valid

    def build(self, capacity: int) -> torch.cuda.Event:
        """Begin a new queue, after all that the current stream was given; returns its event."""
        here = torch.cuda.current_stream(self.state.stamp.device)
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(here)
            return self._build(capacity)

    def rebuild_here(self, capacity: int) -> torch.cuda.Event:
        """The same behind work that the queue's own stream was given; the next batch waits for it."""
        self._must = True
        with torch.cuda.stream(self.stream):
            return self._build(capacity)

    def prepare(self, n: int, capacity: int) -> None:
        """Before a batch of n keys: take over what is ready, and see that it is long enough."""
        if self._pending is not None and (self._must or self._pending[2].query()):
            self._adopt()
        if n <= EXACT_KEYS and self._sure < min(n, capacity):
            if self._pending is None or self._sure_pending < min(n, capacity):
                self.build(capacity)
            self._adopt()
        self._sure -= n
        self._sure_pending -= n
        self._age += 1

    def replenish(self, n: int, capacity: int) -> None:
        """After a batch of n keys: begin the next queue when this one may soon be too short."""
        if self._pending is not None:
            return
        short = n <= EXACT_KEYS and self._sure < min(4 * n, capacity)
        short |= n > EXACT_KEYS and self._low < 3 * self._peak
        short |= self.state.counted and self._age >= COUNTED_BATCHES and self._peak > 0
        if short:
            self.build(capacity)

    def _length(self, capacity: int) -> int:
        wanted = max(LENGTH_MIN, capacity // CAPACITY_SHARE, int(4 * self._peak))
        return min(wanted, capacity)

    def _build(self, capacity: int) -> torch.cuda.Event:
        # A copy first: lookups go on changing scores, and a selection in several passes needs one
        # and the same.
        snapshot = self.state.score.clone()
        k = self._length(capacity)
        if len(snapshot) <= SORT_ALL_SLOTS:
            scores, slots = snapshot.sort(stable=True)
            scores, slots = scores[:k], slots[:k]
        else:
            scores, slots = torch.topk(snapshot, k, largest=False, sorted=True)
        event = torch.cuda.Event()
        entries = slots.int()
        event.record()
        self._pending = entries, scores, event
        self._sure_pending = k
        self.builds += 1
        return event

    def _adopt(self) -> None:
        assert self._pending is not None
        here = torch.cuda.current_stream(self.state.stamp.device)
        slots, scores, event = self._pending
        here.wait_event(event)
        # The allocator may give this memory to others once both streams are past it.
        for tensor in (slots, scores):
            tensor.record_stream(here)
        self.chain.queue_slot, self.chain.queue_score = slots, scores
        self._sure, self._pending, self._must, self._age = self._sure_pending, None, False, 0
        self._low = 2**62
