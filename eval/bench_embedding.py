# mypy: disallow-untyped-calls=False
"""Times the embedding cache beside FBGEMM's, its reads over the link, refill, and moves of the boundary.

    python -m eval.bench_embedding --json runs/bench/embedding.json

Needs a CUDA device; FBGEMM's rows are left out where fbgemm-gpu does not fit the installed torch.
Every timed batch has fresh keys, both caches hold the same bytes and see the same batches from cold,
and values are compared in the same run. Without CUDA the cache's reference is timed at a small size
over an emulated link.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.device_timing import elapsed_ms, percentiles
from eval.embedding_moves import PAGE_BYTES, bench_moves, bench_refill
from hlem_env.command_line import run_command
from hlem_env.errors import BackendError, require
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.fbgemm_ops import Tbe
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool
from hlem_env.machine import command, machine, write_result

BARS = {
    "speedup_cached_0.2": 2.0,
    "speedup_cached_0.5": 3.0,
    "speedup_device": 2.0,
    "gather_gbps": 45.0,
    "refill_s": 1.5,
    "move_host_ms": 1.0,
}
"""At least for speed-ups and the gather, at most for the others."""


@dataclass
class Args:
    """Times the embedding cache beside FBGEMM's cached table-batched embedding."""

    json: Path | None = None
    """file for the figures"""
    keys: int = 1_000_000
    """keys of a batch"""
    tables: int = 10
    """tables"""
    rows: int = 1_000_000
    """rows of a table"""
    dim: int = 256
    """fp16 values of a row, for the lookups"""
    zipf: float = 1.05
    """exponent of the popularity"""
    warm: int = 64
    """batches before the timed ones"""
    batches: int = 24
    """timed batches"""
    host_gib: float = 32.0
    """tables of 1 KiB rows, for the gather, refill and moves"""
    seed: int = 0
    """seed of keys and tables"""

    def __post_init__(self) -> None:
        require(
            self.keys % self.tables == 0, "keys", self.keys, f"a multiple of {self.tables} tables"
        )
        require(self.batches >= 4, "batches", self.batches, "4 or more")


def main(args: Args) -> int:
    """Run all parts, print and write the figures; 1 if a value was wrong."""
    if not torch.cuda.is_available():
        return main_cpu(args)
    payload: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "arguments": plain(args)}
    print(f"{payload['gpu']}, torch {torch.__version__}, {machine()['cores']} host cores")
    payload["lookup"] = bench_lookup(args)
    gc.collect()
    torch.cuda.empty_cache()
    rows = int(args.host_gib * 2**30) // 1024
    began = time.perf_counter()
    tables = HostTables(1, rows, 512, torch.float16, args.seed, "cuda")
    payload["host_tables"] = {
        "gib": args.host_gib,
        "set_up_s": round(time.perf_counter() - began, 1),
    }
    payload["copy_gbps"] = copy_gbps(tables)
    print(f"\ncopy of 1 GiB in one piece: {payload['copy_gbps']} GB/s")
    payload["gather"] = bench_gather(tables, args.seed)
    payload["refill"] = bench_refill(tables, args.seed)
    payload["moves"] = bench_moves(tables, args.seed)
    payload["bars"] = check_bars(payload)
    for name, bar in payload["bars"].items():
        print(f"{name:<24} {bar['value']!s:>10}  bar {bar['bar']:<6} {bar['result']}")
    if args.json is not None:
        write_result(args.json, command("eval.bench_embedding"), payload)
    return 0 if payload["lookup"]["values_equal"] and payload["refill"]["values_right"] else 1


def bench_lookup(args: Args) -> dict[str, Any]:
    """Batches of keys through ours and FBGEMM's, by the share of rows that is cached."""
    tables = HostTables(args.tables, args.rows, args.dim, torch.float16, args.seed, "cuda")
    *batches, fresh = zipf_batches(args, args.warm + 2 * args.batches + 1)
    result: dict[str, Any] = {"values_equal": True, "ours": {}, "fbgemm": {}}
    print(f"\nms for {args.keys:,} keys: median (p90) of single batches, mean of a row of them")
    for name, placement, share in (
        ("device", "device", 1.0),
        ("cached_0.5", "cached", 0.5),
        ("cached_0.2", "cached", 0.2),
        ("uncached", "mapped", 0.0),
    ):
        ours, figures = run_ours(args, tables, batches, fresh, share)
        result["ours"][name] = figures
        print(f"{name:<12} ours   {line(figures)}")
        few = figures["few_keys"]
        print(f"{'':<12} {few['keys']:,} keys: host {few['host_ms']}, in all {few['ms']} ms")
        try:
            theirs, figures = run_fbgemm(args, tables, batches, placement, share)
        except BackendError as error:
            print(f"{name:<12} FBGEMM not timed: {error}")
            continue
        result["fbgemm"][name] = figures
        expected = tables.expected(batches[-1])
        equal = torch.equal(ours, expected) and torch.equal(theirs, expected)
        result["values_equal"] = result["values_equal"] and equal
        ratio = figures["median_ms"] / result["ours"][name]["median_ms"]
        in_row = figures["in_a_row_ms"] / result["ours"][name]["in_a_row_ms"]
        result["ours"][name]["speedup"] = round(ratio, 2)
        result["ours"][name]["speedup_in_a_row"] = round(in_row, 2)
        print(
            f"{'':<12} FBGEMM {line(figures)}   ours {ratio:.2f} times as fast ({in_row:.2f} in a "
            f"row), values {'equal' if equal else 'DIFFER'}"
        )
        del theirs, expected
        gc.collect()
        torch.cuda.empty_cache()
    return result


def run_ours(
    args: Args, tables: HostTables, batches: list[Tensor], fresh: Tensor, share: float
) -> tuple[Tensor, dict[str, Any]]:
    """The last batch's rows, and the figures."""
    rows_per_page = PAGE_BYTES // tables.row_bytes
    pages = max(-(-int(tables.n_rows * share) // rows_per_page), 1)
    pool = Pool(pages * PAGE_BYTES, PAGE_BYTES, "cuda")
    cache = EmbeddingCache(pool, tables)
    cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
    if share == 1.0:
        cache.warm(torch.arange(tables.n_rows, device="cuda"))
    begun = [cache.counters()]

    def timed_from_here() -> None:
        begun[0] = cache.counters()

    out, figures = time_batches(args, cache.lookup, batches, timed_from_here)
    counters = cache.counters() - begun[0]
    n = 2 * args.batches
    figures |= {
        "hit_rate": round(counters.hit / counters.looked_up, 4),
        "unique_misses": counters.unique_misses // n,
        "inserted": counters.inserted // n,
        "inserted_share": round(counters.inserted / max(counters.unique_misses, 1), 4),
        "capacity_rows": cache.capacity_rows,
        "few_keys": few_keys(cache, fresh),
    }
    return out, figures


def few_keys(cache: EmbeddingCache, keys: Tensor, size: int = 1000) -> dict[str, Any]:
    """Lookups of 1,000 keys, one at a time: time of the call on the host, and until the rows are there."""
    host_ms, ms = [], []
    for some in keys[torch.randperm(len(keys), device="cuda")][: 60 * size].split(size):
        torch.cuda.synchronize()
        began = time.perf_counter()
        cache.lookup(some)
        host_ms.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        ms.append((time.perf_counter() - began) * 1e3)
    return {"keys": size, "host_ms": percentiles(host_ms[10:]), "ms": percentiles(ms[10:])}


def run_fbgemm(
    args: Args, tables: HostTables, batches: list[Tensor], placement: str, share: float
) -> tuple[Tensor, dict[str, Any]]:
    """The same for FBGEMM."""
    tbe = Tbe(tables, placement, share)
    first = torch.arange(args.tables, device="cuda").repeat_interleave(args.keys // args.tables)
    local = [batch - first * args.rows for batch in batches]
    offsets = torch.arange(args.keys + 1, device="cuda")
    return time_batches(args, lambda keys: tbe.lookup(keys, offsets), local, lambda: None)


def time_batches(
    args: Args,
    lookup: Callable[[Tensor], Tensor],
    batches: list[Tensor],
    timed_from_here: Callable[[], None],
) -> tuple[Tensor, dict[str, Any]]:
    """Warm, then batches one at a time, then as many in a row; each batch once."""
    for keys in batches[: args.warm]:
        lookup(keys)
    timed_from_here()
    times = [elapsed_ms(lookup, keys) for keys in batches[args.warm : args.warm + args.batches]]
    out = torch.empty(0)

    def row_of_batches() -> None:
        nonlocal out
        for keys in batches[args.warm + args.batches :]:
            out = lookup(keys)

    in_a_row = elapsed_ms(row_of_batches) / args.batches
    return out, {
        "median_ms": round(float(np.median(times)), 3),
        "p90_ms": round(float(np.percentile(times, 90)), 3),
        "in_a_row_ms": round(in_a_row, 3),
    }


def bench_gather(tables: HostTables, seed: int) -> list[dict[str, Any]]:
    """Zero-copy reads of 150,000 rows of 1 KiB, by the size of the tables and the order of the rows."""
    from hlem_env.live.kernels.gather_triton import gather_rows

    print("\nGB/s of 150,000 rows of 1 KiB from host memory, and 50,000")
    generator = torch.Generator("cuda").manual_seed(seed)
    result = []
    for gib in (2.0, 16.0, 32.0):
        last = min(int(gib * 2**20), tables.n_rows)
        for order in ("random", "sorted"):
            figures: dict[str, Any] = {"tables_gib": last / 2**20, "order": order}
            for n in (50_000, 150_000):
                times = []
                for _ in range(12):
                    rows = torch.randint(last, (n,), device="cuda", generator=generator)
                    rows = rows.sort().values if order == "sorted" else rows
                    out = torch.empty(n, tables.dim, dtype=tables.dtype, device="cuda")
                    times.append(elapsed_ms(gather_rows, tables.rows, rows, out))
                figures[f"gbps_{n}"] = round(n * tables.row_bytes / np.median(times[2:]) / 1e6, 1)
                figures["values_right"] = torch.equal(out, tables.expected(rows))
            result.append(figures)
            print("  ".join(f"{name} {value}" for name, value in figures.items()))
    return result


def copy_gbps(tables: HostTables) -> float:
    """What the link of this machine carries at best: a piece of the tables copied as it lies, GB/s."""
    piece = tables.rows[: 2**30 // tables.row_bytes]
    out = torch.empty_like(piece, device="cuda")
    times = [elapsed_ms(lambda: out.copy_(piece, non_blocking=True)) for _ in range(6)]
    return round(piece.numel() * piece.itemsize / float(np.median(times[1:])) / 1e6, 1)


def zipf_batches(args: Args, n: int) -> list[Tensor]:
    """N batches of keys, int64 [keys] on the GPU, table after table; each table has its own order."""
    generator = torch.Generator("cuda").manual_seed(args.seed)
    rank = torch.arange(1, args.rows + 1, device="cuda", dtype=torch.float64)
    cumulative = rank.pow(-args.zipf).cumsum(0)
    cumulative /= cumulative[-1].clone()
    orders = torch.stack(
        [
            torch.randperm(args.rows, device="cuda", generator=generator) + t * args.rows
            for t in range(args.tables)
        ]
    )
    shape = args.tables, args.keys // args.tables
    batches = []
    for _ in range(n):
        drawn = torch.rand(shape, device="cuda", generator=generator, dtype=torch.float64)
        ranks = torch.searchsorted(cumulative, drawn).clamp(max=args.rows - 1)
        batches.append(orders.gather(1, ranks).reshape(-1))
    return batches


def check_bars(payload: dict[str, Any]) -> dict[str, Any]:
    """Each bar with its value; speed-ups only where FBGEMM ran."""
    values: dict[str, float | None] = {
        f"speedup_{name}": payload["lookup"]["ours"][name].get("speedup")
        for name in ("cached_0.2", "cached_0.5", "device")
    }
    values["gather_gbps"] = payload["gather"][-1]["gbps_150000"]
    values["refill_s"] = payload["refill"]["alone"]["seconds"]
    values["move_host_ms"] = max(payload["moves"][name]["host_ms"] for name in ("shrink", "grow"))
    at_most = ("refill_s", "move_host_ms")
    result = {}
    for name, bar in BARS.items():
        value = values[name]
        if value is None:
            met = "not measured"
        else:
            met = "met" if (value <= bar if name in at_most else value >= bar) else "missed"
        result[name] = {"value": value, "bar": bar, "result": met}
    return result


def main_cpu(args: Args) -> int:
    """The reference at a small size; its link is emulated, so only the shape means something."""
    print("no CUDA device: CPU, emulated link of 10 GB/s, small tables")
    tables = HostTables(4, 50_000, 64, torch.float16, args.seed)
    payload: dict[str, Any] = {"gpu": None, "link": "CPU, emulated link", "milliseconds": {}}
    rng = np.random.default_rng(args.seed)
    for share in (1.0, 0.5, 0.2):
        pages = int(tables.n_rows * share * tables.row_bytes / 2**16)
        pool = Pool(pages * 2**16, 2**16)
        cache = EmbeddingCache(pool, tables, emulated_link_gbps=10.0)
        cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
        times = []
        for _ in range(args.batches):
            keys = torch.from_numpy((rng.random(20_000) ** 4 * tables.n_rows).astype(np.int64))
            began = time.perf_counter()
            out = cache.lookup(keys)
            times.append((time.perf_counter() - began) * 1e3)
            if not torch.equal(out, tables.rows[keys]):
                return 1
        payload["milliseconds"][str(share)] = percentiles(times)
        print(f"CPU, emulated link: {share:.0%} cached, 20,000 keys: {percentiles(times)} ms")
    if args.json is not None:
        write_result(args.json, command("eval.bench_embedding"), payload)
    return 0


def line(figures: dict[str, Any]) -> str:
    """One line of figures."""
    extra = "".join(
        f"  {name} {figures[name]}"
        for name in ("hit_rate", "unique_misses", "inserted_share")
        if name in figures
    )
    return f"{figures['median_ms']:>7.3f} ({figures['p90_ms']:.3f})  {figures['in_a_row_ms']:.3f}{extra}"


def plain(args: Args) -> dict[str, Any]:
    """The arguments as JSON values."""
    return {name: value for name, value in vars(args).items() if name != "json"}


if __name__ == "__main__":
    run_command("eval.bench_embedding", main, Args)
