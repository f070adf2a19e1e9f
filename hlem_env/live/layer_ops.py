"""What a layer does to each row by itself: layer norm, the gate, and SiLU.

PyTorch's functions define the results, on any device; rows in bfloat16 on a CUDA device take kernels
that read and write each value once. No call waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

KERNEL_WIDTH = 1024
"""Widest row that the norm's kernel takes: it holds whole rows in the registers of one warp."""


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, gate: Tensor | None = None
) -> Tensor:
    """`LN(x) * weight + bias`, times `silu(gate)` where there is a gate: [N, width], contiguous.

    Args:
        x: [N, width]; rows may be strided.
        weight: [width].
        bias: [width].
        epsilon: added to the variance.
        gate: [N, width], before its activation; rows may be strided.

    Raises
    ------
        RuntimeError: PyTorch's, shapes, dtypes or devices do not fit together.
    """
    width = x.shape[1:]
    rows = (x,) if gate is None else (x, gate)
    fits = weight.shape == width and bias.shape == width and width[0] <= KERNEL_WIDTH
    if fits and _has_kernel(*rows):
        from hlem_env.live.kernels import layer_triton

        return layer_triton.layer_norm(x, weight, bias, epsilon, gate)
    normed = functional.layer_norm(x, width, weight, bias, epsilon)
    return normed if gate is None else normed.mul_(functional.silu(gate))


def silu_(x: Tensor) -> None:
    """`x / (1 + exp(-x))` in place of x, [N, width], whose rows may be strided."""
    if _has_kernel(x):
        from hlem_env.live.kernels import layer_triton

        layer_triton.silu_(x)
    else:
        functional.silu(x, inplace=True)


def _has_kernel(*rows: Tensor) -> bool:
    """Whether a kernel takes these together; what does not fit is left for PyTorch to refuse."""
    shape = rows[0].shape
    return shape[0] > 0 and all(
        x.is_cuda and x.dtype == torch.bfloat16 and x.shape == shape and x.stride(1) == 1
        for x in rows
    )
