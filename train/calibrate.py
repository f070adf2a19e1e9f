"""Calibrate a live preset on this machine.

    python -m train.calibrate --preset cpu-small

times batches of every kind on the live node at several model depths, fits the surrogate's hardware
profile to them, and writes `PROFILES/PRESET-live.json` with the machine's name, the commit and how well
the model fits. Every depth is a file of its own under `--records`, and one that is there is not measured
again: with `--seconds` a run stops before the depth that it has no time for, and the next one goes on.

    python -m train.calibrate --load --preset cpu-small --output FILE

finds instead, for each hot share, the request rate at which the node, at the best of a few alphas, is busy
for the preset's utilisation, and the SLO; writes the preset with both and with this machine's speed. The
SLO is 1.2 times the P99 there, averaged over the hot shares: the surrogate's 30 ms over its 25 ms.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError, require
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.live.serving import LiveBackend
from hlem_env.live.time_source import clock_name, make_clock
from hlem_env.live_scenario import live_workload
from hlem_env.machine import command, git_revision, json_text, machine, write_result
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats
from train.fit_profile import fit
from train.service_times import measure

SLO_OVER_P99 = 1.2


@dataclass
class Args:
    """The hardware profile, or request rates and SLO, of a live preset."""

    preset: str = "cpu-small"
    """live preset to start from, or the path of one"""
    records: Path = Path("runs/calibrate")
    """folder for what is measured"""
    profiles: Path = Path("hlem_env/surrogate/profiles")
    """folder for the hardware profile"""
    layers: tuple[int, ...] = ()
    """model depths to measure; by default half the preset's and the preset's"""
    repeats: int = 12
    """batches of each kind, length and alpha"""
    seconds: float = 480.0
    """for this run; depths that do not fit are left for the next"""
    rate_seconds: float = 4.0
    """for each of refill and the serving loop"""
    measure_only: bool = False
    """leave the fit for another run, which needs no device"""
    commit: str = ""
    """of the code, where it is no checkout"""
    load: bool = False
    """find request rates and SLO instead"""
    output: Path | None = None
    """with --load: the calibrated preset, JSON"""
    hot_shares: tuple[float, ...] = (0.05, 0.2, 0.6)
    """of Steady"""
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7)
    """of which the least busy counts"""
    rounds: int = 2
    """each sets the rate by what the last one measured"""
    epoch_seconds: float | None = None
    """instead of the preset's, while measuring"""
    slo_ms: float | None = None
    """written as it is, instead of one from the P99 measured"""
    settle_epochs: int = 6
    """after each move, not measured"""
    epochs: int = 12
    """measured at each alpha"""


@dataclass(frozen=True)
class Point:
    """The best alpha of one hot share at one rate."""

    alpha: float
    utilisation: float
    p99_ms: float


def best_point(backend: LiveBackend, args: Args, seconds: float) -> Point:
    """Where the node is least busy, over the alphas; caches are warm from one to the next."""
    points = []
    backend.reset(1)
    backend.run(round(100 * args.alphas[0]), backend.warmup_s)
    for alpha in args.alphas:
        centi = round(100 * alpha)
        backend.run(centi, args.settle_epochs * seconds)
        epochs: list[EpochStats] = [backend.run(centi, seconds) for _ in range(args.epochs)]
        busy = sum(epoch.utilisation for epoch in epochs) / len(epochs)
        points.append(Point(alpha, busy, sum(epoch.p99_ms for epoch in epochs) / len(epochs)))
    return min(points, key=lambda point: point.utilisation)


def calibrate(args: Args, config: LiveConfig) -> LiveConfig:
    """The preset with what this machine measured."""
    seconds = args.epoch_seconds or config.epoch_seconds
    node = LiveNode(replace(config, epoch_seconds=seconds))
    try:
        probe_ms = node.probe_ms()
        known = dict(zip(config.hot_share, config.requests_per_s, strict=True))
        rates: list[float] = []
        p99_ms: list[float] = []
        total = len(args.hot_shares) * args.rounds
        with tqdm(total=total, unit="round", disable=None) as bar:
            for hot_share in args.hot_shares:
                rate = rates[-1] if rates else known.get(hot_share, config.requests_per_s[0])
                for _ in range(args.rounds):
                    at = replace(config, hot_share=(hot_share,), requests_per_s=(rate,))
                    scenario = Scenario(steady_hot_share=hot_share, utilisation=config.utilisation)
                    workload = live_workload(scenario, at, node.entries_in_pool, speed=1.0)
                    point = best_point(LiveBackend(workload, node), args, node.config.epoch_seconds)
                    print(f"hot share {hot_share}: {rate:.1f} requests/s, {point}", file=sys.stderr)
                    rate *= config.utilisation / point.utilisation
                    bar.update()
                rates.append(round(rate, 1))
                p99_ms.append(point.p99_ms)
    finally:
        node.close()
    return replace(
        config,
        hot_share=args.hot_shares,
        requests_per_s=tuple(rates),
        probe_ms=round(probe_ms, 2),
        slo_ms=args.slo_ms or float(round(SLO_OVER_P99 * sum(p99_ms) / len(p99_ms))),
        measured_on=device_name(config),
    )


def main(args: Args) -> int:
    """Measure, fit and write."""
    config = LiveConfig.load(args.preset)
    if args.load:
        return _calibrate_load(args, config)
    for name in ("repeats", "seconds", "rate_seconds"):
        require(getattr(args, name) > 0, name, getattr(args, name), "above 0")
    depths = args.layers or tuple(sorted({max(config.layers // 2, 1), config.layers}))
    missing = measure_depths(args, config, depths)
    if missing or args.measure_only:
        print(f"depths left to measure: {missing or 'none'}")
        return 0
    write_profile(args, config, depths)
    return 0


def record_file(args: Args, config: LiveConfig, layers: int) -> Path:
    """Where the measurements of a depth are kept."""
    return args.records / f"{config.name}-{layers}-layers.json"


def measure_depths(args: Args, config: LiveConfig, depths: tuple[int, ...]) -> list[int]:
    """Measure what is not there yet, as far as time allows; the depths that are left."""
    missing = [layers for layers in depths if not record_file(args, config, layers).is_file()]
    start_s = time.perf_counter()
    tables, took_s = None, 0.0
    while missing:
        left_s = args.seconds - (time.perf_counter() - start_s)
        about = f", about {took_s * len(missing):.0f} s" if took_s else ""  # of the first not known
        print(f"{len(missing)} depths left{about}, {left_s:.0f} s of this run", flush=True)
        if took_s > left_s:
            break
        layers = missing.pop(0)
        began_s = time.perf_counter()
        seconds = min(config.epoch_seconds, 1.0)
        # Prefetch beside every batch: when it is worth its price is what the profile tells.
        at = replace(config, layers=layers, epoch_seconds=seconds, prefetch_beside=0)
        node = LiveNode(at, "lru", tables, make_clock(clock_name("auto", at.device), at.device))
        try:
            tables = node.tables
            measured = measure(node, args.repeats, args.rate_seconds)
        finally:
            node.close()
        took_s = time.perf_counter() - began_s
        payload = measured | {
            "samples": columns(measured["samples"]),
            "hardware": device_name(config),
            "commit": args.commit or git_revision(),
            "seconds": took_s,
        }
        write_result(record_file(args, config, layers), command("train.calibrate"), payload)
    return missing


def columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Samples as a list for each of their values: a third of the file."""
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def rows(of: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The samples of `columns`."""
    return [dict(zip(of, values, strict=True)) for values in zip(*of.values(), strict=True)]


def read_record(path: Path) -> dict[str, Any]:
    """What `measure_depths` wrote.

    Raises:
        ArtefactError: it is damaged, or something else.
    """
    try:
        depth: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return depth | {"samples": rows(depth["samples"])}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ArtefactError(f"{path} is no record of this command: {error!r}") from error


def write_profile(args: Args, config: LiveConfig, depths: tuple[int, ...]) -> None:
    """Fit what was measured, write the profile and print how well it fits."""
    files = [record_file(args, config, layers) for layers in depths]
    raw = [read_record(file) for file in files]
    profile = fit(raw, config, f"{Path(config.name).name}-live")
    about = {
        "commit": raw[0]["commit"],
        "measured_by": raw[0]["command"],
        "machine": raw[0]["machine"],
        "preset": config.name,
    }
    values = profile.to_json()
    values["fit"] = about | values["fit"]
    args.profiles.mkdir(parents=True, exist_ok=True)
    path = args.profiles / f"{profile.name}.json"
    path.write_text(json_text(values), "utf-8")
    quality = profile.fit
    print(f"{path}: residuals of {quality['cells']} cells, median"
          f" {100 * quality['median_relative_residual']:.1f} %, P90"
          f" {100 * quality['p90_relative_residual']:.1f} %, largest"
          f" {100 * quality['largest_relative_residual']:.1f} %")  # fmt: skip
    print(json.dumps(quality["by_kind"]))


def device_name(config: LiveConfig) -> str:
    """The GPU, or the CPU and its cores."""
    if config.device == "cuda":
        return str(torch.cuda.get_device_name())
    about = machine()
    return f"{about['cpu']}, {about['cores']} cores, emulated link"


def _calibrate_load(args: Args, config: LiveConfig) -> int:
    require(args.output is not None, "output", args.output, "a file, with --load")
    assert args.output is not None
    require(len(args.hot_shares) >= 1, "hot_shares", args.hot_shares, "at least one")
    require(len(args.alphas) >= 1, "alphas", args.alphas, "at least one")
    for name in ("epoch_seconds", "slo_ms"):
        value = getattr(args, name)
        require(value is None or value > 0, name, value, "above 0")
    for name in ("rounds", "settle_epochs", "epochs"):
        require(getattr(args, name) >= 1, name, getattr(args, name), "1 or more")
    preset = calibrate(args, config)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(asdict(preset), indent=2) + "\n")
    print(f"{args.output}: {preset.requests_per_s} requests/s, probe {preset.probe_ms} ms,"
          f" SLO {preset.slo_ms:g} ms")  # fmt: skip
    return 0


def _interrupted(args: Args) -> str:
    return "nothing was written" if args.load else f"what had ended is in {args.records}"


if __name__ == "__main__":
    run_command("train.calibrate", main, Args, _interrupted)
