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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from agents.oracle import Planned
from agents.static import Static
from eval.cells import LEAST_ROOM
from eval.end_to_end import Args as PlanArgs
from eval.end_to_end import seeds
from eval.end_to_end_bench import Bench, SurrogateBench
from eval.end_to_end_plan import (
    GRID_CENTI,
    PPO,
    REGIMES,
    SCAN_RESISTANT,
    SMART,
    WORKING_SET,
    Run,
    make,
)
from eval.end_to_end_replay import config_of, node_profile
from eval.end_to_end_report import shown
from eval.host_slowness import MOST_SLOWNESS
from eval.machine_speed import MOST_LOAD
from eval.pieces import Slice
from eval.statistics import Floats, ratio_of_means
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

STATIC, FINE_STATIC = "best static", "static, by 0.02"
FORESEEN, ALPHA_STAR, REACHABLE, FREE = "foreseen", "alpha*", "reachable", "reachable, free"
CONTROLLERS = WORKING_SET, PPO, SMART
ANY_STEP_CENTI = 80
"""From one bound of alpha to the other."""
Values = Mapping[str, Any]
P99s = dict[str, Floats]
"""By name, [seeds] ms."""


@dataclass
class Args:
    """Room over the best static split, and what of it is recovered."""

    live: Path
    """report of `eval.end_to_end_one_host`: its node, requests and host are taken"""
    profile: str = "h200-live"
    """calibrated hardware profile, or the path of one"""
    repeats: int = 16
    """seeds, the same for all that is compared"""
    epochs: int = 60
    """of an episode"""
    draws: int = 4
    """of the jitter, for each figure"""
    arrivals: int = 16
    """drawings of them, of which the mean counts where the course alone is known"""
    json: Path | None = None
    """file for the figures"""

    def __post_init__(self) -> None:
        for name in ("repeats", "epochs", "draws", "arrivals"):
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
            found = cls(config_of(report), str(report["dataset"]), speed, load, slowness, rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtefactError(
                f"{path} is no report of eval.end_to_end_one_host: {error}"
            ) from error
        for name, most in (("speed", MOST_LOAD), ("load", MOST_LOAD), ("slowness", MOST_SLOWNESS)):
            value = getattr(found, name)
            require(0 < value <= most, name, f"{value} in {path}", f"above 0, up to {most}")
        require(found.dataset in PRESETS, "dataset", found.dataset, ", ".join(PRESETS))
        return found


class Courses:
    """alpha* of each course of a workload, found once: all seeds of Steady and of Trend have the same."""

    def __init__(self, bench: Bench, args: Args) -> None:
        self._mdp, self._args = bench.mdp, args
        self._found: dict[str, AlphaStar] = {}

    def of(self, backend: BatchedBackend, seed: int) -> AlphaStar:
        """That of a seed; the backend's workload is drawn anew."""
        backend.reset(seed)
        workload: Any = backend.workload
        course = workload.digest()
        if course not in self._found:
            args = self._args
            self._found[course] = alpha_star(
                backend, self._mdp, args.epochs, step_centi=2, repeats=args.arrivals
            )
        return self._found[course]


def of_seed(
    backend: BatchedBackend, bench: Bench, star: AlphaStar, args: Args, seed: int
) -> dict[str, float]:
    """Mean P99, ms, over a seed's epochs, of static splits, sequences and controllers."""
    backend.draw = 0
    backend.reset(seed)
    episode = record_episode(backend, args.epochs)
    plans = {
        FORESEEN: foreseen(star),
        ALPHA_STAR: star.alpha_centi,
        REACHABLE: reachable(backend, bench.mdp, episode)[0],
        FREE: reachable(backend, bench.mdp, episode, reach_centi=ANY_STEP_CENTI)[0],
    }

    def played(controller: Controller) -> float:
        found: list[float] = []
        for draw in range(1, 1 + args.draws):
            backend.draw = draw
            epochs = run_controller(Runner(backend, bench.mdp), controller, args.epochs, seed)
            found += [stats.p99_ms for stats, _ in epochs]
        return float(np.mean(found))

    static = {alpha: played(Static(alpha)) for alpha in GRID}
    return {
        STATIC: min(static[alpha] for alpha in GRID_CENTI),
        FINE_STATIC: min(static.values()),
        **{name: played(Planned(plan, name)) for name, plan in plans.items()},
        **{name: played(make(name, bench.mdp)) for name in CONTROLLERS},
    }


def simulate(
    args: Args, bench: Bench, profile: NodeProfile, live: Live
) -> tuple[list[int], dict[str, P99s]]:
    """Seeds, and P99s by regime, on the machine of a profile."""
    of_all = seeds(PlanArgs(repeats=args.repeats, epochs=args.epochs), bench)
    rows: dict[str, list[dict[str, float]]] = {regime: [] for regime in REGIMES}
    courses = {regime: Courses(bench, args) for regime in REGIMES}
    units = [(regime, seed) for regime in REGIMES for seed in of_all]
    for regime, seed in tqdm(units, unit="episode", disable=None):
        run = Run(regime, SCAN_RESISTANT, STATIC, seed)
        scenario = bench.scenario(run, args.epochs, live.load)
        backend = surrogate_twin(scenario, bench.config, profile, live.speed)
        star = courses[regime].of(backend, seed)
        rows[regime].append(of_seed(backend, bench, star, args, seed))
    return of_all, {
        regime: {name: np.array([row[name] for row in found]) for name in found[0]}
        for regime, found in rows.items()
    }


def of_surrogate(p99_ms: P99s) -> dict[str, Any]:
    """Room of a regime and what controllers recover of it, with 95 % intervals over the seeds."""
    static, bound = p99_ms[STATIC], p99_ms[REACHABLE]
    room = float(1 - bound.mean() / static.mean())
    over = {name: asdict(ratio_of_means(of, static)) for name, of in p99_ms.items()}
    recovered = {
        name: asdict(ratio_of_means(static - p99_ms[name], static - bound)) for name in CONTROLLERS
    }
    return {
        "over_best_static": over,
        "room": room,
        "room_recovered": recovered if room >= LEAST_ROOM else {},
    }


def of_live(rows: list[Values], known: list[int], p99_ms: P99s) -> dict[str, Any]:
    """Room recovered by live controllers, of the room that the surrogate has on the same requests.

    Args:
        rows: of a regime, as `Live` has them.
        known: seeds of the simulated runs.
        p99_ms: of the regime, simulated.
    """
    measured = {row["allocation"]: dict(zip(row["seeds"], row["p99_ms"], strict=True))
                for row in rows if not any(row["saturated"])}  # fmt: skip
    rooms = dict(zip(known, 1 - p99_ms[REACHABLE] / p99_ms[STATIC], strict=True))
    found = {}
    for name in CONTROLLERS:
        ours, best = measured.get(name, {}), measured.get(STATIC, {})
        same = sorted(ours.keys() & best.keys() & rooms.keys())
        if not same:
            continue
        static, p99 = (np.array([of[seed] for seed in same]) for of in (best, ours))
        to_gain = static * np.array([rooms[seed] for seed in same])
        room = float(to_gain.sum() / static.sum())
        recovered = asdict(ratio_of_means(static - p99, to_gain)) if room >= LEAST_ROOM else None
        found[name] = {"seeds": same, "room": room, "room_recovered": recovered}
    return found


def print_tables(found: Mapping[str, Values], console: Console) -> None:
    """What sequences of alpha bring, and who recovers how much of it."""
    table = Table(title="simulated, P99 over the best of five static splits", title_justify="left")
    names = (FINE_STATIC, FORESEEN, ALPHA_STAR, REACHABLE, FREE, *CONTROLLERS)
    for heading in ("regime", *names):
        table.add_column(heading, justify="right")
    for regime, of in found.items():
        table.add_row(regime, *(shown(of["simulated"]["over_best_static"][one]) for one in names))
    console.print(table)
    table = Table(title="room recovered, %", title_justify="left")
    for heading in ("regime", "seeds", "room, %", *CONTROLLERS):
        table.add_column(heading, justify="right")
    for regime, of in found.items():
        room, recovered = of["simulated"]["room"], of["simulated"]["room_recovered"]
        table.add_row(
            f"{regime}, simulated", str(len(of["seeds"])), f"{100 * room:.1f}",
            *(percent(recovered.get(name)) for name in CONTROLLERS),
        )  # fmt: skip
        rows = of["live"]
        if rows:
            one = next(iter(rows.values()))
            table.add_row(
                f"{regime}, live", str(len(one["seeds"])), f"{100 * one['room']:.1f}",
                *(percent(rows[name]["room_recovered"]) if name in rows else "-" for name in CONTROLLERS),
            )  # fmt: skip
    console.print(table)


def percent(value: Mapping[str, float] | None) -> str:
    """An estimate and its interval; a dash for none."""
    if value is None:
        return "-"
    return f"{100 * value['value']:.0f} [{100 * value['low']:.0f}, {100 * value['high']:.0f}]"


def main(args: Args) -> int:
    """Simulate, print, write."""
    live, profile = Live.read(args.live), node_profile(args.profile)
    bench = SurrogateBench(live.config, live.dataset, Slice(Path(), 0.0, ""), profile)
    of_all, p99_ms = simulate(args, bench, profile.slower_host(live.slowness), live)
    found = {}
    for regime, of in p99_ms.items():
        rows = [row for row in live.rows if row["regime"] == regime]
        found[regime] = {
            "seeds": of_all,
            "p99_ms": {name: values.tolist() for name, values in of.items()},
            "simulated": of_surrogate(of),
            "live": of_live(rows, of_all, of),
        }
    print_tables(found, Console(width=160))
    if args.json is not None:
        same = {name: getattr(live, name) for name in ("dataset", "speed", "load", "slowness")}
        payload = {"device": profile.hardware, "profile": profile.name,
                   "preset": live.config.to_json(), **same, "regimes": found}  # fmt: skip
        write_result(args.json, command("eval.end_to_end_room"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.end_to_end_room", main, Args)
