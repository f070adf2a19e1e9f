# mypy: disallow-untyped-calls=False
"""Reads of rows over the link to host memory: by how thinly they are spread, and in which order.

    python -m eval.bench_link --json docs/results/bench_link_h200.json

Before the link is full, the time of a read goes with the stretches of memory that it touches more than with
its bytes, as if the translation of host addresses were the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from eval.device_timing import elapsed_ms
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.host_tables import HostTables
from hlem_env.machine import command, write_result

STRETCH_BYTES = 64 * 2**10
"""What one translation seems to cover."""


@dataclass
class Args:
    """Times reads of rows from host memory on this machine's CUDA device."""

    json: Path | None = None
    """file for the figures"""
    gib: float = 4.0
    """host memory that the rows are spread over"""
    dim: int = 128
    """of a row, in float32"""
    rows: tuple[int, ...] = (5_000, 20_000, 40_000, 75_000, 120_000, 300_000)
    """of a batch"""
    repeats: int = 9
    """batches of each kind, fresh rows in each"""
    seed: int = 0
    """of the rows"""

    def __post_init__(self) -> None:
        for name in ("gib", "dim", "repeats"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        require(all(n > 0 for n in self.rows), "rows", self.rows, "above 0")


def main(args: Args) -> int:
    """Measure, print, write; 1 if a row was wrong."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_link times reads by a CUDA device, and torch finds none")
    n_rows = int(args.gib * 2**30 / (4 * args.dim))
    require(
        max(args.rows) <= n_rows, "rows", max(args.rows), f"at most the {n_rows} in host memory"
    )
    tables = HostTables(1, n_rows, args.dim, torch.float32, args.seed, "cuda")
    lines = [measure(args, tables, n, order) for n in args.rows for order in ("sorted", "random")]
    gpu = torch.cuda.get_device_name()
    show(lines, f"{gpu}: rows of {tables.row_bytes} bytes from {args.gib:g} GiB of host memory")
    if args.json is not None:
        payload = {"gpu": gpu, "row_bytes": tables.row_bytes, "gib": args.gib, "lines": lines}
        write_result(args.json, command("eval.bench_link"), payload)
    return 0 if all(line["right"] for line in lines) else 1


def measure(args: Args, tables: HostTables, n: int, order: str) -> dict[str, Any]:
    """Batches of n distinct rows in one order."""
    from hlem_env.live.kernels.gather_triton import gather_rows

    times, right, stretches = [], True, []
    generator = torch.Generator("cuda").manual_seed(args.seed)
    out = torch.empty(n, args.dim, device="cuda")
    for _ in range(args.repeats + 1):
        rows = torch.randperm(tables.n_rows, generator=generator, device="cuda")[:n]
        if order == "sorted":
            rows = rows.sort().values
        out.fill_(torch.nan)
        times.append(elapsed_ms(lambda rows: gather_rows(tables.rows, rows, out), rows))
        right &= bool((out == tables.expected(rows)).all())
        stretches.append(len((rows * tables.row_bytes // STRETCH_BYTES).unique()))
    ms = float(np.median(times[1:]))  # the first compiles
    return {
        "rows": n,
        "order": order,
        "ms": round(ms, 4),
        "gbps": round(n * tables.row_bytes / ms * 1e-6, 2),
        "ns_per_row": round(1e6 * ms / n, 2),
        "stretches": round(float(np.mean(stretches))),
        "ns_per_stretch": round(1e6 * ms / float(np.mean(stretches)), 2),
        "right": right,
    }


def show(lines: list[dict[str, Any]], title: str) -> None:
    """The table."""
    table = Table(title=title, title_justify="left")
    names = ("rows", "order", "ms", "GB/s", "ns a row", "64 KiB touched", "ns for each", "right")
    for name in names:
        table.add_column(name, justify="left" if name == "order" else "right")
    for line in lines:
        table.add_row(
            *(f"{value:,}" if type(value) is int else str(value) for value in line.values())
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    run_command("eval.bench_link", main, Args)
