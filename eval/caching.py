"""Caching policies on real and standard sequences: `python -m eval.caching --json FILE`.

Policies x sequences x cache sizes: miss ratio, competitive ratio (misses over Belady's), error of the
prediction, time an access. Every item takes one slot. A cache's size is a share of the sequence's
distinct keys. Predictions come from POPU and from the predictor that learns as it goes, with the 22
features of users and, for rows, with the 4 of rows as well; they do not depend on the cache, so each
sequence is predicted once.

    --golden FOLDER    checks right values from outside on public inputs (eval.caching_golden)
    --noise            predictions replaced by their worst case with probability 0 to 1
    --keys FILE ...    standard sequences of one's own (eval.caching_sequences)

The public traces are looked for in `--traces`, $HLEM_TRACES or ../shared/traces; what is not there is
named and left out. LRU and Belady are compared with libCacheSim's where that is installed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from eval import caching_predictors as predictors
from eval import caching_reference as reference
from eval.caching_golden import checks
from eval.caching_sequences import Sequence, key_file, public
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.eviction.online import Schedule
from hlem_env.eviction.replay import Floats, next_requests, replay
from hlem_env.machine import command, write_result

BLIND = ("lru", "scan_resistant")
RANKED = ("hf", "fpb", "laru")
LEARNED = {"users": "22 features", "rows": "4 features"}
REFERENCE_SHARES = 3
"""Cache sizes of a sequence that are compared with libCacheSim."""


@dataclass
class Args:
    """Miss ratios of caching policies."""

    traces: Path | None = None
    """folder of the public traces; by default $HLEM_TRACES, or shared/traces beside the checkout"""
    keys: tuple[Path, ...] = ()
    """key files, besides the public traces"""
    shares: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2)
    """cache sizes over the distinct keys"""
    most_requests: int = 100_000
    """of a sequence, its first ones"""
    label_window: float = 0.3
    """of the learned predictor, in distinct keys of the sequence"""
    train_every: int = 1_000
    """new samples between two trainings"""
    noise: bool = False
    """only the study of spoilt predictions"""
    probabilities: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """that a prediction is replaced by its worst case"""
    noise_share: float = 0.1
    """cache size of that study"""
    golden: Path | None = None
    """only check the right values on the inputs in this folder"""
    json: Path | None = None
    """file for the figures"""
    plot: Path | None = None
    """PNG file of the study of spoilt predictions"""

    def __post_init__(self) -> None:
        for share in (*self.shares, self.noise_share):
            require(0 < share <= 1, "shares", share, "above 0, at most 1")
        require(self.most_requests >= 10, "most_requests", self.most_requests, "10 or more")
        require(self.label_window > 0, "label_window", self.label_window, "above 0")
        require(self.train_every >= 1, "train_every", self.train_every, "1 or more")


@dataclass(frozen=True)
class Cell:
    """A policy on a sequence at one size."""

    sequence: str
    requests: int
    distinct: int
    share: float
    capacity: int
    policy: str
    predictor: str | None
    miss_ratio: float
    competitive_ratio: float
    prediction_error: float | None
    """Mean |log((1 + predicted gap) / (1 + true gap))|, cut to twice the label window."""
    access_ns: float
    """CPU time of the policy alone, prediction excluded."""
    mispredictions: int


def main(args: Args) -> int:
    """Check, or measure, print and write."""
    console = Console(width=140)
    if args.golden is not None:
        return golden(args, args.golden, console)
    sequences, skipped = found_sequences(args)
    for name, why in skipped.items():
        console.print(f"left out: {name}: {why}")
    require(bool(sequences), "traces", str(args.traces), "a folder with a public trace, or --keys")
    if args.noise:
        return noise(args, sequences, console)
    cells: list[Cell] = []
    compared: list[dict[str, Any]] = []
    bar = tqdm(sequences, disable=None)
    for sequence in bar:
        bar.set_postfix_str(sequence.name)
        part, training = measured(sequence, args)
        cells += part
        compared += against_reference(sequence, part)
        console.print(table_of(part, training))
    reason = reference.missing()
    differing = [each for each in compared if each["ours"] != each["libcachesim"]]
    console.print(
        f"libCacheSim: {reason}"
        if reason
        else f"libCacheSim: {len(compared)} comparisons, {len(differing)} differ"
    )
    if args.json is not None:
        payload = {
            "skipped": skipped,
            "libcachesim": reason or compared,
            "cells": [asdict(cell) for cell in cells],
        }
        write_result(args.json, command("eval.caching"), payload)
    return 1 if differing else 0


def golden(args: Args, folder: Path, console: Console) -> int:
    """Print the right values beside ours; 1 if one differs."""
    found = list(checks(folder))
    mirrored = {check.name: check.found for check in checks(folder, mirror=True)}
    table = Table(title="Right values", title_justify="left")
    for heading in ("", "expected", "found", "", "with overdue mirrored"):
        table.add_column(heading, justify="left" if not heading else "right")
    for check in found:
        good = "equal" if check.good else "DIFFERS"
        cells = (check.name, f"{check.expected}", f"{check.found}", good, f"{mirrored[check.name]}")
        table.add_row(*cells)
    console.print(table)
    if args.json is not None:
        lines = [
            asdict(c) | {"equal": c.good, "with_overdue_mirrored": mirrored[c.name]} for c in found
        ]
        write_result(args.json, command("eval.caching"), {"golden": lines})
    return 0 if all(check.good for check in found) else 1


def found_sequences(args: Args) -> tuple[list[Sequence], dict[str, str]]:
    """What is there, and why the rest is not."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "traces"
    folder = args.traces or Path(os.environ.get("HLEM_TRACES") or beside)
    sequences, skipped = public(folder, args.most_requests)
    return sequences + [key_file(path, args.most_requests) for path in args.keys], skipped


def measured(sequence: Sequence, args: Args) -> tuple[list[Cell], str]:
    """All policies at all sizes, and a line on the training."""
    keys, window = sequence.keys, args.label_window * sequence.distinct
    schedule = Schedule(every=args.train_every)
    sources: dict[str, Floats] = {"popu": predictors.popu(keys)}
    trained = []
    for kind in dict.fromkeys(("users", sequence.kind)):
        name = LEARNED[kind]
        sources[name], predictor = predictors.learned(keys, kind, window, schedule)
        trained.append(f"{predictor.trainings} models of {name}")
    errors = {name: predictors.error(keys, by, window) for name, by in sources.items()}
    cells = []
    for share in args.shares:
        capacity = max(1, round(share * sequence.distinct))
        least = replay("belady", keys, capacity).misses

        def cell(policy: str, source: str | None) -> Cell:
            given = None if source is None else sources[source]
            result = replay(policy, keys, capacity, given)  # noqa: B023
            return Cell(
                sequence.name, keys.size, sequence.distinct, share, capacity, policy, source,  # noqa: B023
                result.miss_ratio, result.misses / least, None if source is None else errors[source],  # noqa: B023
                1e9 * result.seconds / keys.size, result.mispredictions,
            )  # fmt: skip

        cells += [cell(policy, None) for policy in (*BLIND, "belady")]
        cells += [cell(policy, source) for source in sources for policy in RANKED]
    return cells, ", ".join(trained)


def against_reference(sequence: Sequence, cells: list[Cell]) -> list[dict[str, Any]]:
    """Misses of LRU and Belady beside libCacheSim's, at the first sizes."""
    if reference.missing():
        return []
    capacities = list(dict.fromkeys(cell.capacity for cell in cells))[:REFERENCE_SHARES]
    return [
        {
            "sequence": sequence.name,
            "capacity": capacity,
            "policy": policy,
            "ours": replay(policy, sequence.keys, capacity).misses,
            "libcachesim": reference.misses(policy, sequence.keys, capacity),
        }
        for capacity in capacities
        for policy in ("lru", "belady")
    ]


def table_of(cells: list[Cell], training: str) -> Table:
    """A line a policy and predictor, a column a size: miss ratio (competitive ratio)."""
    first = cells[0]
    title = f"{first.sequence}: {first.requests:,} requests, {first.distinct:,} keys; {training}"
    table = Table(title=title, title_justify="left")
    shares = list(dict.fromkeys(cell.share for cell in cells))
    for heading in ("policy", "predictor", "error", *(f"{share:.0%}" for share in shares), "ns"):
        table.add_column(heading, justify="left" if heading in ("policy", "predictor") else "right")
    lru = {cell.share: cell.miss_ratio for cell in cells if cell.policy == "lru"}
    for policy, source in dict.fromkeys((cell.policy, cell.predictor) for cell in cells):
        row = [c for c in cells if (c.policy, c.predictor) == (policy, source)]
        error = row[0].prediction_error
        table.add_row(
            policy, source or "", "" if error is None else f"{error:.2f}",
            *(f"{c.miss_ratio:.4f} ({c.competitive_ratio:.2f}){mark(c, lru)}" for c in row),
            f"{np.mean([c.access_ns for c in row]):.0f}",
        )  # fmt: skip
    table.caption = "miss ratio (over Belady's); < below LRU's, > above it; ns an access"
    return table


def mark(cell: Cell, lru: dict[float, float]) -> str:
    """How it stands to LRU."""
    difference = cell.miss_ratio - lru[cell.share]
    return " <" if difference < 0 else " >" if difference > 0 else "  "


def noise(args: Args, sequences: list[Sequence], console: Console) -> int:
    """Hit rates under true predictions, each replaced by its worst case with a probability."""
    lines: list[dict[str, Any]] = []
    for sequence in sequences:
        keys = sequence.keys
        capacity = max(1, round(args.noise_share * sequence.distinct))
        rate: Callable[..., float] = lambda *given: 1.0 - replay(*given).miss_ratio  # noqa: E731
        true = next_requests(keys)
        blind = {policy: rate(policy, keys, capacity) for policy in (*BLIND, "belady")}
        table = Table(title=f"{sequence.name}, {capacity:,} slots: hit rate", title_justify="left")
        for heading in ("worst with", *blind, *RANKED):
            table.add_column(heading, justify="right")
        for probability in args.probabilities:
            rng = np.random.default_rng(1)
            predicted = predictors.spoilt(keys, true, probability, rng)
            rates = blind | {p: rate(p, keys, capacity, predicted) for p in RANKED}
            table.add_row(f"{probability:.1f}", *(f"{value:.4f}" for value in rates.values()))
            about = {"sequence": sequence.name, "capacity": capacity, "probability": probability}
            lines.append(about | {"hit_rate": rates})
        console.print(table)
    if args.json is not None:
        write_result(args.json, command("eval.caching"), {"noise": lines})
    if args.plot is not None:
        draw_noise(lines, args.plot)
    return 0


def draw_noise(lines: list[dict[str, Any]], path: Path) -> None:
    """Hit rate against probability, a panel a sequence."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(line["sequence"] for line in lines))
    columns = min(len(names), 4)
    rows = -(-len(names) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.6 * rows), layout="constrained")
    axes = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axis, name in zip(axes, names, strict=False):
        part = [line for line in lines if line["sequence"] == name]
        for policy in part[0]["hit_rate"]:
            rates = [line["hit_rate"][policy] for line in part]
            axis.plot([line["probability"] for line in part], rates, label=policy)
        axis.set(title=name, xlabel="share of worst cases", ylabel="hit rate")
    for axis in axes[len(names) :]:
        axis.remove()
    axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_command("eval.caching", main, Args)
