"""Batches for SparseLengthsSum, and what predictors say of their rows, batch by batch.

A table's rows have the popularity of a bounded Zipf law; with each batch some of its ranks change
hands. Time is the number of the batch: a row that stands in a batch several times is requested once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hlem_env.eviction.forest import Forest
from hlem_env.eviction.online import OnlinePredictor, Schedule, Train
from hlem_env.eviction.predictor import Floats
from hlem_env.eviction.protocol import Keys

SOURCES = ("true", "learned", "timeless", "crippled")
LABEL_WINDOW = 30.0
"""Batches."""
SCHEDULES = {
    "learned": Schedule(every=20_000),
    "timeless": Schedule(every=20_000),
    "crippled": Schedule(window=100, every=20_000),
}
"""Trained on the latest 20,000 samples, and on 100; at most once for 20,000 new ones."""
TIME = 0
"""Column of the time among the features of rows."""


class Drawn(Protocol):
    """What `draw_batches` reads of the arguments."""

    pooling: int
    tables: int
    rows: int
    zipf: float
    drift: float
    warm: int
    batches: int
    seed: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Bags of all tables, table after table."""

    keys: Tensor
    """int64 [n] rows of all tables."""
    local: Tensor
    """int64 [n] rows within their tables."""
    offsets: Tensor
    """int64 [tables * bags + 1] first key of each bag."""

    def to(self, device: str) -> Batch:
        """The same on a device."""
        return Batch(self.keys.to(device), self.local.to(device), self.offsets.to(device))

    def sums(self, values: Tensor) -> Tensor:
        """Values [n, dim] summed by bag: [tables * bags, dim]."""
        lengths = self.offsets.diff()
        out: Tensor = torch.segment_reduce(values, "sum", lengths=lengths, axis=0)
        return out


class Gaps:
    """Predicted gaps of rows in batches, as a function of rows [n] and times [n], all of one batch."""

    def __init__(self) -> None:
        self.rows: list[Keys] = []
        self.gaps: list[Floats] = []

    def append(self, rows: Keys, gaps: Floats) -> None:
        """Of the next batch: distinct rows [n], ascending, and gaps [n] in batches."""
        self.rows.append(rows)
        self.gaps.append(gaps)

    def __call__(self, rows: Keys, times: Floats) -> Floats:
        """Gaps [n]."""
        batch = int(times[0])
        found: Floats = self.gaps[batch][np.searchsorted(self.rows[batch], rows)]
        return found


def draw_batches(args: Drawn, bags: int) -> list[Batch]:
    """Warm ones, timed ones and those in a row, with so many bags of each table."""
    rng = np.random.default_rng(args.seed)
    weight = np.arange(1, args.rows + 1) ** -args.zipf
    cumulative = np.cumsum(weight) / weight.sum()
    order = np.stack([rng.permutation(args.rows) for _ in range(args.tables)])
    first = np.arange(args.tables) * args.rows
    batches = []
    for _ in range(args.warm + 2 * args.batches):
        lengths = rng.integers(1, 2 * args.pooling, (args.tables, bags))
        table = np.repeat(np.arange(args.tables), lengths.sum(1))
        ranks = np.minimum(np.searchsorted(cumulative, rng.random(table.size)), args.rows - 1)
        local = torch.from_numpy(order[table, ranks])
        offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
        batches.append(Batch(local + torch.from_numpy(first[table]), local, offsets))
        for ranking in order:
            changed = rng.choice(args.rows, round(args.drift * args.rows), replace=False)
            ranking[changed] = ranking[np.roll(changed, 1)]
    return batches


def predictions(batches: list[Batch]) -> tuple[dict[str, Gaps], dict[str, float]]:
    """Gaps of each source, and the milliseconds a batch of those that learn, training included."""
    rows = [np.unique(batch.keys.numpy()) for batch in batches]
    found = {"true": true_gaps(rows)}
    times = {}
    for name, schedule in SCHEDULES.items():
        train = without_time(schedule) if name == "timeless" else None
        predictor = OnlinePredictor(LABEL_WINDOW, "rows", schedule, background=False, train=train)
        found[name] = Gaps()
        began = time.thread_time()
        for t, some in enumerate(rows):
            found[name].append(some, predictor.access(some, np.full(some.size, float(t))))
        times[name] = round(1e3 * (time.thread_time() - began) / len(rows), 2)
    return found, times


def without_time(schedule: Schedule) -> Train:
    """Training that sees one time only, so that no tree asks for it.

    Of the latest accesses only short gaps are known yet. A tree that may ask for the time learns that
    what was accessed lately comes back at once, and everything that it is asked for was accessed now.
    """

    def train(rows: NDArray[np.float32], labels: NDArray[np.float32]) -> Forest:
        rows = rows.copy()
        rows[:, TIME] = 0.0
        return schedule.train(rows, labels)

    return train


def error(predicted: Gaps, true: Gaps, first: int) -> float:
    """Mean |log((1 + predicted gap) / (1 + true gap))| from a batch on, cut to twice the label window."""
    most = 2.0 * LABEL_WINDOW
    ratios = [
        np.log1p(np.minimum(ours, most)) - np.log1p(np.minimum(theirs, most))
        for ours, theirs in zip(predicted.gaps[first:], true.gaps[first:], strict=True)
    ]
    return float(np.abs(np.concatenate(ratios)).mean())


def true_gaps(rows: list[Keys]) -> Gaps:
    """Batches until each row's next request; infinity where there is none."""
    after: NDArray[np.float64] = np.full(1 + max(int(some.max()) for some in rows), np.inf)
    gaps = []
    for t in range(len(rows) - 1, -1, -1):
        gaps.append(after[rows[t]] - t)
        after[rows[t]] = t
    result = Gaps()
    for some, gap in zip(rows, reversed(gaps), strict=True):
        result.append(some, gap)
    return result
