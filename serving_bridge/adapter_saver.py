"""Keeps adapters' states on disk, in a thread of its own: neither decisions nor learning wait for it."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path

from serving_bridge.adapter import OnlineAdapter
from serving_bridge.adapter_state import restore_state, save_state
from serving_bridge.policy import FrozenPolicy

logger = logging.getLogger(__name__)


class AdapterSaver:
    """One folder for the states of all policies that a node ran, each in a folder by its weights' hash.

    A policy that comes back finds what was learnt on it.

    Args:
        folder: made when first written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.failures = 0
        """Savings that the disk refused. What was not saved is with the next saving."""
        self._asked: queue.SimpleQueue[tuple[OnlineAdapter, str, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hlem-adapter-saver", daemon=True)
        self._thread.start()

    def restore(self, adapter: OnlineAdapter, policy: FrozenPolicy) -> bool:
        """Load what was learnt on the policy; whether there was something. In the caller's thread."""
        sha256 = policy.metadata["weights_sha256"]
        return restore_state(adapter, self._of(sha256), sha256)

    def save(self, adapter: OnlineAdapter, policy: FrozenPolicy, retire: bool = False) -> None:
        """Have the state written, soon.

        Args:
            adapter: may go on learning.
            policy: that it learns on.
            retire: end its thread first: it is not used any more.
        """
        self._asked.put((adapter, policy.metadata["weights_sha256"], retire))

    def close(self) -> None:
        """Write what was asked for, and end the thread. May be called twice."""
        self._asked.put(None)
        self._thread.join()

    def _of(self, sha256: str) -> Path:
        return self.folder / sha256[:16]

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            adapter, sha256, retire = asked
            try:
                if retire:
                    adapter.close()
                save_state(adapter, self._of(sha256), sha256)
            except OSError as error:
                self.failures += 1
                logger.warning("the adapter's state cannot be saved: %s", error.strerror)
            except Exception:
                self.failures += 1
                logger.exception("the adapter's state cannot be saved")
