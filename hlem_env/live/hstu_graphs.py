# mypy: disallow-untyped-calls=False
"""The model as recorded launches: one replay a batch in place of some sixty launches.

A request with a cached history computes about a hundred tokens, in kernels of a few microseconds each,
and a host needs longer to launch them than a GPU to run them. A CUDA graph launches them at once, but
for one shape of batch only. So tokens are rounded up: what is missing is a request of its own at the
batch's end, all candidates, which see nobody and whom nobody sees.

Batches of one request, and of several small ones, have graphs; others are too many shapes, and large
enough not to need one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlem_env.live.hstu import Hstu, HstuBatch, Parts, layout, pack, packed_size, unpack
from hlem_env.live.paged_kv import PagedKv

SMALL_TOKENS = 256
"""Most new tokens of a request that shares a graph with others."""
FINE, COARSE = 128, 1024
"""Tokens are rounded up to multiples of these, by the longest request of a batch."""
SHARED_TOKENS, SHARED_REQUESTS = 8192, 64
"""Most tokens, and requests, that have a graph together."""

PREPARED_REQUESTS = 16
"""Small batches of up to so many requests are recorded ahead."""

Ints = NDArray[np.int64]


class Shape(NamedTuple):
    """What one graph serves."""

    requests: int
    tokens: int
    """Rounded up; at most `longest` above the real number."""
    longest: int
    """Upper bound of a request's new tokens."""
    any_cached: bool


class _Graph(NamedTuple):
    recorded: torch.cuda.CUDAGraph
    scores: Tensor


class HstuGraphs:
    """Graphs of a model over one pool, recorded when a shape is first seen.

    Args:
        model: on a CUDA device.
        blocks: of the KV cache, [blocks, 2, block_tokens, heads, head_dim].
        blocks_per_page: of the pool.
        page_columns: width of a batch's page table.
        most_tokens: of one request.
    """

    def __init__(
        self,
        model: Hstu,
        blocks: Tensor,
        blocks_per_page: int,
        page_columns: int,
        most_tokens: int,
    ) -> None:
        self.model, self.page_columns, self._most_tokens = model, page_columns, most_tokens
        self._blocks, self._blocks_per_page = blocks, blocks_per_page
        most = max(_up(most_tokens, COARSE), SHARED_TOKENS)
        self._tokens = torch.zeros(most, model.config.dim, dtype=blocks.dtype, device=blocks.device)
        ints = 2 * most + (SHARED_REQUESTS + 1) * (page_columns + 4)
        self._ints = torch.zeros(ints, dtype=torch.int32, device=blocks.device)
        self._staged = torch.zeros(ints, dtype=torch.int32).pin_memory()
        self._sent = torch.cuda.Event()
        self._graphs: dict[Shape, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def shape(self, new_tokens: Ints, cached: Ints) -> Shape | None:
        """The shape that serves requests of so many new tokens, [B], or None."""
        requests, total, most = len(new_tokens), int(new_tokens.sum()), int(new_tokens.max())
        step = FINE if most <= COARSE else COARSE
        longest = max(1 << (most - 1).bit_length(), FINE) if step == FINE else _up(most, step)
        shape = Shape(requests, _up(total, step), longest, bool(cached.any()))
        alone = requests == 1 and shape.tokens <= len(self._tokens)
        small = most <= SMALL_TOKENS and requests <= SHARED_REQUESTS
        return shape if alone or (small and shape.tokens <= SHARED_TOKENS) else None

    def run(
        self,
        shape: Shape,
        rows: Tensor,
        new: Ints,
        candidates: Ints,
        cached: Ints,
        pages: NDArray[np.int32],
    ) -> Tensor:
        """Scores of all candidates; K and V of the new history go to the pages.

        Args:
            shape: what `shape` gave for the batch.
            rows: [N, tables, dim], whose sum over the tables a token is.
            new: [B] history tokens to compute.
            candidates: [B].
            cached: [B] history tokens in the pages.
            pages: [B, at most page_columns]: the requests' pages, then -1.
        """
        count = len(rows)
        missing = shape.tokens - count
        *parts, candidate_rows = layout(
            np.append(new, 0), np.append(candidates, missing), np.append(cached, 0)
        )
        table = np.full((shape.requests + 1, self.page_columns), -1, np.int64)
        table[:-1, : pages.shape[1]] = pages
        whole: Parts = (*parts, candidate_rows[: int(candidates.sum())], table)
        size = packed_size(whole)
        self._sent.synchronize()
        pack(whole, self._staged[:size].numpy())
        self._ints[:size].copy_(self._staged[:size], non_blocking=True)
        self._sent.record()
        torch.sum(rows, 1, out=self._tokens[:count])
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self._record(shape, whole)
        graph.recorded.replay()
        return graph.scores.clone()

    def prepare(self, tables: int, new_items: int, candidates: int) -> None:
        """Record what most batches need, so that no request waits for it.

        Those are single requests without cached history, and small ones with some. It writes to the
        pool's first page: call it before anything is stored.

        Args:
            tables: of an item.
            new_items: of a request with cached history.
            candidates: of any request.
        """
        sizes = [*range(2 * COARSE, self._most_tokens, COARSE), self._most_tokens]
        fresh = [([tokens - candidates], 0) for tokens in sizes if tokens > candidates]
        for new, cached in fresh + [([new_items] * n, 1) for n in range(1, PREPARED_REQUESTS + 1)]:
            history, old = np.array(new), np.full(len(new), cached)
            tail = np.full(len(new), candidates)
            shape = self.shape(history + tail, old)
            if shape is not None and shape not in self._graphs:
                count = int((history + tail).sum())
                rows = self._tokens.new_zeros(count, tables, self._tokens.shape[1])
                self.run(shape, rows, history, tail, old, np.zeros((len(new), 1), np.int32))

    def _record(self, shape: Shape, parts: Parts) -> _Graph:
        *fields, table = unpack(parts, self._ints)
        batch = HstuBatch.of(fields, shape.longest, shape.any_cached)
        kv = PagedKv(
            self._blocks, table, batch.cached, 0, self.model.config.layers, self._blocks_per_page
        )
        tokens = self._tokens[: shape.tokens]
        self.model(tokens, batch, kv)  # compiles
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, pool=self._memory):
            scores = self.model(tokens, batch, kv)
        return _Graph(recorded, scores)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
