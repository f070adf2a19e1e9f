"""What there is to gain over the best static split: `python -m eval.end_to_end_room --live FILE`.

On the surrogate of a calibrated machine, with the requests of `eval.end_to_end` under scan-resistant KV, over
the best of its five static splits in hindsight. Sequences of alpha (`hlem_env.surrogate.optimum`), each
played with other jitter than it was found with:

    foreseen          the best under the step limit by mean P99 over other arrivals on the same course, warm
    alpha*            the same without the limit
    reachable         the best under the step limit for these very requests
    reachable, free   the same without the limit

    room = 1 - P99 of reachable / P99 of the best static split
    room recovered = (P99 of the best static split - P99) / (P99 of the best static split - P99 of reachable)

Room recovered is no figure where the room is under `LEAST_ROOM`. Live controllers are held against the room
that the surrogate has on the same requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from tqdm import tqdm

from agents.oracle import Planned
from agents.static import Static
from eval.end_to_end import Args as PlanArgs
from eval.end_to_end import seeds
from eval.end_to_end_bench import Bench, SurrogateBench
from eval.end_to_end_plan import (
    GRID_CENTI,
    REGIMES,
    SCAN_RESISTANT,
    Run,
    make,
)
from eval.end_to_end_replay import config_of, node_profile
from eval.end_to_end_room_report import (
    ALPHA_STAR,
    CONTROLLERS,
    FINE_STATIC,
    FORESEEN,
    FREE,
    REACHABLE,
    SHOWN,
    STATIC,
    Values,
    draw_alphas,
    of_live,
    of_surrogate,
    print_tables,
)
from eval.host_slowness import MOST_SLOWNESS
from eval.machine_speed import MOST_LOAD
from eval.pieces import Slice
from eval.statistics import Floats
from eval.unit import GRID
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.controller import Controller
from hlem_env.errors import ArtefactError, require
from hlem_env.live.config import LiveConfig
from hlem_env.live_scenario import surrogate_twin
from hlem_env.machine import command, write_result
from hlem_env.surrogate.batched import BatchedBackend
from hlem_env.surrogate.hardware import NodeProfile
from hlem_env.surrogate.optimum import AlphaStar, alpha_star, foreseen, reachable, record_episode
from hlem_env.workload.regimes import PRESETS

ANY_STEP_CENTI = 80
"""From one bound of alpha to the other."""


@dataclass
class Args:
    """Room over the best static split, and what of it is recovered."""

    live: Path
    """report of `eval.end_to_end_one_host`: its node, requests and host are taken"""
    profile: str = "h200-live"
    """calibrated hardware profile, or the path of one"""
    repeats: int = 16
    """seeds, the same for all that is compared"""
    draws: int = 4
    """of the jitter, for each figure"""
    arrivals: int = 16
    """drawings of them, of which the mean counts where the course alone is known"""
    json: Path | None = None
    """file for the figures"""
    plot: Path | None = None
    """PNG file"""

    def __post_init__(self) -> None:
        for name in ("repeats", "draws", "arrivals"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")


@dataclass(frozen=True)
class Live:
    """Live runs as on one host."""

    config: LiveConfig
    dataset: str
    speed: float
    """Of the machine over the preset's, by which the rates were scaled."""
    load: float
    slowness: float
    """Of the one host."""
    epochs: int
    """Of a run."""
    rows: list[Values]
    """Under scan-resistant KV."""

    @classmethod
    def read(cls, path: Path) -> Live:
        """A report of `eval.end_to_end_one_host`.

        Raises:
            ArtefactError: it is none.
        """
        try:
            report = json.loads(path.read_text("utf-8"))
            rows = [row for row in report["rows"] if row["kv_policy"] == SCAN_RESISTANT]
            speed, load, slowness = (float(report[key]) for key in ("speed", "load", "slowness"))
            config, dataset, epochs = (
                config_of(report),
                str(report["dataset"]),
                int(report["epochs"]),
            )
            found = cls(config, dataset, speed, load, slowness, epochs, rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtefactError(
                f"{path} is no report of eval.end_to_end_one_host: {error}"
            ) from error
        most = {"speed": MOST_LOAD, "load": MOST_LOAD, "slowness": MOST_SLOWNESS, "epochs": 10**6}
        for name, limit in most.items():
            value = getattr(found, name)
            require(0 < value <= limit, name, f"{value} in {path}", f"above 0, up to {limit}")
        require(found.dataset in PRESETS, "dataset", found.dataset, ", ".join(PRESETS))
        return found


class Courses:
    """alpha* of each course of a workload, found once: all seeds of Steady and of Trend have the same."""

    def __init__(self, bench: Bench, epochs: int, repeats: int) -> None:
        self._mdp, self._epochs, self._repeats = bench.mdp, epochs, repeats
        self._found: dict[str, AlphaStar] = {}

    def of(self, backend: BatchedBackend, seed: int) -> AlphaStar:
        """That of a seed; the backend's workload is drawn anew."""
        backend.reset(seed)
        workload: Any = backend.workload
        course = workload.digest()
        if course not in self._found:
            self._found[course] = alpha_star(
                backend, self._mdp, self._epochs, step_centi=2, repeats=self._repeats
            )
        return self._found[course]


class Played(NamedTuple):
    """Means over drawings of the jitter."""

    p99_ms: float
    """Over the epochs."""
    alpha: Floats
    """[epochs]."""


def of_seed(
    backend: BatchedBackend, bench: Bench, star: AlphaStar, draws: int, seed: int
) -> dict[str, Played]:
    """Static splits, sequences and controllers on a seed's requests."""
    backend.draw = 0
    backend.reset(seed)
    count = star.alpha_centi.size
    episode = record_episode(backend, count)
    plans = {
        FORESEEN: foreseen(star),
        ALPHA_STAR: star.alpha_centi,
        REACHABLE: reachable(backend, bench.mdp, episode)[0],
        FREE: reachable(backend, bench.mdp, episode, reach_centi=ANY_STEP_CENTI)[0],
    }

    def played(controller: Controller) -> Played:
        found: list[tuple[float, float]] = []
        for draw in range(1, 1 + draws):
            backend.draw = draw
            epochs = run_controller(Runner(backend, bench.mdp), controller, count, seed)
            found += [(stats.p99_ms, stats.alpha_target) for stats, _ in epochs]
        p99_ms, alpha = np.array(found).reshape(draws, count, 2).mean(axis=0).T
        return Played(float(p99_ms.mean()), alpha)

    static = {alpha: played(Static(alpha)) for alpha in GRID}
    return {
        STATIC: min((static[alpha] for alpha in GRID_CENTI), key=attrgetter("p99_ms")),
        FINE_STATIC: min(static.values(), key=attrgetter("p99_ms")),
        **{name: played(Planned(plan, name)) for name, plan in plans.items()},
        **{name: played(make(name, bench.mdp)) for name in CONTROLLERS},
    }


def simulate(
    args: Args, bench: Bench, profile: NodeProfile, live: Live
) -> tuple[list[int], dict[str, dict[str, list[Played]]]]:
    """Seeds, and what was played on them by regime and name, on the machine of a profile."""
    of_all = seeds(PlanArgs(repeats=args.repeats, epochs=live.epochs), bench)
    rows: dict[str, list[dict[str, Played]]] = {regime: [] for regime in REGIMES}
    courses = {regime: Courses(bench, live.epochs, args.arrivals) for regime in REGIMES}
    units = [(regime, seed) for regime in REGIMES for seed in of_all]
    for regime, seed in tqdm(units, unit="episode", disable=None):
        run = Run(regime, SCAN_RESISTANT, STATIC, seed)
        scenario = bench.scenario(run, live.epochs, live.load)
        backend = surrogate_twin(scenario, bench.config, profile, live.speed)
        star = courses[regime].of(backend, seed)
        rows[regime].append(of_seed(backend, bench, star, args.draws, seed))
    return of_all, {
        regime: {name: [row[name] for row in found] for name in found[0]}
        for regime, found in rows.items()
    }


def main(args: Args) -> int:
    """Simulate, print, write."""
    live, profile = Live.read(args.live), node_profile(args.profile)
    bench = SurrogateBench(live.config, live.dataset, Slice(Path(), 0.0, ""), profile)
    of_all, played = simulate(args, bench, profile.slower_host(live.slowness), live)
    found = {}
    for regime, of in played.items():
        rows = [row for row in live.rows if row["regime"] == regime]
        p99_ms = {name: np.array([one.p99_ms for one in some]) for name, some in of.items()}
        alpha = {name: np.mean([one.alpha for one in of[name]], axis=0) for name in SHOWN}
        found[regime] = {
            "seeds": of_all,
            "p99_ms": {name: values.tolist() for name, values in p99_ms.items()},
            "mean_alpha": {name: values.round(4).tolist() for name, values in alpha.items()},
            "simulated": of_surrogate(p99_ms),
            "live": of_live(rows, of_all, p99_ms),
        }
    print_tables(found, Console(width=160))
    if args.plot is not None:
        draw_alphas(found, args.plot)
    if args.json is not None:
        taken = "dataset", "speed", "load", "slowness", "epochs"
        same = {name: getattr(live, name) for name in taken}
        payload = {"device": profile.hardware, "profile": profile.name,
                   "preset": live.config.to_json(), **same, "regimes": found}  # fmt: skip
        write_result(args.json, command("eval.end_to_end_room"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.end_to_end_room", main, Args)
