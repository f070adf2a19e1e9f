"""A layer's work on single rows in Triton; `layer_ops` says what it computes.

All of it is bound by memory: a value is read once, used in float32, and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.kernels.common_triton import blocks, launch

NORM_ELEMENTS = 1024
"""Of a program's tile: whole rows in one warp, whose sums need no other's. 32 values a thread take no
more registers than let as many programs run at once as a processor has room for."""
SILU_COLUMNS, SILU_ELEMENTS = 512, 2048
"""Of a program's tile. More elements than threads, or several threads would write one in place."""


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, gate: Tensor | None
) -> Tensor:
    """See `layer_ops.layer_norm`, which has checked the arguments; not for empty x."""
    rows, width = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = triton.next_power_of_2(width)
    tile = max(NORM_ELEMENTS // columns, 1)
    gated = gate is not None
    gate = x if gate is None else gate
    launch(
        _layer_norm,
        (blocks(rows, tile), 1, 1),
        {"num_warps": 1},
        (x, gate, weight.contiguous(), bias.contiguous(), out),
        (epsilon,),
        (x.stride(0), gate.stride(0)),
        (rows,),
        (width, columns, tile, gated),
    )
    return out


def silu_(x: Tensor) -> None:
    """See `layer_ops.silu_`; not for empty x."""
    rows, width = x.shape
    columns = min(triton.next_power_of_2(width), SILU_COLUMNS)
    tile = SILU_ELEMENTS // columns
    launch(
        _silu,
        (blocks(rows, tile), blocks(width, columns), 1),
        {"num_warps": 4},
        (x,),
        (),
        (x.stride(0),),
        (rows,),
        (width, columns, tile),
    )


@triton.jit(do_not_specialize=["rows"])
def _layer_norm(  # type: ignore[no-untyped-def]
    x_rows,
    gate_rows,
    weight,
    bias,
    out,
    epsilon,
    x_stride,
    gate_stride,
    rows,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
):
    """ROWS whole rows; WIDTH of the COLUMNS exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    exists = column < WIDTH
    inside = (row < rows) & exists
    # All loads start before the first sum waits for any.
    x = tl.load(x_rows + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate = tl.load(gate_rows + row * gate_stride + column, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
    factor = tl.load(weight + column, mask=exists, other=0.0).to(tl.float32)
    offset = tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)

    mean = tl.sum(x, 1, keep_dims=True) / WIDTH
    centred = tl.where(exists, x - mean, 0.0)
    variance = tl.sum(centred * centred, 1, keep_dims=True) / WIDTH
    result = centred * tl.rsqrt(variance + epsilon) * factor + offset
    if GATED:
        result *= gate * tl.sigmoid(gate)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _silu(  # type: ignore[no-untyped-def]
    x_rows, x_stride, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < WIDTH)
    at = x_rows + row * x_stride + column
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (x * tl.sigmoid(x)).to(x_rows.dtype.element_ty), mask=inside)
