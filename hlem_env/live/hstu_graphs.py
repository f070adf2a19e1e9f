# mypy: disallow-untyped-calls=False
"""The model as recorded launches: one replay a batch in place of some sixty launches.

A request with a cached history computes about a hundred tokens, in kernels of a few microseconds each,
and a host needs longer to launch them than a GPU to run them. A CUDA graph launches them at once, but
for one shape of batch only. So batches are rounded up to a few shapes: as many requests as there may be
follow the real ones, and share the missing tokens as candidates, which see nobody and whom nobody sees.

All shapes are recorded before the first request, since recording one takes as long as a hundred
requests. Batches of one request and of several small ones have a shape; others are too many to record,
and large enough not to need it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlem_env.live.hstu import Hstu, HstuBatch, Parts, packed_size, unpack
from hlem_env.live.paged_kv import PagedKv

FINE, COARSE = 128, 1024
"""Tokens of a single request are rounded up to multiples of these, above COARSE to multiples of it."""
TOGETHER = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of requests that have a graph together."""
SMALL_TOKENS = (128, 256)
"""Most new tokens of a request that shares a graph with others; each is rounded up to one of these."""
SHARED_TOKENS = 8192
"""Most tokens that have a graph together."""

Ints = NDArray[np.int64]

_MOST_TOGETHER = np.array(
    [max(n for n in TOGETHER if n * size <= SHARED_TOKENS) for size in SMALL_TOKENS] + [1]
)
"""Requests that one graph serves, by the place in SMALL_TOKENS of the longest of them; beyond, one alone."""


class Shape(NamedTuple):
    """What one graph serves."""

    requests: int
    """Most of a batch."""
    longest: int
    """Most new tokens of a request; the graph computes this many times `requests` tokens."""
    any_cached: bool

    @property
    def rows(self) -> int:
        """Requests that the graph computes: the missing tokens fit into the second half."""
        return 2 * self.requests

    @property
    def tokens(self) -> int:
        """Tokens that the graph computes."""
        return self.requests * self.longest

    def parts(self, page_columns: int) -> Parts:
        """Empty int32 arrays for what describes a batch.

        Returns:
            As `hstu.layout`, the last one filled up with 0; and the page table [rows, page_columns].
        """
        rows, tokens = self.rows, self.tokens
        shapes = (rows + 1,), (rows,), (rows,), (tokens,), (tokens,), (rows, page_columns)
        return tuple(np.empty(shape, np.int32) for shape in shapes)


class _Graph(NamedTuple):
    recorded: torch.cuda.CUDAGraph
    scores: Tensor
    written: Parts
    """Where the host describes the batch, as `describe` writes it."""
    staged: Tensor
    """All of that, and where it goes to on the device."""
    sent: Tensor


class HstuGraphs:
    """Graphs of a model over one pool; `prepare` records them.

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
        self.model, self.page_columns = model, page_columns
        self._blocks, self._blocks_per_page = blocks, blocks_per_page
        self._most_tokens = _up(most_tokens, COARSE)
        most = max(self._most_tokens, SHARED_TOKENS)
        self._tokens = torch.zeros(most, model.config.dim, dtype=blocks.dtype, device=blocks.device)
        ints = 2 * most + 2 * (TOGETHER[-1] + 1) * (page_columns + 4)
        self._ints = torch.zeros(ints, dtype=torch.int32, device=blocks.device)
        self._staged = torch.zeros(ints, dtype=torch.int32).pin_memory()
        self._device = blocks.device.index  # a number is looked at faster
        self._sent = torch.cuda.Event()
        self._graphs: dict[Shape, _Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()

    @property
    def prepared(self) -> frozenset[Shape]:
        """The shapes that have been recorded."""
        return frozenset(self._graphs)

    def shape(self, new_tokens: Ints, cached: Ints) -> Shape | None:
        """The shape that serves requests of so many new tokens, [B], or None."""
        requests, most = len(new_tokens), max(new_tokens.tolist())
        if requests == 1:
            longest = _up(most, FINE if most <= COARSE else COARSE)
            return Shape(1, longest, bool(cached[0])) if longest <= self._most_tokens else None
        return shared_shape(requests, most)

    def prepare(self) -> None:
        """Record every shape. It writes to no page."""
        sizes = [*range(FINE, COARSE, FINE), *range(COARSE, self._most_tokens + 1, COARSE)]
        alone = [Shape(1, size, cached) for size in sizes for cached in (False, True)]
        together = [Shape(n, most, True) for n in TOGETHER for most in SMALL_TOKENS]
        for shape in alone + [some for some in together if some.tokens <= SHARED_TOKENS]:
            self._graphs[shape] = self._record(shape)

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
        graph = self._graphs[shape]
        here = torch.cuda.current_stream(self._device)
        self._sent.synchronize()
        describe(graph.written, shape.longest, new, candidates, cached, pages)
        graph.sent.copy_(graph.staged, non_blocking=True)
        self._sent.record(here)
        torch.sum(rows, 1, out=self._tokens[: len(rows)])
        graph.recorded.replay()
        return graph.scores[: sum(candidates.tolist())].clone()

    def _record(self, shape: Shape) -> _Graph:
        parts = shape.parts(self.page_columns)
        size = packed_size(parts)
        written = tuple(part.numpy() for part in unpack(parts, self._staged))
        none = np.zeros(0, np.int64)
        describe(written, shape.longest, none, none, none, np.zeros((0, 1), np.int32))
        self._ints.copy_(self._staged)
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
        return _Graph(recorded, scores, written, self._staged[:size], self._ints[:size])


def shared_shape(requests: int, most: int) -> Shape | None:
    """The shape that serves several requests of at most so many new tokens, or None."""
    if requests > TOGETHER[-1] or most > SMALL_TOKENS[-1]:
        return None
    rounded = TOGETHER[bisect_left(TOGETHER, requests)]
    shape = Shape(rounded, SMALL_TOKENS[bisect_left(SMALL_TOKENS, most)], True)
    return shape if shape.tokens <= SHARED_TOKENS else None


def first_to_share(new_tokens: Ints) -> int:
    """How many of the requests, from the first on, one graph serves: at least one.

    Args:
        new_tokens: [n], candidates included.
    """
    longest = np.maximum.accumulate(new_tokens)
    most = _MOST_TOGETHER[np.searchsorted(SMALL_TOKENS, longest)]
    return max(int((np.arange(1, len(most) + 1) <= most).sum()), 1)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@numba.njit(cache=True)
def describe(
    written: Any, longest: int, new: Any, candidates: Any, cached: Any, pages: Any
) -> None:
    """Write what `hstu.layout` makes of a batch and its page table, rounded up to a shape.

    Args:
        written: as `Shape.parts`.
        longest: most candidates of a request that is there to fill up.
        new: int64 [B], new history of the requests.
        candidates: int64 [B].
        cached: int64 [B].
        pages: int32 [B, at most the columns of the table].
    """
    offsets, tails, olds, positions, scored, table = written
    rows, tokens = tails.size, positions.size
    start, count = 0, 0
    missing = tokens - new.sum() - candidates.sum()
    table[:] = -1
    for row in range(rows):
        history, old = 0, 0
        if row < new.size:
            history, old, tail = new[row], cached[row], candidates[row]
            table[row, : pages.shape[1]] = pages[row]
        else:
            tail = min(missing, longest)
            missing -= tail
        offsets[row], tails[row], olds[row] = start, tail, old
        for within in range(history + tail):
            positions[start + within] = old + min(within, history)
        for at in range(start + history, start + history + tail):
            scored[count] = at
            count += 1
        start += history + tail
    offsets[rows] = start
    scored[count:] = 0
