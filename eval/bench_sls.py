# mypy: disallow-untyped-calls=False
"""SparseLengthsSum over cached embedding tables, by the policy that evicts: latency, throughput, hits.

    python -m eval.bench_sls --json docs/results/bench_sls_cpu.json

A batch holds bags of rows of every table; each bag's rows are looked up in the cache and summed. All
policies serve the same batches, each batch in turn, so that other work on the machine meets all alike;
then each serves the last ones in a row, in four turns. Sums are compared with the tables' own.

Predictions are made beforehand, once for all policies, and not timed (`eval.sls_batches`); the time that
the predictor took for a batch is given beside. `true` knows the batch of each row's next request,
`learned` is the online predictor with the four features of rows, `timeless` the same without the time,
`crippled` is `learned` with a window of 100 samples instead of 20,000.

On CUDA the dense index and its kernels serve, and latency is the time until the sums are there, whatever
is sorted beside for later batches; that shows in the throughput. LRU and LARU with true predictions stand
there on the set-associative index, too, whose lookups are the reference in PyTorch. On a CPU missing
rows take as long as they would on an emulated link. FBGEMM's table-batched embedding stands beside
where it fits the installed torch, on CUDA with a cache of the same share, on a CPU over whole tables.

Where there is a CUDA device the sizes are larger by default.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.sls_batches import (
    SOURCES,
    Batch,
    Gaps,
    draw_batches,
    error,
    label_window,
    predictions,
    warm_batches,
)
from hlem_env.command_line import run_command
from hlem_env.errors import BackendError, require
from hlem_env.eviction.predictor import GivenGaps
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.fbgemm_ops import Tbe
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool
from hlem_env.machine import command, machine, write_result

GPU = torch.cuda.is_available()
DIM = 128
PAGE_BYTES = 2**16
TURNS = 4
PAPER = {
    "source": "arXiv 2509.20979, LARU over LRU, at most",
    "latency_lower_percent": {"AD-CTR-User": 19.5, "QB-video": 14.2},
    "throughput_higher_percent": {"AD-CTR-User": 24.2, "QB-video": 16.6},
}
Name = tuple[str, str | None]
"""A policy, and where its predictions come from."""
Serve = Callable[[Batch, float], Tensor]
"""Sums [bags of all tables, DIM] of a batch at a time."""


@dataclass
class Args:
    """SparseLengthsSum through the embedding cache under each eviction policy."""

    json: Path | None = None
    """file for the figures"""
    device: str = "cuda" if GPU else "cpu"
    """cpu or cuda"""
    batch: tuple[int, ...] = (128, 512, 4096) if GPU else (128, 512)
    """bags of a table in a batch"""
    pooling: int = 10
    """rows of a bag on average; lengths are uniform from 1 to twice that less 1"""
    tables: int = 8 if GPU else 4
    """tables"""
    rows: int = 1_000_000 if GPU else 50_000
    """rows of a table, 128 floats each"""
    zipf: float = 0.9
    """exponent of the rows' popularity"""
    drift: float = 0.01
    """share of the popularity's ranks that change hands with each batch"""
    share: float = 0.1
    """of the rows that fit in the cache"""
    warm: int = 30
    """batches before the timed ones, at least"""
    warm_keys: float = 5.0 if GPU else 0.0
    """keys before the timed ones for each row that fits in the cache, at least"""
    batches: int = 30 if GPU else 40
    """timed one at a time, and as many in a row"""
    link_gbps: float = 10.0
    """of the emulated link, on a CPU"""
    threads: int = 1
    """of PyTorch and FBGEMM on a CPU"""
    seed: int = 0
    """of keys and tables"""

    def __post_init__(self) -> None:
        require(self.device in ("cpu", "cuda"), "device", self.device, "cpu or cuda")
        require(bool(self.batch) and min(self.batch) >= 1, "batch", self.batch, "1 or more each")
        require(self.pooling >= 1, "pooling", self.pooling, "1 or more")
        require(0 <= self.drift <= 1, "drift", self.drift, "0 to 1")
        require(0 < self.share <= 1, "share", self.share, "above 0, at most 1")
        require(self.warm_keys >= 0, "warm_keys", self.warm_keys, "0 or more")
        require(self.threads >= 1, "threads", self.threads, "1 or more")
        require(self.batches >= 2, "batches", self.batches, "2 or more")


def main(args: Args) -> int:
    """Time, print, write; 1 if a sum was wrong."""
    if args.device == "cpu":
        torch.set_num_threads(args.threads)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    print(f"{gpu or machine()['cpu']}, torch {torch.__version__}")
    tables = HostTables(args.tables, args.rows, DIM, torch.float32, args.seed, args.device)
    with ThreadPoolExecutor() as threads:
        drawn = threads.map(lambda bags: draw_batches(args, bags), args.batch)
        batches = dict(zip(args.batch, drawn, strict=True))
    gaps, predictor_ms = predictions(args, batches)
    lines: list[dict[str, Any]] = []
    errors: dict[int, dict[str, float]] = {}
    for bags in args.batch:
        true, window, first = gaps[bags]["true"], label_window(args, bags), warm_batches(args, bags)
        errors[bags] = {
            source: round(error(gaps[bags][source], true, first, window), 3) for source in SOURCES
        }
        lines += measured(args, tables, bags, batches[bags], gaps[bags])
    show(lines, predictor_ms)
    for size, of_sources in errors.items():
        print(f"error of the log gaps, {size} bags a table: {of_sources}")
    if args.json is not None:
        arguments = {name: value for name, value in vars(args).items() if name != "json"}
        path = "kernels of the dense index, CUDA" if gpu else "PyTorch reference, CPU"
        payload = {
            "gpu": gpu,
            "path": path,
            "link": None if gpu else f"emulated, {args.link_gbps} GB/s",
            "arguments": arguments,
            "lines": lines,
            "warm_batches": {bags: warm_batches(args, bags) for bags in args.batch},
            "label_window": {bags: label_window(args, bags) for bags in args.batch},
            "predictor_ms_a_batch": predictor_ms,
            "error_of_log_gaps": errors,
            "paper": PAPER,
        }
        write_result(args.json, command("eval.bench_sls"), payload)
    return 0 if all(line["sums_right"] for line in lines) else 1


def measured(
    args: Args, tables: HostTables, bags: int, batches: list[Batch], gaps: dict[str, Gaps]
) -> list[dict[str, Any]]:
    """A line a policy and predictor, for one batch size."""
    caches = made_caches(args, tables, gaps)
    serves: dict[Name, Serve] = {name: through(cache) for name, cache in caches.items()}
    try:
        serves["FBGEMM", None] = beside(args, tables)
    except BackendError as error:
        print(f"FBGEMM not timed: {error}")
    right = dict.fromkeys(serves, True)
    latency: dict[Name, list[float]] = {name: [] for name in serves}
    warm = warm_batches(args, bags)
    for t, batch in enumerate(batches[:warm]):
        on_device = batch.to(args.device)
        for serve in serves.values():
            serve(on_device, float(t))
        for cache in caches.values():
            cache.wait_for_predictions()
    begun = {name: cache.counters() for name, cache in caches.items()}
    single = batches[: warm + args.batches]
    for t, batch in enumerate(single[warm:], warm):
        on_device = batch.to(args.device)
        expected = on_device.sums(tables.expected(on_device.keys))
        for name, serve in serves.items():
            milliseconds, out = timed(args, serve, on_device, float(t))
            right[name] &= bool(torch.allclose(out, expected, atol=1e-4))
            latency[name].append(milliseconds)
            if name in caches:
                caches[name].wait_for_predictions()
    hits = {name: cache.counters() - begun[name] for name, cache in caches.items()}
    last = [batch.to(args.device) for batch in batches[len(single) :]]
    seconds = in_a_row(args, serves, caches, last, float(len(single)))
    result = []
    for name in serves:
        line: dict[str, Any] = {
            "bags": bags,
            "policy": name[0],
            "predictions": name[1],
            "median_ms": round(float(np.median(latency[name])), 3),
            "p99_ms": round(float(np.percentile(latency[name], 99)), 3),
            "bags_per_s": round(len(last) * bags * args.tables / seconds[name]),
            "hit_rate": round(hits[name].hit / hits[name].looked_up, 4) if name in hits else None,
            "sums_right": right[name],
        }
        result.append(line)
        if name in caches:
            caches[name].close()
    against_lru(result)
    return result


def against_lru(lines: list[dict[str, Any]]) -> None:
    """Add to each line how much lower its latency, and higher its throughput, is than LRU's, percent."""
    lru = next(line for line in lines if line["policy"] == "lru")
    for line in lines:
        latency = 100.0 * (1.0 - line["median_ms"] / lru["median_ms"])
        throughput = 100.0 * (line["bags_per_s"] / lru["bags_per_s"] - 1.0)
        line["latency_lower_percent"] = round(latency, 1)
        line["throughput_higher_percent"] = round(throughput, 1)


def made_caches(
    args: Args, tables: HostTables, gaps: dict[str, Gaps]
) -> dict[Name, EmbeddingCache]:
    """A cache a policy and predictor; on CUDA also two whose lookups are the reference."""
    made: dict[Name, EmbeddingCache] = {("lru", None): cache_of(args, tables, "lru", None)}
    for source in SOURCES:
        for policy in ("hf", "fpb", "laru"):
            made[policy, source] = cache_of(args, tables, policy, gaps[source])
    if args.device == "cuda":
        index = "set_associative"
        made["lru, reference", None] = cache_of(args, tables, "lru", None, index)
        made["laru, reference", "true"] = cache_of(args, tables, "laru", gaps["true"], index)
    return made


def cache_of(
    args: Args, tables: HostTables, policy: str, gaps: Gaps | None, index: str = "dense"
) -> EmbeddingCache:
    """A cache of `share` of the rows; time is the batch's number."""
    pages = max(round(args.share * tables.n_rows * tables.row_bytes / PAGE_BYTES), 1)
    pool = Pool(pages * PAGE_BYTES, PAGE_BYTES, args.device)
    cache = EmbeddingCache(
        pool,
        tables,
        policy,
        index,
        emulated_link_gbps=args.link_gbps if args.device == "cpu" else None,
        predictor=None if gaps is None else GivenGaps(gaps),
    )
    cache.grow(pool.alloc_pages(pages, Owner.EMBEDDING))
    return cache


def through(cache: EmbeddingCache) -> Serve:
    """Sums through a cache."""
    return lambda batch, now: batch.sums(cache.lookup(batch.keys, now))


def beside(args: Args, tables: HostTables) -> Serve:
    """FBGEMM's sums, in the same order.

    Raises:
        BackendError: fbgemm-gpu does not fit the installed torch, or is missing.
    """
    placement = "cached" if args.device == "cuda" else "host"
    tbe = Tbe(tables, placement, args.share, pooled=True)

    def serve(batch: Batch, now: float) -> Tensor:
        out = tbe.lookup(batch.local, batch.offsets)
        return out.view(-1, tables.tables, DIM).transpose(0, 1).reshape(-1, DIM)

    return serve


def timed(args: Args, serve: Serve, batch: Batch, now: float) -> tuple[float, Tensor]:
    """Milliseconds from an idle device until the sums are there, and the sums."""
    wait_for(args)
    began = time.perf_counter()
    out = serve(batch, now)
    if args.device == "cuda":
        torch.cuda.current_stream().synchronize()
    return (time.perf_counter() - began) * 1e3, out


def in_a_row(
    args: Args,
    serves: dict[Name, Serve],
    caches: dict[Name, EmbeddingCache],
    batches: list[Batch],
    now: float,
) -> dict[Name, float]:
    """Seconds for all batches, in turns of a few; a ranked cache may be behind with its predictions."""
    seconds = dict.fromkeys(serves, 0.0)
    few = -(-len(batches) // TURNS)
    for first in range(0, len(batches), few):
        for name, serve in serves.items():
            wait_for(args)
            began = time.perf_counter()
            for i, batch in enumerate(batches[first : first + few], first):
                serve(batch, now + i)
            wait_for(args)
            seconds[name] += time.perf_counter() - began
            if name in caches:
                caches[name].wait_for_predictions()
    return seconds


def wait_for(args: Args) -> None:
    """Until the device is idle."""
    if args.device == "cuda":
        torch.cuda.synchronize()


def show(lines: list[dict[str, Any]], predictor_ms: dict[int, dict[str, float]]) -> None:
    """The table."""
    print(f"{'bags':>5} {'policy':<20}{'predictions':<13}{'hits':>7}{'median ms':>11}{'P99':>9}")
    print(f"{'':>5} {'bags/s; latency lower and throughput higher than LRU, percent':<60}")
    for line in lines:
        hits = "" if line["hit_rate"] is None else f"{line['hit_rate']:.3f}"
        print(
            f"{line['bags']:>5} {line['policy']:<20}{line['predictions'] or '':<13}{hits:>7}"
            f"{line['median_ms']:>11.2f}{line['p99_ms']:>9.2f}{line['bags_per_s']:>10,}"
            f"{line['latency_lower_percent']:>8.1f}{line['throughput_higher_percent']:>8.1f}"
            f"{'' if line['sums_right'] else '  SUMS DIFFER'}"
        )
    for bags, times in predictor_ms.items():
        print(f"predictor, {bags} bags a table: {times} ms a batch, not in the above")
    print(f"{PAPER['source']}: latency lower {PAPER['latency_lower_percent']} percent, ", end="")
    print(f"throughput higher {PAPER['throughput_higher_percent']} percent")


if __name__ == "__main__":
    run_command("eval.bench_sls", main, Args)
