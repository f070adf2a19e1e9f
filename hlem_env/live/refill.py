# mypy: disallow-untyped-calls=False
"""Refill and prefetch: rows inserted ahead of their use, with what the link has left.

Refill warms free slots (new pages) with the rows missed most of late. Prefetch fetches missing rows
of requests that wait, and comes first; it may evict, but never what the last lookup used or what was
inserted ahead since. Both move in chunks: rows are read into a buffer on a stream of low priority,
and published to the cache on the serving stream once their copy has run. A buffer is used again only
behind its publication.

Nothing here waits for the device. On a CPU a chunk's copy runs when the emulated link would have
ended it, so a buffer that is handed out too early would show.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hlem_env.errors import require
from hlem_env.live.embedding_cache import EmbeddingCache

DEMAND_HALF_LIFE_S = 0.5


class TokenBucket:
    """Bytes that transfers ahead of time may take: link - critical demand - headroom.

    The demand of critical misses is measured, its average decaying with a half-life of 0.5 s.

    Args:
        link_bytes_per_s: what the link carries, bytes a second.
        headroom: share of the link that is left alone, 0 to 1.
        burst_s: tokens that are not used are kept for so long.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self, link_bytes_per_s: float, headroom: float = 0.1, burst_s: float = 0.01
    ) -> None:
        require(link_bytes_per_s > 0, "link_bytes_per_s", link_bytes_per_s, "above 0")
        require(0 <= headroom <= 1, "headroom", headroom, "0 to 1")
        require(burst_s > 0, "burst_s", burst_s, "above 0")
        self.link_bytes_per_s, self.headroom, self.burst_s = link_bytes_per_s, headroom, burst_s
        self.demand_bytes_per_s = 0.0
        self._tokens = 0.0
        self._filled_s: float | None = None
        self._observed: tuple[float, int] | None = None

    @property
    def rate_bytes_per_s(self) -> float:
        """Budget now, bytes a second."""
        return max(self.link_bytes_per_s * (1.0 - self.headroom) - self.demand_bytes_per_s, 0.0)

    def observe(self, critical_bytes: int, now: float) -> None:
        """Learn how many bytes critical misses have moved from the start."""
        if self._observed is not None:
            seconds = now - self._observed[0]
            if seconds <= 0:
                return
            rate = max(critical_bytes - self._observed[1], 0) / seconds
            keep = 0.5 ** (seconds / DEMAND_HALF_LIFE_S)
            self.demand_bytes_per_s = keep * self.demand_bytes_per_s + (1 - keep) * rate
        self._observed = now, critical_bytes

    def take(self, n_bytes: int, now: float) -> bool:
        """Take tokens, if there are any; what is missing is owed, and waits are as long as that takes.

        So a chunk may be larger than the burst, and the mean rate is the budget all the same.
        """
        if self._filled_s is None:
            self._filled_s = now
        rate = self.rate_bytes_per_s
        grown = self._tokens + rate * max(now - self._filled_s, 0.0)
        self._tokens, self._filled_s = min(grown, rate * self.burst_s), now
        if self._tokens < 0 or rate == 0:
            return False
        self._tokens -= n_bytes
        return True


@dataclass
class _Work:
    """Rows to move, distinct and in order of their numbers, the first `count` of `rows`."""

    rows: Tensor
    count: Tensor
    prefetch: bool
    known: torch.cuda.Event | None
    begin: int = 0


@dataclass
class _Buffer:
    """A staging buffer and where its chunk is."""

    values: Tensor
    staged: Tensor
    busy: bool = False
    n: int = 0
    prefetch: bool = False
    rows: Tensor | None = None
    ready_s: float = 0.0
    copied: torch.cuda.Event | None = None
    published: torch.cuda.Event | None = field(default=None)


class Refill:
    """Moves rows ahead of their use; call `step` between batches and while there is nothing to do.

    Args:
        cache: to fill.
        bucket: its budget; None: no limit.
        chunk_rows: rows of a chunk.
        buffers: chunks under way at once.
        slo_ms: with it, nothing begins while P99 is at or above `pause_at` times this.
        pause_at: share of the SLO.
        programs: on CUDA, thread blocks that read rows.
        stream: on CUDA, where it moves rows; by default a new one. Memory that was needed on a stream
            once is there the next time.

    Raises:
        ArgumentError: an argument is out of range.
    """

    def __init__(
        self,
        cache: EmbeddingCache,
        bucket: TokenBucket | None = None,
        *,
        chunk_rows: int = 4096,
        buffers: int = 2,
        slo_ms: float | None = None,
        pause_at: float = 0.9,
        programs: int = 64,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        require(chunk_rows >= 1, "chunk_rows", chunk_rows, "1 or more")
        require(buffers >= 1, "buffers", buffers, "1 or more")
        require(slo_ms is None or slo_ms > 0, "slo_ms", slo_ms, "above 0")
        self.cache, self.bucket, self.chunk_rows = cache, bucket, chunk_rows
        self.slo_ms, self.pause_at, self.programs = slo_ms, pause_at, programs
        self.paused_steps = 0
        device, tables = cache.device, cache.tables
        self._cuda = device.type == "cuda"
        self._stream = (stream or torch.cuda.Stream(device)) if self._cuda else None
        self._work: dict[bool, deque[_Work]] = {True: deque(), False: deque()}
        self._buffers = [
            _Buffer(
                torch.empty(chunk_rows, tables.dim, dtype=tables.dtype, device=device),
                torch.empty(chunk_rows, dtype=torch.int64, device=device),
            )
            for _ in range(buffers)
        ]
        self._moved = torch.zeros(2, dtype=torch.int64, device=device)
        self._link_free_s = 0.0
        self._to_find = 0  # rows for new pages that have not been looked for yet

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is under way."""
        waiting = self._to_find > 0 or any(self._work.values())
        return not waiting and not any(buffer.busy for buffer in self._buffers)

    @property
    def refilling(self) -> bool:
        """Whether rows for new pages wait or are under way; prefetch aside."""
        under_way = any(buffer.busy and not buffer.prefetch for buffer in self._buffers)
        return self._to_find > 0 or bool(self._work[False]) or under_way

    @property
    def refill_bytes(self) -> int:
        """Bytes that refill moved over the link; waits for the device."""
        return int(self._moved[0]) * self.cache.tables.row_bytes

    @property
    def prefetch_bytes(self) -> int:
        """Bytes that prefetch moved over the link; waits for the device."""
        return int(self._moved[1]) * self.cache.tables.row_bytes

    def refill(self, n_rows: int) -> None:
        """Warm free slots with the `n_rows` rows missed most of late; what waits from before is dropped.

        They are looked for at the next step.
        """
        require(n_rows >= 0, "n_rows", n_rows, "0 or more")
        self._work[False].clear()
        self._to_find = n_rows

    def insert(self, rows: Tensor) -> None:
        """Warm free slots with these rows, int64 [n]; resident, repeated and negative ones are left out."""
        self._plan(rows, prefetch=False)

    def mark(self) -> torch.cuda.Event | None:
        """Where the current stream is now, for `aside`."""
        if self._stream is None:
            return None
        here = torch.cuda.Event()
        here.record(torch.cuda.current_stream(self.cache.device.index))
        return here

    def aside(self, after: torch.cuda.Event | None) -> Any:
        """A context on the stream of the transfers, behind a `mark`; on a CPU it does nothing.

        What is planned there does not wait for what the serving stream was given since.
        """
        if self._stream is None or after is None:
            return contextlib.nullcontext()
        self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def prefetch(self, keys: Tensor) -> None:
        """Fetch what is missing of the keys, int64 [n], of requests that wait; older plans are dropped."""
        self.forget_prefetch()
        self._plan(keys, prefetch=True)

    def forget_prefetch(self) -> None:
        """The requests planned for have been looked up: what has not begun would come too late.

        Else plans queue up once they take longer than batches, and from then on every one comes too late: it
        fetches rows that were evicted again since their lookup, and evicts others for them.
        """
        self._work[True].clear()

    def step(self, now: float, p99_ms: float | Callable[[], float] | None = None) -> int:
        """Publish what has arrived and begin what the budget allows; returns the chunks begun.

        Args:
            now: time in seconds.
            p99_ms: of late, or what tells it; None: not known.
        """
        if self.bucket is not None:
            self.bucket.observe(self.cache.critical_bytes, now)
        for buffer in self._buffers:
            if buffer.busy and self._arrived(buffer, now):
                self._publish(buffer, now)
        if self._near_slo(p99_ms):
            self.paused_steps += not self.idle
            return 0
        if self._to_find:
            with self.aside(self.mark()):
                self.insert(self.cache.hottest_missed(self._to_find))
            self._to_find = 0
        begun = 0
        for buffer in self._buffers:
            if buffer.busy:
                continue
            if not self._begin(buffer, now):
                break
            begun += 1
        return begun

    def _plan(self, rows: Tensor, prefetch: bool) -> None:
        if rows.numel() == 0:
            return
        in_order = rows.sort().values
        wanted = in_order >= 0
        wanted[1:] &= in_order[1:] != in_order[:-1]
        wanted &= ~self.cache.contains(in_order.clamp(min=0))
        last = torch.iinfo(torch.int64).max
        in_order = torch.where(wanted, in_order, last).sort().values
        count, known = wanted.sum(), None
        if self._cuda:
            on_host = torch.empty((), dtype=torch.int64, pin_memory=True)
            on_host.copy_(count, non_blocking=True)
            known = torch.cuda.Event()
            known.record()
            count = on_host
        self._work[prefetch].append(_Work(in_order, count, prefetch, known))

    def _next(self) -> _Work | None:
        """Work whose size is known, prefetch first."""
        for prefetch in (True, False):
            queue = self._work[prefetch]
            while queue and (queue[0].known is None or queue[0].known.query()):
                if queue[0].begin < int(queue[0].count):
                    return queue[0]
                queue.popleft()
        return None

    def _begin(self, buffer: _Buffer, now: float) -> bool:
        work = self._next()
        if work is None:
            return False
        n = min(int(work.count) - work.begin, self.chunk_rows)
        n_bytes = n * self.cache.tables.row_bytes
        if self.bucket is not None and not self.bucket.take(n_bytes, now):
            return False
        rows = work.rows[work.begin : work.begin + n]
        work.begin += n
        buffer.busy, buffer.n, buffer.prefetch, buffer.rows = True, n, work.prefetch, rows
        if self._stream is None:
            gbps = self.cache.emulated_link_gbps
            self._link_free_s = max(self._link_free_s, now)
            self._link_free_s += 0.0 if gbps is None else n_bytes / (gbps * 1e9)
            buffer.ready_s = self._link_free_s
            return True
        rows.record_stream(self._stream)
        if work.known is not None:
            self._stream.wait_event(work.known)
        if buffer.published is not None:
            self._stream.wait_event(buffer.published)
        with torch.cuda.stream(self._stream):
            self._copy(buffer)
            buffer.copied = torch.cuda.Event()
            buffer.copied.record()
        return True

    def _copy(self, buffer: _Buffer) -> None:
        assert buffer.rows is not None
        staged = buffer.staged[: buffer.n]
        self.cache.stage(buffer.rows, buffer.values[: buffer.n], staged, self.programs)
        self._moved[int(buffer.prefetch)] += (staged >= 0).sum()

    def _arrived(self, buffer: _Buffer, now: float) -> bool:
        if buffer.copied is not None:
            return bool(buffer.copied.query())
        return self._stream is None and now >= buffer.ready_s

    def _publish(self, buffer: _Buffer, now: float) -> None:
        if self._stream is None:
            self._copy(buffer)
        elif buffer.copied is not None:
            torch.cuda.current_stream(self.cache.device).wait_event(buffer.copied)
        n = buffer.n
        self.cache.publish(buffer.staged[:n], buffer.values[:n], now, evict=buffer.prefetch)
        if self._cuda:
            buffer.published = torch.cuda.Event()
            buffer.published.record()
        buffer.busy, buffer.copied, buffer.rows = False, None, None

    def _near_slo(self, p99_ms: float | Callable[[], float] | None) -> bool:
        if self.slo_ms is None or p99_ms is None:
            return False
        value = p99_ms() if callable(p99_ms) else p99_ms
        return value >= self.pause_at * self.slo_ms
