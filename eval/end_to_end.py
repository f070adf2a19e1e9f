"""KV policy and allocation on a live node under load: `python -m eval.end_to_end --preset h100`.

Every run is a piece with a record of its own, in the order of their importance; `--seconds` is the time of
this run, and another one goes on where it ended. First come what the others need: the design point of each
KV policy (the best of a grid on Steady), and the load, the highest at which plain LRU with its design point
keeps the node busy for at most 0.85 of the time in every regime. All have the same refill and prefetch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from eval.end_to_end_plan import (
    GRID_CENTI,
    LRU,
    SCAN_RESISTANT,
    Run,
    everything,
    make,
    seeds_with_bursts,
    static,
)
from eval.end_to_end_report import print_tables, report
from eval.pieces import Piece, Slice, time_left
from eval.records import SATURATION
from eval.sim_to_real import START_S
from hlem_env.backend import Runner, run_controller
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.live.machine_state import MachineState
from hlem_env.live.node import LiveNode
from hlem_env.live.serving import LiveBackend
from hlem_env.live.time_source import CLOCKS, clock_name, make_clock
from hlem_env.live_scenario import live_workload
from hlem_env.machine import command, write_result
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats
from hlem_env.workload.regimes import PRESETS, RegimeConfig, SyntheticWorkload

MOST_UTILISATION = 0.85
"""Of LRU with its design point, in every regime."""
MARGIN = 0.98
LOAD_TRIES = 4


@dataclass
class Args:
    """P99 by KV policy and allocation, from end to end."""

    preset: str = "cpu-small"
    """live preset, or the path of one"""
    dataset: str = "books"
    """workload preset"""
    records: Path = Path("runs/end-to-end")
    """folder of the pieces"""
    seconds: float = 480.0
    """of this run"""
    repeats: int = 3
    """seeds, the same for all that is compared"""
    epochs: int = 60
    """of a run"""
    short_epochs: int = 20
    """of a run that finds the design point; half as many again for the load"""
    epoch_seconds: float | None = None
    """by default at most 1"""
    layers: int | None = None
    """instead of the preset's"""
    whole: bool = False
    """every policy with every allocation, after what is required"""
    clock: str = "auto"
    """wall; cpu: CPU time of the node's thread, so that others' work does not count; auto: cpu on a CPU"""
    report: bool = False
    """show what there is, measure nothing"""
    share: tuple[int, int] = (1, 1)
    """K N: one of N processes with the same records, a device each: every Nth piece from the Kth on"""
    commit: str = ""
    """of the code, where it is no checkout"""
    json: Path | None = None
    """file for the report"""

    def __post_init__(self) -> None:
        for name in ("seconds", "repeats", "epochs", "short_epochs"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        require(self.dataset in PRESETS, "dataset", self.dataset, ", ".join(PRESETS))
        require(self.clock in (*CLOCKS, "auto"), "clock", self.clock, "wall, cpu or auto")


class Bench:
    """The live node, made when it is first needed, and runs on it.

    Args:
        args: of the command.
        part: where speed, design points and load are kept.
    """

    def __init__(self, args: Args, part: Slice) -> None:
        preset = LiveConfig.load(args.preset)
        seconds = args.epoch_seconds or min(preset.epoch_seconds, 1.0)
        self.args, self.slice = args, part
        self.config = replace(
            preset, epoch_seconds=seconds, zipf=PRESETS[args.dataset].zipf,
            layers=args.layers or preset.layers,
        )  # fmt: skip
        self.clock = clock_name(args.clock, preset.device)
        self._node: LiveNode | None = None
        self._speed: float | None = None

    @property
    def mdp(self) -> MdpConfig:
        """State and reward on this node; alpha may be anything, since one allocation holds 0."""
        return MdpConfig(
            slo_ms=self.config.slo_ms,
            max_history_tokens=self.config.max_history_tokens,
            epoch_seconds=self.config.epoch_seconds,
            features="working_set",
        )

    def piece_s(self, epochs: int) -> float:
        """Estimate for a run of so many epochs."""
        return self.config.epoch_seconds * (self.config.warmup_epochs + epochs) + 2.0

    def run(self, run: Run, epochs: int, load: float) -> dict[str, Any]:
        """One episode of a controller at so many times the preset's load."""
        node = self._at(run.kv_policy)
        scenario = self.scenario(run, epochs, load)
        workload = live_workload(scenario, node.config, node.entries_in_pool, self.speed())
        assert isinstance(workload, SyntheticWorkload)
        config = self.mdp
        if run.allocation.startswith("static-"):
            config = replace(config, alpha_min_centi=0, alpha_max_centi=100)
        runner = Runner(LiveBackend(workload, node), config)
        controller = make(run.allocation, self.mdp)
        stats: list[EpochStats] = []
        alphas: list[list[int]] = []
        state, machine_state = MachineState(node), list[dict[str, Any]]()
        for epoch, _ in run_controller(runner, controller, epochs, run.seed):
            stats.append(epoch)
            alphas.append(runner.tick_alphas_centi)
            machine_state.append(state.sample())
        return {
            "run": asdict(run),
            "load": load,
            "speed": self.speed(),
            "clock": self.clock,
            "preset": node.config.to_json(),
            "dataset": self.args.dataset,
            "workload_digest": workload.digest(),
            **figures(stats, alphas, self.config.slo_ms),
            "machine_state": machine_state,
        }

    def scenario(self, run: Run, epochs: int, load: float) -> Scenario:
        """The requests of a run."""
        return Scenario(
            preset=self.args.dataset,
            regime=run.regime,
            kv_policy=run.kv_policy,
            utilisation=self.config.utilisation * load,
            episode_epochs=epochs,
        )

    def speed(self) -> float:
        """Of the machine of the first slice over the preset's: all slices get the same requests."""
        if self._speed is None:

            def measure() -> Mapping[str, Any]:
                probe_ms = self._at(SCAN_RESISTANT).probe_ms()
                return {"probe_ms": probe_ms, "speed": self.config.probe_ms / probe_ms}

            self._speed = float(self.slice.once("speed", measure)["speed"])
        return self._speed

    def close(self) -> None:
        """Give the node's memory back."""
        if self._node is not None:
            self._node.close()

    def _at(self, kv_policy: str) -> LiveNode:
        if self._node is None:
            clock = make_clock(self.clock, self.config.device)
            self._node = LiveNode(self.config, kv_policy, time_source=clock)
        self._node.kv_policy = kv_policy
        return self._node


def figures(stats: list[EpochStats], alphas: list[list[int]], slo_ms: float) -> dict[str, Any]:
    """What a run measured, epoch by epoch and as a whole."""
    whole = stats[0]
    for epoch in stats[1:]:
        whole = whole.merge(epoch)
    steps = np.diff([alpha for ticks in alphas for alpha in ticks])
    per_epoch = max(whole.requests / len(stats), 1.0)
    return {
        "p99_ms": float(np.mean([epoch.p99_ms for epoch in stats])),
        "p99_all_ms": whole.p99_ms,
        "p50_all_ms": float(np.median(whole.latency_ms)) if whole.requests else 0.0,
        "qos": whole.qos(slo_ms),
        "kv_hit": whole.kv_hit,
        "emb_hit": whole.emb_hit,
        "mean_service_ms": whole.mean_service_ms,
        "utilisation": whole.utilisation,
        "requests": whole.requests,
        "movement": float(np.abs(steps).sum()) / 100,
        "refill_bytes": whole.refill_bytes,
        "prefetch_bytes": whole.prefetch_bytes,
        "backlog": whole.backlog,
        "saturated": bool(whole.utilisation > SATURATION or whole.backlog > per_epoch),
        "epochs": {
            "p99_ms": [round(epoch.p99_ms, 3) for epoch in stats],
            "qos": [round(epoch.qos(slo_ms), 5) for epoch in stats],
            "alpha": [round(epoch.alpha_target, 2) for epoch in stats],
            "hot_share": [round(epoch.hot_share, 4) for epoch in stats],
            "working_set": [round(epoch.working_set, 4) for epoch in stats],
            "kv_hit": [round(epoch.kv_hit, 4) for epoch in stats],
            "emb_hit": [round(epoch.emb_hit, 4) for epoch in stats],
            "utilisation": [round(epoch.utilisation, 4) for epoch in stats],
            "requests": [epoch.requests for epoch in stats],
        },
    }


def design_points(bench: Bench, run_missing: bool) -> tuple[dict[str, int], list[Piece]]:
    """Best alpha of the grid on Steady for each KV policy, hundredths; and pieces that are missing."""
    args, found = bench.args, dict[str, int]()
    missing: list[Piece] = []
    for policy in (LRU, SCAN_RESISTANT):
        runs = {f"design-{policy}-{alpha:03d}": Run("steady", policy, static(alpha), 1)
                for alpha in GRID_CENTI}  # fmt: skip
        pieces = [Piece(name, bench.piece_s(args.short_epochs)) for name in runs]

        def execute(piece: Piece, runs: dict[str, Run] = runs) -> Mapping[str, Any]:
            return bench.run(runs[piece.name], args.short_epochs, 1.0)

        left = [piece for piece in pieces if not bench.slice.has(piece.name)]
        missing += bench.slice.run(pieces, execute) if run_missing and not missing else left
        if not left or not missing:
            p99 = [bench.slice.read(name)["p99_ms"] for name in runs]
            found[policy] = GRID_CENTI[int(np.argmin(p99))]
    return found, missing


def find_load(bench: Bench, design: dict[str, int], run_missing: bool) -> tuple[float, list[Piece]]:
    """Factor on the preset's rates; 0 and the pieces that are missing while it is not known.

    The regimes are run at a guess, and the guess corrected by the busiest of them. Kept is the highest
    guess that met the limit; when none did, the last correction.
    """
    args, guess, best = bench.args, 1.0, 0.0
    epochs = args.short_epochs * 3 // 2
    for attempt in range(LOAD_TRIES):
        names = {f"load-{attempt}-{regime}": regime for regime in ("trend", "burst", "steady")}
        pieces = [Piece(name, bench.piece_s(epochs)) for name in names]

        def execute(
            piece: Piece, names: dict[str, str] = names, load: float = guess
        ) -> Mapping[str, Any]:
            run = Run(names[piece.name], LRU, static(design[LRU]), bench_seed(bench))
            return bench.run(run, epochs, load)

        left = [piece for piece in pieces if not bench.slice.has(piece.name)]
        if left:
            left = bench.slice.run(pieces, execute) if run_missing else left
        if left:
            return 0.0, left
        records = [bench.slice.read(name) for name in names]
        busy = max(record["utilisation"] for record in records)
        if busy <= MOST_UTILISATION and not any(record["saturated"] for record in records):
            best = max(best, guess)
        if best and MOST_UTILISATION - 0.04 <= busy <= MOST_UTILISATION:
            break
        guess = round(guess * min(MARGIN * MOST_UTILISATION / busy, 1.4), 3)
    return best or guess, []


def bench_seed(bench: Bench) -> int:
    """The first repeat's."""
    return seeds(bench)[0]


def seeds(bench: Bench) -> list[int]:
    """One for each repeat."""
    config = RegimeConfig(
        episode_epochs=bench.args.epochs, epoch_seconds=bench.config.epoch_seconds
    )
    return seeds_with_bursts(config, bench.args.repeats)


def measure(bench: Bench, run_missing: bool) -> tuple[list[Run], list[Piece]]:
    """All runs, as far as they are known, and the pieces that are missing."""
    args = bench.args
    design, missing = design_points(bench, run_missing)
    load = 0.0
    if not missing:
        load, missing = find_load(bench, design, run_missing)
    if missing:  # the rest counts, too, with a guess at its size
        guess = {LRU: 50, SCAN_RESISTANT: 50}
        later = everything(seeds(bench), guess, args.whole)
        return [], missing + [Piece(run.name, bench.piece_s(args.epochs)) for run in later]
    runs = everything(seeds(bench), design, args.whole)
    by_name = {run.name: run for run in runs}
    pieces = [Piece(name, bench.piece_s(args.epochs)) for name in by_name]
    left = [piece for piece in pieces if not bench.slice.has(piece.name)]
    if run_missing:
        left = bench.slice.run(
            pieces, lambda piece: bench.run(by_name[piece.name], args.epochs, load)
        )
    return runs, left


def main(args: Args) -> int:
    """Measure what is missing, as far as time allows; show what there is."""
    part = Slice(args.records, args.seconds, command("eval.end_to_end"), args.commit, args.share)
    bench = Bench(args, part)
    try:
        runs, missing = measure(bench, run_missing=not args.report)
    finally:
        bench.close()
    print(time_left(missing, args.seconds, START_S))
    if not runs:
        return 0
    design, _ = design_points(bench, run_missing=False)
    found = report([part.read(run.name) for run in runs if part.has(run.name)], design)
    print_tables(found, Console(width=130))
    if args.json is not None:
        payload = {"pieces_missing": len(missing), "preset": bench.config.to_json(),
                   "clock": bench.clock, "dataset": args.dataset, **found}  # fmt: skip
        write_result(args.json, command("eval.end_to_end"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.end_to_end", main, Args, lambda args: f"what had ended is in {args.records}")
