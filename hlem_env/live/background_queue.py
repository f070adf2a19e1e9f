# mypy: disallow-untyped-calls=False
"""The victim queue on CUDA: sorted on a stream of its own while lookups run.

`lookup_reference.VictimQueue` says why an old queue is still right: an entry whose score has changed
is passed over, and every other one comes before all that is not queued. What an old queue can be is
too short. The host, which may be far ahead of the device, rules that out: a batch of n keys
invalidates at most n entries, by hits or by eviction, so it counts the keys given to the device since
a queue was begun, and has the device wait for a longer one before the valid entries could be fewer
than a batch needs. What the device itself has counted, as far as the host has heard of it, makes the
bound tighter: queues are then begun more seldom.

Exact: every missing row of a batch gets a victim as long as there are slots that the batch has not
used, and by stamps no victim was used after a slot that stays. Not exact: among slots that were last
used by a batch that ran while the queue was made, the order is not always that of the slot; and of
decayed counts, see `VictimQueue`: rows inserted since the queue was begun are exempt, for 16 batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hlem_env.live.cache_state import LAST_UNIQUE, QUEUE_NUMBER, VALID_UNTIL, CacheState

LENGTH_MIN = 2**18
CAPACITY_SHARE = 8
"""The queue holds at least 1/8 of the slots."""
BATCHES_MIN = 5
"""And enough for so many batches of late, whatever they ask for."""
BATCHES_AHEAD = 3
"""The next queue is begun when this one may be too short for so many."""
AUDIT_BATCHES = 8
"""The device counts valid entries when there may be too few for so many batches."""
COUNTED_BATCHES = 16
"""Decayed counts: batches until rows inserted since may be victims."""


class BackgroundQueue:
    """Builds queues in the background, and hands over the latest.

    A queue of k entries that was begun when `given` keys had been given to the device has at least
    k + given - (keys given until now) valid ones. k + given is what the code calls `until`.

    Args:
        state: of the cache.
        chain: of kernels; what it knows of the queue is set here.
        slots: finds the lowest scores.
        stream: to sort on.
    """

    def __init__(
        self, state: CacheState, chain: Any, slots: Any, stream: torch.cuda.Stream
    ) -> None:
        self.state, self.chain, self.slots, self.stream = state, chain, slots, stream
        self.builds = 0
        self._pending: tuple[tuple[Tensor, ...], torch.cuda.Event] | None = None
        self._pending_until = 0
        self._must = False
        self._until = 0
        self._age = 0
        self._missed = False
        self._keys = 0.0  # of a batch, of late at most

    def observe(self, counters: list[int]) -> None:
        """Learn what the device has counted."""
        self._missed |= counters[LAST_UNIQUE] > 0
        if counters[QUEUE_NUMBER] == self.chain.queue_number:
            self._until = max(self._until, counters[VALID_UNTIL])

    def pass_by(self, n: int) -> None:
        """Count n keys that are looked up without victims."""
        self.chain.given += n

    def prepare(self, n: int, capacity: int) -> None:
        """Before a batch of n keys: take over what is ready, and see that it is long enough."""
        self._keys = max(float(n), 0.9 * self._keys)
        if self._pending is not None and (self._must or self._pending[1].query()):
            self._adopt()
        enough = self.chain.given + min(n, capacity)
        if self._until < enough:
            if self._pending is None or self._pending_until < enough:
                self.build(capacity, beside=False)
            self._adopt()
        self.chain.audit = self._until < self.chain.given + AUDIT_BATCHES * n
        self.chain.given += n
        self._age += 1

    def replenish(self, n: int, capacity: int) -> None:
        """After a batch of n keys: begin the next queue when this one may soon be too short."""
        short = self._until < self.chain.given + min(BATCHES_AHEAD * n, capacity)
        if self._pending is None and (short or self._old(capacity)):
            self.build(capacity, beside=True)

    def build(self, capacity: int, beside: bool) -> None:
        """Begin a new queue after all that the current stream was given, beside what comes next or not."""
        here = torch.cuda.current_stream(self.state.stamp.device)
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(here)
            self._build(capacity, beside)

    def rebuild_here(self, capacity: int) -> None:
        """The same on the queue's own stream, which is the current one; the next batch waits for it."""
        self._must = True
        self._build(capacity, beside=False)

    def _build(self, capacity: int, beside: bool) -> None:
        wanted = max(LENGTH_MIN, capacity // CAPACITY_SHARE, int(BATCHES_MIN * self._keys))
        queue = self._in_order(min(wanted, capacity), capacity, beside)
        event = torch.cuda.Event()
        event.record()
        self._pending = queue, event
        self._pending_until = len(queue[0]) + self.chain.given
        self.builds += 1

    def _old(self, capacity: int) -> bool:
        """Whether the queue is to be replaced although it is long enough."""
        return self.state.counted and self._age >= COUNTED_BATCHES and self._missed

    def _in_order(self, k: int, capacity: int, beside: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The first k slots to go: entries int32 [k], the scores that they have now [k], and 0, int32 [1]."""
        queue: tuple[Tensor, Tensor, Tensor] = self.slots.lowest_in_order(k, beside)
        return queue

    def _adopt(self) -> None:
        assert self._pending is not None
        here = torch.cuda.current_stream(self.state.stamp.device)
        queue, event = self._pending
        here.wait_event(event)
        # The allocator may give this memory to others once both streams are past it.
        for tensor in queue:
            tensor.record_stream(here)
        self.chain.queue_slot, self.chain.queue_score, self.chain.queue_head = queue
        self.chain.queue_number += 1
        self._until, self._pending, self._must = self._pending_until, None, False
        self._age, self._missed = 0, False
