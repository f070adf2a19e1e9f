"""Where `eval.end_to_end` runs an episode: on the live node, or on the surrogate in its place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from eval.end_to_end_plan import SCAN_RESISTANT, Run, make
from eval.machine_speed import machine_speed
from eval.pieces import Slice
from eval.records import SATURATION
from hlem_env.backend import Backend, Runner, run_controller
from hlem_env.live.config import LiveConfig
from hlem_env.live.machine_state import MachineState
from hlem_env.live.node import LiveNode
from hlem_env.live.serving import LiveBackend
from hlem_env.live.time_source import clock_name, make_clock
from hlem_env.live_scenario import live_workload, surrogate_twin
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.hardware import NodeProfile
from hlem_env.telemetry import EpochStats
from hlem_env.workload.regimes import SyntheticWorkload

State = dict[str, Any]


class Bench(ABC):
    """Runs episodes.

    Args:
        config: of the node.
        dataset: workload preset.
        part: where the machine's speed is kept: all runs get the same requests.
        policy: folder of the frozen policy; None: the shipped one.
    """

    clock: str
    """By name."""

    def __init__(
        self, config: LiveConfig, dataset: str, part: Slice, policy: Path | None = None
    ) -> None:
        self.config, self.dataset, self.slice, self.policy = config, dataset, part, policy
        self._speed: float | None = None

    @property
    def mdp(self) -> MdpConfig:
        """State and reward on this node; alpha may be anything, since one allocation holds 0."""
        return MdpConfig(
            slo_ms=self.config.slo_ms,
            max_history_tokens=self.config.max_history_tokens,
            epoch_seconds=self.config.epoch_seconds,
            features="working_set",
        )

    @abstractmethod
    def probe_ms(self) -> float:
        """How fast the machine is: `LiveNode.probe_ms`."""

    @abstractmethod
    def backend(self, scenario: Scenario) -> tuple[Backend, SyntheticWorkload, Callable[[], State]]:
        """What serves a scenario, its requests, and what samples the machine's state after an epoch."""

    def about(self) -> dict[str, Any]:
        """What all runs of a folder have in common, plain values."""
        return {
            "clock": self.clock,
            "preset": self.config.to_json(),
            "dataset": self.dataset,
            "policy": "shipped" if self.policy is None else str(self.policy),
        }

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds."""

    def speed(self) -> float:
        """Of the machine of the first slice over the preset's: all slices get the same requests."""
        if self._speed is None:
            self.set_speed(None)
            assert self._speed is not None
        return self._speed

    def set_speed(self, given: float | None) -> None:
        """Take it as the machine's, instead of a probe's.

        Raises:
            ArgumentError: the folder has another one.
        """
        preset_ms = self.config.probe_ms
        self._speed = machine_speed(self.slice, "speed", given, preset_ms, self.probe_ms)

    def scenario(self, run: Run, epochs: int, load: float) -> Scenario:
        """The requests of a run."""
        return Scenario(
            preset=self.dataset,
            regime=run.regime,
            kv_policy=run.kv_policy,
            utilisation=self.config.utilisation * load,
            episode_epochs=epochs,
        )

    def run(self, run: Run, epochs: int, load: float) -> dict[str, Any]:
        """One episode of a controller at so many times the preset's load."""
        backend, workload, state = self.backend(self.scenario(run, epochs, load))
        config = self.mdp
        if run.allocation.startswith("static-"):
            config = replace(config, alpha_min_centi=0, alpha_max_centi=100)
        runner = Runner(backend, config)
        controller = make(run.allocation, self.mdp, self.policy)
        stats: list[EpochStats] = []
        alphas: list[list[int]] = []
        machine_state: list[State] = []
        for epoch, _ in run_controller(runner, controller, epochs, run.seed):
            stats.append(epoch)
            alphas.append(runner.tick_alphas_centi)
            machine_state.append(state())
        return {
            "run": asdict(run),
            "load": load,
            "speed": self.speed(),
            **self.about(),
            "workload_digest": workload.digest(),
            **figures(stats, alphas, self.config.slo_ms),
            "machine_state": machine_state,
        }


class LiveBench(Bench):
    """The live node, made when it is first needed."""

    def __init__(
        self, config: LiveConfig, dataset: str, part: Slice, clock: str, policy: Path | None = None
    ) -> None:
        super().__init__(config, dataset, part, policy)
        self.clock = clock_name(clock, config.device)
        self._node: LiveNode | None = None

    def probe_ms(self) -> float:
        """See `Bench.probe_ms`."""
        return self._at(SCAN_RESISTANT).probe_ms()

    def backend(self, scenario: Scenario) -> tuple[Backend, SyntheticWorkload, Callable[[], State]]:
        """See `Bench.backend`."""
        speed = self.speed()  # it may probe the node, under a policy of its own
        node = self._at(scenario.kv_policy)
        workload = live_workload(scenario, node.config, node.entries_in_pool, speed)
        assert isinstance(workload, SyntheticWorkload)
        return LiveBackend(workload, node), workload, MachineState(node).sample

    def close(self) -> None:
        """Give the node's memory back."""
        if self._node is not None:
            self._node.close()

    def _at(self, kv_policy: str) -> LiveNode:
        if self._node is None:
            clock = make_clock(self.clock, self.config.device)
            self._node = LiveNode(self.config, kv_policy, time_source=clock)
        self._node.kv_policy = kv_policy
        return self._node


class SurrogateBench(Bench):
    """The surrogate that serves as that node does, on the machine of a calibrated profile."""

    clock = "simulated"

    def __init__(
        self, config: LiveConfig, dataset: str, part: Slice, profile: NodeProfile,
        policy: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, dataset, part, policy)
        self._profile = profile

    def probe_ms(self) -> float:
        """See `Bench.probe_ms`."""
        return self._profile.probe_ms.get(str(self.config.layers), self.config.probe_ms)

    def backend(self, scenario: Scenario) -> tuple[Backend, SyntheticWorkload, Callable[[], State]]:
        """See `Bench.backend`. A simulated machine has no state."""
        twin = surrogate_twin(scenario, self.config, self._profile, self.speed())
        assert isinstance(twin.workload, SyntheticWorkload)
        return twin, twin.workload, dict

    def close(self) -> None:
        """Nothing is held."""


def figures(stats: list[EpochStats], alphas: list[list[int]], slo_ms: float) -> dict[str, Any]:
    """What a run measured, epoch by epoch and as a whole."""
    whole = stats[0]
    for epoch in stats[1:]:
        whole = whole.merge(epoch)
    steps = np.diff([alpha for ticks in alphas for alpha in ticks])
    per_epoch = max(whole.requests / len(stats), 1.0)
    return {
        "p99_ms": float(np.mean([epoch.p99_ms for epoch in stats])),
        "p99_all_ms": whole.p99_ms,
        "p50_all_ms": float(np.median(whole.latency_ms)) if whole.requests else 0.0,
        "qos": whole.qos(slo_ms),
        "kv_hit": whole.kv_hit,
        "emb_hit": whole.emb_hit,
        "mean_service_ms": whole.mean_service_ms,
        "utilisation": whole.utilisation,
        "requests": whole.requests,
        "movement": float(np.abs(steps).sum()) / 100,
        "evictions": whole.evictions,
        "refill_bytes": whole.refill_bytes,
        "prefetch_bytes": whole.prefetch_bytes,
        "backlog": whole.backlog,
        "saturated": bool(whole.utilisation > SATURATION or whole.backlog > per_epoch),
        "epochs": {
            "p99_ms": [round(epoch.p99_ms, 3) for epoch in stats],
            "qos": [round(epoch.qos(slo_ms), 5) for epoch in stats],
            "alpha": [round(epoch.alpha_target, 2) for epoch in stats],
            "hot_share": [round(epoch.hot_share, 4) for epoch in stats],
            "working_set": [round(epoch.working_set, 4) for epoch in stats],
            "kv_hit": [round(epoch.kv_hit, 4) for epoch in stats],
            "emb_hit": [round(epoch.emb_hit, 4) for epoch in stats],
            "utilisation": [round(epoch.utilisation, 4) for epoch in stats],
            "requests": [epoch.requests for epoch in stats],
        },
    }
