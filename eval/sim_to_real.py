"""The same requests through a live node and the surrogate: `python -m eval.sim_to_real --preset h100`.

Pieces of alpha x regime x model depth, each from empty caches, a file each; `--seconds` is the time of
this run, and another one goes on where it ended. When all are there, or with `--report`, the surrogate
serves the same requests with the profile of `train.calibrate`, and the two are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from eval.host_slowness import ColdWork, host_slowness
from eval.machine_speed import MOST_LOAD, machine_speed
from eval.pieces import Piece, Slice, time_left
from eval.sim_to_real_report import compare, draw, print_tables
from hlem_env.backend import Backend
from hlem_env.command_line import run_command
from hlem_env.errors import ArgumentError, require
from hlem_env.live.config import LiveConfig
from hlem_env.live.host_tables import HostTables
from hlem_env.live.machine_state import MachineState, undisturbed
from hlem_env.live.node import LiveNode
from hlem_env.live.serving import LiveBackend
from hlem_env.live.time_source import CLOCKS, clock_name, make_clock
from hlem_env.live_scenario import live_workload, surrogate_twin
from hlem_env.machine import command, write_result
from hlem_env.scenario import Scenario
from hlem_env.surrogate.hardware import HardwareProfile, NodeProfile
from hlem_env.telemetry import EpochStats

Floats = NDArray[np.float64]

MATCHING_ROUNDS = 2
LEAST_UNDISTURBED = 0.5
"""A run with less than this share of undisturbed epochs is disturbed, and counts in no figure."""
NO_RULES = {"only_graphs": False, "prefetch_beside": 0}
"""For batches, of a preset; records that are older than these had none."""
START_S = 75.0
"""That a node needs before its first piece."""


@dataclass
class Args:
    """P99, hit rates and best alpha of a live node beside the surrogate's."""

    preset: str = "cpu-small"
    """live preset, or the path of one"""
    records: Path = Path("runs/sim-to-real")
    """folder of the pieces"""
    seconds: float = 480.0
    """of this run"""
    layers: tuple[int, ...] = ()
    """model depths; by default the preset's, then half of it"""
    regimes: tuple[str, ...] = ("steady", "trend", "burst")
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """embedding shares, multiples of 0.01"""
    kv_policy: str = "scan_resistant"
    """or lru"""
    repeats: int = 1
    """seeds; two tell the live node's own noise"""
    load: float = 0.85
    """factor on the preset's request rate"""
    speed: tuple[float, ...] = ()
    """of the machine over the preset's, for each depth, by which the rates are scaled, too; by default by a
    probe, once for a folder, which hangs on how fast the host happens to be"""
    epoch_seconds: float | None = None
    """by default at most 1"""
    settle_epochs: int = 2
    """after the warm-up, not measured"""
    epochs: int = 20
    """measured"""
    clock: str = "auto"
    """wall; cpu: CPU time of the node's thread, so that others' work does not count; auto: cpu on a CPU"""
    profile: str = ""
    """hardware profile, or the path of one; by default PRESET-live"""
    machine_speed: bool = False
    """scale what is the host's of the profile (on a CPU all but the link) by how fast the host was over the
    calibration: in each epoch by what it took to give the device a batch; where that is not known, in each
    piece by a fixed piece of work, timed between epochs"""
    draws: int = 8
    """runs of the surrogate for each piece, of which the mean counts; they differ in the profile's jitter"""
    match_service: bool = False
    """scale it so that mean service times agree: what then differs is batching and queueing, not speed"""
    again: bool = False
    """measure anew, first, where the host was slow in most epochs: such runs count in no figure"""
    report: bool = False
    """compare what there is, measure nothing"""
    share: tuple[int, int] = (1, 1)
    """K N: one of N processes with the same records, a device each: every Nth piece from the Kth on"""
    commit: str = ""
    """of the code, where it is no checkout"""
    json: Path | None = None
    """file for the comparison"""
    plot: Path | None = None
    """PNG file"""

    def __post_init__(self) -> None:
        for name in ("seconds", "repeats", "load", "epochs", "draws"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        require(self.settle_epochs >= 0, "settle_epochs", self.settle_epochs, "0 or more")
        for speed in self.speed:
            require(0 < speed <= MOST_LOAD, "speed", speed, f"above 0, up to {MOST_LOAD:g}")
        for alpha in self.alphas:
            require(0 <= alpha <= 1, "alphas", alpha, "0 to 1")
        require(not (self.again and self.report), "again", "with --report", "one of the two")
        require(self.clock in (*CLOCKS, "auto"), "clock", self.clock, "wall, cpu or auto")


@dataclass(frozen=True)
class Run:
    """One piece: an alpha held from empty caches on."""

    layers: int
    regime: str
    alpha_centi: int
    seed: int

    @property
    def name(self) -> str:
        """Of its record."""
        return f"{self.layers}-layers-{self.regime}-{self.alpha_centi:03d}-seed{self.seed}"


class Setting:
    """What all runs share.

    Args:
        args: of the command.
    """

    def __init__(self, args: Args) -> None:
        preset = LiveConfig.load(args.preset)
        seconds = args.epoch_seconds or min(preset.epoch_seconds, 1.0)
        self.args, self.config = args, replace(preset, epoch_seconds=seconds)
        depths = args.layers or tuple(dict.fromkeys((preset.layers, max(preset.layers // 2, 1))))
        known = f"one for each of {', '.join(map(str, depths))} layers"
        require(len(args.speed) in (0, len(depths)), "--speed", args.speed, known)
        self.speeds = dict(zip(depths, args.speed, strict=False))
        """Given, by depth."""
        self.runs = [
            Run(layers, regime, round(100 * alpha), seed)
            for seed in range(1, args.repeats + 1)
            for layers in depths
            for regime in args.regimes
            for alpha in args.alphas
        ]
        self.piece_s = seconds * (preset.warmup_epochs + args.settle_epochs + args.epochs) + 1.0
        self.clock = clock_name(args.clock, preset.device)
        """By name."""

    @property
    def unmeasured_epochs(self) -> int:
        """Of each run, before the others."""
        return max(self.config.warmup_epochs + self.args.settle_epochs, 1)

    def at(self, run: Run) -> LiveConfig:
        """The node of a run."""
        return replace(self.config, layers=run.layers)

    def scenario(self, run: Run) -> Scenario:
        """The requests of a run."""
        args = self.args
        return Scenario(
            regime=run.regime,
            kv_policy=args.kv_policy,
            utilisation=self.config.utilisation * args.load,
            episode_epochs=args.settle_epochs + args.epochs,
        )

    def check(self, record: Mapping[str, Any]) -> None:
        """Refuse a record of a run with other epochs: the surrogate would serve other requests."""
        measured = len(record["live"]["epoch_p99_ms"])
        settled = record["scenario"]["episode_epochs"] - measured
        for name, value, known in (
            ("--epochs", self.args.epochs, measured),
            ("--settle-epochs", self.args.settle_epochs, settled),
            ("--epoch-seconds", self.config.epoch_seconds, record["preset"]["epoch_seconds"]),
        ):
            require(value == known, name, value, f"{known}, as in the records")

    def simulate(
        self, record: Mapping[str, Any], profile: NodeProfile, slowness: Floats | None = None
    ) -> dict[str, Any]:
        """What the surrogate measures in the run of a record, with its load and its rule for batches.

        Args:
            record: of the live node.
            profile: the machine.
            slowness: [epochs, those before the measured ones too] times as long as in the profile that
                what is the host's takes; on a CPU everything but the link.
        """
        scaled = NodeProfile.slower if self.config.device == "cpu" else NodeProfile.slower_host

        def set_speed(epoch: int) -> None:
            if slowness is not None:
                twin.set_speed(scaled(profile, float(slowness[epoch])))

        run = Run(**record["run"])
        scenario = replace(self.scenario(run), utilisation=record["scenario"]["utilisation"])
        node = replace(self.at(run), **rules_of(record))
        twin = surrogate_twin(scenario, node, profile, record["speed"])
        drawn = []
        for twin.draw in range(self.args.draws):
            drawn.append(self.serve(twin, run, before=set_speed))
        return mean_of(drawn)

    def serve(
        self,
        backend: Backend,
        run: Run,
        before: Callable[[int], None] = lambda epoch: None,
        after: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """What a backend measures in a run.

        Args:
            backend: live or simulated.
            run: of which seed, at which alpha.
            before: called before each epoch, of the warm-up, too, with its number.
            after: called after each.
        """
        seconds = self.config.epoch_seconds
        unmeasured = self.unmeasured_epochs
        backend.reset(run.seed)
        epochs = []
        for epoch in range(unmeasured + self.args.epochs):
            before(epoch)
            epochs.append(backend.run(run.alpha_centi, seconds))
            after()
        return summary(epochs[unmeasured:], epochs[unmeasured - 1])


def rules_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The rules for batches of a run, whatever the preset says by now."""
    return {name: record["preset"].get(name, none) for name, none in NO_RULES.items()}


def mean_of(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure of `summary`, lists place by place; saturated if most are."""

    def mean(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {key: mean([value[key] for value in values]) for key in values[0]}
        return np.mean(values, axis=0).tolist()

    means = {name: mean([one[name] for one in figures]) for name in figures[0]}
    return means | {"saturated": means["saturated"] > 0.5}


def summary(epochs: list[EpochStats], before: EpochStats) -> dict[str, Any]:
    """Figures of the epochs measured.

    Args:
        epochs: in order.
        before: the one before them.
    """
    whole = epochs[0]
    for epoch in epochs[1:]:
        whole = whole.merge(epoch)
    grew = whole.backlog > before.backlog + 0.1 * whole.requests
    return {
        "p99_ms": float(np.mean([epoch.p99_ms for epoch in epochs])),
        "p99_all_ms": whole.p99_ms,
        "latency_ms": {
            str(q): float(np.percentile(whole.latency_ms, q)) if whole.requests else 0.0
            for q in (10, 50, 90, 95, 99)
        },
        "mean_service_ms": whole.mean_service_ms,
        "kv_hit": whole.kv_hit,
        "emb_hit": whole.emb_hit,
        "hot_share": whole.hot_share,
        "working_set": float(np.mean([epoch.working_set for epoch in epochs])),
        "utilisation": whole.utilisation,
        "requests": whole.requests,
        "computed_tokens": whole.computed_tokens,
        "refill_bytes": whole.refill_bytes,
        "prefetch_bytes": whole.prefetch_bytes,
        "evictions": whole.evictions,
        "backlog": whole.backlog,
        "saturated": bool(whole.utilisation > 0.95 or grew),
        "epoch_p99_ms": [epoch.p99_ms for epoch in epochs],
        "epoch_utilisation": [epoch.utilisation for epoch in epochs],
        "epoch_service_ms": [epoch.mean_service_ms for epoch in epochs],
    }


class Live:
    """The live node of one depth at a time; host tables are made once.

    Args:
        setting: of the command.
        part: where speeds are kept, so that all runs of a depth get the same requests.
    """

    def __init__(self, setting: Setting, part: Slice) -> None:
        self._setting, self._slice = setting, part
        self._node: LiveNode | None = None
        self._tables: HostTables | None = None

    def __call__(self, piece: Piece) -> Mapping[str, Any]:
        """The record of a piece."""
        setting = self._setting
        run = next(run for run in setting.runs if run.name == piece.name)
        node = self._at(run)
        speed, probe_ms = self.speed(run), node.probe_ms()
        workload = live_workload(setting.scenario(run), node.config, node.entries_in_pool, speed)
        state, samples = MachineState(node), list[dict[str, Any]]()
        measured = setting.serve(
            LiveBackend(workload, node), run, after=lambda: samples.append(state.sample())
        )
        about = {
            "preset": node.config.to_json(),
            "clock": setting.clock,
            "speed": speed,
            "probe_ms": probe_ms,
            "scenario": setting.scenario(run).to_json(),
        }
        return {"run": asdict(run), **about, "live": measured, "machine_state": samples}

    def speed(self, run: Run) -> float:
        """Load of a depth over the preset's, given or from the probe."""
        return machine_speed(
            self._slice, f"speed-{run.layers}-layers", self._setting.speeds.get(run.layers),
            self._setting.config.probe_ms, lambda: self._at(run).probe_ms(),
        )  # fmt: skip

    def close(self) -> None:
        """Give the node's memory back."""
        if self._node is not None:
            self._node.close()

    def _at(self, run: Run) -> LiveNode:
        if self._node is None or self._node.config.layers != run.layers:
            self.close()
            clock = make_clock(self._setting.clock, self._setting.config.device)
            self._node = LiveNode(
                self._setting.at(run), self._setting.args.kv_policy, self._tables, clock
            )
            self._tables = self._node.tables
        return self._node


def simulate(setting: Setting, part: Slice, profile: NodeProfile) -> list[dict[str, Any]]:
    """Every run that has a record, with the surrogate's figures beside the live node's."""
    found = []
    for record, kept in counted(setting, part):
        disturbed = is_disturbed(kept)
        kept |= disturbed  # for want of others
        now, slowness = profile, None
        if setting.args.machine_speed:
            epochs = setting.unmeasured_epochs + kept.size
            config = setting.at(Run(**record["run"]))
            slowness = host_slowness(
                record.get("machine_state", ()), kept, profile, config.layers,
                ColdWork.of(config, record["live"]), epochs,
            )  # fmt: skip
        live = without(kept, record["live"])
        sim = without(kept, setting.simulate(record, now, slowness))
        for _ in range(MATCHING_ROUNDS if setting.args.match_service else 0):
            now = now.slower(live["mean_service_ms"] / sim["mean_service_ms"])
            sim = without(kept, setting.simulate(record, now, slowness))
        about = {"epochs_left_out": int((~kept).sum()), "disturbed": disturbed}
        found.append({"run": record["run"], **about, "live": live, "sim": sim})
    return found


def counted(setting: Setting, part: Slice) -> list[tuple[dict[str, Any], NDArray[np.bool_]]]:
    """Every record, and which of its measured epochs count, bool [n]: those in which the host was not slow.

    All where that is not known, or where it does not matter, on the clock of the node's CPU time.
    """
    records = [part.read(run.name) for run in setting.runs if part.has(run.name)]
    for record in records:
        setting.check(record)
    states = [record.get("machine_state", ()) for record in records]
    fastest_ms = min((state["python_ms"] for run in states for state in run), default=None)
    found = []
    for record, run in zip(records, states, strict=True):
        epochs = len(record["live"]["epoch_p99_ms"])
        if record["clock"] == "cpu" or not run:
            kept = np.ones(epochs, np.bool_)
        else:
            kept = undisturbed([run], fastest_ms)[-epochs:]
        found.append((record, kept))
    return found


def is_disturbed(kept: NDArray[np.bool_]) -> bool:
    """Whether too few of a run's epochs count."""
    return bool(kept.mean() < LEAST_UNDISTURBED)


def forget_disturbed(setting: Setting, part: Slice) -> None:
    """Delete the records of disturbed runs."""

    def disturbed() -> list[str]:
        found = counted(setting, part)
        return [Run(**record["run"]).name for record, kept in found if is_disturbed(kept)]

    for name in part.forget(disturbed):
        print(f"{name} was disturbed: it is measured again")


def measured_on(setting: Setting, part: Slice, profile: NodeProfile) -> str:
    """Where the live node ran; this may be another machine."""
    if setting.config.device == "cuda":
        return profile.hardware
    cpus = {part.read(run.name)["machine"]["cpu"] for run in setting.runs if part.has(run.name)}
    return ", ".join(sorted(cpus)) + ", emulated link"


def without(kept: NDArray[np.bool_], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with P99, service time and utilisation of the epochs that are kept, bool [n]."""
    if kept.all():
        return dict(figures)
    times = {
        name: float(np.array(figures[of])[kept].mean())
        for name, of in (
            ("p99_ms", "epoch_p99_ms"), ("mean_service_ms", "epoch_service_ms"),
            ("utilisation", "epoch_utilisation"),
        )
    }  # fmt: skip
    return {**figures, **times}


def main(args: Args) -> int:
    """Measure what is missing; compare when all is there."""
    setting = Setting(args)
    part = Slice(args.records, args.seconds, command("eval.sim_to_real"), args.commit, args.share)
    pieces = [Piece(run.name, setting.piece_s) for run in setting.runs]
    if args.again:
        forget_disturbed(setting, part)
    missing = [piece for piece in pieces if not part.has(piece.name)]
    if missing and not args.report:
        live = Live(setting, part)
        try:
            missing = part.run(pieces, live)
        finally:
            live.close()
    print(time_left(missing, args.seconds, START_S))
    if missing and not args.report:
        return 0
    there = f"a folder with some of {pieces[0].name} to {pieces[-1].name}"
    require(len(missing) < len(pieces), "records", str(args.records), there)
    try:
        profile = HardwareProfile.load(args.profile or f"{setting.config.name}-live")
    except ArgumentError:
        if args.report:
            raise
        print("no profile to compare with yet: run train.calibrate, then this with --report")
        return 0
    require(isinstance(profile, NodeProfile), "profile", profile.name, "one of train.calibrate")
    assert isinstance(profile, NodeProfile)
    compared = compare(simulate(setting, part, profile))
    print_tables(compared, Console(width=140))
    if args.plot is not None:
        draw(compared, args.plot)
    if args.json is not None:
        payload = {
            "device": measured_on(setting, part, profile),
            "preset": setting.config.to_json(),
            "clock": setting.clock,
            "profile": profile.to_json(),
            **compared,
        }
        write_result(args.json, command("eval.sim_to_real"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.sim_to_real", main, Args, lambda args: f"what had ended is in {args.records}")
