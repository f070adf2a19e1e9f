"""Times HSTU's attention as the node calls it, beside published figures, and checks its results.

    python -m eval.bench_attention --json docs/results/bench_attention.json

Full: causal, bf16, all sequences of the same length; FLOPs are counted as B 2 H S^2 D, as others do.
Cached: one request of 200 new history tokens and 100 candidates against history in randomly chosen
pages of a pool, six layers one after the other so that no layer finds its pages in the L2 cache; time
is of one layer. "Replayed" is from a CUDA graph; "called" is from Python, whose launches may take
longer than the device does.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hlem_env.command_line import run_command
from hlem_env.live.attention import PagedKv, append_history, hstu_attention
from hlem_env.live.kernels import attention_reference
from hlem_env.machine import command, write_result

SCALING_SEQLEN = 16_384
TOLERANCE = 5e-3
"""Relative error, Frobenius norm, against the reference in float32."""
FULL = (
    (4, 64, 32, 2048),
    (4, 64, 32, 4096),
    (4, 64, 32, 8192),
    (4, 128, 32, 2048),
    (4, 128, 32, 4096),
    (4, 128, 32, 8192),
    (8, 64, 1, 15_000),
)
"""heads, head_dim, sequences, tokens of each."""
CUTLASS_MS = {
    (4, 64, 2048): 0.206,
    (4, 64, 4096): 0.661,
    (4, 64, 8192): 2.34,
    (4, 128, 2048): 0.301,
    (4, 128, 4096): 1.04,
    (4, 128, 8192): 4.19,
}
"""Published for NVIDIA's CUTLASS kernels on one H100, B 32."""
META_TFLOPS = {(4, 64, 4096): 294, (4, 128, 4096): 392}
"""Meta's Triton kernel, measured on one H100, B 32."""
META_CACHED_MS = {15_000: 0.145}
"""Meta's Triton kernel, measured on one H100, on contiguous memory."""
CACHED = (5_000, 8_000, 10_000, 15_000)
NEW_HISTORY, CANDIDATES = 200, 100
HEADS, HEAD_DIM, LAYERS, BLOCK_TOKENS, BLOCKS_PER_PAGE = 8, 64, 6, 128, 8
BARS_TFLOPS = {(4, 64, 4096): 450, (4, 128, 4096): 500}
BAR_CACHED_MS = {15_000: 0.06}


@dataclass
class Args:
    """Times HSTU's attention on this machine's CUDA device, and checks its results."""

    json: Path | None = None
    """file for the figures"""
    seed: int = 0
    """seed of the inputs"""


def main(args: Args) -> int:
    """Run the benchmark, print and write its figures; 1 if a result is wrong or a bar is missed."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_attention times CUDA kernels, and torch finds no CUDA device")
    generator = torch.Generator("cuda").manual_seed(args.seed)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, bf16\n")
    print(f"{'full, causal':<26}{'ms':>8}{'TFLOP/s':>9}{'CUTLASS':>9}{'Meta':>7}{'error':>9}")
    full = [time_full(*sizes, generator) for sizes in FULL]
    for row in full:
        label = f"{row['heads']} x {row['head_dim']}, B {row['sequences']}, S {row['tokens']}"
        print(
            f"{label:<26}{row['ms']:>8.3f}{row['tflops']:>9.0f}{row['cutlass_tflops'] or '':>9}"
            f"{row['meta_tflops'] or '':>7}{row['error']:>9.4f}  {verdict(row)}"
        )
    title = f"{NEW_HISTORY + CANDIDATES} new tokens, cached"
    print(f"\n{title:<26}{'replayed, ms':>13}{'called, ms':>12}{'Meta':>7}{'error':>9}")
    cached = [time_cached(tokens, generator) for tokens in CACHED]
    for row in cached:
        print(
            f"{row['cached_tokens']:<26,}{row['replayed_ms']:>13.4f}{row['called_ms']:>12.4f}"
            f"{row['meta_ms'] or '':>7}{row['error']:>9.4f}  {verdict(row)}"
        )
    if args.json is not None:
        payload: dict[str, Any] = {
            "gpu": gpu,
            "dtype": "bfloat16",
            "flops": "B 2 H S^2 D",
            "tolerance": TOLERANCE,
            "new_history": NEW_HISTORY,
            "candidates": CANDIDATES,
            "heads_cached": HEADS,
            "head_dim_cached": HEAD_DIM,
            "full": full,
            "cached": cached,
        }
        write_result(args.json, command("eval.bench_attention"), payload)
    rows = full + cached
    return 0 if all(row["error"] < TOLERANCE and row["met"] is not False for row in rows) else 1


def verdict(row: dict[str, Any]) -> str:
    """What a row says of its bar and its result."""
    bar = {True: f"bar {row['bar']}: met", False: f"bar {row['bar']}: missed", None: ""}[row["met"]]
    return bar if row["error"] < TOLERANCE else f"WRONG RESULT {bar}"


def time_full(
    heads: int, head_dim: int, sequences: int, tokens: int, generator: torch.Generator
) -> dict[str, Any]:
    """One row of the first table; the first and the last sequence are checked."""
    q, k, v = (random_rows(sequences * tokens, heads, head_dim, generator) for _ in range(3))
    offsets = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * tokens
    candidates = torch.zeros(sequences, device="cuda", dtype=torch.int32)
    attend = functools.partial(
        hstu_attention,
        q,
        k,
        v,
        offsets,
        candidates,
        scaling_seqlen=SCALING_SEQLEN,
        max_new=tokens,
    )
    result, errors = attend(), []
    for start in (0, (sequences - 1) * tokens):
        rows = slice(start, start + tokens)
        expected = attention_reference.attend(
            q[rows].float(),
            k[rows].float(),
            v[rows].float(),
            offsets[:2],
            candidates[:1],
            SCALING_SEQLEN,
            head_dim**-0.5,
            None,
        )
        errors.append(relative_error(result[rows], expected))
    ms = median_ms(attend)
    flops = sequences * 2 * heads * tokens**2 * head_dim
    key = (heads, head_dim, tokens)
    bar = BARS_TFLOPS.get(key)
    tflops = flops / ms / 1e9
    return {
        "heads": heads,
        "head_dim": head_dim,
        "sequences": sequences,
        "tokens": tokens,
        "ms": round(ms, 4),
        "tflops": round(tflops, 1),
        "cutlass_ms": CUTLASS_MS.get(key),
        "cutlass_tflops": round(flops / CUTLASS_MS[key] / 1e9) if key in CUTLASS_MS else None,
        "meta_tflops": META_TFLOPS.get(key),
        "error": round(max(errors), 5),
        "bar": bar,
        "met": None if bar is None else tflops >= bar,
    }


def time_cached(cached_tokens: int, generator: torch.Generator) -> dict[str, Any]:
    """One row of the second table; the first layer is checked."""
    new = NEW_HISTORY + CANDIDATES
    offsets = torch.tensor([0, new], device="cuda", dtype=torch.int32)
    candidates = torch.tensor([CANDIDATES], device="cuda", dtype=torch.int32)
    cache = fill_pages(cached_tokens, generator)
    q, k, v = (random_rows(new, HEADS, HEAD_DIM, generator) for _ in range(3))

    def layer(index: int) -> Tensor:
        return hstu_attention(
            q,
            k,
            v,
            offsets,
            candidates,
            scaling_seqlen=SCALING_SEQLEN,
            cache=cache._replace(layer=index),
            max_new=new,
        )

    def layers() -> None:
        for index in range(LAYERS):
            layer(index)

    in_float32 = cache._replace(blocks=cache.blocks.float())
    expected = attention_reference.attend(
        q.float(),
        k.float(),
        v.float(),
        offsets,
        candidates,
        SCALING_SEQLEN,
        HEAD_DIM**-0.5,
        in_float32,
    )
    error = relative_error(layer(0), expected)
    called_ms = median_ms(layers) / LAYERS
    replayed_ms = median_ms(captured(layers).replay) / LAYERS
    bar = BAR_CACHED_MS.get(cached_tokens)
    return {
        "cached_tokens": cached_tokens,
        "replayed_ms": round(replayed_ms, 4),
        "called_ms": round(called_ms, 4),
        "meta_ms": META_CACHED_MS.get(cached_tokens),
        "error": round(error, 5),
        "bar": bar,
        "met": None if bar is None else replayed_ms <= bar,
        "met_called": None if bar is None else called_ms <= bar,
    }


def fill_pages(tokens: int, generator: torch.Generator) -> PagedKv:
    """A pool of twice the pages that the history needs, in random order; NaN where nothing is."""
    chunks = -(-(tokens + NEW_HISTORY) // BLOCK_TOKENS)
    pages = -(-chunks * LAYERS // BLOCKS_PER_PAGE)
    order = torch.randperm(2 * pages, generator=generator, device="cuda")
    table = order[:pages].to(torch.int32)[None]
    shape = (2 * pages * BLOCKS_PER_PAGE, 2, BLOCK_TOKENS, HEADS, HEAD_DIM)
    blocks = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    cache = PagedKv(blocks, table, none, 0, LAYERS, BLOCKS_PER_PAGE)
    offsets = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    for layer in range(LAYERS):
        k, v = (random_rows(tokens, HEADS, HEAD_DIM, generator) for _ in range(2))
        append_history(k, v, offsets, none, cache._replace(layer=layer))
    return cache._replace(cached=torch.full_like(none, tokens))


def random_rows(rows: int, heads: int, head_dim: int, generator: torch.Generator) -> Tensor:
    """Standard normal, bf16: [rows, heads, head_dim]."""
    shape = (rows, heads, head_dim)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`; NaN counts as 1."""
    error = float((actual.float() - expected).norm() / expected.norm())
    return error if error == error else 1.0


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def median_ms(call: Callable[[], object], repeats: int = 30) -> float:
    """Milliseconds of one call, by events around it, after the L2 cache was overwritten."""
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.Event("cuda", enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        stop.record()
        times.append((start, stop))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(stop) for start, stop in times))


if __name__ == "__main__":
    run_command("eval.bench_attention", main, Args)
