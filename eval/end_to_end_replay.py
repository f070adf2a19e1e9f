"""A live run of `eval.end_to_end` on the surrogate: the same requests, at the alpha of each second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eval.end_to_end_plan import Run
from eval.host_slowness import ColdWork, Floats, States, host_slowness, typical_host_ms
from eval.pieces import Slice
from hlem_env.errors import ArgumentError, require
from hlem_env.live.config import LiveConfig
from hlem_env.live_scenario import surrogate_twin
from hlem_env.scenario import Scenario
from hlem_env.surrogate.hardware import NodeProfile
from hlem_env.telemetry import EpochStats

Epochs = NDArray[np.bool_]


class Replay:
    """Serves what a live run served.

    Args:
        record: of the live run.
        profile: of its machine, or one like it.
    """

    def __init__(self, record: Mapping[str, Any], profile: NodeProfile) -> None:
        self.config, self._run = config_of(record), Run(**record["run"])
        self._record, self._profile = record, profile
        self._alphas = record["epochs"]["alpha"]
        scenario = Scenario(
            preset=record["dataset"], regime=self._run.regime, kv_policy=self._run.kv_policy,
            utilisation=self.config.utilisation * record["load"], episode_epochs=len(self._alphas),
        )  # fmt: skip
        self._twin = surrogate_twin(scenario, self.config, profile, record["speed"])

    def serve(self, slowness: Floats, draw: int) -> list[EpochStats]:
        """The run's epochs.

        Args:
            slowness: [1 + epochs], of the host over the calibration's, first in the warm-up.
            draw: which of many runs; they differ in the profile's jitter.
        """
        twin = self._twin
        twin.draw = draw
        twin.reset(self._run.seed)
        seconds = [twin.warmup_s] + [self.config.epoch_seconds] * len(self._alphas)
        alphas = [self._alphas[0], *self._alphas]
        served = []
        for alpha, slow, epoch_s in zip(alphas, slowness, seconds, strict=True):
            twin.set_speed(self._profile.slower_host(float(slow)))
            served.append(twin.run(round(100 * alpha), epoch_s))
        return served[1:]

    def slowness(self, kept: Epochs) -> Floats:
        """How slow the host was, [1 + epochs]; in the warm-up, not recorded, the mean of those that count.

        Args:
            kept: [epochs], which count.
        """
        record = self._record
        if "evictions" not in record:  # of older ones; the surrogate counts what the node does
            epochs = self.serve(np.ones(1 + kept.size), draw=0)
            record = {**record, "evictions": sum(epoch.evictions for epoch in epochs)}
        return host_slowness(
            record["machine_state"], kept, self._profile, self.config.layers,
            ColdWork.of(self.config, record), 1 + kept.size,
        )  # fmt: skip


def config_of(record: Mapping[str, Any]) -> LiveConfig:
    """The node of a record; what has come to a preset since has its default."""
    preset, known = record["preset"], [field.name for field in fields(LiveConfig)]
    values: dict[str, Any] = {name: preset[name] for name in known if name in preset}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return LiveConfig(**values)


def mean_over(
    epochs: Sequence[EpochStats], figure: Callable[[EpochStats], float], kept: Epochs
) -> float:
    """Mean of a figure over the epochs that are kept, [epochs]."""
    return float(np.mean([figure(epoch) for epoch in epochs], where=kept))


def typical_by_folder(records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Median `cold_host_ms` of each folder: a host is slow beside the others of its folder.

    Args:
        records: as `read`.
    """
    hosts: dict[str, list[States]] = {}
    for name, record in records.items():
        hosts.setdefault(folder_of(name), []).append(record["machine_state"])
    return {folder: typical_host_ms(runs) for folder, runs in hosts.items()}


def folder_of(name: str) -> str:
    """Of a record that `read` has named."""
    return name.rpartition("/")[0]


def read(folders: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Records of live runs by folder and file.

    Raises:
        ArgumentError: a folder is missing or holds others, two have one name, or there are none.
    """
    found: dict[str, dict[str, Any]] = {}
    names = [folder.resolve().name for folder in folders]
    require(len(set(names)) == len(names), "--records", names, "folders with different names")
    for folder, folder_name in zip(folders, names, strict=True):
        require(folder.is_dir(), "--records", f"{folder}, no folder", "folders of eval.end_to_end")
        part = Slice(folder, 0.0, "")
        for path in sorted(folder.glob("*.json")):
            record = part.read(path.stem)
            if "run" not in record:  # the machine's speed
                continue
            require("epochs" in record, "--records", str(path), "records of eval.end_to_end")
            clock, known = record.get("clock"), "runs of a live node on the wall clock"
            require(clock == "wall", "--records", f"{path}, clock {clock}", known)
            found[f"{folder_name}/{path.stem}"] = record
    given = ", ".join(map(str, folders))
    require(bool(found), "--records", given, "folders of eval.end_to_end")
    return found


def node_profile(name: str) -> NodeProfile:
    """A calibrated profile, by name or path.

    Raises:
        ArgumentError: it is another kind of profile.
    """
    profile = NodeProfile.load(name)
    if not isinstance(profile, NodeProfile):
        raise ArgumentError("profile", name, "one that train.calibrate has fitted")
    return profile
