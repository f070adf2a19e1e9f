"""The engine of a served node: a queue, a live node that executes batches of it, histories on disk.

    any thread    submit: check, queue, a future
    worker        owns the node: batches, idle moments, ticks and epochs of the controller; chooses histories
                  that are removed, where there are too many
    committer     writes the batch's histories with one synchronisation, then resolves the futures

The worker goes on with the next batch while the last one is written. Time is the machine's monotonic
clock and never stops: ticks and epochs go by without requests, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env import mdp
from hlem_env.errors import BackendError, HlemError, require
from hlem_env.live.given_items import GivenRequests
from hlem_env.live.hot_users import HotUsers
from hlem_env.live.measured import Measured
from hlem_env.live.node import Executed, LiveNode
from hlem_env.live.serving import TRANSFER_STEP_S
from hlem_env.workload.requests import Requests
from serving_bridge.checking import checked
from serving_bridge.committer import Answered, Batch, Committer
from serving_bridge.history_store import USER_BYTES_MAX, HistoryStore, StoreError
from serving_bridge.placing import Placed, place
from serving_bridge.rehearsal import rehearse
from serving_bridge.retention import Retention
from serving_bridge.scoring import (
    Limits,
    NotServed,
    Overloaded,
    Scored,
    ScoreRequest,
    ScoringError,
)
from serving_bridge.ticker import Control, Ticker
from serving_bridge.user_table import UserTable

logger = logging.getLogger(__name__)

Scores = NDArray[np.float32]

CLOSE_TIMEOUT_S = 0.9
"""A batch that runs longer is left to end by itself."""
RETRY_AFTER_S = 0.05, 30.0
"""Shortest and longest that a client is told to wait."""
DRAINING_RETRY_S = 1.0
"""Another node serves, or this one comes back."""


@dataclass(eq=False)
class _Waiting:
    """A request in the queue."""

    request: ScoreRequest
    arrival_s: float
    future: Future[Scored]


class _Ready(NamedTuple):
    """A request that waits, and what it means for its user's history."""

    waiting: _Waiting
    placed: Placed


class Engine:
    """A Scorer on a live node. Making one takes a rehearsal: seconds where nothing has been compiled yet.

    Args:
        node: what executes; the engine empties it, owns it and closes it.
        store: of histories; closed with the engine.
        control: decides alpha; not closed.
        limits: by default the node's longest history and the defaults of `Limits`.
        known_users: of which a history can be cached, half a kilobyte each; more than `limits.queue`. By
            default as many as the node remembers, and twice the queue at least.
        retain_bytes: of histories in the store; beyond it those of users go who were not here for longest.
            By default seven eighths of what the store may grow to.

    Raises:
        ArgumentError: limits beyond what the node or the store can do.
    """

    def __init__(
        self,
        node: LiveNode,
        store: HistoryStore,
        control: Control,
        limits: Limits | None = None,
        known_users: int | None = None,
        retain_bytes: int | None = None,
    ) -> None:
        longest = node.config.max_history_tokens
        self.limits = limits or Limits(history_tokens=longest)
        require(
            1 <= self.limits.history_tokens <= longest, "limits.history_tokens",
            self.limits.history_tokens, f"1 to {longest}, the model's positions",
        )  # fmt: skip
        require(
            self.limits.user_bytes <= USER_BYTES_MAX, "limits.user_bytes", self.limits.user_bytes,
            f"1 to {USER_BYTES_MAX}, the longest key of the store",
        )  # fmt: skip
        if known_users is None:
            known_users = max(node.remembered_users, 2 * self.limits.queue)
        require(known_users > self.limits.queue, "known_users", known_users, "above limits.queue")
        if retain_bytes is None:
            retain_bytes = store.max_bytes - store.max_bytes // 8
        require(
            1 <= retain_bytes <= store.max_bytes, "retain_bytes", retain_bytes,
            f"1 to {store.max_bytes}, what the store may grow to",
        )  # fmt: skip
        self._node, self._store = node, store
        rehearse(node, self.limits)
        hot = HotUsers(known_users, mdp.HOT_WINDOW_EPOCHS * node.config.epoch_seconds)
        self._users = UserTable(store, known_users, hot.forget)
        self._start_s = time.monotonic()
        self._wake = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._writing: deque[Batch] = deque()
        self._outstanding = 0
        self._refused = 0
        self._service_s = 0.01
        self._draining = self._closing = False
        self._failed = ""
        self._committer = Committer(store, self.now, self._fail)
        self._retention = Retention(store, self._users, retain_bytes, self._committer.put)
        self._ticker = Ticker(
            node, Measured(node, hot), control, self._start_s, self._retention.take
        )
        self._worker = threading.Thread(target=self._run, name="hlem-worker", daemon=True)
        self._worker.start()

    @property
    def ready(self) -> bool:
        """See `Scorer.ready`."""
        return not (self._draining or self._closing or self._failed)

    @property
    def failure(self) -> str:
        """Why the node serves no more; empty while it does."""
        return self._failed

    def now(self) -> float:
        """The node's clock: seconds since its start."""
        return time.monotonic() - self._start_s

    def submit(self, request: ScoreRequest) -> Future[Scored]:
        """See `Scorer.submit`. The request's arrays must not change until it has been answered."""
        request = checked(request, self.limits)
        future: Future[Scored] = Future()
        with self._wake:
            if self._failed:
                future.set_exception(NotServed("the node has failed"))
                return future
            if self._draining or self._closing:
                raise Overloaded("the node is draining", DRAINING_RETRY_S)
            if self._outstanding >= self.limits.queue:
                self._refused += 1
                raise Overloaded("the queue is full", self._retry_after_s())
            self._outstanding += 1
            waiting = _Waiting(request, self.now(), future)
            self._queue.append(waiting)
            self._wake.notify_all()
        future.add_done_callback(partial(self._forget, waiting))
        return future

    def drain(self, timeout_s: float) -> bool:
        """See `Scorer.drain`."""
        with self._wake:
            self._draining = True
            return self._wake.wait_for(lambda: self._outstanding == 0, timeout_s)

    def close(self) -> None:
        """Stop within a second; what waits is not served. May be called twice."""
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._worker.join(max(end_s - time.monotonic(), 0.0))
        if self._worker.is_alive() or not self._committer.close(max(end_s - time.monotonic(), 0.1)):
            logger.warning("a batch did not end in time; node and store are left to the process")
            return
        self._refuse_all("the node is closing")
        self._store.close()
        self._node.close()

    def _retry_after_s(self) -> float:
        """How long what is in the queue takes, at the pace of late."""
        return min(max(self._outstanding * self._service_s, RETRY_AFTER_S[0]), RETRY_AFTER_S[1])

    def _forget(self, waiting: _Waiting, future: Future[Scored]) -> None:
        """A future is done: answered, or cancelled, then it leaves the queue at once."""
        with self._wake:
            self._outstanding -= 1
            if future.cancelled() and waiting in self._queue:
                self._queue.remove(waiting)
            self._wake.notify_all()

    def _run(self) -> None:
        """The worker."""
        try:
            self._ticker.begin()
            while not (self._closing or self._failed):
                self._measure()
                removing = self._retention.step(self.now(), self._on_their_way())
                if not self._serve():
                    self._idle(removing)
        except Exception:
            logger.exception("the node has failed")
            self._fail("the node has failed")
        if self._failed:
            self._refuse_all("the node has failed")

    def _measure(self) -> None:
        """Count what was answered; close the ticks that have ended."""
        answered = self._committer.answered
        while answered:
            self._count(answered.popleft())
        now_s = self.now()
        while (end_s := self._ticker.due_s(now_s)) <= now_s:
            with self._wake:
                since_s = [one.arrival_s for one in self._queue if one.arrival_s <= end_s]
                refused, self._refused = self._refused, 0
            for batch in self._writing:
                since_s += batch.requests.arrival_s.tolist()
            self._ticker.close_tick(end_s, since_s, refused)

    def _count(self, answered: Answered) -> None:
        """Requests that were answered, those whose history could not be written left out."""
        batch, written = answered.batch, answered.written
        self._writing.popleft()
        for user in batch.users:
            user.settle()
        if written.any():
            slots = np.array([user.slot for user in batch.users])
            self._ticker.completed(
                _those(batch.requests, batch.requests.user, written),
                _those(batch.requests, slots, written),
                _part(batch.executed, written),
                answered.done_s,
            )

    def _serve(self) -> bool:
        """Execute the next batch; whether there was one."""
        ready = self._place()
        if not ready:
            return False
        requests = _given_requests(ready)
        count = self._node.first_batch(requests)
        begun = self._begin(ready[:count])
        if not begun:
            return True
        batch = requests[:count] if len(begun) == count else _given_requests(begun)
        start_s = self.now()
        try:
            executed = self._node.execute(batch, requests[count:], start_s)
            scores = executed.scores.float().cpu().numpy()
        except Exception as error:
            for one in begun:
                one.waiting.future.set_exception(NotServed("the node failed at the request"))
            if isinstance(error, BackendError) or not isinstance(error, HlemError):
                raise
            logger.exception("a batch was not served")
            return True
        self._ticker.measured.ran(start_s, self.now())
        self._service_s += 0.1 * (executed.device_s / len(begun) - self._service_s)
        self._hand_over(begun, batch, executed, scores)
        return True

    def _place(self) -> list[_Ready]:
        """The first requests that wait, no user twice, a few more than a batch may take."""
        with self._wake:
            waiting = list(self._queue)
        most, tokens = 2 * self._node.config.token_budget, 0
        ready: dict[str, _Ready] = {}
        for one in waiting:
            if one.request.user in ready or tokens > most:
                break
            try:
                placed = place(one.request, self._users, self._store, self.limits)
            except (ScoringError, StoreError) as error:
                if self._take(one):
                    one.future.set_exception(
                        error if isinstance(error, ScoringError) else NotServed(str(error))
                    )
                continue
            tokens += placed.new_items + one.request.candidates.size
            ready[one.request.user] = _Ready(one, placed)
        return list(ready.values())

    def _take(self, waiting: _Waiting) -> bool:
        """Take a request out of the queue; False: it has been cancelled."""
        with self._wake:
            if waiting not in self._queue:
                return False
            self._queue.remove(waiting)
        return waiting.future.set_running_or_notify_cancel()

    def _begin(self, ready: list[_Ready]) -> list[_Ready]:
        """Take the requests of a batch out of the queue, those left out that have been cancelled."""
        return [one for one in ready if self._take(one.waiting)]

    def _hand_over(
        self, begun: list[_Ready], requests: Requests, executed: Executed, scores: Scores
    ) -> None:
        """What a batch did to histories goes to the disk, and its answers out behind it."""
        ends = np.cumsum([one.waiting.request.candidates.size for one in begun])
        parts = np.split(scores, ends[:-1])
        answers = [
            Scored(part.copy(), one.placed.length, int(reused))
            for part, one, reused in zip(parts, begun, executed.reused, strict=True)
        ]
        batch = Batch(
            _those(requests, requests.user, np.ones(len(begun), np.bool_)),
            executed,
            [one.placed.user for one in begun],
            [one.placed.executed() for one in begun],
            answers,
            [one.waiting.future for one in begun],
        )
        self._writing.append(batch)
        self._committer.put(batch)

    def _on_their_way(self) -> Iterator[str]:
        """Users whose requests have been executed and may not have been written."""
        return (user.name for batch in self._writing for user in batch.users)

    def _idle(self, removing: bool) -> None:
        """Warm rows, or wait for a request, a removal, the end of a tick or of the node."""
        now_s = self.now()
        more = self._node.idle(now_s) or removing
        seconds = TRANSFER_STEP_S if more else self._ticker.due_s(now_s) - now_s
        with self._wake:
            if not (self._queue or self._closing or self._failed or self._committer.answered):
                self._wake.wait(max(seconds, 0.0))

    def _fail(self, reason: str) -> None:
        with self._wake:
            self._failed = self._failed or reason
            self._wake.notify_all()

    def _refuse_all(self, reason: str) -> None:
        with self._wake:
            waiting = list(self._queue)
        for one in waiting:
            if self._take(one):
                one.future.set_exception(NotServed(reason))


def _given_requests(ready: list[_Ready]) -> GivenRequests:
    placed = [one.placed for one in ready]
    return GivenRequests(
        np.array([one.waiting.arrival_s for one in ready]),
        np.array([one.user.number for one in placed], np.int64),
        np.array([one.length for one in placed], np.int32),
        np.array([one.new_items for one in placed], np.int32),
        np.array([one.edits for one in placed], np.int64),
        tuple(one.read for one in placed),
        tuple(one.waiting.request.candidates for one in ready),
    )


def _those(requests: Requests, users: NDArray[np.int64], mask: NDArray[np.bool_]) -> Requests:
    """Some of the requests, without their items, by these numbers of users."""
    return Requests(
        requests.arrival_s[mask],
        users[mask],
        requests.history_length[mask],
        requests.new_items[mask],
    )


def _part(executed: Executed, mask: NDArray[np.bool_]) -> Executed:
    """What some requests had of a batch, by their tokens."""
    share = float(executed.computed[mask].sum() / executed.computed.sum())
    return executed._replace(
        reused=executed.reused[mask],
        computed=executed.computed[mask],
        pages=executed.pages[mask],
        rows_hit=round(executed.rows_hit * share),
        device_s=executed.device_s * share,
    )
