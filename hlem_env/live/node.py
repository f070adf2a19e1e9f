"""A live node: it executes HSTU for batches of requests, out of one pool for both caches.

One batch goes through

    histories   which items each request's history holds
    kv.begin    whose K and V can be reused, whose are to be kept: pages, pins
    rows        table rows of the new tokens and the candidates, from the embedding cache
    model       HSTU over new tokens and candidates, against the cached pages
    kv.commit   the new K and V count from now on
    settle      what a move of alpha had to leave until the batch was done
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlem_env import mdp
from hlem_env.live.attention import PagedKv
from hlem_env.live.config import LiveConfig
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.hashing import mix
from hlem_env.live.histories import Histories
from hlem_env.live.host_tables import HostTables
from hlem_env.live.hstu import Hstu, HstuConfig
from hlem_env.live.kv_cache import KvBatch, KvCache, KvLayout
from hlem_env.live.partition import Move, Partition
from hlem_env.live.pool import Pool
from hlem_env.workload.requests import Requests

_CANDIDATE_USER = 1 << 40
"""Candidates are drawn like the items of a user of this id and up, whom no workload has."""


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
    device_s: float
    """Seconds from the batch's start to its completion."""


class AheadBytes(NamedTuple):
    """Host to device bytes that were moved before anybody asked, since they were last taken."""

    refill: int
    prefetch: int


class LiveNode:
    """Pool, caches, tables and model of one preset, on its device.

    Args:
        config: what it is made of.
        kv_policy: "scan_resistant" or "lru".

    Raises:
        BackendError: the device is not there.
    """

    def __init__(self, config: LiveConfig, kv_policy: str = "scan_resistant") -> None:
        self.config, self._kv_policy = config, kv_policy
        self.device, self._dtype = torch.device(config.device), getattr(torch, config.dtype)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise BackendError(f"the preset {config.name} needs a CUDA device, and there is none")
        self.tables = HostTables(
            config.tables, config.rows_per_table, config.dim, self._dtype, config.seed, config.device
        )
        self.pool = Pool(config.pool_bytes, config.page_bytes, config.device)
        self.model = Hstu(model_config(config), seed=config.seed).to(self.device, self._dtype)
        self.reset(0)

    def reset(self, persistent_users: int) -> None:
        """Empty both caches. User ids below `persistent_users` may come back."""
        config = self.config
        self.pool.reset()
        self._histories = Histories(
            persistent_users, config.rows_per_table, config.zipf, config.seed
        )
        layout = KvLayout(config.layers, config.heads, config.head_dim, config.block_tokens, self._dtype)
        half_life_s = mdp.KV_HALF_LIFE_EPOCHS * config.epoch_seconds
        policy = Lru() if self._kv_policy == "lru" else ScanResistant(half_life_s)
        self.embedding = EmbeddingCache(self.pool, self.tables)
        self.kv = KvCache(
            self.pool, layout, policy, max_history_tokens=config.max_history_tokens
        )
        self.partition = Partition(self.pool, self.embedding, self.kv)
        self._served = 0
        self._evictions_told = 0

    def move(self, alpha_centi: int) -> Move:
        """Set the embedding cache's share of the pool, in hundredths."""
        return self.partition.move(alpha_centi)

    def first_batch(self, waiting: Requests) -> int:
        """How many of the requests, from the first on, make the next batch: at least one.

        As many as the token budget allows if nothing were cached, no user twice, and no more pages
        than there are.
        """
        tokens = np.cumsum(waiting.history_length.astype(np.int64) + self.config.candidates)
        most = max(int(np.searchsorted(tokens, self.config.token_budget, side="right")), 1)
        return int(self.kv.split(waiting.user[:most], waiting.history_length[:most])[0].size)

    def execute(self, requests: Requests, waiting: Requests, now_s: float) -> Executed:
        """Run one batch to its completion.

        Args:
            requests: no user twice; `first_batch` sees to that.
            waiting: those that have arrived and come next.
            now_s: the workload's clock.
        """
        start_s = time.perf_counter()
        lengths = requests.history_length.astype(np.int64)
        window = self._histories.visit(requests.user, lengths, requests.new_items.astype(np.int64))
        batch = self.kv.begin(
            requests.user, lengths, requests.new_items, window.edits, requests.arrival_s
        )
        try:
            jagged, tokens = self._tokens(requests, window, batch.cached.astype(np.int64))
            hits = self.embedding.hits()
            scores = self.model(tokens, jagged, self._paged(batch))
            self._wait()
        except BaseException:
            self.kv.abort(batch)
            raise
        self.kv.commit(batch)
        self.partition.settle()
        self._served += len(requests)
        done_s = time.perf_counter()
        return Executed(
            scores=scores,
            reused=batch.cached.astype(np.int64),
            computed=lengths - batch.cached + self.config.candidates,
            pages=self.kv.layout.pages(lengths, self.kv.blocks_per_page),
            rows_hit=hits,
            device_s=done_s - start_s,
        )
