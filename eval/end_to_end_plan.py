"""What `eval.end_to_end` runs: KV policy x allocation x regime x repeat, the most important first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from agents.forecast import PRETRAINED
from agents.ppo_only import PpoOnly
from agents.smart import SHIPPED
from agents.static import Static
from agents.working_set import WorkingSetRule
from hlem_env.controller import Controller
from hlem_env.mdp import MdpConfig
from hlem_env.workload.regimes import RegimeConfig, draw_path
from serving_bridge.adapter import AdapterSettings
from serving_bridge.allocator import SmartAllocator
from serving_bridge.policy import FrozenPolicy
from serving_bridge.recovery import RecoverySettings

LRU, SCAN_RESISTANT = "lru", "scan_resistant"
GRID_CENTI = (10, 30, 50, 70, 90)
Regime = Literal["trend", "burst", "steady"]
REGIMES: tuple[Regime, ...] = "trend", "burst", "steady"
WORKING_SET, PPO, SMART = "working-set", "ppo", "smart"
KV_ONLY = "static-000"
"""alpha = 0, the paper's KV-Opt."""


def static(alpha_centi: int) -> str:
    """Name of the allocation that holds an alpha."""
    return f"static-{alpha_centi:03d}"


@dataclass(frozen=True)
class Run:
    """One episode."""

    regime: str
    kv_policy: str
    allocation: str
    seed: int

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.regime}-{self.kv_policy}-{self.allocation}-seed{self.seed}"


def headline(regime: str, seed: int, design: dict[str, int]) -> Iterator[Run]:
    """What the whole system is held against the plain one by, and what of it admission alone brings.

    Args:
        regime: of the requests.
        seed: of the requests.
        design: alpha of the design point by KV policy, hundredths.
    """
    yield Run(regime, LRU, static(design[LRU]), seed)
    yield Run(regime, SCAN_RESISTANT, SMART, seed)
    yield Run(regime, SCAN_RESISTANT, static(design[SCAN_RESISTANT]), seed)


def peers(regime: str, seed: int) -> Iterator[Run]:
    """The grid for the best static split in hindsight, and the other controllers, which Steady leaves out."""
    for alpha in GRID_CENTI:
        yield Run(regime, SCAN_RESISTANT, static(alpha), seed)
    if regime != "steady":
        yield Run(regime, SCAN_RESISTANT, WORKING_SET, seed)
        yield Run(regime, SCAN_RESISTANT, PPO, seed)


def everything(
    seeds: list[int],
    design: dict[str, int],
    whole: bool,
    by_repeat: bool = False,
    regimes: Sequence[str] = REGIMES,
) -> list[Run]:
    """All runs in order: the headline in the regimes and repeats, its peers repeat by repeat, then the rest.

    Args:
        seeds: one for each repeat.
        design: as in `headline`.
        whole: the rest, too: both policies with every allocation, in every regime.
        by_repeat: headline and peers of the same requests together instead, repeat by repeat.
        regimes: of the requests.
    """
    parts = [(seed, regime) for seed in seeds for regime in regimes]
    if by_repeat:
        runs = [run for seed, regime in parts
                for run in (*headline(regime, seed, design), *peers(regime, seed))]  # fmt: skip
    else:
        runs = [run for seed, regime in parts for run in headline(regime, seed, design)]
        runs += [run for seed, regime in parts for run in peers(regime, seed)]
    if whole:
        allocations = [KV_ONLY, *map(static, GRID_CENTI), WORKING_SET, PPO, SMART]
        runs += [Run(regime, policy, allocation, seed) for seed, regime in parts
                 for policy in (SCAN_RESISTANT, LRU) for allocation in allocations]  # fmt: skip
    return list(dict.fromkeys(runs))


def seeds_with_bursts(config: RegimeConfig, count: int) -> list[int]:
    """The first seeds, from 1 on, whose Burst has a burst within the episode."""
    burst = replace(config, regime="burst")
    found: list[int] = []
    seed = 0
    while len(found) < count:
        seed += 1
        path, _ = np.random.default_rng(seed).spawn(2)
        if draw_path(burst, path).burst.any():
            found.append(seed)
    return found


def make(allocation: str, config: MdpConfig, policy_folder: Path | None = None) -> Controller:
    """The controller of an allocation.

    Args:
        allocation: its name.
        config: of the node: SLO, epoch, longest history.
        policy_folder: of the frozen policy, by default the shipped one.
    """
    if allocation == WORKING_SET:
        return WorkingSetRule()
    if allocation.startswith("static-"):
        return Static(int(allocation.removeprefix("static-")))
    policy = FrozenPolicy.load(policy_folder or PRETRAINED / SHIPPED)
    if allocation == PPO:
        return PpoOnly(policy)
    return SmartAllocator(
        policy, AdapterSettings(), RecoverySettings(detector="workload"),
        replace(config, reward="busy_time"),
    )  # fmt: skip
