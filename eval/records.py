"""Records: one episode of one controller, with what is needed to run it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.oracle import Planned, PlannedTicks
from hlem_env.backend import Backend, Runner, run_controller
from hlem_env.controller import Controller
from hlem_env.errors import ArtefactError
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import tables_digest

FORMAT = 1
SIZE_LIMIT = 64 * 2**20
SATURATION = 0.95


@dataclass(frozen=True)
class Record:
    """An episode. Lists have one entry an epoch."""

    controller: str
    scenario: dict[str, Any]
    seed: int
    workload_digest: str
    """Hash of the workload's course; it changes with the workload's code or a trace's content."""
    load_tables: str
    """Hash of the committed load tables."""
    mdp_config: dict[str, Any]
    alpha_centi: list[int]
    p99_ms: list[float]
    qos: list[float]
    kv_hit: list[float]
    emb_hit: list[float]
    hot_share: list[float]
    utilisation: list[float]
    requests: list[int]
    backlog: int
    """At the episode's end."""
    tick_alpha_centi: list[list[int]] | None = None
    """alpha in each tick of each epoch; None where the controller has none. alpha_centi is the last."""
    format: int = FORMAT

    @property
    def mean_p99_ms(self) -> float:
        """Mean over epochs of the epoch's P99."""
        return float(np.mean(self.p99_ms))

    @property
    def mean_qos(self) -> float:
        """Share of all requests within the SLO."""
        return float(np.average(self.qos, weights=np.maximum(self.requests, 1e-9)))

    @property
    def movement(self) -> float:
        """Sum of the absolute steps of alpha, those between ticks included."""
        return float(np.abs(self._steps()).sum()) / 100

    @property
    def largest_step(self) -> float:
        """Largest move of alpha at once, by a decision or a tick."""
        return float(np.abs(self._steps()).max(initial=0)) / 100

    def _steps(self) -> NDArray[np.int64]:
        alphas = self.alpha_centi
        if self.tick_alpha_centi is not None:
            alphas = [alpha for epoch in self.tick_alpha_centi for alpha in epoch]
        held = np.array(alphas, np.int64)
        return held[1:] - held[:-1]

    def gap(self, alpha_star_centi: NDArray[np.int64]) -> float:
        """Mean distance of alpha to alpha* ([epochs] hundredths) over time, ticks included."""
        alphas = self.tick_alpha_centi or [[alpha] for alpha in self.alpha_centi]
        pairs = zip(alphas, alpha_star_centi, strict=True)
        return float(
            np.mean([np.abs(np.subtract(ticks, star)).mean() for ticks, star in pairs]) / 100
        )

    @property
    def saturated(self) -> bool:
        """Busy for more than 0.95 of the time, or a backlog of more than 5 s of requests at the end."""
        arriving_per_epoch = max(float(np.mean(self.requests)), 1.0)
        return float(np.mean(self.utilisation)) > SATURATION or self.backlog > arriving_per_epoch

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(asdict(self)))
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what `save` wrote.

        Raises:
            ArtefactError: no such file, or not a record; says why.
        """
        try:
            if path.stat().st_size > SIZE_LIMIT:
                raise ArtefactError(f"{path} is larger than {SIZE_LIMIT} bytes")
            values = json.loads(path.read_text())
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                raise ArtefactError(f"{path} is not a record of format {FORMAT}")
            return cls(**values)
        except OSError as error:
            raise ArtefactError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            names = ", ".join(field.name for field in fields(cls))
            raise ArtefactError(f"{path} is not a record ({error}); it has {names}") from error


def run_record(
    controller: Controller, backend: Backend, scenario: Scenario, config: MdpConfig, seed: int
) -> Record:
    """Run one episode of a controller and keep what happened.

    Args:
        backend: built from `scenario`; its workload starts anew from `seed`.
    """
    stats, alphas, ticks = [], [], []
    runner = Runner(backend, config)
    for epoch, _ in run_controller(runner, controller, scenario.episode_epochs, seed):
        stats.append(epoch)
        alphas.append(round(100 * epoch.alpha_target))
        ticks.append(runner.tick_alphas_centi)
    return Record(
        controller=controller.name,
        scenario=scenario.to_json(),
        seed=seed,
        workload_digest=backend.workload.digest(),  # type: ignore[attr-defined]
        load_tables=tables_digest(),
        mdp_config=config.to_json(),
        alpha_centi=alphas,
        p99_ms=[s.p99_ms for s in stats],
        qos=[s.qos(config.slo_ms) for s in stats],
        kv_hit=[s.kv_hit for s in stats],
        emb_hit=[s.emb_hit for s in stats],
        hot_share=[s.hot_share for s in stats],
        utilisation=[s.utilisation for s in stats],
        requests=[s.requests for s in stats],
        backlog=stats[-1].backlog,
        tick_alpha_centi=ticks if hasattr(controller, "on_tick") else None,
    )


def replay(record: Record) -> tuple[Record, list[str]]:
    """Run a record's alphas on its scenario and seed again; returns the new record and what differs."""
    scenario = Scenario.parse(record.scenario)
    config = MdpConfig(**record.mdp_config)
    plan: Planned | PlannedTicks = Planned(record.alpha_centi, record.controller)
    if record.tick_alpha_centi is not None:
        plan = PlannedTicks(record.tick_alpha_centi, record.controller)
    again = run_record(plan, scenario.build(), scenario, config, record.seed)
    differences = [
        field.name
        for field in fields(Record)
        if not _same(getattr(record, field.name), getattr(again, field.name))
    ]
    return again, differences


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, list) and mine and isinstance(mine[0], float):
        return len(mine) == len(theirs) and bool(np.allclose(mine, theirs, rtol=1e-9, atol=0))
    return bool(mine == theirs)
