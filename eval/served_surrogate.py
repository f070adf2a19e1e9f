"""A surrogate node whose engine is a control loop: thousands of epochs in seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hlem_env import mdp
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.node import SurrogateBackend
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests
from serving_bridge.control_loop import ControlLoop, Served
from serving_bridge.status import EpochRecord

Spoil = Callable[[int, EpochStats], EpochStats | None]


class Recorded:
    """A workload that remembers what it gave."""

    def __init__(self, workload: Any) -> None:
        self._workload = workload
        self.given = Requests.empty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def take(self, until_s: float) -> Requests:
        """As of the workload."""
        taken: Requests = self._workload.take(until_s)
        self.given = self.given.then(taken)
        return taken

    def completed(self, arrival_s: np.ndarray) -> Requests:
        """Those with these arrivals; they are forgotten, with all before them."""
        if not arrival_s.size:
            return Requests.empty()
        at = self.given.arrival_s.searchsorted(np.sort(arrival_s))
        given, self.given = self.given, self.given[int(at[-1]) + 1 :]
        return Requests(
            given.arrival_s[at], given.user[at], given.history_length[at], given.new_items[at]
        )


class Node:
    """Runs epochs, in ticks or whole, at the alpha that the loop gives."""

    def __init__(self, scenario: Scenario, loop: ControlLoop, seed: int = 1) -> None:
        self.loop, self.scenario = loop, scenario
        self.workload = Recorded(scenario.workload())
        self.backend = SurrogateBackend(self.workload, scenario.node(), scenario.profile())
        self.backend.reset(seed)
        self.alpha_centi = loop.initial_alpha_centi
        self.backend.run(self.alpha_centi, self.backend.warmup_s)
        self.workload.given = self.workload.given[:0]

    def epochs(
        self, count: int, ticks: bool = True, spoil: Spoil = lambda epoch, stats: stats
    ) -> Iterator[EpochRecord]:
        """Run epochs; `spoil` may change what the loop is told of each."""
        for epoch in range(count):
            stats = self._run(ticks)
            served = Served(self.workload.completed(stats.arrival_s), 0)
            self.alpha_centi = self.loop.epoch(spoil(epoch, stats), served)
            yield self.loop.recent()[-1]

    def _run(self, ticks: bool) -> EpochStats:
        seconds = self.scenario.epoch_seconds
        if not ticks:
            return self.backend.run(self.alpha_centi, seconds)
        whole: EpochStats | None = None
        for _ in range(mdp.TICKS_PER_EPOCH):
            tick = self.backend.run(self.alpha_centi, seconds / mdp.TICKS_PER_EPOCH)
            moved = self.loop.tick(tick)
            self.alpha_centi = self.alpha_centi if moved is None else moved
            whole = tick if whole is None else whole.merge(tick)
        assert whole is not None
        return whole


def config_of(scenario: Scenario) -> MdpConfig:
    """Of a node that serves the scenario."""
    return MdpConfig(
        max_history_tokens=scenario.max_history_tokens,
        epoch_seconds=scenario.epoch_seconds,
        features="working_set",
    )
