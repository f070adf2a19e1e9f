"""How many requests a second hold a node at a wanted utilisation, as a function of the hot share.

The load of a regime is set by utilisation at the node's own best alpha: at low load no split
matters, in overload none helps. Settings of published results have a simulated table, committed in
`load_tables.json`; others get the closed form below, which the tables are also started from.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from functools import lru_cache
from importlib import resources
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require
from hlem_env.mdp import queueing_p99_ms
from hlem_env.surrogate.hardware import HardwareProfile, compute_ms
from hlem_env.surrogate.hit_rates import (
    distinct_curve,
    distinct_rows,
    draws_to_fill,
    miss_probability,
)
from hlem_env.surrogate.node import NodeConfig, SurrogateBackend
from hlem_env.workload.regimes import LoadCurve, RegimeConfig, SyntheticWorkload

TARGET_UTILISATION = 0.70
HOT_SHARES = tuple(round(0.05 * i, 2) for i in range(1, 13))

_IRRELEVANT = ("regime", "steady_hot_share", "burst_users", "episode_epochs")
"""Fields of a regime that do not change what a request costs at a given hot share."""


class Optimum(NamedTuple):
    """Best alpha and what a request costs there, by hot share ([n] each)."""

    alpha_centi: NDArray[np.int64]
    service_ms: NDArray[np.float64]
    square_ms2: NDArray[np.float64]
    """Second moment of the service time."""


@numba.njit(cache=True, nogil=True, error_model="numpy")
def service_moments(  # type: ignore[no-untyped-def]
    curve, compute, hot_shares, hot_pages, pool_pages, rows_per_page, history, new_items,
    candidates, tables, overhead_ms, append_tokens, missed_row_ms, resident_row_ms,
):  # fmt: skip
    """Mean and second moment of the service time [n, 2, 101] at every alpha, in closed form.

    Hot users fill the KV cache first and nobody else's entries are reused.

    Args:
        curve, compute: of `hit_rates.distinct_curve` and `HardwareProfile.compute_table`.
        hot_shares: [n] of requests.
        hot_pages: [n] of the hot users' entries.
        pool_pages: of the pool.
        rows_per_page: rows of one table for a page, all tables having as many.
        history, new_items, candidates: tokens of a request.
        tables: embedding tables.
        overhead_ms, append_tokens: of the hardware profile.
        missed_row_ms, resident_row_ms: to read a row from the host and from HBM.
    """
    moments = np.empty((hot_shares.size, 2, 101))
    cost = np.empty(2)  # of a request whose history is reused, and of one whose is not
    for alpha in range(101):
        reach = draws_to_fill(curve, pool_pages * alpha / 100 * rows_per_page)
        missing = miss_probability(curve, reach)
        held = distinct_rows(curve, reach)
        for i in range(2):
            tokens = (new_items if i == 0 else history) + candidates
            missed = distinct_rows(curve, reach + tokens) - held
            cost[i] = (
                overhead_ms
                + compute_ms(compute, append_tokens, tokens, history + candidates)
                + tables * (missed * missed_row_ms + tokens * (1 - missing) * resident_row_ms)
            )
        kv_pages = pool_pages * (100 - alpha) / 100
        for i in range(hot_shares.size):
            fits = min(1.0, kv_pages / hot_pages[i]) if hot_pages[i] > 0 else 0.0
            reused = hot_shares[i] * fits
            moments[i, 0, alpha] = reused * cost[0] + (1.0 - reused) * cost[1]
            moments[i, 1, alpha] = reused * cost[0] ** 2 + (1.0 - reused) * cost[1] ** 2
    return moments


@numba.njit(cache=True, nogil=True)
def _least_p99(moments, requests_per_s):  # type: ignore[no-untyped-def]
    """The alpha [n] of the least P99 of the queue, of moments [n, 2, 101] and rates [n]."""
    best = np.empty(requests_per_s.size, np.int64)
    for i in range(requests_per_s.size):
        least_ms, best[i] = np.inf, 0
        for alpha in range(moments.shape[2]):
            mean_ms, square_ms2 = moments[i, 0, alpha], moments[i, 1, alpha]
            p99_ms = queueing_p99_ms(mean_ms, square_ms2, requests_per_s[i])
            if p99_ms < least_ms:
                least_ms, best[i] = p99_ms, alpha
    return best


def estimate_optimum(
    config: RegimeConfig,
    node: NodeConfig,
    hardware: HardwareProfile,
    hot_share: NDArray[Any],
    load: LoadCurve | None = None,
) -> Optimum:
    """Closed form of the best alpha in [0, 1] for hot shares [n].

    With a load the best is that of the queue's P99 (`mdp.queueing_p99_ms`), without one that of the
    mean service time.
    """
    shares = tuple(np.atleast_1d(hot_share).tolist())
    return _estimate(config, node, hardware, shares, load)


@lru_cache(maxsize=256)
def _estimate(
    config: RegimeConfig,
    node: NodeConfig,
    hardware: HardwareProfile,
    hot_share: tuple[float, ...],
    load: LoadCurve | None,
) -> Optimum:
    moments = _closed_form(config, node, hardware, hot_share)
    if load is None:
        best = moments[:, 0].argmin(axis=1)
    else:
        best = _least_p99(moments, load(np.array(hot_share)))
    rows = np.arange(best.size)
    return Optimum(best, moments[rows, 0, best], moments[rows, 1, best])


@lru_cache(maxsize=256)
def _closed_form(
    config: RegimeConfig, node: NodeConfig, hardware: HardwareProfile, hot_share: tuple[float, ...]
) -> NDArray[np.float64]:
    """Moments of the service time [hot shares, 2, 101 alphas]."""
    catalogue = config.catalogue
    compute = hardware.compute_table(node.layers, config.max_history_tokens + catalogue.candidates)
    entry = node.kv_pages(int(config.mean_history_tokens))
    shares = np.array(hot_share)
    moments: NDArray[np.float64] = service_moments(
        distinct_curve(catalogue.rows_per_table, catalogue.zipf), compute, shares,
        config.hot_users(shares) * float(entry), float(node.pool_pages),
        node.page_bytes / catalogue.row_bytes / catalogue.tables,
        float(config.mean_history_tokens), float(config.new_items),
        float(catalogue.candidates), float(catalogue.tables), hardware.overhead_ms,
        hardware.append_tokens, catalogue.row_bytes / hardware.gather_gbps * 1e-6,
        2 * catalogue.row_bytes / hardware.hbm_gbps * 1e-6,
    )  # fmt: skip
    return moments


def estimate_load(
    config: RegimeConfig,
    node: NodeConfig,
    hardware: HardwareProfile,
    utilisation: float = TARGET_UTILISATION,
) -> LoadCurve:
    """The load that the closed form gives."""
    require(0 < utilisation < 5, "utilisation", utilisation, "above 0 and below 5")
    service = estimate_optimum(config, node, hardware, np.array(HOT_SHARES)).service_ms
    return LoadCurve(HOT_SHARES, tuple(float(1000 * utilisation / s) for s in service), "estimate")


@lru_cache(maxsize=256)
def load_curve(
    config: RegimeConfig,
    node: NodeConfig,
    hardware: HardwareProfile,
    utilisation: float = TARGET_UTILISATION,
) -> LoadCurve:
    """The committed table of this setting, scaled to `utilisation`, or else the estimate."""
    table = _tables().get(setting_key(config, node, hardware))
    if table is None:
        return estimate_load(config, node, hardware, utilisation)
    curve = LoadCurve(tuple(table["hot_share"]), tuple(table["requests_per_s"]), "table")
    return curve.scaled(utilisation / TARGET_UTILISATION)


def simulate_load(
    config: RegimeConfig, node: NodeConfig, hardware: HardwareProfile, seed: int = 0
) -> dict[str, Any]:
    """The table of a setting: simulated under the scan-resistant policy, a Steady regime per hot share.

    For each hot share the service time is measured over 72 epochs at every alpha of a grid of 0.04,
    the rate set so that the least is at 0.70 utilisation, and both done again at that rate on every
    second alpha within 0.06 of the best.
    """
    node = replace(node, kv_policy="scan_resistant")
    closed = estimate_optimum(config, node, hardware, np.array(HOT_SHARES))
    rates, alphas, services = [], [], []
    for share, service_ms in zip(HOT_SHARES, closed.service_ms.tolist(), strict=True):
        steady = replace(config, regime="steady", steady_hot_share=share)
        candidates = range(0, 101, 4)
        for _ in range(2):
            rate = 1000 * TARGET_UTILISATION / service_ms
            workload = SyntheticWorkload(steady, LoadCurve((share,), (rate,)))
            backend = SurrogateBackend(workload, node, hardware)
            costs = [_measured_service_ms(backend, a, seed) for a in candidates]
            service_ms, best = min(costs), candidates[int(np.argmin(costs))]
            candidates = range(max(best - 6, 0), min(best + 6, 100) + 1, 2)
        rates.append(round(1000 * TARGET_UTILISATION / service_ms, 3))
        alphas.append(best)
        services.append(round(service_ms, 4))
    return {
        "key": setting_key(config, node, hardware),
        "hot_share": list(HOT_SHARES),
        "requests_per_s": rates,
        "alpha_centi": alphas,
        "service_ms": services,
    }


def setting_key(config: RegimeConfig, node: NodeConfig, hardware: HardwareProfile) -> str:
    """Hash (16 hex digits) of all that a request's cost depends on."""
    population = {k: v for k, v in asdict(config).items() if k not in _IRRELEVANT}
    layout = {k: v for k, v in asdict(node).items() if k not in ("kv_policy", "warmup_epochs")}
    costs = {k: v for k, v in hardware.to_json().items() if k not in ("source", "hardware")}
    content = json.dumps([population, layout, costs], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def tables_digest() -> str:
    """Hash (16 hex digits) of the committed load tables; part of every record."""
    content = json.dumps(_tables(), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _measured_service_ms(backend: SurrogateBackend, alpha_centi: int, seed: int) -> float:
    backend.reset(seed)
    seconds = backend.node.epoch_seconds
    backend.run(alpha_centi, backend.warmup_s + 12 * seconds)
    return backend.run(alpha_centi, 72 * seconds).mean_service_ms


def _tables_text() -> str:
    file = resources.files("hlem_env.surrogate") / "load_tables.json"
    return file.read_text() if file.is_file() else '{"tables": []}'


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    return {table["key"]: table for table in json.loads(_tables_text())["tables"]}
