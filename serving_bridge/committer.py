"""The thread that writes to the store: histories, of which it then answers the requests, and removals."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
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


@dataclass(eq=False)
class Removal:
    """Users whose histories are to be removed."""

    users: list[str]
    done: bool = False
    """Set by the thread that commits, after `error`."""
    error: str = ""
    """Why nothing was removed; empty if all of it was."""


class Answered(NamedTuple):
    """A batch whose futures have been resolved."""

    batch: Batch
    done_s: float
    written: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """[n] the others were refused, and are not served."""


class Committer:
    """Writes what batches bring, all that wait together, and removes histories, in order.

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
        self._work: queue.SimpleQueue[Batch | Removal | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hlem-committer", daemon=True)
        self._thread.start()

    def put(self, work: Batch | Removal) -> None:
        """Write and answer a batch, or remove histories, soon."""
        self._work.put(work)

    def close(self, timeout_s: float) -> bool:
        """Finish what was put; whether that was done in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        together: list[Batch] = []
        while True:
            work = self._work.get()
            if isinstance(work, Batch):
                together.append(work)
                if not self._work.empty():
                    continue
            if together:
                self._finish(together)
                together = []
            if work is None:
                return
            if isinstance(work, Removal):
                self._remove(work)

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

    def _remove(self, removal: Removal) -> None:
        try:
            self._store.remove(removal.users)
        except StoreError as error:
            removal.error = str(error)
        except Exception as error:
            logger.exception("histories cannot be removed")
            removal.error = type(error).__name__
        removal.done = True

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
