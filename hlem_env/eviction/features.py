"""What a predictor knows of a key at an access, and the samples that it learns from.

A sample is a key's features at an access and, once known, the time to its next one. When that does
not come within the label window the label is twice the window: what is not seen again is far away.

Users (KV entries), 22 features: the last 10 gaps (-1 where there are none), 10 counts that decay
with half-lives of the label window over 512, 256, ... 1, visits so far, and a size (the history's
length). Rows, 4 features: time, key, visits, last gap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

GAPS = 10
COUNTERS = 10
USER_FEATURES = GAPS + COUNTERS + 2
ROW_FEATURES = 4

RECORD = np.dtype(
    [
        ("key", "i8"),  # -1: empty
        ("last", "f8"),  # time of the last access
        ("visits", "f4"),
        ("size", "f4"),
        ("pending", "i4"),  # whether the features of the last access wait for their label
    ]
)

_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")


class Samples(NamedTuple):
    """Places of a ring, the newest over the oldest; `written` [1] is how many there ever were."""

    features: NDArray[np.float32]
    """[places, features]"""
    labels: NDArray[np.float32]
    """[places] log(1 + gap)."""
    written: NDArray[np.int64]

    @classmethod
    def empty(cls, places: int, features: int) -> Samples:
        """A ring without samples."""
        return cls(
            np.zeros((places, features), np.float32),
            np.zeros(places, np.float32),
            np.zeros(1, np.int64),
        )

    def newest(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Copies of features [n, features] and labels [n] of those that are kept."""
        n = min(int(self.written[0]), self.labels.size)
        return self.features[:n].copy(), self.labels[:n].copy()


def new_records(n: int) -> NDArray[np.void]:
    """Records [n] of no key."""
    records = np.zeros(n, RECORD)
    records["key"] = -1
    return records


@_compiled
def cell_of(key: int, cells: int, hashed: bool) -> int:
    """Where a key's record is: its own number, or one that it shares with others (a power of two)."""
    if not hashed:
        return key
    return int((np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)) & (cells - 1)


@_compiled
def _copy(row: Any, to: Any) -> None:
    """Like `to[:] = row`, which numba compiles several times as long."""
    for j in range(row.size):
        to[j] = row[j]


@_compiled
def _note_sample(row: Any, label: float, features: Any, labels: Any, count: Any) -> None:
    place = count[0] % labels.size
    _copy(row, features[place])
    labels[place] = np.log1p(label)
    count[0] += 1


@_compiled
def access(
    records: Any,
    known: Any,
    hashed: bool,
    keys: Any,
    times: Any,
    sizes: Any,
    window: float,
    waiting: Any,
    line: Any,
    out: Any,
    features: Any,
    labels: Any,
    count: Any,
) -> None:
    """Accesses of keys [n] at times [n], ascending: features [n, features] into `out`.

    Args:
        records: [cells] of keys.
        known: [cells, features] of their last access.
        hashed: whether keys share cells; the latest key has a cell.
        keys: accessed.
        times: of it.
        sizes: of what the keys stand for, or none.
        window: the label window.
        waiting: ring of (time, cell) of accesses whose label may still be unknown.
        line: [2] first and one after the last of those, ever growing numbers.
        out: written.
        features: of the samples' ring, with labels and count.
        labels: see `Samples`.
        count: see `Samples`.
    """
    users = out.shape[1] == GAPS + COUNTERS + 2
    for i in range(keys.size):
        key, now = keys[i], times[i]
        while line[0] < line[1] and (
            waiting[line[0] % waiting.size].time + window < now or line[1] - line[0] == waiting.size
        ):
            oldest = waiting[line[0] % waiting.size]
            old = records[oldest.cell]
            if old.pending and old.last == oldest.time:
                old.pending = 0
                if oldest.time + window < now:  # else there was no room to wait: no sample
                    _note_sample(known[oldest.cell], 2.0 * window, features, labels, count)
            line[0] += 1
        cell = cell_of(key, records.size, hashed)
        record, row = records[cell], known[cell]
        if record.key != key:
            size = record.size if not hashed else np.float32(0.0)
            record.key, record.visits, record.pending, record.size = key, 0.0, 0, size
            row[:] = 0.0
            gap = -1.0
            if users:
                row[:GAPS] = -1.0
        else:
            gap = now - record.last
            if record.pending:
                _note_sample(row, gap, features, labels, count)
            if users:
                for j in range(GAPS - 1, 0, -1):
                    row[j] = row[j - 1]
                row[0] = gap
        if sizes.size > 0:
            record.size = sizes[i]
        record.visits += 1.0
        if users:
            decay(row, max(gap, 0.0), window)
            for j in range(COUNTERS):
                row[GAPS + j] += 1.0
            row[GAPS + COUNTERS] = record.visits
            row[GAPS + COUNTERS + 1] = record.size
        else:
            row[0], row[1], row[2], row[3] = now, key, record.visits, gap
        record.last = now
        record.pending = 1
        entry = waiting[line[1] % waiting.size]
        entry.time, entry.cell = now, cell
        line[1] += 1
        _copy(row, out[i])


@_compiled
def decay(row: Any, seconds: float, window: float) -> None:
    """Let a user's decayed counts fall for so long."""
    for j in range(COUNTERS):
        row[GAPS + j] *= np.exp2(-seconds / (window * 2.0 ** (j + 1 - COUNTERS)))


@_compiled
def aged(
    records: Any, known: Any, hashed: bool, keys: Any, now: float, window: float, out: Any
) -> None:
    """Features [n, features] of keys at a time after their last access; nothing is changed."""
    for i in range(keys.size):
        cell = cell_of(keys[i], records.size, hashed)
        _copy(known[cell], out[i])
        if out.shape[1] == GAPS + COUNTERS + 2:
            decay(out[i], max(now - records[cell].last, 0.0), window)
        else:
            out[i, 0] = now
