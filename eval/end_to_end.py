"""KV policy and allocation on a live node under load: `python -m eval.end_to_end --preset h100`.

Every run is a piece with a record of its own, in the order of their importance; `--seconds` is the time of
this run, and another one goes on where it ended. First come what the others need: the design point of each
KV policy (the best of a grid on Steady), and the load, the highest at which plain LRU with its design point
keeps the node busy for at most 0.85 of the time in each of `--regimes`. All have the same refill and
prefetch. With `--profile` the surrogate serves the same plan, in minutes: what is to be expected of the live
node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from eval.end_to_end_bench import Bench, LiveBench, SurrogateBench
from eval.end_to_end_plan import (
    GRID_CENTI,
    LRU,
    REGIMES,
    SCAN_RESISTANT,
    Regime,
    Run,
    everything,
    seeds_with_bursts,
    static,
)
from eval.end_to_end_report import disturbed_runs, print_tables, report
from eval.machine_speed import MOST_LOAD
from eval.pieces import Piece, Slice, time_left
from eval.records import SATURATION
from eval.sim_to_real import START_S
from hlem_env.command_line import run_command
from hlem_env.errors import ArgumentError, ArtefactError, require
from hlem_env.live.config import LiveConfig
from hlem_env.live.time_source import CLOCKS
from hlem_env.machine import command, write_result
from hlem_env.surrogate.hardware import NodeProfile
from hlem_env.workload.regimes import PRESETS, RegimeConfig
from serving_bridge.policy import FrozenPolicy

MOST_UTILISATION = 0.85
"""Of LRU with its design point, in every regime."""
MARGIN = 0.99
"""Of it, aimed at."""
NEAR = 0.02
"""The search ends so close below it."""
LOAD_TRIES = 5
SIMULATED_S = 0.3
"""For a run of the surrogate."""


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
    first_load: float = 1.0
    """times the preset's rates: the design points are of it, and the search for the load begins there"""
    load: float | None = None
    """times the preset's rates, instead of a search"""
    regimes: tuple[Regime, ...] = REGIMES
    """of the requests; the load is the highest that the plain system bears in these"""
    speed: float | None = None
    """of the machine over the preset's, by which the rates are scaled, too; by default by a probe, once for a
    folder, which hangs on how fast the host happens to be"""
    design: Path | None = None
    """report (`--json`) of the same node and dataset, such as the surrogate's: its design points are taken"""
    epoch_seconds: float | None = None
    """by default at most 1"""
    layers: int | None = None
    """instead of the preset's"""
    whole: bool = False
    """every policy with every allocation, after what is required"""
    by_repeat: bool = False
    """all runs of the same requests after one another, instead of the headline of all repeats first: where
    runs of this command fall on different machines, what is compared was measured on one"""
    policy: Path | None = None
    """folder of the frozen policy, instead of the shipped one"""
    profile: str = ""
    """calibrated hardware profile, or the path of one: the surrogate serves instead of the live node"""
    clock: str = "auto"
    """wall; cpu: CPU time of the node's thread, so that others' work does not count; auto: cpu on a CPU"""
    again: bool = False
    """measure anew, first, the runs in which the host had a slow spell: they count in no figure"""
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
        for name in ("first_load", "load", "speed"):
            value = getattr(self, name)
            require(
                value is None or 0 < value <= MOST_LOAD, name, value, f"above 0, up to {MOST_LOAD}"
            )
        distinct = 0 < len(self.regimes) == len(set(self.regimes))
        require(distinct, "regimes", self.regimes, f"some of {', '.join(REGIMES)}, each once")
        require(not (self.again and self.report), "again", "with --report", "one of the two")
        require(self.dataset in PRESETS, "dataset", self.dataset, ", ".join(PRESETS))
        require(self.clock in (*CLOCKS, "auto"), "clock", self.clock, "wall, cpu or auto")


def make_bench(args: Args, part: Slice) -> Bench:
    """The live node, or with a profile the surrogate."""
    preset = LiveConfig.load(args.preset)
    config = replace(
        preset, epoch_seconds=args.epoch_seconds or min(preset.epoch_seconds, 1.0),
        zipf=PRESETS[args.dataset].zipf, layers=args.layers or preset.layers,
    )  # fmt: skip
    if args.policy is not None:
        FrozenPolicy.load(args.policy)  # a missing one is refused before the first run
    if not args.profile:
        return LiveBench(config, args.dataset, part, args.clock, args.policy)
    profile = NodeProfile.load(args.profile)
    if not isinstance(profile, NodeProfile):
        raise ArgumentError("profile", args.profile, "one that train.calibrate has fitted")
    return SurrogateBench(config, args.dataset, part, profile, args.policy)


def piece_s(args: Args, bench: Bench, epochs: int) -> float:
    """Estimate for a run of so many epochs."""
    live_s = bench.config.epoch_seconds * (bench.config.warmup_epochs + epochs) + 2.0
    return SIMULATED_S if args.profile else live_s


def design_points(
    args: Args, bench: Bench, run_missing: bool
) -> tuple[dict[str, int], list[Piece]]:
    """Best alpha of the grid on Steady for each KV policy, hundredths; and pieces that are missing.

    It is the best by mean P99 over all repeats: of one run it may be that of the fastest host.
    """
    if args.design is not None:
        return given_design(args.design, bench.dataset, bench.config), []
    found: dict[str, int] = {}
    missing: list[Piece] = []
    for policy in (LRU, SCAN_RESISTANT):
        runs = {f"design-{policy}-{alpha:03d}-seed{seed}": Run("steady", policy, static(alpha), seed)
                for seed in seeds(args, bench) for alpha in GRID_CENTI}  # fmt: skip
        pieces = [Piece(name, piece_s(args, bench, args.short_epochs)) for name in runs]

        def execute(piece: Piece, runs: dict[str, Run] = runs) -> Mapping[str, Any]:
            return bench.run(runs[piece.name], args.short_epochs, args.first_load)

        left = [piece for piece in pieces if not bench.slice.has(piece.name)]
        missing += bench.slice.run(pieces, execute) if run_missing and not missing else left
        if not left or not missing:
            records = [bench.slice.read(name) for name in runs]
            for record in records:
                refuse_other_load("--first-load", args.first_load, record)
            p99 = np.array([record["p99_ms"] for record in records]).reshape(-1, len(GRID_CENTI))
            found[policy] = GRID_CENTI[int(p99.mean(axis=0).argmin())]
    return found, missing


def given_design(path: Path, dataset: str, config: LiveConfig) -> dict[str, int]:
    """The design points of a report, hundredths.

    Raises:
        ArtefactError: it is none.
        ArgumentError: it is of another node or dataset.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        design = {
            policy: round(100 * found["design_point_alpha"][policy])
            for policy in (LRU, SCAN_RESISTANT)
        }
        theirs = {"dataset": found["dataset"], **found["preset"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} is no report of eval.end_to_end: {error}") from error
    ours = json.loads(json.dumps({"dataset": dataset, **config.to_json()}))
    for name, value in ours.items():
        given = f"{path}, with {name}={theirs.get(name)}"
        require(theirs.get(name) == value, "--design", given, f"{name}={value}")
    return design


def refuse_other_load(option: str, load: float, record: Mapping[str, Any]) -> None:
    """Refuse a record of another load."""
    require(record["load"] == load, option, load, f"{record['load']}, as in --records")


def find_load(
    args: Args, bench: Bench, design: dict[str, int], run_missing: bool
) -> tuple[float, list[Piece]]:
    """Factor on the preset's rates; 0 and the pieces that are missing while it is not known.

    All regimes are run at the first load; it is corrected by the busiest of them, and once that one is told
    from the others it alone is run again. Kept is the highest guess that met the limit; when none did, the
    last correction.
    """
    guess, best, regimes = args.first_load, 0.0, list(args.regimes)
    epochs = args.short_epochs * 3 // 2
    for attempt in range(LOAD_TRIES):
        names = {f"load-{attempt}-{regime}": regime for regime in regimes}
        pieces = [Piece(name, piece_s(args, bench, epochs)) for name in names]

        def execute(
            piece: Piece, names: Mapping[str, str] = names, load: float = guess
        ) -> Mapping[str, Any]:
            run = Run(names[piece.name], LRU, static(design[LRU]), seeds(args, bench)[0])
            return bench.run(run, epochs, load)

        left = [piece for piece in pieces if not bench.slice.has(piece.name)]
        if left:
            left = bench.slice.run(pieces, execute) if run_missing else left
        if left:
            return 0.0, left
        records = {regime: bench.slice.read(name) for name, regime in names.items()}
        busiest = max(records, key=lambda regime: float(records[regime]["utilisation"]))
        busy = records[busiest]["utilisation"]
        if busy <= SATURATION:  # beyond it they are all as busy
            regimes = [busiest]
        if busy <= MOST_UTILISATION and not records[busiest]["saturated"]:
            best = max(best, guess)
        if best and MOST_UTILISATION - NEAR <= busy <= MOST_UTILISATION:
            break
        guess = round(guess * min(MARGIN * MOST_UTILISATION / busy, 1.4), 3)
    return best or guess, []


def seeds(args: Args, bench: Bench) -> list[int]:
    """One for each repeat."""
    config = RegimeConfig(episode_epochs=args.epochs, epoch_seconds=bench.config.epoch_seconds)
    return seeds_with_bursts(config, args.repeats)


def plan(args: Args, bench: Bench, design: dict[str, int]) -> list[Run]:
    """The runs in order."""
    return everything(seeds(args, bench), design, args.whole, args.by_repeat, args.regimes)


def refuse_others(bench: Bench, part: Slice) -> None:
    """Refuse a folder with records of another node, policy or dataset: they would be compared with these.

    Raises:
        ArgumentError: naming what differs.
    """
    ours = json.loads(json.dumps(bench.about()))
    for path in sorted(part.folder.glob("*.json")):
        record = part.read(path.stem)
        if "run" not in record:  # the machine's speed
            continue
        differ = {name: record.get(name) for name in ours if record.get(name) != ours[name]}
        node = differ.pop("preset", {})
        differ |= {
            f: node.get(f) for f in ours["preset"] if node and node.get(f) != ours["preset"][f]
        }
        for name, theirs in differ.items():
            value = ours.get(name, ours["preset"].get(name))
            require(
                theirs == value, "--records", f"{path}, with {name}={theirs}", f"{name}={value}"
            )


def forget_disturbed(part: Slice) -> None:
    """Delete the records of disturbed runs."""

    def disturbed() -> set[str]:
        names = [path.stem for path in part.folder.glob("*-seed*.json")]
        runs = sorted(name for name in names if not name.startswith("design-"))
        return disturbed_runs([part.read(name) for name in runs])

    for name in part.forget(disturbed):
        print(f"{name} was disturbed: it is measured again")


def measure(args: Args, bench: Bench, run_missing: bool) -> tuple[list[Run], list[Piece]]:
    """All runs, as far as they are known, and the pieces that are missing."""
    design, missing = design_points(args, bench, run_missing)
    load = 0.0
    if not missing:
        load, missing = (
            (args.load, []) if args.load else find_load(args, bench, design, run_missing)
        )
    if missing:  # the rest counts, too, with a guess at its size
        guess = {LRU: 50, SCAN_RESISTANT: 50}
        later = plan(args, bench, guess)
        return [], missing + [Piece(run.name, piece_s(args, bench, args.epochs)) for run in later]
    runs = plan(args, bench, design)
    by_name = {run.name: run for run in runs}
    for name in filter(bench.slice.has, by_name):
        refuse_other_load("--load", load, bench.slice.read(name))
    pieces = [Piece(name, piece_s(args, bench, args.epochs)) for name in by_name]
    left = [piece for piece in pieces if not bench.slice.has(piece.name)]
    if run_missing:
        left = bench.slice.run(
            pieces, lambda piece: bench.run(by_name[piece.name], args.epochs, load)
        )
    return runs, left


def main(args: Args) -> int:
    """Measure what is missing, as far as time allows; show what there is."""
    part = Slice(args.records, args.seconds, command("eval.end_to_end"), args.commit, args.share)
    bench = make_bench(args, part)
    refuse_others(bench, part)
    if args.speed is not None:
        bench.set_speed(args.speed)
    if args.again:
        forget_disturbed(part)
    try:
        runs, missing = measure(args, bench, run_missing=not args.report)
    finally:
        bench.close()
    print(time_left(missing, args.seconds, START_S))
    if not runs:
        return 0
    design, _ = design_points(args, bench, run_missing=False)
    found = report([part.read(run.name) for run in runs if part.has(run.name)], design)
    print_tables(found, Console(width=130))
    if args.json is not None:
        payload = {"pieces_missing": len(missing), "preset": bench.config.to_json(),
                   "clock": bench.clock, "dataset": args.dataset, **found}  # fmt: skip
        write_result(args.json, command("eval.end_to_end"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.end_to_end", main, Args, lambda args: f"what had ended is in {args.records}")
