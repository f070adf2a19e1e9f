"""Ticks and epochs of a served node: what it measured goes to the controller, alpha comes back.

They lie on a grid of the node's clock and go by without requests. Whoever calls late gets the ticks
that were missed one by one; of more than an epoch, the whole epochs as one long tick.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from hlem_env import mdp
from hlem_env.errors import require
from hlem_env.live.measured import Measured
from hlem_env.live.node import Executed, LiveNode
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests
from serving_bridge.control_loop import Histories
from serving_bridge.control_loop import Served as Served

logger = logging.getLogger(__name__)


class Control(Protocol):
    """What decides alpha. It is called from one thread; it must not wait."""

    @property
    def initial_alpha_centi(self) -> int:
        """Alpha at the node's start, hundredths."""

    def tick(self, stats: EpochStats) -> int | None:
        """After each tick: alpha to apply now, hundredths, or None."""

    def epoch(self, stats: EpochStats, served: Served) -> int:
        """After each epoch, its last tick's `tick` included: alpha from now on, hundredths."""


class Ticker:
    """Follows the grid of ticks.

    Args:
        node: whose alpha is moved.
        measured: of that node.
        control: decides. What it raises is logged, and alpha stays.
        start_s: of the node's clock, by `time.monotonic`.
        histories: what the store holds, and what was removed since the last call.
    """

    def __init__(
        self, node: LiveNode, measured: Measured, control: Control, start_s: float,
        histories: Callable[[], Histories],
    ) -> None:  # fmt: skip
        self._node, self.measured, self._control = node, measured, control
        self._tick_s = node.config.epoch_seconds / mdp.TICKS_PER_EPOCH
        self._ticks, self._start_s, self._histories = 0, start_s, histories
        self._epoch: EpochStats | None = None
        self._served: deque[tuple[float, Requests]] = deque()
        self._refused = 0
        self._failing = False
        self.alpha_centi = 0
        """In force, hundredths."""

    def begin(self) -> None:
        """Set the first alpha."""
        self.alpha_centi = self._control.initial_alpha_centi
        require(0 <= self.alpha_centi <= 100, "initial_alpha_centi", self.alpha_centi, "0 to 100")
        self._node.move(self.alpha_centi)

    def due_s(self, now_s: float) -> float:
        """When the tick ends that is to be closed next, seconds."""
        epochs = int(now_s / self._tick_s) // mdp.TICKS_PER_EPOCH
        if epochs - self._ticks // mdp.TICKS_PER_EPOCH > 1:
            return epochs * mdp.TICKS_PER_EPOCH * self._tick_s
        return (self._ticks + 1) * self._tick_s

    def completed(
        self, requests: Requests, slots: Requests, executed: Executed, done_s: float
    ) -> None:
        """A batch has been answered; `slots` are the requests by their users' slots."""
        self.measured.completed(slots, executed, done_s)
        self._served.append((done_s, requests))

    def close_tick(self, end_s: float, waiting_since_s: list[float], refused: int) -> None:
        """Close the tick that ends at `end_s`, and the epoch if one ends there.

        Args:
            end_s: what `due_s` gave.
            waiting_since_s: arrivals until then of requests that have not been answered yet.
            refused: since the last tick.
        """
        begun_s = self._ticks * self._tick_s
        epochs = self._ticks // mdp.TICKS_PER_EPOCH
        self._ticks = round(end_s / self._tick_s)
        oldest_s = min(waiting_since_s, default=end_s)
        stats = self.measured.take(begun_s, end_s, self.alpha_centi, len(waiting_since_s), oldest_s)
        self._epoch = stats if self._epoch is None else self._epoch.merge(stats)
        self._refused += refused
        self._ask(lambda: self._control.tick(stats))
        if self._ticks // mdp.TICKS_PER_EPOCH > epochs:
            self._close_epoch(end_s)

    def _close_epoch(self, end_s: float) -> None:
        stats, self._epoch = self._epoch, None
        assert stats is not None
        served = Served(
            self._take_served(end_s), self._refused, self._start_s + end_s, self._histories()
        )
        self._refused = 0
        self._node.last_p99_ms = stats.p99_ms
        self._ask(lambda: self._control.epoch(stats, served))

    def _take_served(self, end_s: float) -> Requests:
        done = []
        while self._served and self._served[0][0] <= end_s:
            done.append(self._served.popleft()[1])
        if not done:
            return Requests.empty()
        arrival_s = np.concatenate([one.arrival_s for one in done])
        order = np.argsort(arrival_s, kind="stable")
        return Requests(
            arrival_s[order],
            np.concatenate([one.user for one in done])[order],
            np.concatenate([one.history_length for one in done])[order],
            np.concatenate([one.new_items for one in done])[order],
        )

    def _ask(self, question: Callable[[], int | None]) -> None:
        """Apply the controller's answer; nothing that it does or says ends the node."""
        try:
            answer = question()
            alpha_centi = self.alpha_centi if answer is None else operator.index(answer)
            require(0 <= alpha_centi <= 100, "alpha_centi", alpha_centi, "0 to 100")
        except Exception:
            if not self._failing:
                logger.exception("the controller fails: alpha is held at %d", self.alpha_centi)
            self._failing = True
            return
        self._failing = False
        if alpha_centi != self.alpha_centi:
            self._node.move(alpha_centi)
            self.alpha_centi = alpha_centi
