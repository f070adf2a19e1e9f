"""The serving loop on a node whose batches take a known time."""

import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from hlem_env.errors import ArgumentError, BackendError
from hlem_env.live.node import AheadBytes, Executed
from hlem_env.live.pool import Pool
from hlem_env.live.serving import LiveBackend
from hlem_env.live.time_source import WallTime
from hlem_env.workload.requests import Requests


class Arrivals:
    """Requests at given times, all from users that come once or of the ids given."""

    persistent_users = 4

    def __init__(self, arrival_s: list[float], users: list[int] | None = None) -> None:
        n = len(arrival_s)
        ids = np.arange(n) + 10 if users is None else np.array(users)
        lengths = np.full(n, 100, np.int32)
        self.all = Requests(np.array(arrival_s), ids.astype(np.int64), lengths, lengths)

    def reset(self, rng: np.random.Generator, start_s: float) -> None:
        self.taken = 0

    def take(self, until_s: float) -> Requests:
        first, self.taken = self.taken, int(np.searchsorted(self.all.arrival_s, until_s))
        return self.all[first : self.taken]


class SteppedTime(WallTime):
    """Time that passes when somebody sleeps or works, and a nanosecond when somebody looks."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        self.seconds += 1e-9
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class TimedNode:
    """Takes `batch_s` for a batch of at most `most` requests."""

    def __init__(self, batch_s: float, most: int = 1) -> None:
        self.time, self.time_source = SteppedTime(), WallTime()
        self.config = SimpleNamespace(warmup_epochs=0, epoch_seconds=0.5, tables=2)
        self.pool = Pool(200 * 4096, 4096)
        self.embedding = SimpleNamespace(resident_rows=0)
        self.rows_in_pool = 100
        self.batch_s, self.most, self.batches, self.closed = batch_s, most, [], False

    def reset(self, persistent_users: int) -> None:
        self.batches.clear()

    def move(self, alpha_centi: int) -> None:
        pass

    def idle(self, now_s: float) -> None:
        pass

    def first_batch(self, waiting: Requests) -> int:
        return min(len(waiting), self.most)

    def execute(self, batch: Requests, waiting: Requests, now_s: float) -> Executed:
        self.time.sleep(self.batch_s)
        self.batches.append(batch.user.tolist())
        n = len(batch)
        ones = np.ones(n, np.int64)
        return Executed(None, 10 * ones, 90 * ones, 3 * ones, 7 * n, 0, 0, 0, False, self.batch_s)

    def take_ahead_bytes(self) -> AheadBytes:
        return AheadBytes(0, 0)

    def take_kv_evictions(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True


def started(workload: Arrivals, node: TimedNode) -> LiveBackend:
    backend = LiveBackend(workload, node, node.time)
    backend.reset(0)
    return backend


def test_every_request_completes_once_and_none_is_lost() -> None:
    times = np.sort(np.random.default_rng(0).uniform(0, 0.6, 120)).tolist()
    node = TimedNode(0.002, most=3)
    backend = started(Arrivals(times), node)
    runs = [backend.run(50, 0.2) for _ in range(4)]
    served = [user for batch in node.batches for user in batch]
    assert served == list(range(10, 130))
    assert sum(run.requests for run in runs) == 120
    assert np.concatenate([run.arrival_s for run in runs]).tolist() == times
    assert runs[-1].backlog == 0 and runs[-1].backlog_age_s == 0
    total = runs[0].merge(runs[1]).merge(runs[2]).merge(runs[3])
    assert total.history_tokens == 12_000 and total.reused_tokens == 1_200
    assert total.computed_tokens == 120 * 90 and total.rows_looked_up == 120 * 90 * 2
    assert total.rows_hit == pytest.approx(120 * 7)


def test_latency_is_from_arrival_to_completion() -> None:
    backend = started(Arrivals([0.05, 0.05, 0.05]), TimedNode(0.04))
    stats = backend.run(50, 0.3)
    assert stats.latency_ms.tolist() == pytest.approx([40, 80, 120], abs=1e-3)
    assert stats.utilisation == pytest.approx(0.12 / 0.3)
    assert stats.service_ms == pytest.approx(np.full(3, 40.0))


def test_a_request_belongs_to_the_run_in_which_it_completes() -> None:
    backend = started(Arrivals([0.05, 0.06]), TimedNode(0.10))
    first, second = backend.run(50, 0.1), backend.run(50, 0.2)
    assert (first.requests, first.backlog) == (0, 2)
    assert first.backlog_age_s == pytest.approx(0.05)
    assert (second.requests, second.backlog) == (2, 0)
    assert first.utilisation == pytest.approx(0.5)
    assert second.utilisation == pytest.approx(0.75)  # of 0.2 s, 0.05 to 0.2


def test_the_clock_stands_still_between_runs() -> None:
    backend = started(Arrivals([0.05, 0.15]), TimedNode(0.001))
    backend.run(50, 0.1)
    backend.node.time.sleep(300.0)
    stats = backend.run(50, 0.1)
    assert stats.latency_ms.tolist() == pytest.approx([1.0], abs=1e-3)


def test_a_user_is_hot_from_its_third_request_in_the_window() -> None:
    backend = started(Arrivals([0.01, 0.02, 0.03, 0.04, 0.05], [1, 2, 1, 1, 99]), TimedNode(0.001))
    stats = backend.run(50, 0.1)
    assert stats.is_hot.tolist() == [False, False, False, True, False]
    assert stats.working_set_bytes == 3 * 4096


def test_an_interrupt_ends_an_idle_run_and_the_backend_stays_usable() -> None:
    backend = LiveBackend(Arrivals([]), TimedNode(0.001))
    backend.reset(0)
    before = threading.active_count()
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with pytest.raises(KeyboardInterrupt):
            backend.run(50, 3600.0)
    finally:
        signal.signal(signal.SIGALRM, old)
    backend.reset(1)
    assert backend.run(50, 0.05).requests == 0
    backend.close()
    backend.close()
    assert backend.node.closed and threading.active_count() == before


def test_misuse_is_refused() -> None:
    backend = LiveBackend(Arrivals([]), TimedNode(0.001))
    with pytest.raises(BackendError, match="reset"):
        backend.run(50, 0.1)
    backend.reset(0)
    with pytest.raises(ArgumentError, match="alpha_centi=101"):
        backend.run(101, 0.1)
    with pytest.raises(ArgumentError, match="seconds=0"):
        backend.run(50, 0)
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.reset(0)
