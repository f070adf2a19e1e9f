"""Before a control loop is asked anything: all that is compiled at its first use is used once.

The engine's worker calls the loop between batches; a compilation there would hold up every request.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hlem_env import mdp
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats
from serving_bridge.adapter import AdapterSettings
from serving_bridge.allocator import SmartAllocator
from serving_bridge.epoch_record import describe
from serving_bridge.policy import FrozenPolicy
from serving_bridge.recovery import RecoverySettings

EPOCHS = 3
"""The adapter proposes in the first, learns in the second."""
REQUESTS = 4


def rehearse(
    policy: FrozenPolicy,
    config: MdpConfig,
    adapter: AdapterSettings | None,
    recovery: RecoverySettings | None,
) -> None:
    """Decide a few made-up epochs with an allocator that is thrown away."""
    allocator = SmartAllocator(policy, adapter, recovery, config)
    alpha_centi = config.clip(allocator.initial_alpha_centi)
    for epoch in range(EPOCHS):
        stats = replace(_stats(epoch, config), alpha_target=alpha_centi / 100)
        if hasattr(allocator, "on_tick"):
            allocator.on_tick(stats)
        describe(stats, config)
        alpha_centi = allocator.decide(mdp.observe(stats, config), stats).alpha_centi
    allocator.close()


def _stats(epoch: int, config: MdpConfig) -> EpochStats:
    """Of an epoch with little to do."""
    times = np.arange(REQUESTS, dtype=np.float64)
    return EpochStats(
        duration_s=config.epoch_seconds, latency_ms=1.0 + times, service_ms=1.0 + times,
        arrival_s=epoch * config.epoch_seconds + 1e-3 * times,
        is_hot=np.zeros(REQUESTS, np.bool_), history_tokens=REQUESTS, reused_tokens=0,
        rows_looked_up=REQUESTS, rows_hit=0.0, computed_tokens=REQUESTS, refill_bytes=0.0,
        prefetch_bytes=0.0, evictions=0, alpha_target=0.0, alpha_resident=0.0, embedding_pages=0,
        kv_pages=0, free_pages=1, pending_pages=0, pool_bytes=1,
        working_set_bytes=0.0, backlog=0, backlog_age_s=0.0, utilisation=0.1,
    )  # fmt: skip
