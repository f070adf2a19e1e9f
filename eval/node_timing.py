"""Times of a live node with nothing else to do: requests one after the other, and moves of alpha."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from hlem_env.live.node import Executed, LiveNode
from hlem_env.workload.requests import Requests

NEW_ITEMS = 10
GROUPS, GROUP = 2, 8
"""Users that come back: so many to a group, of which the next batch is never the last one's."""
KINDS = {"hot": 1, "candidates only": 1, "4 hot": 4, "8 hot": 8, "cold": 1}
"""Requests in a batch."""
STEPS_CENTI = (2, 6, 10)


@dataclass(frozen=True)
class Service:
    """Batches of one kind, each from an idle device to its completion, host time included."""

    kind: str
    requests: int
    """In a batch."""
    waiting: bool
    """Whether the next batch was known, so that its rows could be fetched ahead."""
    samples: int
    p50_ms: float
    p90_ms: float
    history_tokens: float
    """Mean of a request."""
    reused: float
    """Share of those whose K and V came from the cache."""
    rows_hit: float
    """Share of the rows looked up that were resident."""


@dataclass(frozen=True)
class MoveTime:
    """Moves of one size, before each of which no mean history and no row fitted in any more."""

    step_centi: int
    """Hundredths of the pool; above 0 the embedding cache grows."""
    samples: int
    median_ms: float
    max_ms: float
    evicted_entries: float
    """Mean of a move."""
    evicted_rows: float


class Visitors:
    """Requests on demand: from users whose histories are cached, and from ones that come once.

    Lengths keep to the preset's mean: a history that has grown much above it is cut.

    Args:
        node: its caches are emptied.
        alpha_centi: embedding share to start with.
        seed: of the rows that fill the embedding cache.
    """

    def __init__(self, node: LiveNode, alpha_centi: int, seed: int) -> None:
        config = node.config
        node.reset(GROUPS * GROUP)
        node.move(alpha_centi)
        self.node = node
        self.mean = round(config.mean_history_tokens)
        room = min(8 * NEW_ITEMS, config.max_history_tokens - self.mean, self.mean // 2)
        self._least, self._most = self.mean - room, self.mean + room
        # Different ones, so that on average they are as long as the mean.
        self._start = np.linspace(self._least, self._most, GROUPS * GROUP).astype(np.int64)
        self._length = np.zeros(GROUPS * GROUP, np.int64)
        self._turn, self._stranger, self._now_s = 0, GROUPS * GROUP, 0.0
        self._rows = torch.Generator(node.device).manual_seed(seed)

    def batch(self, kind: str) -> Requests:
        """The next batch of a kind; users whose history is not there, or too long, come once before."""
        if kind == "cold":
            return self.strangers(1)
        new = 0 if kind == "candidates only" else NEW_ITEMS
        self._turn += 1
        first = self._turn % GROUPS * GROUP
        users = first + (self._turn // GROUPS + np.arange(KINDS[kind])) % GROUP
        for user in users.tolist():
            if self._length[user] == 0:
                self._visit(user, self._start[user], self._start[user])
            if self._length[user] + new > self._most:
                self._visit(user, self._least, NEW_ITEMS)
        self._length[users] += new
        return self._requests(users, new)

    def strangers(self, n: int) -> Requests:
        """Users who come once, with histories of mean length of which nothing is cached."""
        users = self._stranger + np.arange(n)
        self._stranger += n
        lengths = np.full(n, self.mean, np.int32)
        return Requests(np.full(n, self._now_s), users, lengths, lengths)

    def execute(self, requests: Requests, waiting: Requests | None = None) -> Executed:
        """Run a batch, a millisecond of the workload's clock after the last."""
        self._now_s += 1e-3
        following = requests[:0] if waiting is None else waiting
        return self.node.execute(requests, following, self._now_s)

    def fill(self) -> None:
        """Fill both caches: K and V of users who come once, and rows in every free slot."""
        kv, config = self.node.kv, self.node.config
        pages = int(kv.layout.pages(np.array([self.mean]), kv.blocks_per_page)[0])
        together = max(config.token_budget // (self.mean + config.candidates), 1)
        while (n := min((kv.capacity_pages - kv.used_pages) // pages, together)) > 0:
            used = kv.used_pages
            self.execute(self.strangers(n))
            if kv.used_pages == used:
                break
        cache = self.node.embedding
        free = cache.capacity_rows - cache.resident_rows
        if free:
            some = torch.randint(
                cache.tables.n_rows, (2 * free,), generator=self._rows, device=self.node.device
            )
            cache.warm(some, self._now_s, evict=False)

    def _visit(self, user: int, length: int, new: int) -> None:
        self._length[user] = length
        self.execute(self._requests(np.array([user]), new))

    def _requests(self, users: NDArray[np.int64], new: int) -> Requests:
        lengths = self._length[users].astype(np.int32)
        return Requests(
            np.full(len(users), self._now_s), users, lengths, np.full(len(users), new, np.int32)
        )


def time_services(visitors: Visitors, repeats: int) -> list[Service]:
    """Every kind of batch, without and with a next one that waits."""
    return [
        _time_service(visitors, kind, waiting, repeats)
        for kind in KINDS
        for waiting in (False, True)
    ]


def _time_service(visitors: Visitors, kind: str, waiting: bool, repeats: int) -> Service:
    times, tokens, reused, hit, looked_up = [], 0, 0, 0, 0
    current = visitors.batch(kind)
    with _quiet():
        for turn in range(repeats + 3):
            following = visitors.batch(kind)
            _idle(visitors.node)
            start_s = time.perf_counter()
            done = visitors.execute(current, following if waiting else None)
            if turn >= 3:
                times.append(1000.0 * (time.perf_counter() - start_s))
                tokens += int(current.history_length.sum())
                reused += int(done.reused.sum())
                hit += done.rows_hit
                looked_up += int(done.computed.sum()) * visitors.node.config.tables
            current = following
    visitors.execute(current)  # its users' histories have grown
    return Service(
        kind=kind,
        requests=KINDS[kind],
        waiting=waiting,
        samples=len(times),
        p50_ms=float(np.percentile(times, 50)),
        p90_ms=float(np.percentile(times, 90)),
        history_tokens=tokens / (repeats * KINDS[kind]),
        reused=reused / tokens,
        rows_hit=hit / looked_up,
    )


def time_moves(visitors: Visitors, alpha_centi: int, repeats: int) -> list[MoveTime]:
    """Moves up from an alpha by each size, and back down."""
    rows = []
    visitors.node.move(alpha_centi)
    for step in STEPS_CENTI:
        up, down = [], []
        with _quiet():
            for _ in range(repeats):
                up.append(_time_move(visitors, alpha_centi + step))
                down.append(_time_move(visitors, alpha_centi))
        rows += [_move_row(step, up), _move_row(-step, down)]
    return rows


def _time_move(visitors: Visitors, alpha_centi: int) -> tuple[float, int, int]:
    """Milliseconds on the host, entries evicted, rows evicted."""
    node = visitors.node
    visitors.fill()
    before = node.embedding.counters()
    _idle(node)
    start_s = time.perf_counter()
    move = node.move(alpha_centi)
    taken_ms = 1000.0 * (time.perf_counter() - start_s)
    node.refill.refill(0)  # `fill` sees to the new pages
    gone = node.embedding.counters() - before  # what a move says of rows lags behind on a GPU
    return taken_ms, move.evicted_entries, gone.evicted_by_shrinking


def _move_row(step_centi: int, moves: list[tuple[float, int, int]]) -> MoveTime:
    times, entries, rows = np.array(moves).T
    return MoveTime(
        step_centi=step_centi,
        samples=len(moves),
        median_ms=float(np.median(times)),
        max_ms=float(times.max()),
        evicted_entries=float(entries.mean()),
        evicted_rows=float(rows.mean()),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No collection of garbage in what is timed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _idle(node: LiveNode) -> None:
    """Wait until the device has nothing to do."""
    if node.device.type == "cuda":
        torch.cuda.synchronize(node.device)
