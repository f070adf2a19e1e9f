"""A predictor of gaps that learns from the requests it sees: LightGBM, in a thread of its own.

Every 1,000 new samples a model is trained on the latest 20,000 and takes the place of the last one in
a single assignment: no look-up waits. Without a model that is up to date the predictor is not usable,
and its policy goes by recency. That is so

    before the first model,
    after a training failed, until one succeeds, and
    when training falls behind by more than `lag_limit` samples.

Memory is bounded by the keys that are known (`cells`, or what the policy numbers), the samples' window
and the accesses that wait for their label.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require, require_number
from hlem_env.eviction import features
from hlem_env.eviction.features import ROW_FEATURES, USER_FEATURES, Samples
from hlem_env.eviction.forest import Forest
from hlem_env.eviction.predictor import Floats
from hlem_env.eviction.protocol import Keys

_INITIAL_KEYS = 1024
_WAITING = np.dtype([("time", "f8"), ("cell", "i8")])

Train = Callable[[NDArray[np.float32], NDArray[np.float32]], Forest]


@dataclass(frozen=True)
class Schedule:
    """When and what is trained.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    window: int = 20_000
    """Latest samples that a model is trained on."""
    every: int = 1_000
    """New samples between two trainings."""
    trees: int = 50
    leaves: int = 31
    depth: int = 6
    rate: float = 0.1
    lag_limit: int = 20_000
    """New samples since a model's data, above which it is out of date."""
    waiting: int = 2**18
    """Accesses that wait for their label."""

    def __post_init__(self) -> None:
        for name in ("window", "every", "trees", "leaves", "depth", "lag_limit", "waiting"):
            require_number(name, getattr(self, name), whole=True)
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        require(0 < self.rate <= 1, "rate", self.rate, "above 0, at most 1")

    def train(self, rows: NDArray[np.float32], labels: NDArray[np.float32]) -> Forest:
        """A model of samples [n, features] and labels [n], by LightGBM on one thread."""
        import lightgbm

        data = lightgbm.Dataset(rows, labels, params={"use_missing": False, "verbose": -1})
        settings = {
            "objective": "l2", "num_leaves": self.leaves, "max_depth": self.depth,
            "learning_rate": self.rate, "num_threads": 1, "deterministic": True,
            "force_row_wise": True, "use_missing": False, "seed": 1, "verbose": -1,
        }  # fmt: skip
        return Forest.parse(lightgbm.train(settings, data, self.trees).model_to_string())


class OnlinePredictor:
    """Learns the gaps between a key's requests.

    Args:
        label_window: a key that is not requested again within it gets the label of twice as long, and
            so does the prediction of anything while there is no model. In units of the times.
        kind: "users": 22 features. "rows": 4.
        schedule: of the training.
        background: train in a thread. Without it training happens at once, in `access`, and the same
            requests give the same predictions.
        cells: of hashed keys, a power of two; of keys that share a cell the latest is known.
        train: makes a forest of samples and labels; by default the schedule's.
        hashed: keys are any numbers; else small ones, a policy's. By default those of rows are.

    Raises:
        ArgumentError: naming the argument and what is allowed.
        ImportError: LightGBM is not installed and no `train` is given.
    """

    def __init__(
        self,
        label_window: float,
        kind: str = "users",
        schedule: Schedule | None = None,
        background: bool = True,
        cells: int = 2**20,
        train: Train | None = None,
        hashed: bool | None = None,
    ) -> None:
        require_number("label_window", label_window)
        require(label_window > 0, "label_window", label_window, "above 0")
        require(kind in ("users", "rows"), "kind", kind, "users or rows")
        require(cells >= 1 and cells & (cells - 1) == 0, "cells", cells, "a power of two")
        self.schedule = schedule or Schedule()
        if train is None and importlib.util.find_spec("lightgbm") is None:
            raise ImportError(
                "learned eviction trains with LightGBM: pip install 'hlem[baselines]'"
            )
        self.label_window = float(label_window)
        self.trainings = self.failures = self.skipped = 0
        """Models trained; trainings that failed; trainings due while the last one still ran."""
        self.last_error: Exception | None = None
        self._train: Train = train or self.schedule.train
        self._width = USER_FEATURES if kind == "users" else ROW_FEATURES
        self._hashed = kind == "rows" if hashed is None else hashed
        n = cells if self._hashed else _INITIAL_KEYS
        self._records = features.new_records(n)
        self._known = np.zeros((n, self._width), np.float32)
        self._waiting = np.zeros(self.schedule.waiting, _WAITING)
        self._line = np.zeros(2, np.int64)
        self._samples = Samples.empty(self.schedule.window, self._width)
        self._trained_to = 0  # samples when the last training was started
        self._model: tuple[Forest, int] | None = (
            None  # and the samples when its training was started
        )
        self._failed = False
        self._worker = _Worker(self._make) if background else None

    @property
    def usable(self) -> bool:
        """See `Predictor.usable`."""
        model = self._model
        if model is None or self._failed:
            return False
        return int(self._samples.written[0]) - model[1] <= self.schedule.lag_limit

    def access(
        self, keys: Keys, times: Floats, sizes: NDArray[np.integer[Any]] | None = None
    ) -> Floats:
        """See `Predictor.access`. The times ascend; sizes [n] are as `describe` takes them."""
        keys = np.ascontiguousarray(keys, np.int64)
        if keys.size:
            self._reserve(int(keys.max()) + 1)
        rows = np.empty((keys.size, self._width), np.float32)
        given = np.empty(0, np.float32) if sizes is None else np.asarray(sizes, np.float32)
        features.access(
            self._records, self._known, self._hashed, keys, np.asarray(times, np.float64), given,
            self.label_window, self._waiting, self._line, rows, *self._samples,
        )  # fmt: skip
        seen = int(self._samples.written[0])
        if seen - self._trained_to >= self.schedule.every:
            self._start(seen)
        return self._gaps(rows)

    def again(self, keys: Keys, now: float) -> Floats:
        """See `Predictor.again`."""
        keys = np.ascontiguousarray(keys, np.int64)
        rows = np.empty((keys.size, self._width), np.float32)
        features.aged(
            self._records, self._known, self._hashed, keys, float(now), self.label_window, rows
        )
        return self._gaps(rows)

    def describe(self, keys: Keys, sizes: NDArray[np.int64]) -> None:
        """See `Predictor.describe`."""
        if keys.size and not self._hashed:
            self._reserve(int(keys.max()) + 1)
            self._records["size"][keys] = sizes

    def forget(self, keys: Keys) -> None:
        """See `Predictor.forget`."""
        if not self._hashed:
            known = keys[keys < self._records.size]
            self._records[known] = features.new_records(known.size)

    def wait(self) -> None:
        """Wait for a training that runs in the background."""
        if self._worker is not None:
            self._worker.wait()

    def close(self) -> None:
        """Stop the thread; a training that runs is waited for."""
        if self._worker is not None:
            self._worker.close()

    def _gaps(self, rows: NDArray[np.float32]) -> Floats:
        model = self._model
        if model is None:
            return np.full(rows.shape[0], 2.0 * self.label_window)
        predicted = np.expm1(np.clip(model[0].predict(rows), 0.0, 700.0))
        return np.minimum(predicted, 2.0 * self.label_window)

    def _start(self, seen: int) -> None:
        if self._worker is None:
            self._trained_to = seen
            self._make((*self._samples.newest(), seen))
        elif self._worker.idle:
            self._trained_to = seen
            self._worker.give((*self._samples.newest(), seen))
        else:
            self._trained_to += self.schedule.every
            self.skipped += 1

    def _make(self, job: tuple[NDArray[np.float32], NDArray[np.float32], int]) -> None:
        """Train and put the model in its place. Whatever goes wrong is counted, not raised."""
        rows, labels, seen = job
        try:
            forest = self._train(rows, labels)
        except Exception as error:
            self.failures += 1
            self.last_error = error
            self._failed = True
            return
        self._model = (forest, seen)
        self._failed = False
        self.trainings += 1

    def _reserve(self, keys: int) -> None:
        if self._hashed or keys <= self._records.size:
            return
        more = max(keys, 2 * self._records.size) - self._records.size
        self._records = np.concatenate((self._records, features.new_records(more)))
        known = np.zeros((more, self._width), np.float32)
        self._known = np.concatenate((self._known, known))


class _Worker:
    """A thread that does one job at a time."""

    def __init__(self, do: Callable[[Any], None]) -> None:
        self._do = do
        self._job: Any = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="eviction training", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return self._job is None

    def give(self, job: Any) -> None:
        with self._changed:
            self._job = job
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._job is None)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closed)
                if self._closed:
                    return
                job = self._job
            self._do(job)
            with self._changed:
                self._job = None
                self._changed.notify_all()
