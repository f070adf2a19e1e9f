"""One seed of one scenario: every controller of a comparison on the same requests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from agents.oracle import Planned
from eval.figures import alpha_star_summary
from eval.guard import ControllerFault, Guarded
from eval.lineup import baselines_digest, entries
from eval.names import ALPHA_STAR, FORESEEN, REACHABLE
from eval.records import Record, run_record
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import tables_digest
from hlem_env.surrogate.optimum import (
    AlphaStar,
    alpha_star,
    foreseen,
    hold_all,
    reachable,
    record_episode,
)
from hlem_env.workload.traces import TraceWorkload

GRID = range(10, 91, 2)


@dataclass(frozen=True)
class Unit:
    """One seed of one scenario: what a process works on."""

    scenario: Scenario
    seed: int
    design_centi: int
    controllers: tuple[str, ...]
    policies: tuple[str, ...]
    time_limit_s: float
    oracles: bool
    star_step_centi: int
    repeats: int
    output: str

    @property
    def key(self) -> str:
        """Hash of all that the result depends on."""
        files = [
            hashlib.sha256((Path(p) / "policy.json").read_bytes()).hexdigest()
            for p in self.policies
        ]
        values = asdict(self) | {"policies": files, "output": "", "load": tables_digest()}
        values["baselines"] = baselines_digest(self.controllers)
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def file(self) -> Path:
        """Where the unit's result is kept."""
        return Path(self.output) / "units" / f"{self.key}.json"


def mdp_config(scenario: Scenario) -> MdpConfig:
    """State and reward of the comparison: eight features, of which policies take what they need."""
    return MdpConfig(
        max_history_tokens=scenario.max_history_tokens,
        epoch_seconds=scenario.epoch_seconds,
        features="working_set",
    )


def _slug(*parts: str) -> str:
    """A name of a file or folder."""
    return "-".join("".join(c if c.isalnum() or c in ".-" else "-" for c in p) for p in parts)


def run_unit(unit: Unit) -> dict[str, Any]:
    """Every controller on one seed. Writes its records; returns and keeps the figures."""
    scenario, config = unit.scenario, mdp_config(unit.scenario)
    backend = scenario.build()
    backend.reset(unit.seed)
    episode = record_episode(backend, scenario.episode_epochs)
    grid_p99 = hold_all(backend, episode, list(GRID), jobs=1).mean(axis=1)
    best_centi = GRID[int(grid_p99.argmin())]
    found = entries(unit.controllers, scenario, best_centi, unit.design_centi, unit.policies)
    lineup, star = list(found), None
    if unit.oracles:
        star = star_of(unit, jobs=1)
        plan, _ = reachable(backend, config, episode, jobs=1)
        plans = {REACHABLE: plan, ALPHA_STAR: star.alpha_centi, FORESEEN: foreseen(star)}
        lineup += [(name, partial(Planned, plan, name)) for name, plan in plans.items()]
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    hot_share: list[float] = []
    for name, build in lineup:
        try:
            guarded = Guarded(build, config, unit.time_limit_s)
            if guarded.name in rows:
                guarded.name += f" <{name}>"
            record = run_record(guarded, backend, scenario, config, unit.seed)
        except ControllerFault as fault:
            failed[name] = str(fault)
            continue
        folder = _slug(scenario.name, scenario.kv_policy, scenario.digest())
        path = Path("records") / folder / _slug(record.controller) / f"{unit.seed}.json"
        record.save(Path(unit.output) / path)
        rows[record.controller] = (
            _figures(record, star)
            | guarded.times_us()
            | {"clipped": guarded.clipped, "entry": name, "record": str(path)}
        )
        hot_share = record.hot_share
    result: dict[str, Any] = {"rows": rows, "failed": failed, "best_static_centi": best_centi}
    if isinstance(backend.workload, TraceWorkload):
        about = backend.workload.trace.metadata
        result["trace"] = {k: v for k, v in about.items() if k != "path"}
    if star is not None:
        # All controllers see the same requests, so any record has the course's hot share.
        result["alpha_star"] = alpha_star_summary(star.alphas_centi, star.p99_ms, hot_share)
    unit.file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unit.file.with_suffix(".part")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(unit.file)
    return result


def star_of(unit: Unit, jobs: int) -> AlphaStar:
    """alpha* of the unit's course, from the cache where it is there."""
    backend = unit.scenario.build()
    backend.reset(unit.seed)
    return alpha_star(
        backend, mdp_config(unit.scenario), unit.scenario.episode_epochs, unit.star_step_centi,
        unit.repeats, jobs, cache=Path(unit.output) / "alpha-star",
    )  # fmt: skip


def _figures(record: Record, star: AlphaStar | None) -> dict[str, Any]:
    """One episode's figures."""
    figures: dict[str, Any] = {
        "p99_ms": record.mean_p99_ms,
        "qos": record.mean_qos,
        "movement": record.movement,
        "largest_step": record.largest_step,
        "utilisation": float(np.mean(record.utilisation)),
        "saturated": record.saturated,
        "gap": None,
        "regret": None,
    }
    if star is not None:
        figures["gap"] = record.gap(star.alpha_centi)
        figures["regret"] = float(record.mean_p99_ms / star.best_p99_ms.mean() - 1)
    return figures
