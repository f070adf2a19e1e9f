"""HSTU's attention without cached history on a Hopper GPU (compute capability 9.0), in Gluon.

Gluon is the layer of Triton in which a kernel says itself what runs at the same time. Here, while the
tensor cores add the values of one block of keys, the other units compute the activation of the next
block, and a copy engine fetches the ones after that. Triton's own scheduling waits in between.

Rows of a neighbouring sequence may be read, times zero: a NaN there spreads to its neighbour.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

AVAILABLE = hasattr(tma, "async_copy_global_to_shared")
"""Whether this Triton still has the calls used here: 3.6 to 3.8 do, 3.9 renamed some."""


class Config(NamedTuple):
    """Sizes of a program."""

    queries: int
    keys: int
    stages: int
    warps: int


CONFIGS = {64: Config(64, 64, 3, 4), 128: Config(64, 64, 3, 4)}
"""Best of those measured, by head_dim."""


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel takes these tensors; the copy engine wants rows aligned to 16 bytes."""
    aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 8 == 0 for t in (q, k, v))
    return q.dtype == torch.bfloat16 and q.shape[2] in CONFIGS and aligned


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    candidates: Tensor,
    scaling_seqlen: int,
    scale: float,
    max_new: int,
) -> Tensor:
    """See `attention.hstu_attention`; without cache, and only what `takes` allows."""
    rows, heads, head_dim = q.shape
    config = CONFIGS[head_dim]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    layout = gl.NVMMASharedLayout.get_default_for([config.keys, head_dim], gl.bfloat16)
    q_tiles, k_tiles, v_tiles = (
        TensorDescriptor(
            tensor, [rows, heads * head_dim], [tensor.stride(0), 1], [tile, head_dim], layout
        )
        for tensor, tile in ((q, config.queries), (k, config.keys), (v, config.keys))
    )
    _attend[(triton.cdiv(max_new, config.queries), heads * candidates.shape[0])](
        q_tiles,
        k_tiles,
        v_tiles,
        out,
        offsets,
        candidates,
        scale / 2,
        1 / scaling_seqlen,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_M=config.queries,
        BLOCK_N=config.keys,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    return out


@gluon.jit
def _silu_of_double(half):  # type: ignore[no-untyped-def]
    """silu(2 * half) in float32."""
    tanh = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1
    )
    return half * tanh + half


@gluon.jit
def _key(step, near_from, first, BLOCK_N: gl.constexpr):  # type: ignore[no-untyped-def]
    """First key of a step: history from its start, then the tile of the queries itself."""
    return gl.where(step < near_from, step * BLOCK_N, first + (step - near_from) * BLOCK_N)


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    k_tiles, v_tiles, k_row, v_row, column, k_ring, v_ring, k_ready, v_ready, k_step, v_step, steps,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Start the copies of one step's keys and of another step's values, where there are such."""
    k_slot = k_step % STAGES
    v_slot = v_step % STAGES
    k_wanted = k_step < steps
    v_wanted = v_step < steps
    mbarrier.expect(k_ready.index(k_slot), k_tiles.block_type.nbytes, pred=k_wanted)
    mbarrier.expect(v_ready.index(v_slot), v_tiles.block_type.nbytes, pred=v_wanted)
    tma.async_copy_global_to_shared(
        k_tiles, [k_row, column], k_ready.index(k_slot), k_ring.index(k_slot), pred=k_wanted
    )
    tma.async_copy_global_to_shared(
        v_tiles, [v_row, column], v_ready.index(v_slot), v_ring.index(v_slot), pred=v_wanted
    )


@gluon.jit
def _start_step(  # type: ignore[no-untyped-def]
    step, p, acc, zero, q, k_ring, v_ring, k_ready, v_ready, STAGES: gl.constexpr
):
    """Start this step's scores, then the values of the step before, whose weights are p."""
    slot = step % STAGES
    mbarrier.wait(k_ready.index(slot), (step // STAGES) & 1)
    keys = k_ring.index(slot).permute((1, 0))
    scores = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
    last = step - 1
    mbarrier.wait(v_ready.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(p, v_ring.index(last % STAGES), acc, is_async=True)
    return scores, acc


@gluon.jit
def _attend(  # type: ignore[no-untyped-def]
    q_tiles,
    k_tiles,
    v_tiles,
    out,
    offsets,
    candidates,
    half_scale,
    out_scale,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One tile of queries of one head of one sequence against all its keys, BLOCK_N a step.

    BLOCK_M is a multiple of BLOCK_N: the steps over a tile's own keys start at its first query.
    """
    gl.static_assert(BLOCK_M % BLOCK_N == 0)
    # The last tiles have most keys: they start first.
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    sequence = gl.program_id(1) // HEADS
    column = gl.program_id(1) % HEADS * HEAD_DIM
    start = gl.load(offsets + sequence)
    length = gl.load(offsets + sequence + 1) - start
    history = length - gl.load(candidates + sequence)
    first = tile * BLOCK_M
    if first < length:
        # Steps [0, near_from) walk over history (and over the tile, where it starts within
        # history), [near_from, steps) over a tile of candidates only. The first `whole` of them
        # need no mask.
        last = gl.minimum(first + BLOCK_M, length)
        if first <= history:
            near_from = gl.cdiv(last, BLOCK_N)
            steps = near_from
        else:
            near_from = gl.cdiv(history, BLOCK_N)
            steps = near_from + gl.cdiv(last - first, BLOCK_N)
        whole = gl.minimum(first, history) // BLOCK_N

        ring: gl.constexpr = [STAGES, BLOCK_N, HEAD_DIM]
        flags: gl.constexpr = [STAGES, 1]
        flag: gl.constexpr = mbarrier.MBarrierLayout()
        dtype: gl.constexpr = k_tiles.dtype
        k_ring = gl.allocate_shared_memory(dtype, ring, k_tiles.layout)
        v_ring = gl.allocate_shared_memory(dtype, ring, v_tiles.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, flags, flag)
        v_ready = gl.allocate_shared_memory(gl.int64, flags, flag)
        q = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], q_tiles.layout)
        q_ready = gl.allocate_shared_memory(gl.int64, [1], flag)
        for slot in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(slot), count=1)
            mbarrier.init(v_ready.index(slot), count=1)
        mbarrier.init(q_ready, count=1)
        fence_async_shared()
        mbarrier.expect(q_ready, q_tiles.block_type.nbytes)
        tma.async_copy_global_to_shared(q_tiles, [start + first, column], q_ready, q)
        for early in gl.static_range(STAGES):
            row = start + _key(early, near_from, first, BLOCK_N)
            _fetch(
                k_tiles, v_tiles, row, row, column, k_ring, v_ring, k_ready, v_ready, early, early,
                steps, STAGES,
            )  # fmt: skip

        row_threads: gl.constexpr = HEAD_DIM // 8
        rows: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 // row_threads, row_threads], [num_warps, 1], [1, 0]
        )
        mbarrier.wait(q_ready, 0)
        q.store((q.load(rows) * half_scale).to(dtype))
        fence_async_shared()

        score_layout: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [num_warps, 1], [16, BLOCK_N, 16]
        )
        acc_layout: gl.constexpr = gl.NVMMADistributedLayout(
            [3, 0], [num_warps, 1], [16, HEAD_DIM, 16]
        )
        weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
        score_row = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, score_layout))
        score_column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score_layout))
        zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, score_layout)
        acc = warpgroup_mma_init(gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, acc_layout))

        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(q, k_ring.index(0).permute((1, 0)), zero, use_acc=False)
        if whole == 0:
            key = score_column + _key(0, near_from, first, BLOCK_N)
            seen = (key[None, :] <= score_row[:, None]) & (key[None, :] < history)
            seen = seen | (key[None, :] == score_row[:, None])
            scores = gl.where(seen, scores, 0.0)
        p = gl.convert_layout(_silu_of_double(scores).to(dtype), weight_layout)
        _fetch(
            k_tiles, v_tiles, start + _key(STAGES, near_from, first, BLOCK_N), start, column,
            k_ring, v_ring, k_ready, v_ready, STAGES, steps, steps, STAGES,
        )  # fmt: skip

        # Unmasked steps in pairs, so that the weights in use and the next ones take turns in two sets
        # of registers. Nothing waits for the values of a step until the next scores have started.
        pairs = gl.maximum(whole - 1, 0) // 2
        for pair in range(0, pairs):
            for odd in gl.static_range(2):
                step = 2 * pair + 1 + odd
                scores, acc = _start_step(
                    step, p, acc, zero, q, k_ring, v_ring, k_ready, v_ready, STAGES
                )
                scores = warpgroup_mma_wait(1, [scores])
                # Free now: this step's keys, and the values of two steps before.
                freed = gl.where(step < 2, steps, step - 2 + STAGES)
                _fetch(
                    k_tiles, v_tiles, start + _key(step + STAGES, near_from, first, BLOCK_N),
                    start + _key(freed, near_from, first, BLOCK_N), column,
                    k_ring, v_ring, k_ready, v_ready, step + STAGES, freed, steps, STAGES,
                )  # fmt: skip
                p = gl.convert_layout(_silu_of_double(scores).to(dtype), weight_layout)
        total = warpgroup_mma_wait(0, [acc])
        if pairs > 0:
            freed = 2 * pairs - 1 + STAGES
            _fetch(
                k_tiles, v_tiles, start, start + _key(freed, near_from, first, BLOCK_N), column,
                k_ring, v_ring, k_ready, v_ready, steps, freed, steps, STAGES,
            )  # fmt: skip
        for step in range(2 * pairs + 1, steps):
            scores, acc = _start_step(
                step, p, total, zero, q, k_ring, v_ring, k_ready, v_ready, STAGES
            )
            scores = warpgroup_mma_wait(1, [scores])
            key = score_column + _key(step, near_from, first, BLOCK_N)
            seen = (key[None, :] <= score_row[:, None]) & (key[None, :] < history)
            seen = seen | (key[None, :] == score_row[:, None])
            scores = gl.where(seen, scores, 0.0)
            p_next = gl.convert_layout(_silu_of_double(scores).to(dtype), weight_layout)
            total, p = warpgroup_mma_wait(0, [acc, p_next])
            _fetch(
                k_tiles, v_tiles, start + _key(step + STAGES, near_from, first, BLOCK_N),
                start + _key(step - 1 + STAGES, near_from, first, BLOCK_N), column,
                k_ring, v_ring, k_ready, v_ready, step + STAGES, step - 1 + STAGES, steps, STAGES,
            )  # fmt: skip
        end = steps - 1
        mbarrier.wait(v_ready.index(end % STAGES), (end // STAGES) & 1)
        total = warpgroup_mma(p, v_ring.index(end % STAGES), total)
        query = first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, rows))
        dim = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, rows))
        result = gl.convert_layout((total * out_scale).to(dtype), rows)
        out_at = (start + query).to(gl.int64)[:, None] * (HEADS * HEAD_DIM)
        gl.store(out + out_at + (column + dim)[None, :], result, mask=query[:, None] < length)
