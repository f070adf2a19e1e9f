"""Controllers over hours against alpha*, by the minute.

The mean P99 of a minute's epochs over all repeats is less noisy than that of one epoch, and the
workload hardly changes within it: alpha* of a minute is the alpha with the lowest such mean.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

from agents.registry import make
from agents.static import Static
from eval.lineup import frozen_policies, shipped_policies
from eval.names import BEST_STATIC
from eval.records import Record, run_record
from eval.unit import GRID, mdp_config
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import tables_digest
from hlem_env.surrogate.optimum import AlphaStar, alpha_star, hold_all, record_episode

Floats = NDArray[np.float64]
MINUTE = 12
"""Epochs of 5 s."""


def by_minute(values: ArrayLike) -> Floats:
    """Means over minutes: [..., epochs] to [..., minutes]."""
    values = np.asarray(values, float)
    minutes: Floats = values.reshape(*values.shape[:-1], -1, MINUTE).mean(axis=-1)
    return minutes


def star_by_minute(star: AlphaStar) -> tuple[Floats, Floats]:
    """alpha* and P99 there, [minutes] each, from the mean P99 of the minutes' epochs."""
    p99_ms = by_minute(star.p99_ms)
    return star.alphas_centi[p99_ms.argmin(axis=0)] / 100, p99_ms.min(axis=0)


def course_of(record: Record, star: AlphaStar) -> dict[str, Any]:
    """A controller's figures over all epochs, and its course by the minute."""
    alpha = np.array(record.alpha_centi) / 100
    minute_star, _ = star_by_minute(star)
    return {
        "mean_p99_ms": record.mean_p99_ms,
        "qos": record.mean_qos,
        "gap": float(np.abs(alpha - minute_star.repeat(MINUTE)).mean()),
        "gap_to_epoch_star": float(np.abs(alpha - star.alpha_centi / 100).mean()),
        "movement": record.movement,
        "saturated": record.saturated,
        "alpha": by_minute(alpha).round(4).tolist(),
        "p99_ms": by_minute(record.p99_ms).round(3).tolist(),
    }


def track(
    workload: str, minutes: int, seed: int, step_centi: int, repeats: int, jobs: int
) -> dict[str, Any]:
    """Search alpha*, then run the shipped policies, the rule and the best static split.

    Args:
        workload: preset and regime, whose period is the whole time.
        step_centi: grid of alpha*, hundredths.
        repeats: drawings of the arrivals for alpha*; the controllers run on those of `seed`.
        jobs: threads.
    """
    began = time.perf_counter()
    scenario = Scenario.parse(workload, episode_epochs=MINUTE * minutes)
    config, backend = mdp_config(scenario), scenario.build()
    epochs = scenario.episode_epochs
    backend.reset(seed)
    with tqdm(total=repeats, unit="repeat", disable=None) as bar:

        def progress(done: int, _: int) -> None:
            bar.update(done - bar.n)

        star = alpha_star(backend, config, epochs, step_centi, repeats, jobs, progress=progress)
    backend.reset(seed)
    episode = record_episode(backend, epochs)
    tokens = [r.history_length.sum() / max(len(r), 1) for r in episode.epochs]
    held = hold_all(backend, episode, list(GRID), jobs)
    best = GRID[int(held.mean(axis=1).argmin())]
    lineup = [Static(best, BEST_STATIC), make("working-set", scenario)]
    lineup += frozen_policies(shipped_policies())
    records = [run_record(c, backend, scenario, config, seed) for c in lineup]
    alpha, p99_ms = star_by_minute(star)
    return {
        "scenario": scenario.to_json(),
        "load_tables": tables_digest(),
        "seed": seed,
        "slo_ms": config.slo_ms,
        "alpha_step": step_centi / 100,
        "repeats": repeats,
        "best_static_alpha": best / 100,
        "controllers": {record.controller: course_of(record, star) for record in records},
        "alpha_star": alpha.tolist(),
        "best_p99_ms": p99_ms.round(3).tolist(),
        "hot_share": by_minute(records[0].hot_share).round(4).tolist(),
        "history_tokens": by_minute(tokens).round().tolist(),
        "seconds": round(time.perf_counter() - began, 1),
    }
