"""The node that the surrogate models, simulated exactly: every row, every entry, every request.

Slow and meant to be read. It holds each user's history item by item, an LRU list of embedding rows
and a dictionary of KV entries, and draws nothing from a formula. What the surrogate approximates is
compared against this.

An item reads one row in each of the T tables, the row of the item's own number. So the tables are
mirror images of one another: one table is simulated, with a T-th of the rows that the embedding
cache can hold, and rows are counted T times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Catalogue, Requests

ComputeMs = Callable[[int, int], float]
"""compute_ms(tokens through the model, tokens attended to) -> ms."""


@dataclass(frozen=True)
class ExactConfig:
    """The node's memory, its policies and its speeds."""

    pool_pages: int
    page_bytes: int
    layers: int
    block_tokens: int
    block_bytes: int
    """K and V of `block_tokens` tokens in one layer."""
    overhead_ms: float
    gather_gbps: float
    """Embedding rows over the link, 10^9 bytes a second."""
    hbm_gbps: float
    """Embedding rows within HBM, read plus write, 10^9 bytes a second."""
    kv_policy: str = "scan_resistant"
    """"scan_resistant" (decayed count of requests) or "lru" (time of last access)."""
    half_life_s: float = 60.0
    """Of the decayed count."""
    hot_window_s: float = 60.0
    """A hot user's third most recent request is no older."""

    def embedding_pages(self, alpha_centi: int) -> int:
        """Pages of the pool that the embedding cache owns."""
        return alpha_centi * self.pool_pages // 100

    def rows(self, alpha_centi: int, catalogue: Catalogue) -> int:
        """Rows of one table that fit into the embedding cache's pages."""
        pool_bytes = self.embedding_pages(alpha_centi) * self.page_bytes
        return pool_bytes // catalogue.row_bytes // catalogue.tables

    def kv_pages(self, tokens: int) -> int:
        """Pages that K and V of `tokens` tokens take."""
        blocks = math.ceil(tokens / self.block_tokens) * self.layers
        return math.ceil(blocks * self.block_bytes / self.page_bytes)


class EmbeddingCache:
    """Resident rows of one table under LRU.

    Parameters
    ----------
    table_rows: rows of the table.
    """

    def __init__(self, table_rows: int) -> None:
        self.capacity = 0
        self.rows: NDArray[np.int64] = np.empty(0, np.int64)
        """From least to most recently used."""
        self._resident = np.zeros(table_rows, np.bool_)

    def resize(self, capacity: int) -> None:
        """Hold at most `capacity` rows from now on."""
        self.capacity = capacity
        self._evict()

    def read(self, batch: NDArray[np.int64]) -> tuple[int, int]:
        """Look up all rows of one request, then make them the most recently used.

        Returns
        -------
        (lookups that found their row, repeats counted; distinct rows that were not there).
        """
        hits = int(np.count_nonzero(self._resident[batch]))
        distinct, from_behind = np.unique(batch[::-1], return_index=True)
        fetched = distinct.size - int(np.count_nonzero(self._resident[distinct]))
        self._resident[distinct] = False
        others = self.rows[self._resident[self.rows]]
        self.rows = np.concatenate((others, distinct[np.argsort(-from_behind)]))
        self._resident[distinct] = True
        self._evict()
        return hits, fetched

    def _evict(self) -> None:
        too_many = max(self.rows.size - self.capacity, 0)
        self._resident[self.rows[:too_many]] = False
        self.rows = self.rows[too_many:]


class KvCache:
    """KV entries by user, and the score that decides who stays.

    Scan-resistant: a count of the user's requests, each halved in weight every `half_life_s`.
    LRU: the time of the user's last request. Scores outlive the entries.
    """

    def __init__(self, config: ExactConfig) -> None:
        self.config = config
        self.capacity = 0
        """Pages."""
        self.used = 0
        """Pages."""
        self.tokens: dict[int, int] = {}
        """Cached tokens by user."""
        self.evictions = 0
        self._count: dict[int, tuple[float, float]] = {}
        """By user: decayed count and the time that it was decayed to."""
        self._length: dict[int, int] = {}
        """By user: history tokens at the last request."""

    def score(self, user: int, now: float) -> float:
        """The higher, the longer the user stays."""
        count, at = self._count.get(user, (0.0, -math.inf))
        if self.config.kv_policy == "lru":
            return at
        return count * 0.5 ** ((now - at) / self.config.half_life_s) if count else 0.0

    def resize(self, capacity: int, now: float) -> None:
        """Own `capacity` pages from now on; the lowest scores go until the rest fits."""
        self.capacity = capacity
        for user in sorted(self.tokens, key=lambda user: self.score(user, now)):
            if self.used <= self.capacity:
                return
            self._evict(user)

    def access(self, user: int, length: int, new_items: int, now: float) -> int:
        """Serve a request of `user` from the cache and keep what it computes if there is room.

        Returns
        -------
        History tokens whose K and V were there.
        """
        count = self.score(user, now) if self.config.kv_policy == "scan_resistant" else 0.0
        self._count[user] = (count + 1.0, now)
        if user in self.tokens and self._length.get(user, 0) > length - new_items:
            self._free(user)  # the history shrank or was edited
        self._length[user] = length
        reused = self.tokens.get(user, 0)
        extra = self.config.kv_pages(length) - self.config.kv_pages(reused)
        if length and self._make_room(user, extra, now):
            self.tokens[user] = length
            self.used += extra
        return reused

    def _make_room(self, user: int, pages: int, now: float) -> bool:
        """Evict lower scores than the user's until `pages` are free; nobody if that cannot do."""
        mine = self.score(user, now)
        free = self.capacity - self.used
        if free >= pages:
            return True
        scores = {other: self.score(other, now) for other in self.tokens if other != user}
        below = [other for other in scores if scores[other] < mine]
        victims = []
        for other in sorted(below, key=scores.__getitem__):
            victims.append(other)
            free += self.config.kv_pages(self.tokens[other])
            if free >= pages:
                for victim in victims:
                    self._evict(victim)
                return True
        return False

    def _evict(self, user: int) -> None:
        self._free(user)
        self.evictions += 1

    def _free(self, user: int) -> None:
        self.used -= self.config.kv_pages(self.tokens.pop(user))


class Histories:
    """Every user's items, drawn from Zipf and kept."""

    def __init__(self, catalogue: Catalogue, rng: np.random.Generator) -> None:
        weights = np.arange(1, catalogue.rows_per_table + 1, dtype=np.float64) ** -catalogue.zipf
        self._cumulative = np.cumsum(weights) / weights.sum()
        self._last = catalogue.rows_per_table - 1
        self._rng = rng
        self._items: dict[int, NDArray[np.int64]] = {}

    def draw(self, n: int) -> NDArray[np.int64]:
        """Popularity ranks [n] of items, from 0."""
        ranks = np.searchsorted(self._cumulative, self._rng.random(n), side="right")
        return np.minimum(ranks, self._last)

    def visit(self, user: int, length: int, new_items: int) -> NDArray[np.int64]:
        """The user's items [length] after `new_items` more; the oldest go where they do not fit.

        A history that is longer than that explains is a new one.
        """
        kept = self._items.get(user)
        if kept is None or kept.size + new_items < length:
            items = self.draw(length)
        else:
            items = np.concatenate((kept, self.draw(new_items)))[-length:] if length else kept[:0]
        self._items[user] = items
        return items


@dataclass(frozen=True)
class Served:
    """One request that has started."""

    arrival_s: float
    start_s: float
    completion_s: float
    is_hot: bool
    history_tokens: int
    reused_tokens: int
    computed_tokens: int
    rows_hit: int
    """Of `computed_tokens` lookups in one table."""


class ExactNode:
    """One server, first come first served, over one pool.

    Parameters
    ----------
    config: the node.
    catalogue: what tokens look up.
    compute_ms: time of the model, from tokens through it and tokens attended to.
    rng: draws the items.
    start_s: where the clock starts; no request arrives before.
    """

    def __init__(
        self,
        config: ExactConfig,
        catalogue: Catalogue,
        compute_ms: ComputeMs,
        rng: np.random.Generator,
        start_s: float,
    ) -> None:
        self.config = config
        self.catalogue = catalogue
        self.compute_ms = compute_ms
        self.now_s = start_s
        self.embedding = EmbeddingCache(catalogue.rows_per_table)
        self.kv = KvCache(config)
        self.histories = Histories(catalogue, rng)
        self._waiting: deque[tuple[float, int, int, int]] = deque()
        self._in_service: Served | None = None
        self._free_at_s = start_s
        self._arrivals: dict[int, deque[float]] = {}
        """The latest three of each user."""
        self._length: dict[int, int] = {}

    def run(self, arriving: Requests, alpha_centi: int, seconds: float) -> EpochStats:
        """Serve for `seconds` with the embedding cache owning `alpha_centi` hundredths of the pool.

        Parameters
        ----------
        arriving: requests that arrive within the run.
        """
        begin, end = self.now_s, self.now_s + seconds
        evictions = self.kv.evictions
        embedding_pages = self.config.embedding_pages(alpha_centi)
        self.embedding.resize(self.config.rows(alpha_centi, self.catalogue))
        self.kv.resize(self.config.pool_pages - embedding_pages, begin)
        self._waiting.extend(
            zip(
                arriving.arrival_s.tolist(),
                arriving.user.tolist(),
                arriving.history_length.tolist(),
                arriving.new_items.tolist(),
                strict=True,
            )
        )

        done: list[Served] = []
        busy_s = max(min(self._free_at_s, end) - begin, 0.0)
        while True:
            if self._in_service is not None:
                if self._in_service.completion_s > end:
                    break
                done.append(self._in_service)
                self._in_service = None
            if not self._waiting:
                break
            start = max(self._waiting[0][0], self._free_at_s)
            if start >= end:
                break
            self._in_service = self._serve(*self._waiting.popleft(), start)
            self._free_at_s = self._in_service.completion_s
            busy_s += min(self._free_at_s, end) - start
        self.now_s = end

        tables, row_bytes = self.catalogue.tables, self.catalogue.row_bytes
        pool_bytes = self.config.pool_pages * self.config.page_bytes
        backlog = [item[0] for item in self._waiting]
        if self._in_service is not None:
            backlog.insert(0, self._in_service.arrival_s)
        return EpochStats(
            duration_s=seconds,
            latency_ms=np.array([1e3 * (r.completion_s - r.arrival_s) for r in done]),
            service_ms=np.array([1e3 * (r.completion_s - r.start_s) for r in done]),
            arrival_s=np.array([r.arrival_s for r in done]),
            is_hot=np.array([r.is_hot for r in done], np.bool_),
            history_tokens=sum(r.history_tokens for r in done),
            reused_tokens=sum(r.reused_tokens for r in done),
            rows_looked_up=tables * sum(r.computed_tokens for r in done),
            rows_hit=float(tables * sum(r.rows_hit for r in done)),
            computed_tokens=sum(r.computed_tokens for r in done),
            refill_bytes=0.0,
            prefetch_bytes=0.0,
            evictions=self.kv.evictions - evictions,
            alpha_target=alpha_centi / 100,
            alpha_resident=len(self.embedding.rows) * tables * row_bytes / pool_bytes,
            embedding_pages=embedding_pages,
            kv_pages=self.kv.used,
            free_pages=self.config.pool_pages - embedding_pages - self.kv.used,
            pending_pages=0,
            pool_bytes=pool_bytes,
            working_set_bytes=self._working_set_pages(end) * self.config.page_bytes,
            backlog=len(backlog),
            backlog_age_s=end - backlog[0] if backlog else 0.0,
            utilisation=busy_s / seconds,
        )

    def _serve(
        self, arrival_s: float, user: int, length: int, new_items: int, start_s: float
    ) -> Served:
        """Start a request at `start_s`: both caches change, and its completion is known."""
        arrivals = self._arrivals.setdefault(user, deque(maxlen=3))
        arrivals.append(arrival_s)
        self._length[user] = length
        is_hot = self._is_hot(arrivals, arrival_s)

        reused = self.kv.access(user, length, new_items, arrival_s)
        history = self.histories.visit(user, length, new_items)
        candidates = self.histories.draw(self.catalogue.candidates)
        batch = np.concatenate((history[reused:], candidates))
        hit, fetched = self.embedding.read(batch)

        row_bytes = self.catalogue.tables * self.catalogue.row_bytes
        service_ms = (
            self.config.overhead_ms
            + self.compute_ms(len(batch), length + self.catalogue.candidates)
            + fetched * row_bytes / (self.config.gather_gbps * 1e6)
            + hit * 2 * row_bytes / (self.config.hbm_gbps * 1e6)
        )
        return Served(
            arrival_s=arrival_s,
            start_s=start_s,
            completion_s=start_s + service_ms / 1e3,
            is_hot=is_hot,
            history_tokens=length,
            reused_tokens=reused,
            computed_tokens=len(batch),
            rows_hit=hit,
        )

    def _is_hot(self, arrivals: Iterable[float], now: float) -> bool:
        latest = tuple(arrivals)
        return len(latest) == 3 and now - latest[0] <= self.config.hot_window_s

    def _working_set_pages(self, now: float) -> int:
        """KV pages that the histories of the users hot at `now` take or would take."""
        return sum(
            self.config.kv_pages(self._length[user])
            for user, arrivals in self._arrivals.items()
            if self._is_hot(arrivals, now)
        )
