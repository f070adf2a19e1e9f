"""Calibrate a live preset on this machine: `python -m train.calibrate --preset cpu-small --output FILE`.

Finds, for each hot share, the request rate at which the node, at the best of a few alphas, is busy for
the preset's utilisation, and the SLO; writes the preset with both and with this machine's speed. The
SLO is 1.2 times the P99 there, averaged over the hot shares: the surrogate's 30 ms over its 25 ms.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.live.serving import LiveBackend
from hlem_env.live_scenario import live_workload
from hlem_env.machine import machine
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats

SLO_OVER_P99 = 1.2


@dataclass
class Args:
    """Request rates, speed and SLO of a live preset."""

    output: Path
    """the calibrated preset, JSON"""
    preset: str = "cpu-small"
    """live preset to start from, or the path of one"""
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
    about: dict[str, Any] = machine()
    where = about.get("gpu") or f"{about['cpu']}, {about['cores']} cores"
    return replace(
        config,
        hot_share=args.hot_shares,
        requests_per_s=tuple(rates),
        probe_ms=round(probe_ms, 2),
        slo_ms=args.slo_ms or float(round(SLO_OVER_P99 * sum(p99_ms) / len(p99_ms))),
        measured_on=where,
    )


def main(args: Args) -> int:
    """Calibrate and write."""
    config = LiveConfig.load(args.preset)
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


if __name__ == "__main__":
    run_command("train.calibrate", main, Args)
