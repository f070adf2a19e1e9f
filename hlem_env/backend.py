"""The Backend protocol, and the one runner that applies alpha to a backend, epoch by epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from hlem_env import mdp
from hlem_env.controller import Controller, Decision
from hlem_env.errors import BackendError
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats


class Backend(Protocol):
    """A node that serves requests: the surrogate, or a live one."""

    warmup_s: float
    """Seconds to run after `reset` before measuring, with the workload held at its start."""

    def reset(self, seed: int) -> None:
        """Empty the queue and both caches and start the workload anew."""

    def run(self, alpha_centi: int, seconds: float) -> EpochStats:
        """Serve for `seconds` with the embedding share at `alpha_centi` hundredths."""

    def close(self) -> None:
        """Give back what the node holds. May be called twice."""


@dataclass
class Runner:
    """Applies alpha to a backend: clips it to the bounds, warms up, runs epochs whole or in ticks."""

    backend: Backend
    config: MdpConfig
    alpha_centi: int = -1
    """alpha in force, hundredths; -1 before `reset`."""
    was_clipped: bool = False
    """Whether the last alpha asked for was out of bounds."""
    tick_alphas_centi: list[int] = field(default_factory=list)
    """alpha in force in each tick of the last epoch; one entry where it was run whole."""

    def reset(self, seed: int, alpha_centi: int) -> EpochStats:
        """Start an episode at `alpha_centi`: warm up, run one epoch and return its stats."""
        self.backend.reset(seed)
        self.alpha_centi = self.config.clip(alpha_centi)
        if self.backend.warmup_s > 0:
            self.backend.run(self.alpha_centi, self.backend.warmup_s)
        return self.step(self.alpha_centi)

    def step(self, alpha_centi: int) -> EpochStats:
        """Run one epoch at `alpha_centi`, clipped to the bounds (then `was_clipped` says so)."""
        self._apply(alpha_centi)
        self.tick_alphas_centi = [self.alpha_centi]
        return self.backend.run(self.alpha_centi, self.config.epoch_seconds)

    def step_in_ticks(self, alpha_centi: int, controller: Controller) -> EpochStats:
        """Run one epoch in ticks, letting the controller's `on_tick` change alpha after each.

        What it asks for after the last tick holds only until the decision that follows at once: a
        controller that means it decides so.
        """
        self._apply(alpha_centi)
        self.tick_alphas_centi = []
        tick_s = self.config.epoch_seconds / mdp.TICKS_PER_EPOCH
        epoch: EpochStats | None = None
        for _ in range(mdp.TICKS_PER_EPOCH):
            self.tick_alphas_centi.append(self.alpha_centi)
            stats = self.backend.run(self.alpha_centi, tick_s)
            epoch = stats if epoch is None else epoch.merge(stats)
            decision: Decision | None = controller.on_tick(stats)  # type: ignore[attr-defined]
            if decision is not None:
                self._apply(decision.alpha_centi)
        assert epoch is not None
        return epoch

    def _apply(self, alpha_centi: int) -> None:
        if self.alpha_centi < 0:
            raise BackendError("the runner has not been reset: call reset(seed, alpha_centi) first")
        self.alpha_centi = self.config.clip(alpha_centi)
        self.was_clipped = self.alpha_centi != alpha_centi


def run_controller(
    runner: Runner, controller: Controller, epochs: int, seed: int
) -> Iterator[tuple[EpochStats, Decision]]:
    """Run one episode, yielding each epoch's stats with the decision that was in force in it.

    The first of the `epochs` runs at the controller's initial alpha. A controller with a period of
    several epochs decides on their merged stats.
    """
    controller.reset(seed)
    decision = Decision(controller.initial_alpha_centi, "initial")
    has_ticks = hasattr(controller, "on_tick")
    stats = runner.reset(seed, decision.alpha_centi)
    seen = stats
    for epoch in range(1, epochs + 1):
        yield stats, decision
        if epoch == epochs:
            return
        alpha_centi = runner.alpha_centi  # what a tick set stays until the next decision
        if epoch % controller.period == 0:
            decision = controller.decide(mdp.observe(seen, runner.config), seen)
            alpha_centi = decision.alpha_centi
        if has_ticks:
            stats = runner.step_in_ticks(alpha_centi, controller)
        else:
            stats = runner.step(alpha_centi)
        seen = stats if epoch % controller.period == 0 else seen.merge(stats)
