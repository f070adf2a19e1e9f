"""What a predictor says of embedding rows, asked in a thread of its own: no lookup waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import numpy as np

from hlem_env.errors import BackendError
from hlem_env.eviction.predictor import Floats, Predictor
from hlem_env.eviction.protocol import Keys

BATCHES_WAITING = 8
"""That the thread may be behind by."""


class RowPredictions:
    """Asks for the rows of one batch after the other.

    Args:
        predictor: asked in the thread, and closed with it.
        answer: called in the thread with distinct rows [n] and the predicted times [n] of their next
            requests: infinity means never.
    """

    def __init__(self, predictor: Predictor, answer: Callable[[Keys, Floats], None]) -> None:
        self.dropped = 0
        """Batches of which nothing was predicted, since the thread was behind."""
        self.error: Exception | None = None
        """What ended the predictions: they are not usable any more."""
        self._predictor, self._answer = predictor, answer
        self._asked: queue.Queue[tuple[Callable[[], Keys], float] | None] = queue.Queue(
            BATCHES_WAITING
        )
        self._thread = threading.Thread(target=self._run, name="row predictions", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether the predictions are worth following now."""
        return self.error is None and self._predictor.usable

    def has_room(self) -> bool:
        """Whether another batch can be asked for; counts it as dropped if not. One thread asks."""
        room = not self._asked.full()
        self.dropped += not room
        return room

    def ask(self, keys: Callable[[], Keys], now: float) -> None:
        """Ask for what was requested now: keys, which the thread calls for, may repeat."""
        self._asked.put_nowait((keys, now))

    def wait(self) -> None:
        """Wait until all that was asked is answered.

        Raises:
            BackendError: an error ended the predictions.
        """
        self._asked.join()
        if self.error is not None:
            raise BackendError(f"rows are no longer predicted: {self.error!r}") from self.error

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)
        self._thread.join()
        self._predictor.close()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                if self.error is None:
                    self._predict(*asked)
            except Exception as error:
                # Else nobody would take what is asked, and `wait` would wait for ever.
                logging.getLogger(__name__).warning("rows are no longer predicted: %r", error)
                self.error = error
            finally:
                self._asked.task_done()
        self._asked.task_done()

    def _predict(self, keys: Callable[[], Keys], now: float) -> None:
        rows = np.unique(keys())
        gaps = self._predictor.access(rows, np.full(len(rows), now))
        gaps = np.where(np.isnan(gaps), np.inf, np.maximum(gaps, 0.0))
        self._answer(rows, now + gaps)
