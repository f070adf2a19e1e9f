"""SmartAllocator: the frozen policy's step, the adapter's residual, and recovery from bursts.

    alpha' = clip(round(alpha + base step + residual + carry))   outside bursts; the rest is carried
    alpha' = what the recovery controller says                   in a burst, and while recovering

on the grid of 0.01. The decision path is numpy alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env import mdp
from hlem_env.controller import Decision
from hlem_env.errors import require
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats
from serving_bridge.adapted_step import UNKNOWN, Memory, Proposed, on_grid, surprised
from serving_bridge.adapter import AdapterSettings, OnlineAdapter, Sample
from serving_bridge.cache_worth import seen
from serving_bridge.policy import FrozenPolicy
from serving_bridge.recovery import RecoverySettings, State, Transition, WithRecovery

LOG_ENTRIES = 1000
"""Decisions kept in the log; the oldest go first."""
_NO_PARTS = {"policy": 0.0, "adapter": 0.0, "recovery": 0.0}
_decision: Callable[[Iterable[Any]], Decision] = partial(tuple.__new__, Decision)
"""`Decision._make`, in half the time."""


class AdaptedPolicy:
    """The frozen policy with the adapter's residual, or without.

    Args:
        policy: gives the base step.
        adapter: None for the policy alone.
        config: SLO, bounds and reward that the adapter learns from.
    """

    name = "policy"
    period = 1
    initial_alpha_centi = 50

    def __init__(
        self, policy: FrozenPolicy, adapter: OnlineAdapter | None, config: MdpConfig
    ) -> None:
        self.policy, self.adapter, self.config = policy, adapter, config
        self.adapter_frozen = False
        """Leave the adapter out: it neither proposes nor learns."""
        # In words once, and not in every decision; the residual is a number in its parts.
        self._reasons = {step: f"policy {step / 100:+.2f}" for step in policy.actions_centi}
        self.restart()

    def restart(self) -> None:
        """Forget the episode, but not what the adapter has learnt."""
        self._memory = UNKNOWN
        self._pending: Proposed | None = None
        self._commanded = -1

    def reset(self, seed: int) -> None:
        """Forget the episode, and what the adapter has learnt."""
        self.restart()
        if self.adapter is not None:
            self.adapter.reset(seed)

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The alpha in force, the policy's step and the residual, on the grid and within bounds.

        Args:
            observation: float32 [7] or [8]; features beyond the policy's are left out.
            stats: the epoch behind it.

        Raises:
            ArgumentError: the observation is not one that the policy takes.
        """
        policy, adapter = self.policy, self.adapter
        if len(observation) > len(policy.feature_names):
            observation = observation[: len(policy.feature_names)]
        base = policy.actions_centi[policy.act(observation)]
        alpha_centi = round(100 * stats.alpha_target)
        if adapter is None:
            return self._decision(alpha_centi, base, base, 0.0)
        pending, self._pending = self._pending, None
        if self.adapter_frozen:
            return self._decision(alpha_centi, base, self._frozen_step(base, stats), 0.0)
        if pending is not None and alpha_centi == self._commanded:  # recovery had no say in it
            adapter.learn(partial(_sample, pending, stats, self._memory, self.config))
        step, residual_centi, self._pending, self._memory = adapter.step(
            self._memory, self.config.slo_ms, alpha_centi, base, stats.kv_hit, stats.emb_hit,
            stats.hot_share, stats.p99_ms, stats.working_set,
        )  # fmt: skip
        return self._decision(alpha_centi, base, step, residual_centi)

    def _frozen_step(self, base: int, stats: EpochStats) -> int:
        """The policy's step; the adapter's memory goes on."""
        ema_ms, mean_working_set, carry = self._memory
        _, ema_ms = surprised(stats.p99_ms, ema_ms, self.config.slo_ms)
        step, carry = on_grid(base, 0.0, carry)
        self._memory = ema_ms, mean_working_set, carry
        return step

    def _decision(self, alpha_centi: int, base: int, step: int, residual_centi: float) -> Decision:
        self._commanded = self.config.clip(alpha_centi + step)
        parts = {"policy": float(base), "adapter": residual_centi, "recovery": 0.0}
        return _decision((self._commanded, self._reasons[base], parts))


def _sample(proposed: Proposed, stats: EpochStats, before: Memory, config: MdpConfig) -> Sample:
    """Made where it is learnt, not in the decision: the reward goes over all requests."""
    surprise, _ = surprised(stats.p99_ms, before[0], config.slo_ms)
    return Sample(*proposed, mdp.reward(stats, config), abs(surprise), seen(stats))


class LogEntry(NamedTuple):
    """One decision: what it saw, what each layer gave, what came out."""

    epoch: int
    """Decisions since the start, this one included."""
    tick: int
    """Of the epoch after it; 0 for the epoch's decision."""
    state: str
    """Of the recovery controller."""
    hot_share: float
    kv_hit: float
    emb_hit: float
    working_set: float
    p99_ms: float
    alpha_before_centi: int
    alpha_centi: int
    parts: Mapping[str, float]
    """Hundredths."""
    reason: str


_Noted = tuple[int, int, State, float, float, float, float, float, float, Decision]
"""What an entry is made of when the log is read: a decision does not wait for it."""


def _entry(
    epoch: int, tick: int, state: State, hot_share: float, kv_hit: float, emb_hit: float,
    working_set: float, p99_ms: float, alpha: float, decision: Decision,
) -> LogEntry:  # fmt: skip
    return LogEntry(
        epoch, tick, state.value, hot_share, kv_hit, emb_hit, working_set, p99_ms,
        round(100 * alpha), decision.alpha_centi, decision.parts, decision.reason,
    )  # fmt: skip


class SmartAllocator:
    """The allocator that a node runs.

    Args:
        policy: the frozen policy.
        adapter: settings; None leaves the adapter out.
        recovery: settings; None leaves recovery out.
        config: SLO, bounds and reward; None is the policy's, with the reward "busy_time" for the
            adapter (docs/allocator.md says why).
        background: the adapter learns on a thread; `close` ends it.
        name: for tables.

    `log` holds the last 1,000 decisions, `transitions` the changes of the recovery controller's state.
    """

    period = 1

    def __init__(
        self,
        policy: FrozenPolicy,
        adapter: AdapterSettings | None = None,
        recovery: RecoverySettings | None = None,
        config: MdpConfig | None = None,
        background: bool = False,
        name: str = "SmartAllocator",
    ) -> None:
        require(
            background is False or adapter is not None, "background", background,
            "False without an adapter",
        )  # fmt: skip
        self.name = name
        self.config = config or replace(policy.mdp_config, reward="busy_time")
        self.adapter = None if adapter is None else OnlineAdapter(adapter, background)
        self.policy = AdaptedPolicy(policy, self.adapter, self.config)
        self.recovery = (
            None if recovery is None else WithRecovery(self.policy, recovery, self.config)
        )
        self._inner = self.recovery or self.policy
        self.initial_alpha_centi = self.policy.initial_alpha_centi
        if hasattr(self._inner, "on_tick"):
            self.on_tick = self._on_tick
        self._log: deque[_Noted] = deque(maxlen=LOG_ENTRIES)
        self._epoch = self._tick = 0

    @property
    def log(self) -> list[LogEntry]:
        """The last decisions, the oldest first."""
        return [_entry(*noted) for noted in self._log]

    @property
    def transitions(self) -> list[Transition]:
        """Of the recovery controller; none without one."""
        return [] if self.recovery is None else self.recovery.transitions

    def reset(self, seed: int) -> None:
        """Forget the episode, the log, and what the adapter has learnt."""
        self._inner.reset(seed)
        self._log.clear()
        self._epoch = self._tick = 0

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The next alpha; `parts` has each layer's share in hundredths: policy, adapter, recovery."""
        self._epoch, self._tick = self._epoch + 1, 0
        return self._noted(self._inner.decide(observation, stats), stats)

    def restart(self) -> None:
        """Forget the episode, but neither the log nor what the adapter has learnt.

        For a service that goes on after a time in which nothing was decided.
        """
        if self.recovery is not None:
            self.recovery.restart()
        self.policy.restart()

    def overruled(self) -> None:
        """Go on from the alpha of the next stats: the last decision was not applied."""
        if self.recovery is not None:
            self.recovery.overruled()

    def swap(self, policy: FrozenPolicy, adapter: OnlineAdapter | None) -> OnlineAdapter | None:
        """Decide with another policy from now on; returns the adapter of the old one, still running.

        Args:
            policy: its `mdp_config` is not looked at, as the node has one.
            adapter: what was learnt on that policy; None where there is none.
        """
        before, self.adapter = self.adapter, adapter
        self.policy.policy, self.policy.adapter = policy, adapter
        self.policy.restart()
        return before

    def close(self) -> None:
        """End the adapter's thread."""
        if self.adapter is not None:
            self.adapter.close()

    def _on_tick(self, stats: EpochStats) -> Decision | None:
        self._tick += 1
        decision: Decision | None = self._inner.on_tick(stats)  # type: ignore[union-attr]
        return None if decision is None else self._noted(decision, stats)

    def _noted(self, decision: Decision, stats: EpochStats) -> Decision:
        if len(decision.parts) < len(_NO_PARTS):  # recovery's; the policy's is within the bounds
            alpha_centi = self.config.clip(decision.alpha_centi)
            decision = Decision(alpha_centi, decision.reason, {**_NO_PARTS, **decision.parts})
        state = State.NORMAL if self.recovery is None else self.recovery.state
        self._log.append((
            self._epoch, self._tick, state, stats.hot_share, stats.kv_hit, stats.emb_hit,
            stats.working_set, stats.p99_ms, stats.alpha_target, decision,
        ))  # fmt: skip
        return decision
