"""The control loop of a served node: the allocator, its guards and modes, and what is kept of it all.

The engine calls `tick` and `epoch` from its worker thread. Neither reads or writes a file or waits:
orders from other threads lie in single attributes, records and the adapter's state go to threads of
their own. Durations come from a clock that never jumps; only `EpochRecord.end_unix_s` is the system's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hlem_env import mdp
from hlem_env.controller import Decision
from hlem_env.errors import require, require_choice, require_number
from hlem_env.mdp import HOT_WINDOW_EPOCHS, TICKS_PER_EPOCH, MdpConfig
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests
from serving_bridge.adapter import AdapterSettings, OnlineAdapter
from serving_bridge.adapter_saver import AdapterSaver
from serving_bridge.allocator import SmartAllocator
from serving_bridge.control_rehearsal import rehearse
from serving_bridge.epoch_record import describe
from serving_bridge.guards import Dwell, Gathered, GuardSettings
from serving_bridge.policy import FrozenPolicy
from serving_bridge.recovery import RecoverySettings
from serving_bridge.rollback_guard import Rollback, RollbackGuard
from serving_bridge.status import MODES, EpochRecord
from serving_bridge.telemetry_guard import TelemetryGuard

logger = logging.getLogger(__name__)

RECORDS = 1000
"""Epochs that `recent` remembers, and transitions of the recovery controller that are kept."""


class Histories(NamedTuple):
    """What the store of histories held at an epoch's end."""

    users: int
    n_bytes: int
    removed: int
    """Users' histories, in the epoch, for want of room."""


class Served(NamedTuple):
    """What an epoch served, beside its stats."""

    requests: Requests
    """That completed: arrivals on the node's clock, user numbers, lengths, new items."""
    refused: int
    """Turned away for overload."""
    ended_s: float | None = None
    """When the epoch ended, by the loop's clock (`time.monotonic`); None: now."""
    histories: Histories = Histories(0, 0, 0)


class Entry(NamedTuple):
    """What is logged of an epoch."""

    record: EpochRecord
    observation: NDArray[np.float32] | None
    """[8]; None where the telemetry was at fault."""
    stats: EpochStats | None
    """None in the same case."""
    served: Served | None


class Log(Protocol):
    """Takes entries without waiting, as `epoch_log.EpochLog` does."""

    def put(self, entry: Entry) -> bool:
        """Take an entry; False if it had to be dropped."""

    def close(self) -> None:
        """Write what waits."""


@dataclass(frozen=True)
class ControlSettings:
    """Of the loop and all its parts.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    mode: str = "active"
    """At the start: active, shadow or frozen."""
    guards: GuardSettings = field(default_factory=GuardSettings)
    adapter: AdapterSettings | None = field(default_factory=AdapterSettings)
    """None: no adapter."""
    recovery: RecoverySettings | None = field(
        default_factory=lambda: RecoverySettings(detector="workload")
    )
    """None: no recovery."""
    background: bool = True
    """The adapter learns on a thread; False for simulation, so that seeds reproduce."""
    save_every_epochs: int = 12
    """Epochs between savings of the adapter's state."""
    seed: int = 0
    """Of the adapter."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_number("save_every_epochs", self.save_every_epochs, whole=True)
        require(
            1 <= self.save_every_epochs <= 10**6, "save_every_epochs", self.save_every_epochs,
            "1 to 10^6",
        )  # fmt: skip


class _Verdict(NamedTuple):
    """What an epoch's end came to."""

    next_centi: int
    wanted_centi: int
    reason: str
    held: str
    parts: dict[str, float]


class ControlLoop:
    """Decides, guards, applies, remembers.

    Modes: `active` decides and applies. `shadow` decides, with the alpha that is really in force in
    what it sees, and applies nothing. `frozen` neither decides nor moves. In any of them `hold` sets
    alpha until it is released, and the guards look on.

    Args:
        policy: decides.
        config: of the node: SLO, lengths, bounds of alpha, seconds of an epoch.
        settings: see there.
        state: folder of the adapters' states; None: nothing is kept.
        log: where epochs go; closed with the loop. None: nowhere.
        initial_alpha_centi: None is the allocator's.
        clock: never jumps; seconds.
        wall: the system's clock, for `EpochRecord.end_unix_s` alone.
    """

    def __init__(
        self,
        policy: FrozenPolicy,
        config: MdpConfig,
        settings: ControlSettings | None = None,
        *,
        state: str | Path | None = None,
        log: Log | None = None,
        initial_alpha_centi: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings = settings or ControlSettings()
        # Policies with seven features leave the eighth out.
        values = config.to_json() | {"features": "working_set", "reward": "busy_time"}
        self.config = MdpConfig(**values)
        self._clock, self._wall, self._log = clock, wall, log
        self._saver = None if state is None or settings.adapter is None else AdapterSaver(state)
        rehearse(policy, self.config, settings.adapter, settings.recovery)
        self.allocator = SmartAllocator(policy, None, settings.recovery, self.config)
        self.allocator.swap(policy, self._new_adapter(policy))
        self.initial_alpha_centi = self.config.clip(
            self.allocator.initial_alpha_centi
            if initial_alpha_centi is None
            else initial_alpha_centi
        )
        self._alpha_centi = self._shown_centi = self.initial_alpha_centi
        guards = settings.guards
        self._epoch_guard = TelemetryGuard(guards.telemetry)
        self._tick_guard = TelemetryGuard(guards.telemetry)
        self._rollback = RollbackGuard(guards.rollback, self.config.slo_ms)
        self._dwell = Dwell(guards.dwell_epochs)
        self._gathered = Gathered(guards.least_requests)
        self._after_rollback = self._cool_down = self._blind = 0
        self._epoch = self._ticks = 0
        self._notes: list[str] = []
        self._records: deque[EpochRecord] = deque(maxlen=RECORDS)
        self._last_call_s = clock()
        self._closed = False
        # Orders of other threads: each one attribute, read once a call.
        self._mode = self._mode_before = settings.mode
        self._hold_centi: int | None = None
        self._held_before: int | None = None
        self._new_policies: deque[tuple[FrozenPolicy, OnlineAdapter | None]] = deque()

    # Called by the engine's worker alone.

    def tick(self, stats: EpochStats | None) -> int | None:
        """Look at a tenth of an epoch: in a burst alpha moves at once.

        Args:
            stats: of the tick; None where there are none.

        Returns:
            alpha to apply now in hundredths, None to leave it.
        """
        mode, hold = self._take_orders()
        before, self._shown_centi = self._alpha_centi, self._alpha_centi
        self._ticks += 1
        self._dwell.pass_tick()
        if hold is not None:
            self._apply(hold)
        fault = self._tick_guard.fault(stats) or self._other_alpha(stats, (before,))
        if fault:
            self._note(f"tick {self._ticks} left out: {fault}")
        elif mode != "frozen":
            assert stats is not None
            self._decide_tick(mode, hold, stats)
        return None if self._alpha_centi == before else self._alpha_centi

    def epoch(self, stats: EpochStats | None, served: Served | None = None) -> int:
        """Decide at an epoch's end.

        Args:
            stats: of the whole epoch; None where there are none.
            served: its requests.

        Returns:
            alpha from now on in hundredths, within the bounds, whatever the telemetry was.
        """
        start_ns = time.perf_counter_ns()
        now_s = self._clock()
        mode, hold = self._take_orders()
        if not self._ticks:
            for _ in range(TICKS_PER_EPOCH):
                self._dwell.pass_tick()
            self._shown_centi = self._alpha_centi
        in_force = self._alpha_centi
        histories = Histories(0, 0, 0) if served is None else served.histories
        fault = self._fault(stats, served, now_s)
        if fault:
            stats = None
        # Measured first: percentiles let other threads run, and a decision sets the adapter's off.
        measured = describe(stats, self.config)
        observation = None
        if stats is None:
            verdict = self._blinded(hold, fault)
        else:
            if self._blind >= HOT_WINDOW_EPOCHS:
                self.allocator.restart()  # what it remembers is of another time
            self._blind = 0
            gathered = self._gathered.add(stats)
            observation = mdp.observe(gathered, self.config)
            verdict = self._decide_epoch(mode, hold, stats, gathered, observation)
        if verdict.next_centi != verdict.wanted_centi:
            self.allocator.overruled()
        self._apply(verdict.next_centi)
        record = EpochRecord(
            epoch=self._epoch,
            end_unix_s=self._wall(),
            **measured,
            refused=0 if served is None else served.refused,
            alpha_centi=in_force,
            next_alpha_centi=verdict.next_centi,
            wanted_alpha_centi=verdict.wanted_centi,
            reason="; ".join([verdict.reason, *self._notes]),
            held=verdict.held,
            parts=verdict.parts,
            state=self.state,
            mode=mode,
            hold_centi=hold,
            history_users=histories.users,
            history_bytes=histories.n_bytes,
            histories_removed=histories.removed,
            decision_us=(time.perf_counter_ns() - start_ns) / 1000.0,
        )
        self._last_call_s, self._ticks = now_s, 0
        self._notes.clear()
        self._keep(Entry(record, observation, stats, served))
        return self._alpha_centi

    # Called from any thread.

    @property
    def mode(self) -> str:
        """active, shadow or frozen."""
        return self._mode

    def set_mode(self, mode: str) -> None:
        """Change the mode from the next tick on.

        Raises:
            ArgumentError: there is no such mode.
        """
        require_choice("mode", mode, MODES)
        if mode != self._mode:
            logger.info("mode %s", mode)
        self._mode = mode

    def hold(self, alpha_centi: int | None) -> None:
        """Keep alpha at this value from the next tick on, in any mode; None releases it.

        Raises:
            ArgumentError: not a whole number within the bounds of alpha.
        """
        if alpha_centi is not None:
            require_number("alpha_centi", alpha_centi, whole=True)
            low, high = self.config.alpha_min_centi, self.config.alpha_max_centi
            require(low <= alpha_centi <= high, "alpha_centi", alpha_centi, f"{low} to {high}")
        logger.info("alpha is %s", "released" if alpha_centi is None else f"held at {alpha_centi}")
        self._hold_centi = alpha_centi

    @property
    def held_alpha_centi(self) -> int | None:
        """What `hold` set; None: nothing."""
        return self._hold_centi

    def swap_policy(self, folder: str | Path) -> None:
        """Decide with another policy from the next tick on; what was learnt on it before comes back.

        Raises:
            ArtefactError: missing, damaged, or its logits are not those of its parity vectors: the
                policy in use stays.
        """
        policy = FrozenPolicy.load(folder)
        sha256 = policy.metadata["weights_sha256"]
        if sha256 != self.policy_sha256:  # else what is being learnt on it would be lost
            self._new_policies.append((policy, self._new_adapter(policy)))
            logger.info("policy %s", sha256[:16])

    @property
    def policy_sha256(self) -> str:
        """Of the weights that decide, or will from the next tick on."""
        waiting = [*self._new_policies]
        policy = waiting[-1][0] if waiting else self.allocator.policy.policy
        sha256: str = policy.metadata["weights_sha256"]
        return sha256

    def recent(self, after_epoch: int = -1) -> list[EpochRecord]:
        """The last epochs, at most 1,000, oldest first: those after `after_epoch`."""
        while True:
            try:
                records = list(self._records)
            except RuntimeError:  # the worker appended meanwhile
                continue
            return [record for record in records if record.epoch > after_epoch]

    @property
    def silent_s(self) -> float:
        """Seconds since the last epoch was told of, or since the start."""
        return max(self._clock() - self._last_call_s, 0.0)

    def close(self) -> None:
        """End the threads; log and adapter's state are on disk afterwards. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.allocator.close()
        if self._saver is not None and self.allocator.adapter is not None:
            self._saver.save(self.allocator.adapter, self.allocator.policy.policy)
            self._saver.close()
        if self._log is not None:
            self._log.close()

    # Parts of the worker's two calls.

    def _take_orders(self) -> tuple[str, int | None]:
        """Mode and held alpha of this call; installs a new policy."""
        while self._new_policies:
            before = self.allocator.policy.policy
            adapter = self.allocator.swap(*self._new_policies.popleft())
            self._rollback.clear()
            self._note("another policy decides")
            if self._saver is not None and adapter is not None:
                self._saver.save(adapter, before, retire=True)
        mode, hold = self._mode, self._hold_centi
        if mode != self._mode_before:
            if self._mode_before == "frozen":
                self.allocator.restart()
            self._rollback.clear()
            self._mode_before = mode
        if hold != self._held_before:
            self._rollback.clear()
            self._held_before = hold
        return mode, hold

    def _decide_tick(self, mode: str, hold: int | None, stats: EpochStats) -> None:
        try:
            decision: Decision | None = self._on_tick(stats)
        except Exception:
            logger.exception("no decision in a tick")
            self._note(f"tick {self._ticks}: the decision failed")
            return
        if decision is None:
            return
        wanted = self.config.clip(decision.alpha_centi)
        if mode == "active" and hold is None:
            self._apply(wanted)  # a burst's move: dwell and a rollback's hold do not bind it
            self._note(f"tick {self._ticks}: {wanted / 100:.2f}, {decision.reason}")
            return
        self.allocator.overruled()
        why = "held" if hold is not None else mode
        self._note(f"tick {self._ticks}: {wanted / 100:.2f} wanted, {why}")

    def _on_tick(self, stats: EpochStats) -> Decision | None:
        if self.settings.recovery is None or not hasattr(self.allocator, "on_tick"):
            return None
        return self.allocator.on_tick(stats)

    def _fault(self, stats: EpochStats | None, served: Served | None, now_s: float) -> str:
        age_s = 0.0
        if served is not None and served.ended_s is not None:
            age_s = now_s - served.ended_s
        count = None if served is None else len(served.requests)
        return self._epoch_guard.fault(stats, age_s, count) or self._other_alpha(
            stats, (self._shown_centi, self._alpha_centi)
        )

    def _other_alpha(self, stats: EpochStats | None, commanded: tuple[int, ...]) -> str:
        """Whether the stats are of an alpha that was not asked for: then they are of another time."""
        assert stats is not None
        told = round(100 * stats.alpha_target)
        if told in commanded:
            return ""
        return f"telemetry is stale: its alpha is {told / 100:.2f}, in force was {commanded[0] / 100:.2f}"

    def _blinded(self, hold: int | None, fault: str) -> _Verdict:
        """Without telemetry alpha stays, in every mode."""
        if not self._blind:
            logger.warning("alpha is held: %s", fault)
        self._blind += 1
        self._rollback.clear()
        self._gathered.clear()
        alpha = self._alpha_centi if hold is None else hold
        return _Verdict(alpha, alpha, "no decision", fault, {})

    def _decide_epoch(
        self, mode: str, hold: int | None, stats: EpochStats, gathered: EpochStats,
        observation: NDArray[np.float32],
    ) -> _Verdict:  # fmt: skip
        alpha = self._alpha_centi if hold is None else hold
        if mode == "frozen":
            return _Verdict(alpha, alpha, "frozen", "frozen" if hold is None else "held", {})
        back = self._look_back(mode, hold, stats)
        self.allocator.policy.adapter_frozen = self._cool_down > 0
        self._cool_down = max(self._cool_down - 1, 0)
        try:
            decision = self.allocator.decide(observation, gathered)
        except Exception:
            logger.exception("no decision at an epoch's end")
            return _Verdict(alpha, alpha, "no decision", "the decision failed", {})
        wanted = self.config.clip(decision.alpha_centi)
        held, alpha = self._binding(mode, hold, back, wanted)
        self._after_rollback = max(self._after_rollback - 1, 0)
        if back is not None:
            self._after_rollback = self.settings.guards.rollback.hold_epochs
        return _Verdict(alpha, wanted, decision.reason, held, dict(decision.parts))

    def _look_back(self, mode: str, hold: int | None, stats: EpochStats) -> Rollback | None:
        """What the rollback guard says; it compares applied changes outside bursts alone."""
        if mode != "active" or hold is not None or self.state != "normal":
            self._rollback.clear()
            return None
        back = self._rollback.see(stats, self._alpha_centi)
        if back is not None:
            logger.warning("%s", back.reason)
            self._cool_down = self.settings.guards.rollback.cool_down_epochs
        return back

    def _binding(
        self, mode: str, hold: int | None, back: Rollback | None, wanted: int
    ) -> tuple[str, int]:
        """What keeps the wanted alpha from being applied, empty if nothing, and alpha from now on."""
        alpha = self._alpha_centi
        if hold is not None:
            return f"held at {hold / 100:.2f} by the operator", hold
        if mode == "shadow":
            return "shadow", alpha
        if back is not None:
            return back.reason, self.config.clip(back.alpha_centi)
        if wanted == alpha or self.state == "burst":
            return "", wanted
        if self._after_rollback:
            return f"after a rollback, {self._after_rollback} epochs more", alpha
        wait = self._gathered.wait() or self._dwell.wait()
        return wait, alpha if wait else wanted

    @property
    def state(self) -> str:
        """Of the recovery controller: normal, burst, recovering."""
        recovery = self.allocator.recovery
        return "normal" if recovery is None else recovery.state.value

    def _apply(self, alpha_centi: int) -> None:
        if alpha_centi != self._alpha_centi:
            self._alpha_centi = alpha_centi
            self._dwell.changed()
            self._gathered.clear()

    def _note(self, what: str) -> None:
        if len(self._notes) < TICKS_PER_EPOCH:
            self._notes.append(what)

    def _keep(self, entry: Entry) -> None:
        """Remember the epoch, log it, and have the adapter's state saved when it is due."""
        self._records.append(entry.record)
        self._epoch += 1
        recovery, adapter = self.allocator.recovery, self.allocator.adapter
        if recovery is not None:
            del recovery.transitions[:-RECORDS]
        # Last, since each sets off a thread.
        if self._log is not None:
            self._log.put(entry)
        if adapter is None:
            return
        adapter.hand_over()
        if self._saver is not None and self._epoch % self.settings.save_every_epochs == 0:
            self._saver.save(adapter, self.allocator.policy.policy)

    def _new_adapter(self, policy: FrozenPolicy) -> OnlineAdapter | None:
        if self.settings.adapter is None:
            return None
        settings = self.settings
        adapter = OnlineAdapter(settings.adapter, settings.background, settings.seed, True)
        if self._saver is not None:
            self._saver.restore(adapter, policy)
        return adapter
