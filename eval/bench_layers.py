"""Times the parts of one HSTU layer, ours beside PyTorch's, and checks their results.

    python -m eval.bench_layers --json docs/results/bench_layers.json

Sizes are the presets' of a GPU, bf16. A time is of one call among many in a CUDA graph, as the node
replays them: inputs are where the call before left them, small ones in the L2 cache. PyTorch's form
of a layer is the one that its own kernels serve best: SiLU of the whole projection, then a norm and a
product. Both take our attention; nothing is cached, and no K and V are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from eval.bench_attention import captured, median_ms, relative_error
from hlem_env.command_line import run_command
from hlem_env.live.attention import hstu_attention
from hlem_env.live.hstu import Hstu, HstuBatch, HstuConfig
from hlem_env.live.layer_ops import layer_norm, silu_
from hlem_env.machine import command, write_result

TOKENS = (128, 1024, 10_112)
CANDIDATES = 100
CONFIG = HstuConfig(layers=1)
CALLS = 20
"""Of one graph."""
TOLERANCE = 5e-3
"""Relative error, Frobenius norm, of a part against itself in float64."""
LAYER_TOLERANCE = 2e-2
"""Of a whole layer, as of a whole network."""


@dataclass
class Args:
    """Times the parts of a layer on this machine's CUDA device, and checks their results."""

    json: Path | None = None
    """file for the figures"""
    seed: int = 0
    """seed of the inputs and weights"""


class Inputs(NamedTuple):
    """What every part works on, and may overwrite."""

    layer: Any
    """Of `Hstu.layers`."""
    x: Tensor
    """[N, dim]."""
    projected: Tensor
    """[N, 4 * dim]."""
    batch: HstuBatch


class Part(NamedTuple):
    """One row of the table: the same work by two ways."""

    name: str
    ours: Callable[[Inputs], Tensor]
    pytorch: Callable[[Inputs], Tensor]
    tolerance: float = TOLERANCE


def main(args: Args) -> int:
    """Run the benchmark, print and write its figures; 1 if a result is wrong."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_layers times CUDA kernels, and torch finds no CUDA device")
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, bf16, dim {CONFIG.dim}, us a call\n")
    print(f"{'tokens':>7}  {'part':<12}{'ours':>9}{'PyTorch':>9}{'error':>10}{'PyTorch':>10}")
    rows = []
    for tokens in TOKENS:
        for part in PARTS:
            row = measure(part, tokens, args.seed)
            print(
                f"{tokens:>7,}  {part.name:<12}{row['us']:>9.2f}{row['pytorch_us']:>9.2f}"
                f"{row['error']:>10.5f}{row['pytorch_error']:>10.5f}"
                f"{'' if row['right'] else '  WRONG RESULT'}"
            )
            rows.append(row)
    if args.json is not None:
        payload = {
            "gpu": gpu,
            "dtype": "bfloat16",
            "dim": CONFIG.dim,
            "heads": CONFIG.heads,
            "head_dim": CONFIG.head_dim,
            "rows": rows,
        }
        write_result(args.json, command("eval.bench_layers"), payload)
    return 0 if all(row["right"] for row in rows) else 1


@torch.inference_mode()
def measure(part: Part, tokens: int, seed: int) -> dict[str, Any]:
    """A part at one size, both ways."""
    values: dict[str, Any] = {"tokens": tokens, "part": part.name, "tolerance": part.tolerance}
    for prefix, call in (("", part.ours), ("pytorch_", part.pytorch)):
        expected = call(inputs(tokens, seed, torch.float64))
        error = relative_error(call(inputs(tokens, seed, torch.bfloat16)), expected)
        del expected
        us = microseconds(call, inputs(tokens, seed, torch.bfloat16))
        values |= {f"{prefix}us": round(us, 2), f"{prefix}error": round(error, 5)}
    return values | {"right": values["error"] < part.tolerance}


def inputs(tokens: int, seed: int, dtype: torch.dtype) -> Inputs:
    """The same values, those of bfloat16, in either dtype."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, projected = (
        torch.randn(tokens, width, generator=generator, device="cuda").bfloat16().to(dtype)
        for width in (CONFIG.dim, 4 * CONFIG.dim)
    )
    batch = HstuBatch.build([tokens - CANDIDATES], [CANDIDATES], None, CONFIG, "cuda")
    return Inputs(_model(seed, dtype).layers[0], x, projected, batch)


@functools.cache
def _model(seed: int, dtype: torch.dtype) -> Hstu:
    return Hstu(CONFIG, seed, "cuda", torch.bfloat16).to(dtype)


def microseconds(call: Callable[[Inputs], Tensor], given: Inputs) -> float:
    """Of one call among those of a graph."""

    def calls() -> None:
        for _ in range(CALLS):
            call(given)

    return 1e3 * median_ms(captured(calls).replay) / CALLS


def _norm(i: Inputs) -> Tensor:
    return layer_norm(i.x, i.layer.norm_weight, i.layer.norm_bias, CONFIG.norm_epsilon)


def _pytorch_norm(i: Inputs) -> Tensor:
    weight, bias = i.layer.norm_weight, i.layer.norm_bias
    return functional.layer_norm(i.x, (CONFIG.dim,), weight, bias, CONFIG.norm_epsilon)


def _gated(i: Inputs) -> Tensor:
    weight, bias = i.layer.norm_weight, i.layer.norm_bias
    return layer_norm(i.x, weight, bias, CONFIG.norm_epsilon, i.projected[:, : CONFIG.dim])


def _pytorch_gated(i: Inputs) -> Tensor:
    """The gate has had its SiLU with the rest of the projection."""
    return _pytorch_norm(i).mul_(i.projected[:, : CONFIG.dim])


def _silu(i: Inputs) -> Tensor:
    """Of V, Q and K; the gate's is part of the row above."""
    rest = i.projected[:, CONFIG.dim :]
    silu_(rest)
    return rest


def _pytorch_silu(i: Inputs) -> Tensor:
    return functional.silu(i.projected, inplace=True)


def _project(i: Inputs) -> Tensor:
    return functional.linear(i.x, i.layer.uvqk)


def _output(i: Inputs) -> Tensor:
    return i.x.addmm_(_rows(i), i.layer.output.t())


def _pytorch_output(i: Inputs) -> Tensor:
    return torch.addmm(i.x, _rows(i), i.layer.output.t())


def _rows(i: Inputs) -> Tensor:
    """Some rows beside x."""
    return i.projected.view(-1, CONFIG.dim)[: len(i.x)]


def _layer(i: Inputs) -> Tensor:
    result: Tensor = i.layer(i.x, i.batch, None)
    return result


def _pytorch_layer(i: Inputs) -> Tensor:
    layer, rows = i.layer, len(i.x)
    projected = functional.silu(functional.linear(_pytorch_norm(i), layer.uvqk), inplace=True)
    u, v, q, k = projected.view(rows, 4, CONFIG.heads, CONFIG.head_dim).unbind(1)
    attended = hstu_attention(
        q,
        k,
        v,
        i.batch.offsets,
        i.batch.candidates,
        scaling_seqlen=CONFIG.scaling_seqlen,
        max_new=i.batch.max_new,
    )
    normed = functional.layer_norm(
        attended.flatten(1),
        (CONFIG.dim,),
        layer.attention_norm_weight,
        layer.attention_norm_bias,
        CONFIG.attention_norm_epsilon,
    )
    return torch.addmm(i.x, normed.mul_(u.flatten(1)), layer.output.t())


PARTS = (
    Part("norm", _norm, _pytorch_norm),
    Part("norm x gate", _gated, _pytorch_gated),
    Part("SiLU", _silu, _pytorch_silu),
    Part("projection", _project, _project),
    Part("output + x", _output, _pytorch_output),
    Part("layer", _layer, _pytorch_layer, LAYER_TOLERANCE),
)


if __name__ == "__main__":
    run_command("eval.bench_layers", main, Args)
