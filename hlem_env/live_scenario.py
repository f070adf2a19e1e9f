"""A live backend from a scenario: the scenario says what happens, the preset what it happens to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.scenario import Scenario
from hlem_env.workload.regimes import (
    HOT_USERS_POOL_BYTES,
    LoadCurve,
    RegimeConfig,
    SyntheticWorkload,
)
from hlem_env.workload.requests import Catalogue

if TYPE_CHECKING:
    from hlem_env.live.serving import LiveBackend

REFERENCE_ENTRIES = 476
"""Histories of 10,000 tokens that fit in the 60 GB pool of the regimes' table of hot users."""


def live_scenario(scenario: Scenario, config: LiveConfig) -> Scenario:
    """The scenario with the node's sizes in place of its own.

    Raises:
        ArgumentError: it is a trace: the live node's requests come from a regime's population.
    """
    require(scenario.trace is None, "workload", scenario.name, "a regime, with a live node")
    return replace(
        scenario,
        mean_history_tokens=config.mean_history_tokens,
        max_history_tokens=config.max_history_tokens,
        tables=config.tables,
        rows_per_table=config.rows_per_table,
        zipf=config.zipf,
        layers=config.layers,
        pool_bytes=config.pool_bytes,
        warmup_epochs=config.warmup_epochs,
        epoch_seconds=config.epoch_seconds,
    )


def live_workload(
    scenario: Scenario, config: LiveConfig, entries: int, speed: float
) -> SyntheticWorkload:
    """The scenario's requests for a node whose pool holds so many mean histories.

    Args:
        entries: mean histories that fit in the pool: the hot population is in proportion.
        speed: of this machine over that of the preset's load.
    """
    regime = RegimeConfig.preset(
        scenario.preset,
        scenario.regime,
        **(
            {}
            if scenario.steady_hot_share is None
            else {"steady_hot_share": scenario.steady_hot_share}
        ),
        population_factor=scenario.population_factor,
        burst_users=scenario.burst_users,
        mean_history_tokens=config.mean_history_tokens,
        max_history_tokens=config.max_history_tokens,
        new_items=config.new_items,
        pool_bytes=round(HOT_USERS_POOL_BYTES * entries / REFERENCE_ENTRIES),
        episode_epochs=scenario.episode_epochs,
        epoch_seconds=config.epoch_seconds,
    )
    catalogue = Catalogue(
        tables=config.tables,
        rows_per_table=config.rows_per_table,
        row_bytes=config.row_bytes,
        zipf=config.zipf,
        candidates=config.candidates,
    )
    load = LoadCurve(config.hot_share, config.requests_per_s)
    factor = speed * scenario.utilisation / config.utilisation
    return SyntheticWorkload(replace(regime, catalogue=catalogue), load.scaled(factor))


def live_backend(scenario: Scenario, config: LiveConfig) -> LiveBackend:
    """A live node of the preset that serves the scenario. Imports torch."""
    from hlem_env.live.node import LiveNode
    from hlem_env.live.serving import LiveBackend

    node = LiveNode(config, scenario.kv_policy)
    speed = config.probe_ms / node.probe_ms()
    workload = live_workload(scenario, config, node.entries_in_pool, speed)
    return LiveBackend(workload, node)
