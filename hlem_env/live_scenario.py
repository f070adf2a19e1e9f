"""A live backend from a scenario: the scenario says what happens, the preset what it happens to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hlem_env import mdp
from hlem_env.errors import ArgumentError, require
from hlem_env.live.config import LiveConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.batched import BatchedBackend, BatchedNode
from hlem_env.surrogate.hardware import NodeProfile
from hlem_env.workload.regimes import (
    HOT_USERS_POOL_BYTES,
    LoadCurve,
    RegimeConfig,
    SyntheticWorkload,
)
from hlem_env.workload.requests import Catalogue, Workload
from hlem_env.workload.traces import TOKENS_PER_INTERACTION, Trace, TraceWorkload

if TYPE_CHECKING:
    from hlem_env.live.serving import LiveBackend

REFERENCE_TOKENS = 10_000
"""Mean history of the regimes' default node."""
REFERENCE_ENTRIES = 476
"""Of those, what fits in the 60 GB pool of the regimes' table of hot users."""
JITTER_EPOCHS = 0.2
"""How far `trace_jitter` moves an arrival: the surrogate's second, at epochs of 5 s."""


def live_scenario(scenario: Scenario, config: LiveConfig) -> Scenario:
    """The scenario with the node's sizes in place of its own.

    Raises:
        ArgumentError: its trace is no file.
    """
    if scenario.trace is not None:
        require(Path(scenario.trace).is_file(), "path", scenario.trace, "an existing file")
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


def live_workload(scenario: Scenario, config: LiveConfig, entries: int, speed: float) -> Workload:
    """The scenario's requests for a node whose pool holds so many mean histories.

    Args:
        scenario: a regime or a trace.
        config: of the node.
        entries: mean histories that fit in the pool: a regime's hot population is in proportion.
        speed: of this machine over that of the preset's load.
    """
    factor = speed * scenario.utilisation / config.utilisation
    load = LoadCurve(config.hot_share, config.requests_per_s).scaled(factor)
    catalogue = Catalogue(
        tables=config.tables,
        rows_per_table=config.rows_per_table,
        row_bytes=config.row_bytes,
        zipf=config.zipf,
        candidates=config.candidates,
    )
    if scenario.trace is not None:
        return _trace_workload(live_scenario(scenario, config), config, catalogue, load)
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
    return SyntheticWorkload(replace(regime, catalogue=catalogue), load)


def _trace_workload(
    scenario: Scenario, config: LiveConfig, catalogue: Catalogue, load: LoadCurve
) -> TraceWorkload:
    """The trace with histories of the node's sizes, at the load's rate for the trace's hot share.

    Base histories are as much shorter than the surrogate's as the preset's mean is. Where requests
    are longer than that mean after all, they come as much less often.
    """
    shorter = config.mean_history_tokens / REFERENCE_TOKENS
    trace = scenario.recorded(TOKENS_PER_INTERACTION * shorter)
    workload = TraceWorkload(
        trace,
        catalogue,
        config.max_history_tokens,
        jitter_s=JITTER_EPOCHS * config.epoch_seconds,
        jitter_at_reset=scenario.trace_jitter,
    )
    if scenario.time_scale is not None:
        return workload.scaled_to(workload.mean_requests_per_s / scenario.time_scale)
    longer = workload.mean_history_tokens / config.mean_history_tokens
    window_s = mdp.HOT_WINDOW_EPOCHS * config.epoch_seconds
    hot_share = 0.0
    for _ in range(3):  # who is hot follows from the rate, and the rate from who is hot
        rate = float(load(np.array([hot_share]))[0]) / longer
        hot_share = _hot_share(trace, window_s * rate / trace.mean_requests_per_s)
    return workload.scaled_to(rate)


def _hot_share(trace: Trace, window_s: float) -> float:
    """Share of the requests whose user has `HOT_REQUESTS` of them within the trailing window."""
    by_user = np.argsort(trace.user, kind="stable")
    user, arrival_s = trace.user[by_user], trace.arrival_s[by_user]
    before = mdp.HOT_REQUESTS - 1
    same = user[before:] == user[:-before]
    return float((same & (arrival_s[before:] - arrival_s[:-before] <= window_s)).sum() / len(trace))


def live_backend(scenario: Scenario, config: LiveConfig) -> LiveBackend:
    """A live node of the preset that serves the scenario. Imports torch."""
    from hlem_env.live.node import LiveNode
    from hlem_env.live.serving import LiveBackend

    node = LiveNode(config, scenario.kv_policy)
    speed = config.probe_ms / node.probe_ms()
    workload = live_workload(scenario, config, node.entries_in_pool, speed)
    return LiveBackend(workload, node)


def surrogate_node(config: LiveConfig, kv_policy: str) -> BatchedNode:
    """The surrogate's node with everything as the live one has it."""
    dtype_bytes = config.row_bytes // config.dim
    return BatchedNode(
        pool_bytes=config.pool_bytes,
        page_bytes=config.page_bytes,
        block_tokens=config.block_tokens,
        block_bytes=2 * config.block_tokens * config.dim * dtype_bytes,
        layers=config.layers,
        kv_policy=kv_policy,
        warmup_epochs=config.warmup_epochs,
        epoch_seconds=config.epoch_seconds,
        token_budget=config.token_budget,
        bucket_gbps=config.refill_gbps,
        slo_ms=config.slo_ms,
        refill_while_idle=config.device == "cpu",
        only_graphs=config.only_graphs,
        prefetch_beside=config.prefetch_beside,
    )


def surrogate_twin(
    scenario: Scenario, config: LiveConfig, profile: NodeProfile, speed: float
) -> BatchedBackend:
    """A surrogate that serves the requests of `live_backend` as that node does.

    Args:
        scenario: what happens.
        config: of the live node.
        profile: calibrated on it.
        speed: of the machine whose requests these are over that of the preset's load.
    """
    node = surrogate_node(config, scenario.kv_policy)
    pages = node.kv_pages(round(config.mean_history_tokens))
    workload = live_workload(scenario, config, node.pool_pages // pages, speed)
    return BatchedBackend(workload, node, profile)


def twin_backend(scenario: Scenario, config: LiveConfig) -> BatchedBackend:
    """The twin of the preset's node on the machine that `train.calibrate` found, the profile NAME-live.

    Of the scenario's own node only what random scenarios vary counts: item skew, and the machine's scales.

    Raises:
        ArgumentError: the preset was not calibrated.
    """
    found = NodeProfile.load(f"{config.name}-live")
    if not isinstance(found, NodeProfile):
        raise ArgumentError("live preset", config.name, "one that train.calibrate was run for")
    probe_ms = found.probe_ms.get(str(config.layers), config.probe_ms)
    profile = found.slower(1.0 / scenario.compute_scale)
    profile = replace(profile, gather_gbps=profile.gather_gbps * scenario.gather_scale)
    skewed = replace(config, zipf=config.zipf if scenario.zipf is None else scenario.zipf)
    return surrogate_twin(scenario, skewed, profile, config.probe_ms / probe_ms)
