"""Times the pool on the host: pages that change owners, and moves of a tenth of the pool.

    python -m eval.bench_pool --json runs/bench/pool.json

The pool has 8,192 pages of 2 MiB, on the GPU where there is one. Everything timed is bookkeeping on
the host, so the memory is reserved but, on a CPU, never touched; on a GPU any wait for the device
is an error. The embedding side of the moves is a list of pages without rows: what an embedding cache
does to empty its pages comes on top. The KV cache is real and full before every move.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.eviction.policies import make_policy
from hlem_env.live.kv_cache import KvCache, KvLayout
from hlem_env.live.partition import Partition
from hlem_env.live.pool import Owner, Pool
from hlem_env.machine import command, machine, write_result

PAGE_US = 1.0
"""A page changes owners in at most so long."""
MOVE_MS = 1.0
"""A tenth of the pool changes hands in at most so long."""
SINGLE = 1000
"""Pages allocated one by one between two looks at the clock."""
HISTORY_TOKENS = {"long": 12_000, "one page": 128}
"""Entries that fill the KV cache: 71 pages at six layers, and one page."""
LOW_CENTI, HIGH_CENTI = 50, 60


@dataclass
class Args:
    """Times alloc_page, free_page, their bulk forms and moves of 10 % of the pool."""

    json: Path | None = None
    """file for the figures"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """of the pool"""
    pages: int = 8192
    """in the pool, of 2 MiB each"""
    repeats: int = 200
    """timed rounds of page calls"""
    moves: int = 40
    """timed moves in each direction, for each size of entries and each policy"""

    def __post_init__(self) -> None:
        require(self.pages >= 1000, "pages", self.pages, "1,000 or more")
        require(self.repeats >= 1, "repeats", self.repeats, "1 or more")
        require(self.moves >= 1, "moves", self.moves, "1 or more")


class PageList:
    """An embedding side that is nothing but the list of its pages."""

    def __init__(self) -> None:
        self.pages: NDArray[np.int64] = np.empty(0, np.int64)
        self.shrink_evictions = 0

    def grow(self, pages: NDArray[np.int64]) -> None:
        """Append them."""
        self.pages = np.concatenate((self.pages, pages))

    def shrink(self, n: int) -> NDArray[np.int64]:
        """The last n."""
        kept, given = np.split(self.pages, [self.pages.size - n])
        self.pages = kept
        return given


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    unit: str
    bar: float
    times: NDArray[np.float64]
    """[n], in `unit`."""

    def to_json(self) -> dict[str, object]:
        """Median, P99, maximum, the bar, and whether P99 is within it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "samples": self.times.size,
            "median": round(float(np.median(self.times)), 4),
            "p99": round(float(np.percentile(self.times, 99)), 4),
            "max": round(float(self.times.max()), 4),
            "bar": self.bar,
            "met": bool(np.percentile(self.times, 99) <= self.bar),
        }


def main(args: Args) -> int:
    """Run the benchmark, print and write its figures; 1 if a bar is missed."""
    layout = KvLayout(layers=6, heads=8, head_dim=64)
    pool = Pool(args.pages * 2 * 2**20, device=args.device)
    with quiet(pool.device):
        figures = time_pages(pool, args.repeats)
        for policy in ("lru", "scan_resistant"):
            for size, tokens in HISTORY_TOKENS.items():
                figures += time_moves(pool, layout, policy, size, tokens, args.moves)

    here, lines = machine(), [figure.to_json() for figure in figures]
    where = torch.cuda.get_device_name(pool.device) if pool.device.type == "cuda" else "CPU memory"
    print(f"{here['cpu']}, one thread; {pool.pages:,} pages of 2 MiB in {where}")
    print(f"{'on the host':<62}{'median':>9}{'p99':>9}{'max':>9}{'bar':>7}  p99 meets it")
    for line in lines:
        label = f"{line['name']}, {line['unit']}"
        cells = "".join(f"{line[key]:>9.3f}" for key in ("median", "p99", "max"))
        print(f"{label:<62}{cells}{line['bar']:>7.1f}  {'yes' if line['met'] else 'NO'}")
    if args.json is not None:
        payload = {"device": where, "pages": pool.pages, "page_bytes": pool.page_bytes}
        write_result(args.json, command("eval.bench_pool"), {**payload, "figures": lines})
    return 0 if all(line["met"] for line in lines) else 1


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """No collection of garbage in a timed call; on a GPU, an error on any wait for it."""
    gc.collect()
    gc.disable()
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    try:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)
        gc.enable()


def time_pages(pool: Pool, repeats: int) -> list[Figure]:
    """Microseconds a page of the pool's calls, one by one and many at a time."""
    clock = time.perf_counter
    many = pool.pages // 10
    times = np.zeros((4, repeats + 1))
    held = [0] * SINGLE
    for i in range(repeats + 1):
        t0 = clock()
        for k in range(SINGLE):
            held[k] = pool.alloc_page(Owner.KV)
        t1 = clock()
        for page in held:
            pool.free_page(page)
        t2 = clock()
        pages = pool.alloc_pages(many, Owner.KV)
        t3 = clock()
        pool.free_pages(pages)
        times[:, i] = (
            (t1 - t0) / SINGLE,
            (t2 - t1) / SINGLE,
            (t3 - t2) / many,
            (clock() - t3) / many,
        )
    names = (
        "alloc_page",
        "free_page",
        f"alloc_pages, {many} at a time, a page",
        f"free_pages, {many} at a time, a page",
    )
    # The first round warms up.
    return [Figure(n, "us", PAGE_US, 1e6 * t[1:]) for n, t in zip(names, times, strict=True)]


def time_moves(
    pool: Pool, layout: KvLayout, policy: str, size: str, tokens: int, moves: int
) -> list[Figure]:
    """Milliseconds of a move of 10 % of the pool, up and down, the KV cache full before each."""
    kv = KvCache(pool, layout, make_policy(policy))
    partition = Partition(pool, PageList(), kv)
    partition.move(LOW_CENTI)
    fill = filler(kv, tokens)
    up, down = np.zeros(moves + 1), np.zeros(moves + 1)
    for i in range(moves + 1):
        fill()
        up[i] = timed(lambda: partition.move(HIGH_CENTI))
        fill()
        down[i] = timed(lambda: partition.move(LOW_CENTI))
    partition.move(0)
    kv.resize(0)
    entries = f"{size} entries, {policy}"
    return [
        Figure(f"move up 10 %, KV full of {entries}", "ms", MOVE_MS, 1e3 * up[1:]),
        Figure(f"move down 10 %, KV full of {entries}", "ms", MOVE_MS, 1e3 * down[1:]),
    ]


def filler(kv: KvCache, tokens: int) -> Callable[[], None]:
    """A function that fills the KV cache with users of so many tokens, new ones each time."""
    pages = int(kv.layout.pages(np.array([tokens]), kv.blocks_per_page)[0])
    first, now = 0, 0.0

    def fill() -> None:
        nonlocal first, now
        while (n := min((kv.capacity_pages - kv.used_pages) // pages, 64)) > 0:
            users = np.arange(first, first + n)
            first, now = first + n, now + 1.0
            length = np.full(n, tokens)
            kv.commit(kv.begin(users, length, length, users, now))
        assert kv.capacity_pages - kv.used_pages < pages

    return fill


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


if __name__ == "__main__":
    run_command("eval.bench_pool", main, Args)
