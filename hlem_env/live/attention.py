"""HSTU's attention over a batch of unequal sequences, with or without history in a paged cache.

Checks arguments and picks the code: `kernels.attention_reference` defines the result on any device,
the kernels on a CUDA device match it. No call waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hlem_env.errors import ArgumentError, require, require_choice
from hlem_env.live.paged_kv import PagedKv

__all__ = ["PagedKv", "append_history", "hstu_attention"]

MASKS = ("candidates",)
"""`candidates`: history is causal; a candidate sees the whole history and itself."""
KERNEL_DTYPES = (torch.bfloat16, torch.float16)
KERNEL_HEAD_DIMS = (32, 64, 128)
"""What the CUDA kernels take; other CUDA tensors go to the reference, which waits for the device."""

MAX_PROGRAMS = 65_535
"""Sequences times heads of one call on CUDA: the second extent of a grid."""


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
        offsets: int32 [B + 1], row at which each sequence starts; 0 first, and last the number of
            tokens, N or less: what lies behind is padding, whose result is undefined.
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


# The checks run before every launch: messages are made only where one fails.


def _check(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, candidates: Tensor) -> None:
    shape, dtype, device = q.shape, q.dtype, q.device
    if len(shape) != 3:
        raise ArgumentError("q.shape", tuple(shape), "[N, heads, head_dim]")
    inner = (shape[2], 1)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            allowed = f"{tuple(shape)}, {dtype} on {device}, as the others"
            raise ArgumentError(name, _describe(tensor), allowed)
        if tensor.stride()[1:] != inner and 0 not in shape:
            raise ArgumentError(f"{name}.stride", tensor.stride(), "last two dimensions contiguous")
    if candidates.dim() != 1:
        raise ArgumentError("candidates.shape", tuple(candidates.shape), "[B]")
    batch = candidates.shape[0]
    for name, tensor, size in (("offsets", offsets, batch + 1), ("candidates", candidates, batch)):
        _check_int32(name, tensor, (size,), device)


def _check_cache(q: Tensor, offsets: Tensor, cache: PagedKv) -> None:
    blocks, batch = cache.blocks, offsets.shape[0] - 1
    shape = blocks.shape
    fits = len(shape) == 5 and shape[1] == 2 and shape[3:] == q.shape[1:]
    if not fits or not blocks.is_contiguous():
        allowed = f"[blocks, 2, block_tokens, {q.shape[1]}, {q.shape[2]}], contiguous"
        raise ArgumentError("cache.blocks.shape", tuple(shape), allowed)
    if blocks.dtype != q.dtype or blocks.device != q.device:
        raise ArgumentError("cache.blocks", _describe(blocks), f"{q.dtype} on {q.device}")
    _check_int32("cache.cached", cache.cached, (batch,), q.device)
    table = cache.page_table
    width = table.shape[1] if table.dim() == 2 else 0
    _check_int32("cache.page_table", table, (batch, width), q.device)
    if not 0 <= cache.layer < cache.layers:
        raise ArgumentError("cache.layer", cache.layer, f"0 to {cache.layers - 1}")
    if cache.blocks_per_page <= 0:
        raise ArgumentError("cache.blocks_per_page", cache.blocks_per_page, "above 0")


def _check_int32(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    fits = tensor.shape == shape and tensor.dtype == torch.int32 and tensor.device == device
    if not fits or not tensor.is_contiguous():
        allowed = f"{shape}, int32 on {device}, contiguous"
        raise ArgumentError(name, _describe(tensor), allowed)


def _describe(tensor: Tensor) -> tuple[tuple[int, ...], str, str]:
    return tuple(tensor.shape), str(tensor.dtype), str(tensor.device)
