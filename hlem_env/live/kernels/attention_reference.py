"""What HSTU's attention is, in plain PyTorch on any device. Slow, and it waits for the device.

Sums are in float32, in float64 where the input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hlem_env.errors import require
from hlem_env.live.paged_kv import PagedKv

MAX_SCORES = 2**26
"""Scores held at a time; longer sequences go in pieces of queries."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    candidates: Tensor,
    scaling_seqlen: int,
    scale: float,
    cache: PagedKv | None,
) -> Tensor:
    """The result of `attention.hstu_attention`: [N, heads, head_dim] of q's dtype."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = offsets.tolist()
    cached = [0] * len(candidates) if cache is None else cache.cached.tolist()
    for sequence, n_candidates in enumerate(candidates.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        keys, values = k[rows].to(exact), v[rows].to(exact)
        if cached[sequence] > 0 and cache is not None:
            old = cached_tokens(cache, sequence, cached[sequence]).to(exact)
            keys, values = torch.cat([old[0], keys]), torch.cat([old[1], values])
        history = keys.shape[0] - n_candidates
        out[rows] = _attend_one(
            q[rows].to(exact) * scale, keys, values, cached[sequence], history
        ).div_(scaling_seqlen)
    return out


def append(k: Tensor, v: Tensor, offsets: Tensor, candidates: Tensor, cache: PagedKv) -> None:
    """See `attention.append_history`."""
    starts, table = offsets.tolist(), cache.page_table.tolist()
    block_tokens = cache.blocks.shape[2]
    for sequence, (first, n_candidates) in enumerate(
        zip(cache.cached.tolist(), candidates.tolist(), strict=True)
    ):
        start, stop = starts[sequence], starts[sequence + 1] - n_candidates
        # A history that was not admitted may have pages for its beginning only.
        pages = sum(page >= 0 for page in table[sequence])
        room = pages * cache.blocks_per_page // cache.layers * block_tokens
        stop = min(stop, start + room - first)
        if stop <= start:
            continue
        token = torch.arange(first, first + stop - start, device=k.device)
        block = _block_of(cache, sequence, token // block_tokens)
        cache.blocks[block, 0, token % block_tokens] = k[start:stop]
        cache.blocks[block, 1, token % block_tokens] = v[start:stop]


def cached_tokens(cache: PagedKv, sequence: int, tokens: int) -> Tensor:
    """K and V of the first `tokens` tokens of a sequence, from its blocks: [2, tokens, heads, head_dim]."""
    block_tokens = cache.blocks.shape[2]
    chunks = torch.arange(-(-tokens // block_tokens), device=cache.blocks.device)
    blocks = cache.blocks[_block_of(cache, sequence, chunks)]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :tokens]


def _block_of(cache: PagedKv, sequence: int, chunk: Tensor) -> Tensor:
    """Index of the blocks [n] that hold chunks [n] of a sequence in the cache's layer."""
    ordinal = chunk * cache.layers + cache.layer
    page = cache.page_table[sequence, ordinal // cache.blocks_per_page].long()
    have = bool((page >= 0).all())
    require(
        have, "cache.page_table", page.tolist(), f"a page for each token of sequence {sequence}"
    )
    return page * cache.blocks_per_page + ordinal % cache.blocks_per_page


def _attend_one(q: Tensor, k: Tensor, v: Tensor, cached: int, history: int) -> Tensor:
    """One sequence: q [n, heads, head_dim] scaled, k and v [cached + n, ...]; not yet divided."""
    out = torch.empty_like(q)
    key = torch.arange(k.shape[0], device=q.device)
    step = max(MAX_SCORES // max(k.shape[0] * q.shape[1], 1), 1)
    for start in range(0, q.shape[0], step):
        query = key[cached:][start : start + step, None]
        seen = ((key <= query) & (key < history)) | (key == query)
        score = torch.einsum("ihd,jhd->hij", q[start : start + step], k)
        out[start : start + step] = torch.einsum("hij,jhd->ihd", functional.silu(score) * seen, v)
    return out
