# mypy: disallow-untyped-calls=False
"""A live node: it executes HSTU for batches of requests, out of one pool for both caches.

One batch goes through

    items       which items each request's history and candidates are
    kv.begin    whose K and V can be reused, whose are to be kept: pages, pins
    rows        table rows of the new tokens and the candidates, from the embedding cache
    model       HSTU over new tokens and candidates, against the cached pages
    kv.commit   the new K and V count from now on
    settle      what a move of alpha had to leave until the batch was done
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlem_env import mdp
from hlem_env.errors import BackendError, require
from hlem_env.eviction.policies import make_policy
from hlem_env.live.attention import PagedKv
from hlem_env.live.cache_state import COUNTERS, MISSED, UNIQUE
from hlem_env.live.config import LiveConfig
from hlem_env.live.drawn_items import DrawnItems
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.histories import Window
from hlem_env.live.host_tables import HostTables
from hlem_env.live.host_time import HostTime
from hlem_env.live.hstu import Hstu, HstuBatch, HstuConfig
from hlem_env.live.hstu_graphs import HstuGraphs, first_to_share
from hlem_env.live.item_source import ItemSource
from hlem_env.live.kv_cache import KvBatch, KvCache, KvLayout
from hlem_env.live.partition import Move, Partition
from hlem_env.live.pool import Pool
from hlem_env.live.refill import Refill, TokenBucket
from hlem_env.live.time_source import WallTime, make_clock
from hlem_env.workload.requests import Requests

Ints = NDArray[np.int64]
_PROBE_USER = 1 << 39
REMEMBERED_USERS = 2**14
"""Whose requests the KV cache counts, at least: on both presets those of several half-lives of the counts."""
EVICTING_VISITS = 4
"""Of the rehearsal: the batches at the end of it that meet a small embedding cache."""
PREFETCH_TOKENS = 512
"""New history of the requests that come next, from which on its rows are fetched ahead: on an H100 the
rows of fewer tokens come over the link in less time than the host needs to plan it (0.6 ms)."""


class Executed(NamedTuple):
    """One batch that has completed, [requests] each where an array."""

    scores: Tensor
    """[sum of candidates], in the requests' order."""
    reused: NDArray[np.int64]
    """History tokens whose K and V came from the cache."""
    computed: NDArray[np.int64]
    """Tokens that ran through the model, candidates included."""
    pages: NDArray[np.int64]
    """KV pages that the whole history takes or would take."""
    rows_hit: int
    """Rows looked up that were resident when the batch started."""
    rows_fetched: int
    """Distinct rows that came over the link for it."""
    stored: int
    """History tokens whose K and V went to the cache."""
    evicted: int
    """KV entries that went for them."""
    ahead: bool
    """Whether rows of the next batch were looked for meanwhile."""
    device_s: float
    """Seconds from the batch's start to its completion, the host's part included."""


class AheadBytes(NamedTuple):
    """Host to device bytes that were moved before anybody asked, since they were last taken."""

    refill: int
    prefetch: int


class LiveNode:
    """Pool, caches, tables and model of one preset, on its device.

    Args:
        config: what it is made of.
        kv_policy: a name of `hlem_env.eviction.policies`; learned ones learn while the node serves.
            When the attribute changes, from the next `reset` on.
        tables: of another node with the same ones, instead of making them anew, which takes a minute
            where they are large.
        time_source: what its times follow; by default the time that passes.
        row_policy: of the embedding cache: "lru", "scan_resistant", "laru", "fpb" or "hf".

    Raises:
        ArgumentError: the tables are not those of `config`.
        BackendError: the device is not there.
    """

    def __init__(
        self,
        config: LiveConfig,
        kv_policy: str = "scan_resistant",
        tables: HostTables | None = None,
        time_source: WallTime | None = None,
        row_policy: str = "lru",
    ) -> None:
        self.config, self.kv_policy, self._row_policy = config, kv_policy, row_policy
        self.time_source = time_source or make_clock("wall", config.device)
        self.device, self._dtype = torch.device(config.device), getattr(torch, config.dtype)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise BackendError(f"the preset {config.name} needs a CUDA device, and there is none")
        if tables is not None:
            given = tables.tables, tables.rows_per_table, tables.dim, tables.dtype, tables.seed
            wanted = config.tables, config.rows_per_table, config.dim, self._dtype, config.seed
            require(given == wanted, "tables", given, str(wanted))
        self.tables = tables or HostTables(
            config.tables,
            config.rows_per_table,
            config.dim,
            self._dtype,
            config.seed,
            config.device,
        )
        self.model = Hstu(model_config(config), config.seed, config.device, self._dtype)
        self.pool = Pool(config.pool_bytes, config.page_bytes, config.device)
        cuda = self.device.type == "cuda"
        self._counters = torch.zeros(COUNTERS, dtype=torch.int64, pin_memory=cuda)
        self._counted: Ints = self._counters.numpy()
        self._graphs: HstuGraphs | None = None
        self._transfers = torch.cuda.Stream(self.device) if cuda else None
        self._completed = torch.cuda.Event() if cuda else None
        self.reset(0)
        if cuda:
            self._graphs = HstuGraphs(
                self.model, self.kv.blocks, self.kv.blocks_per_page, self.kv.max_pages,
                config.max_history_tokens + config.candidates,
            )  # fmt: skip
            self._graphs.prepare()
            self._rehearse()

    def reset(self, persistent_users: int, items: ItemSource | None = None) -> None:
        """Empty both caches.

        Args:
            persistent_users: ids below it may come back, where items are drawn.
            items: where items come from; by default they are drawn.
        """
        config = self.config
        half_life_s = mdp.KV_HALF_LIFE_EPOCHS * config.epoch_seconds
        self._items: ItemSource = items or DrawnItems(
            persistent_users, self.tables, config.zipf, config.seed, config.candidates
        )
        self.pool.reset()
        self._stop()
        self.embedding = EmbeddingCache(
            self.pool, self.tables, self._row_policy, half_life_s=half_life_s,
            emulated_link_gbps=config.emulated_link_gbps, time_source=self.time_source,
        )  # fmt: skip
        layout = KvLayout(
            config.layers, config.heads, config.head_dim, config.block_tokens, self._dtype
        )
        self.kv = KvCache(
            self.pool, layout, make_policy(self.kv_policy, half_life_s),
            max_history_tokens=config.max_history_tokens,
            max_users=self.remembered_users,
        )  # fmt: skip
        self.partition = Partition(self.pool, self.embedding, self.kv)
        self.refill = Refill(
            self.embedding, TokenBucket(config.refill_gbps * 1e9), slo_ms=config.slo_ms,
            stream=self._transfers,
        )  # fmt: skip
        self.last_p99_ms = 0.0
        """Of the last epoch; refill and prefetch pause while it is near the SLO."""
        self._missed = self._fetched = 0
        self._host_time = HostTime()
        self._told = AheadBytes(0, 0)
        self._told_evictions = 0

    @property
    def remembered_users(self) -> int:
        """Users whose requests the KV cache counts; no more can have an entry."""
        return max(REMEMBERED_USERS, 4 * self.pool.pages)

    @property
    def rows_in_pool(self) -> int:
        """Embedding rows that the whole pool would hold."""
        return self.pool.pages * self.embedding.rows_per_page

    @property
    def entries_in_pool(self) -> int:
        """Histories of mean length that the whole pool would hold."""
        tokens = np.array([round(self.config.mean_history_tokens)])
        return self.pool.pages // int(self._kv_pages(tokens)[0])

    def move(self, alpha_centi: int) -> Move:
        """Set the embedding cache's share of the pool, in hundredths; new pages begin to be warmed."""
        moved = self.partition.move(alpha_centi)
        if moved.moved_pages > 0:
            self.refill.refill(moved.moved_pages * self.embedding.rows_per_page)
        return moved

    def first_batch(self, waiting: Requests) -> int:
        """How many of the requests, from the first on, make the next batch: at least one.

        As many as the token budget allows, what is cached left out, no user twice, no more pages
        than there are, and with `only_graphs` those of one recorded graph.
        """
        if len(waiting) == 1:
            return 1
        some = waiting[: self.config.token_budget // self._items.fewest_candidates + 1]
        lengths = some.history_length.astype(np.int64)
        new = lengths - self._reusable(some)[1] + self._items.candidates(some)
        most = max(int(np.searchsorted(np.cumsum(new), self.config.token_budget, side="right")), 1)
        if self.config.only_graphs:
            most = min(most, first_to_share(new))
        if most == 1:
            return 1
        return int(self.kv.split(some.user[:most], lengths[:most])[0].size)

    def execute(self, requests: Requests, waiting: Requests, now_s: float) -> Executed:
        """Run one batch to its completion.

        Args:
            requests: no user twice; `first_batch` sees to that.
            waiting: those that have arrived and come next: their missing rows are fetched meanwhile.
            now_s: the workload's clock.
        """
        with self._threads():
            return self._execute(requests, waiting, now_s)

    def _execute(self, requests: Requests, waiting: Requests, now_s: float) -> Executed:
        start_s = self.time_source.now()
        lengths = requests.history_length.astype(np.int64)
        new_items = requests.new_items.astype(np.int64)
        window, candidates = self._items.window(requests), self._items.candidates(requests)
        evictions = self.kv.evictions
        batch = self.kv.begin(requests.user, lengths, new_items, window.edits, requests.arrival_s)
        evicted = self.kv.evictions - evictions
        cached = batch.cached.astype(np.int64)
        try:
            keys = self._items.keys(requests, window, cached)
            rows = self.embedding.lookup(keys, now_s)
            self._counters.copy_(self.embedding.state.counters, non_blocking=True)
            computed = int((lengths - cached + candidates).sum())
            if computed * self.config.layers < self.config.prefetch_beside:
                waiting = waiting[:0]
            looked_up = self.refill.mark() if len(waiting) else None
            scores = self._scores(rows, batch, cached, lengths - cached, candidates)
            if len(requests) == 1:
                self._host_time.add(bool(cached[0]), self.time_source.now() - start_s)
            ahead = self._prefetch(waiting, len(requests), looked_up)
            self._finish(now_s - start_s)
        except BaseException:
            self.kv.abort(batch)
            raise
        # Only now do the visits count: a batch that was interrupted can be run again.
        self.kv.commit(batch)
        self._items.served(requests)
        self.partition.settle()
        missed, self._missed = self._missed, int(self._counted[MISSED])
        fetched, self._fetched = self._fetched, int(self._counted[UNIQUE])
        return Executed(
            scores=scores,
            reused=cached,
            computed=lengths - cached + candidates,
            pages=self._kv_pages(lengths),
            rows_hit=keys.numel() - (self._missed - missed),
            rows_fetched=self._fetched - fetched,
            stored=int((batch.stop - batch.start).sum()),
            evicted=evicted,
            ahead=ahead,
            device_s=self.time_source.now() - start_s,
        )

    def idle(self, now_s: float) -> bool:
        """Use a moment without requests to warm rows; whether more remain to be moved."""
        if self.refill.idle:
            return False
        with self._threads():
            self.refill.step(now_s, self.last_p99_ms)
        return not self.refill.idle

    def probe_ms(self, repeats: int = 20) -> float:
        """How fast this machine is: the median time of a batch of one mean history, nothing cached.

        The caches are as new afterwards.
        """
        length = round(self.config.mean_history_tokens)
        times = []
        for i in range(repeats + 3):
            one = np.array([length])
            request = Requests(np.array([0.0]), np.array([_PROBE_USER + i]), one, one)
            times.append(self.execute(request, request[:0], 0.0).device_s)
        self.reset(0)
        return 1000.0 * float(np.median(times[3:]))

    def take_ahead_bytes(self) -> AheadBytes:
        """Bytes that refill and prefetch moved since the last call; waits for the device."""
        now = AheadBytes(self.refill.refill_bytes, self.refill.prefetch_bytes)
        before, self._told = self._told, now
        return AheadBytes(now.refill - before.refill, now.prefetch - before.prefetch)

    def take_kv_evictions(self) -> int:
        """KV entries evicted since the last call."""
        before, self._told_evictions = self._told_evictions, self.kv.evictions
        return self._told_evictions - before

    def take_host_ms(self) -> dict[str, float]:
        """How fast the host was since the last call: `HostTime.take`."""
        return self._host_time.take()

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self._stop()
        for name in (
            "tables", "pool", "model", "embedding", "kv", "partition", "refill", "_graphs", "_transfers",
        ):  # fmt: skip
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _stop(self) -> None:
        """End what learned policies run in the background."""
        for name in {"kv", "embedding"} & self.__dict__.keys():
            self.__dict__[name].close()

    def _rehearse(self) -> None:
        """Do once, as large as it gets, what requests and moves may need; the caches are as new afterwards.

        Else a request waits for a kernel's compilation (up to a second) or for memory (20 ms). Then the KV
        cache has room for one batch alone, and at last the embedding cache is so small that it is full: so
        that entries and rows are evicted, too.
        """
        config, together = self.config, 4
        few_centi = -(-100 // self.pool.pages)
        longest = min(config.token_budget // together, config.max_history_tokens)
        length = longest - 200
        pages = together * int(self._kv_pages(np.array([longest]))[0])
        full_centi = max(100 - -(-100 * pages // self.pool.pages), 0)
        start_s = time.perf_counter()
        alphas_centi = (50, 60, 40, 60, full_centi, full_centi, *[few_centi] * EVICTING_VISITS)
        for visit, alpha_centi in enumerate(alphas_centi):
            self.move(alpha_centi)
            users = _PROBE_USER + visit * together + np.arange(2 * together)
            lengths = np.full(users.shape, length)
            new = lengths.copy()
            if visit:  # one comes again: a batch in which some are cached
                users[0], new[0] = _PROBE_USER, config.new_items
                lengths[0] += visit * config.new_items
            requests = Requests(np.zeros(users.shape), users, lengths, new)
            self.execute(requests[:together], requests[together:], time.perf_counter() - start_s)
            while self.refill.refilling:
                self.refill.step(time.perf_counter() - start_s)
        self.reset(0)

    @contextlib.contextmanager
    def _threads(self) -> Iterator[None]:
        """On a CPU, torch's threads as configured; the process has its own number back afterwards."""
        if self.device.type != "cpu":
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self.config.cpu_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def _scores(
        self, rows: Tensor, kv: KvBatch, cached: Ints, new: Ints, candidates: Ints
    ) -> Tensor:
        """Scores [sum of candidates] from the rows [N * tables, dim] of all tokens."""
        config = self.config
        rows = rows.view(-1, config.tables, config.dim)
        if self._graphs is not None:
            shape = self._graphs.shape(new + candidates, cached)
            if shape is not None:
                return self._graphs.run(shape, rows, new, candidates, cached, kv.page_table)
        widest = int((kv.page_table >= 0).sum(axis=1).max(initial=0))
        pages = kv.page_table[:, :widest]
        batch = HstuBatch.build(new, candidates, cached, self.model.config, self.device)
        paged = PagedKv(
            blocks=self.kv.blocks,
            page_table=torch.from_numpy(np.ascontiguousarray(pages)).to(self.device),
            cached=batch.cached,
            layer=0,
            layers=config.layers,
            blocks_per_page=self.kv.blocks_per_page,
        )
        scores: Tensor = self.model(rows.sum(1), batch, paged)
        return scores

    def _prefetch(self, waiting: Requests, ahead: int, after: torch.cuda.Event | None) -> bool:
        """Plan the missing rows of the requests that come next, behind this batch's lookup alone.

        On a CPU nothing computes meanwhile, so that waiting requests would only wait longer.

        Returns:
            Whether there are enough of them to be worth it.
        """
        self.refill.forget_prefetch()
        if self.device.type == "cpu" or len(waiting) == 0:
            return False
        some = waiting[: self.first_batch(waiting)]
        window, cached = self._reusable(some)
        if int((some.history_length.astype(np.int64) - cached).sum()) < PREFETCH_TOKENS:
            return False
        with self.refill.aside(after):
            self.refill.prefetch(self._items.keys(some, window, cached, ahead))
        return True

    def _reusable(self, requests: Requests) -> tuple[Window, Ints]:
        """Windows of requests that wait, and the tokens [n] whose K and V would be reused now.

        Nothing changes. Of a user that stands there twice, both see what is cached now.
        """
        lengths = requests.history_length.astype(np.int64)
        window = self._items.window(requests)
        cached = self.kv.cached_tokens(requests.user, window.edits).astype(np.int64)
        return window, np.minimum(cached, lengths)

    def _finish(self, clock_offset_s: float) -> None:
        """Wait until the batch has completed on the device; meanwhile rows are moved ahead.

        Args:
            clock_offset_s: of the workload's clock to the time source's.
        """
        done = self._completed
        if done is None:
            return
        done.record(torch.cuda.current_stream(self.pool.device.index))
        moving = not self.refill.idle
        while not done.query():
            if moving:
                self.refill.step(self.time_source.now() + clock_offset_s, self.last_p99_ms)
                moving = not self.refill.idle

    def _kv_pages(self, tokens: Ints) -> Ints:
        return self.kv.layout.pages(tokens, self.kv.blocks_per_page)


def model_config(config: LiveConfig) -> HstuConfig:
    """The preset's model."""
    return HstuConfig(
        layers=config.layers,
        dim=config.dim,
        heads=config.heads,
        head_dim=config.head_dim,
        max_history_tokens=config.max_history_tokens,
        scaling_seqlen=config.max_history_tokens,
    )
