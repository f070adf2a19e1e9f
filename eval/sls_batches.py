"""Batches for SparseLengthsSum, and what predictors say of their rows, batch by batch.

A table's rows have the popularity of a bounded Zipf law; with each batch some of its ranks change
hands. Time is the number of the batch: a row that stands in a batch several times is requested once.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
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
"""Batches, at least."""
KEYS_OF_A_LIFE = 6
"""Keys looked up for each slot of the cache before a row has most probably gone, and some more."""
SAMPLES = {"learned": 20_000, "timeless": 20_000, "crippled": 100}
"""Latest samples that a predictor is trained on, at most once for 20,000 new ones."""
TIME = 0
"""Column of the time among the features of rows."""


class Drawn(Protocol):
    """What `draw_batches` reads of the arguments."""

    pooling: int
    tables: int
    rows: int
    zipf: float
    drift: float
    share: float
    warm: int
    warm_keys: float
    batches: int
    seed: int


def slots(args: Drawn) -> int:
    """Rows that fit in the cache, about."""
    return max(round(args.share * args.tables * args.rows), 1)


def warm_batches(args: Drawn, bags: int) -> int:
    """Batches before the timed ones, with so many bags of each table."""
    keys = bags * args.tables * args.pooling
    return max(args.warm, math.ceil(args.warm_keys * slots(args) / keys))


def label_window(args: Drawn, bags: int) -> float:
    """Batches until a predictor is told that a row was not requested again."""
    keys = bags * args.tables * args.pooling
    return max(LABEL_WINDOW, round(KEYS_OF_A_LIFE * slots(args) / keys))


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
        # A check of the lengths would wait for the device.
        out: Tensor = torch.segment_reduce(values, "sum", lengths=lengths, axis=0, unsafe=True)
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
    for _ in range(warm_batches(args, bags) + 2 * args.batches):
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


def predictions(
    args: Drawn, batches: dict[int, list[Batch]]
) -> tuple[dict[int, dict[str, Gaps]], dict[int, dict[str, float]]]:
    """For batches by their bags: the gaps of each source, and milliseconds a batch, training included.

    A thread each; the milliseconds are its own.
    """
    rows = {
        bags: [np.unique(batch.keys.numpy()) for batch in some] for bags, some in batches.items()
    }
    gaps = {bags: {"true": true_gaps(some)} for bags, some in rows.items()}
    times: dict[int, dict[str, float]] = {bags: {} for bags in rows}
    with ThreadPoolExecutor() as threads:
        made = {
            (bags, source): threads.submit(learned_gaps, args, bags, source, some)
            for bags, some in rows.items()
            for source in SAMPLES
        }
        for (bags, source), future in made.items():
            gaps[bags][source], times[bags][source] = future.result()
    return gaps, times


def learned_gaps(args: Drawn, bags: int, source: str, rows: list[Keys]) -> tuple[Gaps, float]:
    """What a predictor says of each batch's rows when it has seen those before; milliseconds a batch."""
    held = slots(args)
    schedule = Schedule(
        window=SAMPLES[source], every=20_000, waiting=max(Schedule.waiting, power_of_two(8 * held))
    )
    predictor = OnlinePredictor(
        label_window(args, bags), "rows", schedule, background=False,
        cells=max(2**20, power_of_two(args.tables * args.rows)),
        train=without_time(schedule) if source == "timeless" else None,
    )  # fmt: skip
    gaps = Gaps()
    began = time.thread_time()
    for t, some in enumerate(rows):
        gaps.append(some, predictor.access(some, np.full(some.size, float(t))))
    return gaps, round(1e3 * (time.thread_time() - began) / len(rows), 2)


def power_of_two(least: int) -> int:
    """The lowest that is not below."""
    return 1 << (least - 1).bit_length()


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


def error(predicted: Gaps, true: Gaps, first: int, window: float) -> float:
    """Mean |log((1 + predicted gap) / (1 + true gap))| from a batch on, cut to twice the label window."""
    most = 2.0 * window
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
