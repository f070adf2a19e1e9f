"""The live backend: requests that come when they come, batches on a node, and what was measured.

Arrivals are open loop: the workload says when a request arrives and never waits for the server. The
clock is wall time while `run` runs and stands still between runs, so that a policy may think between
epochs; behind the serving bridge it never stops. Everything happens in the caller's thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hlem_env import mdp
from hlem_env.errors import BackendError, require
from hlem_env.live.hot_users import HotUsers
from hlem_env.live.node import Executed, LiveNode
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests, Workload

LONGEST_SLEEP_S = 0.02
"""An idle server looks up at least this often, so that an interrupt ends it at once."""
SPIN_S = 0.0002
"""The last part of a wait is spun: sleep wakes late by about this much."""

TRANSFER_STEP_S = 0.0005
"""While rows are moved ahead, an idle server looks after them this often."""


class WallTime:
    """The time that passes, seconds."""

    def now(self) -> float:
        """Seconds from some moment."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Wait, waking often enough for an interrupt and exactly enough for an arrival."""
        wake_s = time.perf_counter() + seconds
        while (left_s := wake_s - time.perf_counter()) > 0:
            if left_s > SPIN_S:
                time.sleep(min(left_s - SPIN_S, LONGEST_SLEEP_S))


class Clock:
    """A time that can stand still, seconds.

    Args:
        start_s: where it begins.
        source: what it follows while it runs.
    """

    def __init__(self, start_s: float, source: WallTime) -> None:
        self._offset_s, self._source = start_s, source
        self._since: float | None = None

    def now(self) -> float:
        """The time."""
        running = 0.0 if self._since is None else self._source.now() - self._since
        return self._offset_s + running

    def start(self) -> None:
        """Go on from where it stands."""
        self._since = self._source.now()

    def stop(self) -> None:
        """Stand still."""
        self._offset_s, self._since = self.now(), None

    def sleep_until(self, wake_s: float) -> None:
        """Wait for a time."""
        self._source.sleep(max(wake_s - self.now(), 0.0))


@dataclass
class Completed:
    """Requests that completed and are not yet in an epoch's stats, in order of completion."""

    done_s: list[float] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    service_ms: list[float] = field(default_factory=list)
    is_hot: list[bool] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    rows_hit: list[float] = field(default_factory=list)

    def take_until(self, end_s: float) -> tuple[NDArray[np.float64], ...]:
        """Remove and return, as arrays in the fields' order, those that completed until `end_s`."""
        n = int(np.searchsorted(np.array(self.done_s), end_s, side="right"))
        columns = []
        for name in self.__dataclass_fields__:
            values = getattr(self, name)
            columns.append(np.array(values[:n], np.float64))
            del values[:n]
        return tuple(columns)


class LiveBackend:
    """A live node behind the Backend protocol.

    Args:
        workload: where requests come from.
        node: what serves them; closed with the backend.
        time_source: what the clock follows.

    Raises:
        BackendError: `run` before `reset`, or after `close`.
    """

    def __init__(
        self, workload: Workload, node: LiveNode, time_source: WallTime | None = None
    ) -> None:
        self.workload, self.node = workload, node
        self._time = time_source or WallTime()
        self.warmup_s = node.config.warmup_epochs * node.config.epoch_seconds
        window_s = mdp.HOT_WINDOW_EPOCHS * node.config.epoch_seconds
        self._hot = HotUsers(workload.persistent_users, window_s)
        self._clock: Clock | None = None
        self._closed = False

    def reset(self, seed: int) -> None:
        """Empty queue and caches; the workload starts anew from `seed`, before its warm-up."""
        if self._closed:
            raise BackendError("the live node is closed: make a new one")
        self.node.reset(self.workload.persistent_users)
        self._hot.reset()
        self.workload.reset(np.random.default_rng(seed), -self.warmup_s)
        self._clock = Clock(-self.warmup_s, self._time)
        self._end_s = -self.warmup_s
        self._busy: list[tuple[float, float]] = []
        self._waiting = Requests.empty()
        self._completed = Completed()

    def run(self, alpha_centi: int, seconds: float) -> EpochStats:
        """Serve for `seconds` with the embedding share at `alpha_centi` hundredths, 0 to 100."""
        require(0 <= alpha_centi <= 100, "alpha_centi", alpha_centi, "0 to 100")
        require(0 < seconds < 1e6, "seconds", seconds, "above 0 and below 1e6")
        clock = self._clock
        if self._closed or clock is None:
            raise BackendError("the live node has not been reset: call reset(seed) first")
        begin_s, self._end_s = self._end_s, self._end_s + seconds
        self._waiting = self._waiting.then(self.workload.take(self._end_s))
        clock.start()
        try:
            self.node.move(alpha_centi)
            self._serve_until(self._end_s, clock)
        finally:
            clock.stop()
        stats = self._stats(begin_s, self._end_s, alpha_centi)
        self.node.last_p99_ms = stats.p99_ms
        return stats

    def close(self) -> None:
        """Give the node's memory back. May be called twice."""
        self._closed = True
        self.node.close()

    def _serve_until(self, end_s: float, clock: Clock) -> None:
        while (now_s := clock.now()) < end_s:
            arrived = int(np.searchsorted(self._waiting.arrival_s, now_s, side="right"))
            if arrived == 0:
                next_s = float(self._waiting.arrival_s[0]) if len(self._waiting) else end_s
                if self.node.idle(now_s):
                    next_s = min(next_s, now_s + TRANSFER_STEP_S)
                clock.sleep_until(min(end_s, next_s))
                continue
            count = self.node.first_batch(self._waiting[:arrived])
            batch, rest = self._waiting[:count], self._waiting[count:]
            executed = self.node.execute(batch, rest[: arrived - count], now_s)
            self._waiting = rest  # only now: what an interrupt stops is still waiting
            self._record(batch, executed, now_s, clock.now())

    def _record(self, batch: Requests, executed: Executed, start_s: float, done_s: float) -> None:
        self._busy.append((start_s, done_s))
        done = self._completed
        share = executed.computed / executed.computed.sum()
        for i, (user, arrival_s) in enumerate(
            zip(batch.user.tolist(), batch.arrival_s.tolist(), strict=True)
        ):
            done.done_s.append(done_s)
            done.arrival_s.append(arrival_s)
            done.is_hot.append(self._hot.visit(user, arrival_s, int(executed.pages[i])))
        done.service_ms += (1000.0 * executed.device_s * share).tolist()
        done.history += batch.history_length.tolist()
        done.reused += executed.reused.tolist()
        done.computed += executed.computed.tolist()
        done.rows_hit += (executed.rows_hit * share).tolist()

    def _busy_s(self, begin_s: float, end_s: float) -> float:
        """Seconds of [begin, end] in which a batch ran; forgets what lies before the end."""
        total = sum(max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in self._busy)
        self._busy = [(a, b) for a, b in self._busy if b > end_s]
        return total

    def _stats(self, begin_s: float, end_s: float, alpha_centi: int) -> EpochStats:
        done_s, arrival_s, service_ms, is_hot, history, reused, computed, rows_hit = (
            self._completed.take_until(end_s)
        )
        late = self._completed.arrival_s  # ran beyond the end, not yet completed at it
        oldest_s = min([end_s, *late, *self._waiting.arrival_s[:1].tolist()])
        node = self.node
        pool, ahead = node.pool.stats(), node.take_ahead_bytes()
        return EpochStats(
            duration_s=end_s - begin_s,
            latency_ms=1000.0 * (done_s - arrival_s),
            service_ms=service_ms,
            arrival_s=arrival_s,
            is_hot=is_hot.astype(np.bool_),
            history_tokens=int(history.sum()),
            reused_tokens=int(reused.sum()),
            rows_looked_up=int(computed.sum()) * node.config.tables,
            rows_hit=float(rows_hit.sum()),
            computed_tokens=int(computed.sum()),
            refill_bytes=float(ahead.refill),
            prefetch_bytes=float(ahead.prefetch),
            evictions=node.take_kv_evictions(),
            alpha_target=alpha_centi / 100,
            alpha_resident=node.embedding.resident_rows / node.rows_in_pool,
            embedding_pages=pool.embedding,
            kv_pages=pool.kv,
            free_pages=pool.free,
            pending_pages=pool.pending,
            pool_bytes=node.pool.pages * node.pool.page_bytes,
            working_set_bytes=float(self._hot.pages(end_s) * node.pool.page_bytes),
            backlog=len(self._waiting) + len(late),
            backlog_age_s=end_s - oldest_s,
            utilisation=self._busy_s(begin_s, end_s) / (end_s - begin_s),
        )
