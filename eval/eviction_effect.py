"""How the KV cache's eviction policy moves the best alpha and its P99, on the surrogate.

    python -m eval.eviction_effect --json docs/results/eviction_effect.json

Each cell is a Steady regime at one hot share. All policies and alphas serve the same requests, at the
rate that keeps the node busy for `utilisation` of the time at its best alpha under the scan-resistant
policy. P99 is the mean over repeats and epochs of the epochs' P99. For a live node:
`python -m eval.live_sweep --kv-policy laru`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from hlem_env.scenario import Scenario
from hlem_env.surrogate.optimum import hold_all, record_episode


@dataclass
class Args:
    """Best alpha and P99 by KV policy and hot share."""

    json: Path | None = None
    """file for the figures"""
    hot_shares: tuple[float, ...] = (0.1, 0.32, 0.6)
    """of Steady"""
    policies: tuple[str, ...] = ("lru", "scan_resistant", "laru")
    """of the KV cache"""
    alphas: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    """embedding shares, multiples of 0.01"""
    utilisation: float = 0.6
    """at the best alpha under the scan-resistant policy"""
    epochs: int = 48
    """measured after the warm-up"""
    warmup_epochs: int = 36
    """before; learned policies learn in it"""
    repeats: int = 2
    """drawings of the requests"""
    jobs: int = 2
    """threads"""

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", self.epochs, "1 or more")
        require(self.repeats >= 1, "repeats", self.repeats, "1 or more")
        for alpha in self.alphas:
            require(0 <= alpha <= 1, "alphas", alpha, "0 to 1")


@dataclass(frozen=True)
class Row:
    """A policy at a hot share."""

    hot_share: float
    kv_policy: str
    requests_per_s: float
    best_alpha: float
    best_p99_ms: float
    kv_hit: float
    """Share of history tokens reused at the best alpha, in the first repeat."""
    p99_ms: tuple[float, ...]
    """By alpha, as in the arguments."""


def measure(share: float, policy: str, args: Args) -> Row:
    """One row."""
    scenario = Scenario(
        steady_hot_share=share,
        kv_policy=policy,
        utilisation=args.utilisation,
        warmup_epochs=args.warmup_epochs,
    )
    centi = [round(100 * alpha) for alpha in args.alphas]
    backend = scenario.build()
    total, requests = np.zeros(len(centi)), 0
    for repeat in range(args.repeats):
        backend.reset(repeat)
        episode = record_episode(backend, args.epochs)
        requests += len(episode.whole)
        total += hold_all(backend, episode, centi, args.jobs).mean(axis=1)
    p99_ms = total / args.repeats
    best = int(p99_ms.argmin())
    backend.reset(0)
    backend.run(centi[best], backend.warmup_s)
    whole = backend.run(centi[best], args.epochs * scenario.epoch_seconds)
    seconds = args.repeats * args.epochs * scenario.epoch_seconds
    return Row(
        share, policy, requests / seconds, args.alphas[best], float(p99_ms[best]), whole.kv_hit,
        tuple(round(float(value), 3) for value in p99_ms),
    )  # fmt: skip


def main(args: Args) -> int:
    """Measure, print, write."""
    cells = [(share, policy) for share in args.hot_shares for policy in args.policies]
    rows = [measure(share, policy, args) for share, policy in tqdm(cells, disable=None)]
    table = Table(title="default/steady on the surrogate: P99, ms", title_justify="left")
    for heading in ("hot share", "KV policy", "best alpha", "P99 there", "KV hit"):
        table.add_column(heading, justify="right")
    for alpha in args.alphas:
        table.add_column(f"{alpha:g}", justify="right")
    for row in rows:
        table.add_row(
            f"{row.hot_share:.2f}", row.kv_policy, f"{row.best_alpha:.2f}",
            f"{row.best_p99_ms:.1f}", f"{row.kv_hit:.3f}", *(f"{value:.0f}" for value in row.p99_ms),
        )  # fmt: skip
    Console(width=150).print(table)
    if args.json is not None:
        payload = {"alphas": list(args.alphas), "rows": [asdict(row) for row in rows]}
        write_result(args.json, command("eval.eviction_effect"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.eviction_effect", main, Args)
