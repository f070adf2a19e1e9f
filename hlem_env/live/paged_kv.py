"""Where attention finds the keys and values of histories."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PagedKv(NamedTuple):
    """Keys and values of histories in the pool, as one layer of a batch sees them.

    Blocks of a sequence are in order of growth: chunk c of `block_tokens` tokens of layer l is its
    ordinal c * layers + l, found in block `ordinal % blocks_per_page` of the sequence's page number
    `ordinal // blocks_per_page`.
    """

    blocks: Tensor
    """[blocks, 2 (K, V), block_tokens, heads, head_dim], the whole pool."""
    page_table: Tensor
    """int32 [B, max_pages]: pages of each sequence; -1 where it has none. A sequence without pages
    is not appended to."""
    cached: Tensor
    """int32 [B]: tokens already in the pages. What lies behind them is never read."""
    layer: int
    layers: int
    blocks_per_page: int
