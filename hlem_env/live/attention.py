"""HSTU's attention over a batch of unequal sequences, with or without history in a paged cache.

Checks arguments and picks the code: `kernels.attention_reference` defines the result on any device,
the kernels on a CUDA device match it. No call waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hlem_env.errors import require, require_choice

MASKS = ("candidates",)
"""`candidates`: history is causal; a candidate sees the whole history and itself."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_HEAD_DIMS = (32, 64, 128)
"""What the CUDA kernels take; other CUDA tensors go to the reference, which waits for the device."""

MAX_PROGRAMS = 65_535
"""Sequences times heads of one call on CUDA: the second extent of a grid."""


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


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    candidates: Tensor,
    *,
    scaling_seqlen: int,
    scale: float | None = None,
    cache: PagedKv | None = None,
    mask: str = "candidates",
    max_new: int | None = None,
) -> Tensor:
    """`silu(q k^T * scale) / scaling_seqlen * mask` times v, without softmax.

    The new tokens of a sequence are its new history (causal), then its candidates, each of which
    sees the history and itself only. Cached tokens come before the new ones and are seen by all.
    Rows may be strided (views of one projection); the last two dimensions must be contiguous.

    Args:
        q: [N, heads, head_dim], the new tokens of all sequences one after the other.
        k: the same shape.
        v: the same shape.
        offsets: int32 [B + 1], row at which each sequence starts; 0 first and N last.
        candidates: int32 [B], how many of a sequence's new tokens are candidates.
        scaling_seqlen: the constant N of the formula, not a length.
        scale: factor of q k^T; by default head_dim ** -0.5.
        cache: history in pages, if any sequence has some.
        mask: one of MASKS.
        max_new: upper bound of the new tokens of one sequence; a tight one saves empty programs.

    Returns
    -------
        [N, heads, head_dim], contiguous, of q's dtype.

    Raises
    ------
        ArgumentError: shapes, dtypes or devices do not fit together.
    """
    _check(q, k, v, offsets, candidates)
    require_choice("mask", mask, MASKS)
    require(scaling_seqlen > 0, "scaling_seqlen", scaling_seqlen, "above 0")
    rows, _, head_dim = q.shape
    max_new = rows if max_new is None else min(max_new, rows)
    require(rows == 0 or max_new > 0, "max_new", max_new, "above 0 where there are tokens")
    scale = head_dim**-0.5 if scale is None else scale
    if cache is not None:
        _check_cache(q, offsets, cache)
        if cache.page_table.shape[1] == 0:
            cache = None
    if rows == 0:
        return q.new_empty(q.shape)
    if _has_kernel(q):
        programs = candidates.shape[0] * q.shape[1]
        require(programs <= MAX_PROGRAMS, "sequences * heads", programs, f"{MAX_PROGRAMS} or fewer")
        from hlem_env.live.kernels import attention_triton

        return attention_triton.attend(
            q, k, v, offsets, candidates, scaling_seqlen, scale, cache, max_new
        )
    from hlem_env.live.kernels import attention_reference

    return attention_reference.attend(q, k, v, offsets, candidates, scaling_seqlen, scale, cache)


def append_history(
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    candidates: Tensor,
    cache: PagedKv,
    max_new: int | None = None,
) -> None:
    """Write K and V of the new history behind the cached tokens, into the sequences' blocks.

    Candidates are not written, nor sequences whose page table is -1 there.

    Args:
        k: [N, heads, head_dim] as for `hstu_attention`.
        v: the same shape.
        offsets: int32 [B + 1].
        candidates: int32 [B].
        cache: where to; its pages have room for the new history of every sequence that has pages.
        max_new: upper bound of the new tokens of one sequence.

    Raises
    ------
        ArgumentError: shapes, dtypes or devices do not fit together.
    """
    _check(k, k, v, offsets, candidates)
    _check_cache(k, offsets, cache)
    rows = k.shape[0]
    if rows == 0 or cache.page_table.shape[1] == 0:
        return
    max_new = rows if max_new is None else min(max_new, rows)
    if k.is_cuda:
        from hlem_env.live.kernels import attention_triton

        attention_triton.append(k, v, offsets, candidates, cache, max_new)
        return
    from hlem_env.live.kernels import attention_reference

    attention_reference.append(k, v, offsets, candidates, cache)


def _has_kernel(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in KERNEL_DTYPES and q.shape[2] in KERNEL_HEAD_DIMS


def _check(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, candidates: Tensor) -> None:
    require(q.dim() == 3, "q.shape", tuple(q.shape), "[N, heads, head_dim]")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        same = tensor.shape == q.shape and tensor.dtype == q.dtype and tensor.device == q.device
        require(
            same,
            name,
            (tuple(tensor.shape), tensor.dtype, str(tensor.device)),
            f"{tuple(q.shape)}, {q.dtype} on {q.device}, as the others",
        )
        require(
            tensor.stride()[1:] == (q.shape[2], 1) or 0 in tensor.shape,
            f"{name}.stride",
            tensor.stride(),
            "last two dimensions contiguous",
        )
    batch = candidates.shape[0] if candidates.dim() == 1 else -1
    require(batch >= 0, "candidates.shape", tuple(candidates.shape), "[B]")
    require(offsets.shape == (batch + 1,), "offsets.shape", tuple(offsets.shape), f"[{batch + 1}]")
    for name, tensor in (("offsets", offsets), ("candidates", candidates)):
        fits = tensor.dtype == torch.int32 and tensor.device == q.device and tensor.is_contiguous()
        require(
            fits,
            name,
            (tensor.dtype, str(tensor.device)),
            f"int32 on {q.device}, contiguous",
        )


def _check_cache(q: Tensor, offsets: Tensor, cache: PagedKv) -> None:
    blocks, batch = cache.blocks, offsets.shape[0] - 1
    fits = blocks.dim() == 5 and blocks.shape[1] == 2 and blocks.shape[3:] == q.shape[1:]
    require(
        fits and blocks.is_contiguous(),
        "cache.blocks.shape",
        tuple(blocks.shape),
        f"[blocks, 2, block_tokens, {q.shape[1]}, {q.shape[2]}], contiguous",
    )
    require(
        blocks.dtype == q.dtype and blocks.device == q.device,
        "cache.blocks",
        (blocks.dtype, str(blocks.device)),
        f"{q.dtype} on {q.device}",
    )
    for name, tensor, dims in (
        ("page_table", cache.page_table, 2),
        ("cached", cache.cached, 1),
    ):
        fits = (
            tensor.dim() == dims
            and tensor.shape[0] == batch
            and tensor.dtype == torch.int32
            and tensor.device == q.device
            and tensor.is_contiguous()
        )
        require(
            fits,
            f"cache.{name}",
            (tuple(tensor.shape), tensor.dtype, str(tensor.device)),
            f"int32, {batch} rows, contiguous, on {q.device}",
        )
    require(0 <= cache.layer < cache.layers, "cache.layer", cache.layer, f"0 to {cache.layers - 1}")
    require(cache.blocks_per_page > 0, "cache.blocks_per_page", cache.blocks_per_page, "above 0")
