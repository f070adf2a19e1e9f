"""The recovery controller: in a burst it takes over from the controller that it wraps (paper, Eq. 8)."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hlem_env.controller import Controller, Decision
from hlem_env.errors import require, require_choice
from hlem_env.mdp import (
    EMA_WEIGHT,
    FEATURES,
    HOT_WINDOW_EPOCHS,
    TICKS_PER_EPOCH,
    MdpConfig,
    observe,
)
from hlem_env.telemetry import EpochStats
from serving_bridge.burst_watch import BurstWatch, WatchSettings

logger = logging.getLogger(__name__)


class State(Enum):
    """Of the recovery controller."""

    NORMAL = "normal"
    BURST = "burst"
    RECOVERING = "recovering"


_NORMAL, _BURST, _RECOVERING = State
"""Of the module, since every decision compares: to look a member up in its class takes far longer."""


@dataclass(frozen=True)
class RecoverySettings:
    """When a burst begins and ends, and what is done in it.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    detector: str = "p99"
    """"p99": Eq. 8, once an epoch; "workload": the burst watch, every tick."""
    threshold_sigmas: float = 3.0
    """A burst begins when P99 is above EMA + this x sigma."""
    end_sigmas: float = 1.0
    """It ends when P99 is not above EMA + this x sigma."""
    sigma_floor_slos: float = 0.05
    """Least sigma, in SLOs: on a perfectly steady service every ripple would be a burst."""
    hot_share: float = 0.2
    """Above it alpha moves towards KV in a burst; else it holds."""
    step_centi: int = 6
    """The move towards KV, hundredths an epoch."""
    most_epochs: int = 6
    """Of a burst, and of the recovering after it."""
    calm_epochs: int = 2
    """Epochs in a row within EMA + end_sigmas x sigma that end the recovering."""
    burst_step_centi: int = 20
    """By the workload: the move towards KV in a burst, at once, hundredths."""
    burst_creep_centi: int = 1
    """By the workload: the moves after it while the burst lasts, hundredths a tick."""
    burst_most_centi: int = 40
    """By the workload: both moves together, at most, hundredths."""
    hold_epochs: int = HOT_WINDOW_EPOCHS
    """By the workload: epochs for which alpha is held after its return, while users of the burst
    still count as hot and would have the controller follow a burst that is over."""
    watch: WatchSettings = field(default_factory=WatchSettings)
    """By the workload: of the burst watch."""

    def __post_init__(self) -> None:
        require_choice("detector", self.detector, DETECTORS)
        require(
            1 <= self.burst_step_centi <= 100, "burst_step_centi", self.burst_step_centi, "1 to 100"
        )
        require(
            0 <= self.burst_creep_centi <= 100,
            "burst_creep_centi",
            self.burst_creep_centi,
            "0 to 100",
        )
        require(
            self.burst_step_centi <= self.burst_most_centi <= 100,
            "burst_most_centi",
            self.burst_most_centi,
            f"burst_step_centi ({self.burst_step_centi}) to 100",
        )
        require(self.hold_epochs >= 0, "hold_epochs", self.hold_epochs, "0 or more")
        require(
            0 <= self.end_sigmas <= self.threshold_sigmas,
            "end_sigmas",
            self.end_sigmas,
            f"0 to threshold_sigmas ({self.threshold_sigmas})",
        )
        require(self.sigma_floor_slos > 0, "sigma_floor_slos", self.sigma_floor_slos, "above 0")
        require(1 <= self.step_centi <= 100, "step_centi", self.step_centi, "1 to 100")
        require(self.most_epochs >= 1, "most_epochs", self.most_epochs, "at least 1")
        require(self.calm_epochs >= 1, "calm_epochs", self.calm_epochs, "at least 1")


@dataclass(frozen=True)
class Transition:
    """A change of state, with the numbers that made it."""

    epoch: int
    """Decisions since the episode's start."""
    before: State
    after: State
    p99_ms: float
    ema_ms: float
    sigma_ms: float
    hot_share: float
    alpha_centi: int
    """In force during the epoch."""
    tick: int = 0
    """Ticks after that decision; 0 for a transition by an epoch's end."""


class P99Detector:
    """Eq. 8: P99 against its exponential mean and deviation over 10 epochs.

    Until the first epoch is learnt, nothing surges.
    """

    def __init__(self, settings: RecoverySettings, slo_ms: float) -> None:
        self.settings = settings
        self._ema_ms = -1.0
        self._floor_ms = settings.sigma_floor_slos * slo_ms
        self._variance = 0.0

    @property
    def ema_ms(self) -> float:
        """Exponential mean; -1 before the first epoch."""
        return self._ema_ms

    @property
    def sigma_ms(self) -> float:
        """Deviation, not below the floor."""
        return max(float(np.sqrt(self._variance)), self._floor_ms)

    def surges(self, stats: EpochStats) -> bool:
        """P99 above EMA + threshold."""
        return 0.0 <= self.ema_ms < stats.p99_ms - self.settings.threshold_sigmas * self.sigma_ms

    def is_calm(self, stats: EpochStats) -> bool:
        """P99 at or below EMA + end_sigmas x sigma."""
        return stats.p99_ms <= self.ema_ms + self.settings.end_sigmas * self.sigma_ms

    def learn(self, stats: EpochStats) -> None:
        """West's recursion for an exponentially weighted mean and variance."""
        if self._ema_ms < 0.0:
            self._ema_ms = stats.p99_ms
            return
        difference = stats.p99_ms - self._ema_ms
        self._ema_ms += EMA_WEIGHT * difference
        self._variance = (1.0 - EMA_WEIGHT) * (self._variance + EMA_WEIGHT * difference**2)


DETECTORS = ("p99", "workload")
"""Kinds of burst detector."""
_ALPHA = FEATURES["paper"].index("alpha")


class WithRecovery:
    """Any controller, with recovery from bursts around it.

    **Detector "p99"** (Eq. 8). In a burst the wrapped controller is not asked. If more than
    `hot_share` of the requests are from hot users, alpha moves towards KV by `step_centi` an epoch,
    else it holds. The burst ends when P99 is back within EMA + sigma, or after 6 epochs. Then,
    recovering, the wrapped controller decides again and no new burst begins until P99 has stayed
    there for two epochs, or for 6 epochs: this hysteresis lets a level that has come to stay become
    the usual one.

    **Detector "workload"**. The burst watch looks at every tick. When it sees a burst, alpha moves
    towards KV by `burst_step_centi` at once, as soon as a tick has more than `hot_share` hot
    requests, and by `burst_creep_centi` at every such tick after it, as the burst's users come back
    and fill what it frees, up to `burst_most_centi`. When it sees the end, alpha goes back to where it
    was, at once, and is held there, recovering, for `hold_epochs`. P99 does not tell the end: the moves
    keep it from rising. After 6 epochs a burst is a level that has come to stay: the watch takes it as
    usual and the wrapped controller goes on from the alpha in force. A new burst may begin while
    recovering; the hysteresis is in the watch, whose charts start from 0. Without ticks it looks once
    an epoch.

    Epochs of a burst are not learnt, those of the recovering are.

    Args:
        controller: decides outside bursts, at its own period.
        settings: see there.
        config: SLO, which scales the floor of sigma, bounds of alpha, and scales of the state, for a
            controller with a period of several epochs; None is the default, with eight features.
        name: for tables; None appends "+RC" to the controller's.
    """

    period = 1

    def __init__(
        self,
        controller: Controller,
        settings: RecoverySettings | None = None,
        config: MdpConfig | None = None,
        name: str | None = None,
    ) -> None:
        self.controller = controller
        self.settings = settings or RecoverySettings()
        self.config = config or MdpConfig(features="working_set")
        self.name = name or f"{controller.name}+RC"
        self.initial_alpha_centi = controller.initial_alpha_centi
        self._watches = self.settings.detector == "workload"
        if self._watches or hasattr(controller, "on_tick"):
            self.on_tick = self._on_tick
        self.restart()

    def restart(self) -> None:
        """Forget baseline and transitions; the controller stays as it is."""
        self.state = _NORMAL
        self.transitions: list[Transition] = []
        self.detector = P99Detector(self.settings, self.config.slo_ms)
        self.watch = BurstWatch(self.settings.watch)
        self._epoch = self._since = self._calm = self._ticks = 0
        self._seen: EpochStats | None = None
        self._unasked = 0
        self._asked_centi = -1  # by the last tick, -1 for nothing; the next stats are before it
        self._before_centi = (
            -1
        )  # alpha to go back to after a burst; -1: go on from the one in force
        self._quiet: EpochStats | None = None  # the last epoch, where it is learnt at the next tick
        self._given = 0  # towards KV in this burst, hundredths

    def reset(self, seed: int) -> None:
        """Forget baseline and transitions, and reset the controller."""
        self.controller.reset(seed)
        self.restart()

    def overruled(self) -> None:
        """Go on from the alpha of the next stats: what the last tick asked for was not applied."""
        self._asked_centi = -1

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The controller's decision, or recovery's in a burst.

        What the epoch's last tick asked for is not in `stats` yet; it is what this goes on from. A
        controller with a period of several epochs is asked after so many, on their merged stats;
        epochs of a burst count.
        """
        if self._asked_centi >= 0:
            stats = replace(stats, alpha_target=self._asked_centi / 100)
            observation = observation.copy()
            observation[_ALPHA] = stats.alpha_target
            self._asked_centi = -1
        self._epoch += 1
        alpha_centi = round(100 * stats.alpha_target)
        if self._watches:
            alpha_centi = self._watch_workload(stats, alpha_centi)
        else:
            alpha_centi = self._watch_p99(stats, alpha_centi)
        state, controller = self.state, self.controller
        seen = stats if controller.period == 1 else self._gathered(stats)
        if state is not _NORMAL and (self._watches or state is _BURST):
            self._learn_quiet()  # the reason tells of it
            return self._moved(alpha_centi, stats)
        if seen is None:
            return Decision(alpha_centi, f"between decisions of {controller.name}")
        if seen is not stats:
            observation = observe(seen, self.config)[: len(observation)]
        return controller.decide(observation, seen)

    def _gathered(self, stats: EpochStats) -> EpochStats | None:
        """The controller's period, merged, bursts or not; None until it is over."""
        self._seen = stats if self._seen is None else self._seen.merge(stats)
        self._unasked += 1
        if self._unasked < self.controller.period:
            return None
        seen, self._seen, self._unasked = self._seen, None, 0
        return seen

    def _on_tick(self, stats: EpochStats) -> Decision | None:
        self._asked_centi = -1
        decision: Decision | None = None
        if self._watches:
            self._ticks += 1
            before_centi = self._alpha_of(stats)
            alpha_centi = self._watch_tick(stats, before_centi)
            if alpha_centi != before_centi:
                decision = self._moved(alpha_centi, stats)
        bypassed = _BURST, _RECOVERING if self._watches else _BURST
        if self.state not in bypassed and hasattr(self.controller, "on_tick"):
            decision = self.controller.on_tick(stats)
        if decision is not None:
            self._asked_centi = self.config.clip(decision.alpha_centi)
        return decision

    def _watch_p99(self, stats: EpochStats, alpha_centi: int) -> int:
        """Change the state where the epoch's P99 says so; alpha (hundredths) of a burst."""
        settings, calm = self.settings, self.detector.is_calm(stats)
        if self.state is _NORMAL:
            if self.detector.surges(stats):
                self._go(_BURST, stats)
        elif self.state is _BURST and (calm or self._epochs_in_state() >= settings.most_epochs):
            self._go(_RECOVERING, stats)
        if self.state is _RECOVERING:
            self._calm = self._calm + 1 if calm else 0
            if (
                self._calm >= settings.calm_epochs
                or self._epochs_in_state() >= settings.most_epochs
            ):
                self._go(_NORMAL, stats)
        if self.state is not _BURST:
            self.detector.learn(stats)
        elif stats.hot_share > settings.hot_share:
            return alpha_centi - settings.step_centi
        return alpha_centi

    def _watch_tick(self, stats: EpochStats, alpha_centi: int, ticks: int = 1) -> int:
        """Show the watch a tick, or several as one; the alpha (hundredths) that it is reason for."""
        self._learn_quiet()
        if self.state is not _BURST:
            if not self.watch.see(stats):
                return alpha_centi
            if self.state is _NORMAL or self._before_centi < 0:
                self._before_centi = alpha_centi
            self._given = 0
            self._go(_BURST, stats)
            self.watch.clear()
        elif self.watch.see_end(stats):
            self._go(_RECOVERING, stats)
            self.watch.clear()
            self.watch.drop()
            return self._before_centi
        if stats.hot_share > self.settings.hot_share:
            return alpha_centi - self._towards_kv(ticks)
        return alpha_centi

    def _epochs_in_state(self) -> int:
        return self._epoch - self._since

    def _towards_kv(self, ticks: int) -> int:
        """The burst's next move, hundredths: a step at first, then a little each tick, up to a limit."""
        settings = self.settings
        move = ticks * settings.burst_creep_centi if self._given else settings.burst_step_centi
        move = min(move, settings.burst_most_centi - self._given)
        self._given += move
        return move

    def _watch_workload(self, stats: EpochStats, alpha_centi: int) -> int:
        """What is due at the end of an epoch: time limits and the baseline."""
        if not self._ticks:
            alpha_centi = self._watch_tick(stats, alpha_centi, TICKS_PER_EPOCH)
        self._ticks = 0
        if self.state is _BURST:
            if self._epochs_in_state() < self.settings.most_epochs:
                self.watch.drop()
                return alpha_centi
            self.watch.relearn()
            self.watch.clear()
            self._before_centi = -1
            self._go(_NORMAL, stats)
        elif self.state is _RECOVERING and self._epochs_in_state() >= self.settings.hold_epochs:
            self._before_centi = -1
            self._go(_NORMAL, stats)
        self._quiet = stats
        return alpha_centi

    def _learn_quiet(self) -> None:
        """Take an epoch outside bursts into both baselines: at the next tick, so that no decision waits."""
        if self._quiet is not None:
            self.watch.learn()
            self.detector.learn(self._quiet)
            self._quiet = None

    def _alpha_of(self, stats: EpochStats) -> int:
        return round(100 * stats.alpha_target)

    def _moved(self, alpha_centi: int, stats: EpochStats) -> Decision:
        """Recovery's own decision."""
        move = float(alpha_centi - self._alpha_of(stats))
        return Decision(alpha_centi, self._say(self.state.value, stats), {"recovery": move})

    def _go(self, state: State, stats: EpochStats) -> None:
        transition = Transition(
            self._epoch, self.state, state, stats.p99_ms, self.detector.ema_ms,
            self.detector.sigma_ms, stats.hot_share, self._alpha_of(stats), self._ticks,
        )  # fmt: skip
        self.transitions.append(transition)
        logger.info("%s to %s: %s", self.state.value, state.value, self._say(self.name, stats))
        self.state, self._since, self._calm = state, self._epoch, 0

    def _say(self, what: str, stats: EpochStats) -> str:
        return (
            f"{what}, epoch {self._epoch}: P99 {stats.p99_ms:.1f} ms, EMA {self.detector.ema_ms:.1f},"
            f" sigma {self.detector.sigma_ms:.1f}, hot share {stats.hot_share:.2f},"
            f" alpha {stats.alpha_target:.2f}"
        )
