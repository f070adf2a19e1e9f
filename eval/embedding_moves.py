# mypy: disallow-untyped-calls=False
"""Refill of an embedding cache's new pages, and moves of the boundary: parts of `bench_embedding`."""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.device_timing import elapsed_ms, percentiles
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool
from hlem_env.live.refill import Refill, TokenBucket

PAGE_BYTES = 2 * 2**20
LINK_BYTES_PER_S = 50e9
"""For the token bucket: PCIe 5, sorted 1 KiB rows."""


def bench_refill(
    tables: HostTables, seed: int, refill_bytes: int = 3_200_000_000
) -> dict[str, Any]:
    """Scattered rows into new pages, and critical lookups beside it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    new_rows = refill_bytes // tables.row_bytes
    order = torch.randperm(tables.n_rows, device="cuda", generator=generator)
    result: dict[str, Any] = {"bytes": new_rows * tables.row_bytes}
    print(f"\nrefill of {result['bytes'] / 1e9:.1f} GB of scattered rows")
    for name, bucket, critical in (
        ("alone", None, False),
        ("unthrottled", None, True),
        ("throttled", TokenBucket(LINK_BYTES_PER_S, headroom=0.1), True),
    ):
        result[name] = refill_once(tables, order, new_rows, bucket, critical)
        print(f"{name:<12}", "  ".join(f"{k} {v}" for k, v in result[name].items()))
        gc.collect()
        torch.cuda.empty_cache()
    cases = [result[name] for name in ("alone", "unthrottled", "throttled")]
    result["values_right"] = all(case["values_right"] for case in cases)
    return result


def refill_once(
    tables: HostTables, order: Tensor, new_rows: int, bucket: TokenBucket | None, critical: bool
) -> dict[str, Any]:
    """Refill the first `new_rows` of the rows `order`.

    The lookups before and during it ask for 50,000 of the other rows, none of them resident. They
    insert what they miss, in the same new pages and at the expense of old rows there: `inserted_share`
    is the part of the refill's rows that found a free slot when they were published, and
    `resident_share` what is left of them in the end.
    """
    base_pages = 512
    new_pages = -(-new_rows // (PAGE_BYTES // tables.row_bytes))
    pool = Pool((base_pages + new_pages) * PAGE_BYTES, PAGE_BYTES, "cuda")
    cache = EmbeddingCache(pool, tables)
    cache.grow(pool.alloc_pages(base_pages, Owner.EMBEDDING))
    fresh = itertools.cycle(order[new_rows:].split(50_000))

    def look_up() -> object:
        return cache.lookup(next(fresh))

    for _ in range(16):  # fills the cache, compiles
        look_up()
    warming = Refill(cache)
    warming.insert(order[:1])
    drain(warming, None, [])
    before = [elapsed_ms(look_up) for _ in range(20)]
    refill = Refill(cache, bucket, chunk_rows=8192, buffers=4)
    cache.grow(pool.alloc_pages(new_pages, Owner.EMBEDDING))
    during: list[float] = []
    warmed = cache.counters().warmed
    torch.cuda.synchronize()
    began = time.perf_counter()
    refill.insert(order[:new_rows])
    drain(refill, look_up if critical else None, during)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 3),
        "refilled_gbps": round(refill.refill_bytes / seconds / 1e9, 1),
        "inserted_share": round((cache.counters().warmed - warmed) / new_rows, 5),
        "resident_share": round(cache.contains(order[:new_rows]).float().mean().item(), 5),
        "values_right": slots_right(cache),
        "lookup_before_ms": percentiles(before),
        "lookup_during_ms": percentiles(during),
        "lookups_during": len(during),
        "demand_gbps": None if bucket is None else round(bucket.demand_bytes_per_s / 1e9, 1),
    }


def drain(refill: Refill, lookup: Callable[[], object] | None, times_ms: list[float]) -> None:
    """Step until nothing is left, 10 s at most; with `lookup`, one lookup every 4 ms beside it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    running = False
    due = began = time.perf_counter()
    while not refill.idle and (now := time.perf_counter()) < began + 10.0:
        refill.step(now)
        if lookup is None:
            continue
        if running and end.query():
            times_ms.append(begin.elapsed_time(end))
            running = False
        if not running and now >= due:
            begin.record()
            lookup()
            end.record()
            running, due = True, now + 4e-3


def bench_moves(
    tables: HostTables, seed: int, pool_gib: int = 20, turns: int = 5
) -> dict[str, Any]:
    """Moves of 10 % of the pool: host time, device time on the side stream, no synchronisation.

    The cache is full before it shrinks. Medians of all turns but the first, which compiles.
    """
    pool = Pool(pool_gib * 2**30, PAGE_BYTES, "cuda")
    cache = EmbeddingCache(pool, tables)
    cache.grow(pool.alloc_pages(pool.pages * 6 // 10, Owner.EMBEDDING))
    generator = torch.Generator("cuda").manual_seed(seed)
    order = torch.randperm(tables.n_rows, device="cuda", generator=generator)
    for rows in order[: cache.capacity_rows].split(2**20):
        cache.warm(rows)
    n = pool.pages // 10
    result: dict[str, Any] = {"pool_gib": pool_gib, "pages": n, "resident": cache.resident_rows}
    print(f"\nmoves of {n} pages, 10 % of a pool of {pool_gib} GiB")
    recent = order[cache.capacity_rows : cache.capacity_rows + 100_000]
    times: dict[str, list[list[float]]] = {"shrink": [], "grow": []}
    kept = right = True
    others = itertools.cycle(order[cache.capacity_rows + len(recent) :].split(2**20))
    for _ in range(turns):
        while cache.resident_rows < cache.capacity_rows:
            cache.warm(next(others), evict=False)
        cache.lookup(recent)
        torch.cuda.synchronize()
        pages, *ms = time_move(cache, lambda: cache.shrink(n))
        times["shrink"].append(ms)
        pool.free_pages(pages)
        kept = kept and bool(cache.contains(recent).all())
        right = right and slots_right(cache)
        pages = pool.alloc_pages(n, Owner.EMBEDDING)
        _, *ms = time_move(cache, functools.partial(cache.grow, pages))
        times["grow"].append(ms)
    for name, pairs in times.items():
        host, side = np.array(pairs[1:]).T
        result[name] = {
            "host_ms": round(float(np.median(host)), 3),
            "host_ms_max": round(float(host.max()), 3),
            "side_stream_ms": round(float(np.median(side)), 3),
        }
        print(f"{name:<7}", result[name])
    result["shrink"] |= {"recent_kept": kept, "values_right": right}
    result["evicted_by_shrinking"] = cache.counters().evicted_by_shrinking
    return result


def time_move(cache: EmbeddingCache, move: Callable[[], Any]) -> tuple[Any, float, float]:
    """A move's result and its milliseconds, on the host and on the side stream.

    Where the host waits for the device, that is an error.
    """
    side = cache.side_stream
    assert side is not None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(side)
    torch.cuda.set_sync_debug_mode("error")
    began = time.perf_counter()
    moved = move()
    host_ms = (time.perf_counter() - began) * 1e3
    torch.cuda.set_sync_debug_mode("default")
    end.record(side)
    torch.cuda.synchronize()
    return moved, host_ms, float(begin.elapsed_time(end))


def slots_right(cache: EmbeddingCache) -> bool:
    """Whether every resident row has its values, and the index says where it is."""
    rows_of, slab = cache.state.row_of, cache.state.slab
    for first in range(0, len(rows_of), 2**19):
        rows = rows_of[first : first + 2**19]
        held = rows >= 0
        if not torch.equal(slab[first : first + 2**19][held], cache.tables.expected(rows[held])):
            return False
        slots = torch.nonzero(held)[:, 0] + first
        if not torch.equal(cache.state.index.find(rows[held]), slots):
            return False
    return True
