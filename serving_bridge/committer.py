"""The thread that has histories written, and only then answers the requests that brought them."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from hlem_env.live.node import Executed
from hlem_env.workload.requests import Requests
from serving_bridge.history_store import HistoryStore, StoreBroken, StoreError
from serving_bridge.scoring import NotServed, Scored
from serving_bridge.user_table import User, Writing

logger = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Requests that have been executed, [n] each, and what of them must be written."""

    requests: Requests
    executed: Executed
    users: list[User]
    writings: list[Writing]
    answers: list[Scored]
    futures: list[Future[Scored]]


class Answered(NamedTuple):
    """A batch whose futures have been resolved."""

    batch: Batch
    done_s: float
    written: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """[n] the others were refused, and are not served."""


class Committer:
    """Writes what batches bring, all that wait together, in order.

    Args:
        store: where to.
        now: the node's clock, seconds.
        broken: is called, once, with the reason, when nothing can be written any more.
    """

    def __init__(
        self, store: HistoryStore, now: Callable[[], float], broken: Callable[[str], None]
    ) -> None:
        self.answered: deque[Answered] = deque()
        """Batches in order of their answers; whoever measures takes them."""
        self._store, self._now, self._broken = store, now, broken
        self._failing = False
        self._batches: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hlem-committer", daemon=True)
        self._thread.start()

    def put(self, batch: Batch) -> None:
        """Write and answer a batch, soon."""
        self._batches.put(batch)

    def close(self, timeout_s: float) -> bool:
        """Finish what was put; whether that was done in time."""
        self._batches.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            together = [batch]
            while not self._batches.empty():
                following = self._batches.get()
                if following is None:
                    self._batches.put(None)
                    break
                together.append(following)
            self._finish(together)

    def _finish(self, batches: list[Batch]) -> None:
        errors = self._commit([writing for batch in batches for writing in batch.writings])
        done_s, first = self._now(), 0
        for batch in batches:
            mine = errors[first : first + len(batch.writings)]
            first += len(batch.writings)
            for user, writing, error in zip(batch.users, batch.writings, mine, strict=True):
                writing.done, user.lost = error is None, user.lost or error is not None
            # Before the futures: who waits for one finds it counted.
            written = np.array([error is None for error in mine])
            self.answered.append(Answered(batch, done_s, written))
            for future, answer, error in zip(batch.futures, batch.answers, mine, strict=True):
                if error is None:
                    future.set_result(answer)
                else:
                    future.set_exception(NotServed(f"the history was not stored: {error}"))

    def _commit(self, writings: list[Writing]) -> list[StoreError | None]:
        errors: list[StoreError | None]
        try:
            errors = self._store.commit([writing.change for writing in writings])
        except Exception as error:
            logger.exception("histories cannot be written")
            errors = [StoreBroken(f"it cannot be written ({type(error).__name__})")] * len(writings)
        failed = next((error for error in errors if error is not None), None)
        if failed is not None and not self._failing:
            logger.error("requests are refused: %s", failed)
        self._failing = failed is not None
        if isinstance(failed, StoreBroken):
            self._broken(str(failed))
        return errors
