"""The live backend: requests that come when they come, batches on a node, and what was measured.

Arrivals are open loop: the workload says when a request arrives and never waits for the server. The
clock is wall time while `run` runs and stands still between runs, so that a policy may think between
epochs; behind the serving bridge it never stops. Everything happens in the caller's thread.
"""

from __future__ import annotations

import numpy as np

from hlem_env import mdp
from hlem_env.errors import BackendError, require
from hlem_env.live.hot_users import HotUsers
from hlem_env.live.measured import Measured
from hlem_env.live.node import Executed, LiveNode
from hlem_env.live.time_source import WallTime
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests, Workload

TRANSFER_STEP_S = 0.0005
"""While rows are moved ahead, an idle server looks after them this often."""


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


class LiveBackend:
    """A live node behind the Backend protocol.

    Args:
        workload: where requests come from.
        node: what serves them; closed with the backend.
        time_source: what the clock follows; by default what the node's does.

    Raises:
        BackendError: `run` before `reset`, or after `close`.
    """

    def __init__(
        self, workload: Workload, node: LiveNode, time_source: WallTime | None = None
    ) -> None:
        self.workload, self.node = workload, node
        self._time = time_source or node.time_source
        self.warmup_s = node.config.warmup_epochs * node.config.epoch_seconds
        window_s = mdp.HOT_WINDOW_EPOCHS * node.config.epoch_seconds
        self._measured = Measured(node, HotUsers(workload.persistent_users, window_s))
        self._clock: Clock | None = None
        self._closed = False

    def reset(self, seed: int) -> None:
        """Empty queue and caches; the workload starts anew from `seed`, before its warm-up."""
        if self._closed:
            raise BackendError("the live node is closed: make a new one")
        self.node.reset(self.workload.persistent_users)
        self._measured.reset()
        self.workload.reset(np.random.default_rng(seed), -self.warmup_s)
        self._clock = Clock(-self.warmup_s, self._time)
        self._end_s = -self.warmup_s
        self._waiting = Requests.empty()

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
        oldest_s = self._waiting.arrival_s[:1].tolist()
        stats = self._measured.take(
            begin_s, self._end_s, alpha_centi, len(self._waiting), *oldest_s
        )
        self.node.last_p99_ms = stats.p99_ms
        return stats

    def execute(self, batch: Requests, waiting: Requests, now_s: float) -> Executed:
        """One batch on the node, while others wait."""
        return self.node.execute(batch, waiting, now_s)

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
            executed = self.execute(batch, rest[: arrived - count], now_s)
            self._waiting = rest  # only now: what an interrupt stops is still waiting
            done_s = clock.now()
            self._measured.ran(now_s, done_s)
            self._measured.completed(batch, executed, done_s)
