"""Where the best split lies: best alpha and P99 against alpha, by hot share, length and load.

    python -m eval.shape --json docs/results/shape.json --plot docs/results/shape.png

Each cell is a Steady regime at one hot share on one surrogate node. Alpha is held from the warm-up
to the end, for every alpha of a grid over [0, 1] on the same requests (common random numbers), and
this is repeated with arrivals and histories drawn anew. A cell's P99 is the mean over repeats and
epochs of the epochs' P99. Load is set by utilisation at the node's best alpha under the
scan-resistant KV policy; plain LRU gets the same requests a second.

A point with utilisation above 0.95 or a growing backlog is "saturated": its P99 depends on how long
one waits, so none is given.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, machine, write_result
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import load_curve, tables_digest
from hlem_env.surrogate.node import SurrogateBackend
from hlem_env.surrogate.optimum import Episode, record_episode
from hlem_env.telemetry import percentile
from hlem_env.workload.requests import Requests

Floats = NDArray[np.float64]

HOT_SHARES = (0.05, 0.10, 0.20, 0.32, 0.50, 0.60)
SHOWN_CENTI = (0, 10, 30, 50, 70, 90, 100)
"""Alphas of the tables, hundredths."""
BASE_TOKENS = 10_000
"""Mean history length at which utilisation and KV policy are varied."""
BASE_UTILISATION = 0.70
"""Utilisation at which history length and KV policy are varied."""

NEAR_BEST = 0.05
"""Alphas whose P99 is at most this share above the best one's are as good."""
SATURATED_UTILISATION = 0.95
GROWING_BACKLOG = 0.05
"""Requests, over those of an epoch, by which the mean backlog of the last third of the epochs may
exceed that of the first third."""

SPAN_FROM_TOKENS = 8_000
SPAN_BAR = 0.35
"""From this length on, best alpha should fall by at least this much over the hot shares."""

PROTOTYPE = "an earlier prototype at 12k tokens, 28 GB/s gather and 150 requests/s"
PROTOTYPE_LRU_ALPHA = {0.05: 0.98, 0.10: 0.98, 0.20: 0.98, 0.32: 0.80, 0.50: 0.41, 0.60: 0.29}
PROTOTYPE_LRU_P99_MS = {0.05: 96, 0.10: 83, 0.20: 74, 0.32: 84, 0.50: 66, 0.60: 61}
PROTOTYPE_P99_MS = {0.05: 84, 0.10: 66, 0.20: 53, 0.32: 46, 0.50: 37, 0.60: 34}

BOOTSTRAPS = 400


@dataclass
class Args:
    """Shows where the best alpha lies, by hot share, history length, load and KV policy."""

    json: Path | None = None
    """file for the figures"""
    plot: Path | None = None
    """PNG file: P99 against alpha, and best alpha against hot share"""
    quick: bool = False
    """every second alpha, 2 repeats of 24 epochs"""
    hot_shares: tuple[float, ...] = HOT_SHARES
    """hot shares of requests"""
    history_tokens: tuple[int, ...] = (5_000, 8_000, 10_000, 12_000, 14_000)
    """mean history lengths, at utilisation 0.70"""
    utilisations: tuple[float, ...] = (0.50, 0.66, 0.70, 0.74)
    """utilisations at the best alpha, at 10,000 tokens"""
    step_centi: int | None = None
    """grid of alpha, hundredths; by default 1, with --quick 2"""
    repeats: int | None = None
    """drawings of the requests; by default 6, with --quick 2"""
    epochs: int | None = None
    """measured epochs after the warm-up of each; by default 36, with --quick 24"""
    jobs: int = 2
    """threads"""

    def __post_init__(self) -> None:
        step, repeats, epochs = (2, 2, 24) if self.quick else (1, 6, 36)
        self.step_centi = step if self.step_centi is None else self.step_centi
        self.repeats = repeats if self.repeats is None else self.repeats
        self.epochs = epochs if self.epochs is None else self.epochs
        require(
            self.step_centi in (1, 2, 5, 10), "step_centi", self.step_centi, "one of 1, 2, 5, 10"
        )
        require(self.repeats >= 2, "repeats", self.repeats, "at least 2: they tell the noise")
        require(self.epochs >= 3, "epochs", self.epochs, "at least 3")
        require(1 <= self.jobs <= 1024, "jobs", self.jobs, "1 to 1024")


@dataclass(frozen=True)
class Cell:
    """A Steady regime on a node."""

    hot_share: float
    history_tokens: int = BASE_TOKENS
    utilisation: float = BASE_UTILISATION
    """Wanted at the best alpha under the scan-resistant policy."""
    kv_policy: str = "scan_resistant"

    @property
    def scenario(self) -> Scenario:
        """The node and its requests."""
        return Scenario(
            regime="steady",
            steady_hot_share=self.hot_share,
            mean_history_tokens=self.history_tokens,
            utilisation=self.utilisation,
            kv_policy=self.kv_policy,
        )


@dataclass(frozen=True, eq=False)
class Held:
    """What alpha held over one episode gave."""

    p99_ms: float
    """Mean of the epochs' P99."""
    utilisation: float
    growth: float
    """Mean backlog of the last third of the epochs less that of the first, over the requests of an
    epoch."""


@dataclass(frozen=True, eq=False)
class Measured:
    """A cell, measured at every alpha of a grid over the same requests."""

    cell: Cell
    requests_per_s: float
    load: str
    """"table" or "estimate": where the rate comes from."""
    alphas_centi: NDArray[np.int64]
    """[alphas]"""
    p99_ms: Floats
    """[repeats, alphas] mean of the epochs' P99."""
    utilisation: Floats
    """[alphas] mean over the repeats."""
    saturated: NDArray[np.bool_]
    """[alphas]"""

    @cached_property
    def mean_p99_ms(self) -> Floats:
        """[alphas] mean over the repeats."""
        return np.asarray(self.p99_ms.mean(axis=0))

    @cached_property
    def best(self) -> int:
        """Index of the alpha with the lowest P99."""
        return int(self.mean_p99_ms.argmin())

    @property
    def best_alpha(self) -> float:
        """The alpha with the lowest P99."""
        return float(self.alphas_centi[self.best]) / 100

    @property
    def best_p99_ms(self) -> float | None:
        """P99 there; None when saturated."""
        return self.shown_p99_ms(self.best)

    @property
    def is_saturated(self) -> bool:
        """Whether even the best alpha is saturated."""
        return bool(self.saturated[self.best])

    @property
    def near_best(self) -> tuple[float, float]:
        """Least and greatest alpha whose P99 is within 5 % of the best."""
        near = self.alphas_centi[self.mean_p99_ms <= (1 + NEAR_BEST) * self.mean_p99_ms[self.best]]
        return float(near[0]) / 100, float(near[-1]) / 100

    @property
    def p99_error(self) -> float:
        """Standard error of P99 at the best alpha over the repeats, relative."""
        at_best = self.p99_ms[:, self.best]
        return float(at_best.std(ddof=1) / np.sqrt(at_best.size) / at_best.mean())

    @cached_property
    def best_alpha_error(self) -> float:
        """Standard deviation of the best alpha when the repeats are drawn with replacement."""
        rng = np.random.default_rng(0)
        repeats = self.p99_ms.shape[0]
        drawn = rng.integers(repeats, size=(BOOTSTRAPS, repeats))
        best = self.p99_ms[drawn].mean(axis=1).argmin(axis=1)
        return float(self.alphas_centi[best].std()) / 100

    def shown_p99_ms(self, i: int) -> float | None:
        """P99 at the i-th alpha; None when saturated."""
        return None if self.saturated[i] else float(self.mean_p99_ms[i])

    def to_json(self, whole_curve: bool) -> dict[str, Any]:
        """Plain values, the curve at every alpha or at the tables'; a saturated P99 is None."""
        indices = [
            i for i, a in enumerate(self.alphas_centi) if whole_curve or int(a) in SHOWN_CENTI
        ]
        return {
            "hot_share": self.cell.hot_share,
            "mean_history_tokens": self.cell.history_tokens,
            "wanted_utilisation": self.cell.utilisation,
            "kv_policy": self.cell.kv_policy,
            "requests_per_s": round(self.requests_per_s, 3),
            "load": self.load,
            "best_alpha": self.best_alpha,
            "best_alpha_error": round(self.best_alpha_error, 4),
            "alpha_within_5_percent": list(self.near_best),
            "best_p99_ms": _rounded(self.best_p99_ms),
            "p99_relative_error": round(self.p99_error, 4),
            "utilisation": round(float(self.utilisation[self.best]), 4),
            "saturated": self.is_saturated,
            "curve": {
                "alpha": [float(self.alphas_centi[i]) / 100 for i in indices],
                "p99_ms": [_rounded(self.shown_p99_ms(i)) for i in indices],
                "utilisation": [round(float(self.utilisation[i]), 4) for i in indices],
            },
        }


def main(args: Args) -> int:
    """Measure, print, and write what was asked for."""
    start_s = time.perf_counter()
    groups = cell_groups(args)
    cells = list(dict.fromkeys(cell for group in groups.values() for cell in group))
    results: dict[Cell, Measured] = {}
    assert args.step_centi is not None and args.repeats is not None and args.epochs is not None
    alphas = np.arange(0, 101, args.step_centi)
    with ThreadPoolExecutor(args.jobs) as pool:
        for cell in cells:
            results[cell] = measure(cell, alphas, args.repeats, args.epochs, pool, args.jobs)
            if sys.stderr.isatty():
                print(
                    f"\r{len(results)} of {len(cells)} cells ", end="", file=sys.stderr, flush=True
                )
    seconds = time.perf_counter() - start_s
    here = machine()
    print(
        f"{len(cells)} cells x {alphas.size} alphas x {args.repeats} repeats x {args.epochs}"
        f" epochs in {seconds:.0f} s on {args.jobs} threads; {here['cpu']}"
    )
    for title, group in groups.items():
        print_table(title, [results[cell] for cell in group])
    sentences = conclusions(list(results.values()))
    print("\n" + "\n".join(sentences))
    if args.json is not None:
        payload = {
            "workload": "default/steady",
            "load_tables": tables_digest(),
            "repeats": args.repeats,
            "epochs": args.epochs,
            "alpha_step": args.step_centi / 100,
            "seconds": round(seconds, 1),
            "conclusions": sentences,
            "cells": [
                result.to_json(
                    whole_curve=cell.history_tokens == BASE_TOKENS
                    and cell.utilisation == BASE_UTILISATION
                )
                for cell, result in results.items()
            ],
        }
        write_result(args.json, command("eval.shape"), payload)
    if args.plot is not None:
        draw(list(results.values()), args.plot)
    return 0


def cell_groups(args: Args) -> dict[str, list[Cell]]:
    """Cells by the title of their table; a cell may stand in several."""
    shares = args.hot_shares
    groups = {
        f"{tokens:,} tokens, utilisation {BASE_UTILISATION:.2f}, scan-resistant": [
            Cell(share, tokens) for share in shares
        ]
        for tokens in args.history_tokens
    }
    for utilisation in args.utilisations:
        title = f"{BASE_TOKENS:,} tokens, utilisation {utilisation:.2f}, scan-resistant"
        groups[title] = [Cell(share, utilisation=utilisation) for share in shares]
    title = f"{BASE_TOKENS:,} tokens, the requests of utilisation {BASE_UTILISATION:.2f}, plain LRU"
    groups[title] = [Cell(share, kv_policy="lru") for share in shares]
    return groups


def measure(
    cell: Cell,
    alphas_centi: NDArray[np.int64],
    repeats: int,
    epochs: int,
    pool: ThreadPoolExecutor,
    jobs: int,
) -> Measured:
    """Hold every alpha [alphas] over `repeats` episodes of `epochs` epochs with warm caches."""
    scenario = cell.scenario
    backend = scenario.build()
    nodes = [backend.twin() for _ in range(jobs)]
    held: list[list[Held]] = []
    for repeat in range(repeats):
        # By hot share as well: otherwise cells would share the noise of their repeats.
        rng = np.random.default_rng([repeat, round(1000 * cell.hot_share), cell.history_tokens])
        backend.workload.reset(rng, -backend.warmup_s)
        episode = record_episode(backend, epochs)
        joined = reduce(Requests.then, episode.epochs)

        def some(
            node: SurrogateBackend,
            part: Iterable[int],
            episode: Episode = episode,
            joined: Requests = joined,
        ) -> list[Held]:
            return [hold_whole(node, episode, joined, alpha) for alpha in part]

        parts = [alphas_centi[worker::jobs].tolist() for worker in range(jobs)]
        row: list[Any] = [None] * alphas_centi.size
        for worker, done in enumerate(pool.map(some, nodes, parts)):
            row[worker::jobs] = done
        held.append(row)
    utilisation = np.mean([[h.utilisation for h in row] for row in held], axis=0)
    growth = np.mean([[h.growth for h in row] for row in held], axis=0)
    load = load_curve(
        scenario.regime_config(), scenario.node(), scenario.profile(), cell.utilisation
    )
    return Measured(
        cell=cell,
        requests_per_s=float(load(np.array(cell.hot_share))),
        load=load.source,
        alphas_centi=alphas_centi,
        p99_ms=np.array([[h.p99_ms for h in row] for row in held]),
        utilisation=utilisation,
        saturated=(utilisation > SATURATED_UTILISATION) | (growth > GROWING_BACKLOG),
    )


def hold_whole(
    node: SurrogateBackend, episode: Episode, requests: Requests, alpha_centi: int
) -> Held:
    """Hold alpha from the warm-up to the end, the episode's epochs in one run.

    The epochs' P99 are those of `hlem_env.surrogate.optimum.hold`; one run takes less time.

    Args:
        node: emptied first.
        episode: its warm-up and its epochs' length and number are used.
        requests: those of all its epochs, joined.
        alpha_centi: hundredths.
    """
    node.empty()
    waiting = 0
    if episode.warmup_s > 0:
        waiting = node.serve(episode.warmup, alpha_centi, episode.warmup_s).backlog
    epochs, seconds = len(episode.epochs), episode.epoch_seconds
    stats = node.serve(requests, alpha_centi, epochs * seconds)
    ends_s = seconds * np.arange(1, epochs + 1)
    done_s = stats.arrival_s + 1e-3 * stats.latency_ms
    completed = np.searchsorted(done_s, ends_s, side="right")
    first = np.concatenate(([0], completed[:-1]))
    p99_ms = [
        percentile(stats.latency_ms[begin:end], 0.99) if end > begin else np.inf
        for begin, end in zip(first, completed, strict=True)
    ]
    arrived = waiting + np.cumsum([len(taken) for taken in episode.epochs])
    backlog = arrived - completed
    third = max(epochs // 3, 1)
    growth = (backlog[-third:].mean() - backlog[:third].mean()) / max(len(requests) / epochs, 1.0)
    return Held(float(np.mean(p99_ms)), stats.utilisation, float(growth))


def print_table(title: str, results: Sequence[Measured]) -> None:
    """A line a hot share."""
    print(f"\n{title}")
    curve = "".join(f"{a / 100:>7.1f}" for a in SHOWN_CENTI)
    print(f"{'':>46}{'':>10}P99 in ms at alpha")
    print(
        f"{'hot':>5}{'req/s':>7}{'busy':>6}{'best alpha':>14}{'within 5 %':>13}{'best P99':>11}"
        + curve
    )
    for result in results:
        low, high = result.near_best
        best = f"{result.best_alpha:.2f} ± {result.best_alpha_error:.2f}"
        best_ms = result.best_p99_ms
        p99 = "sat" if best_ms is None else f"{best_ms:.1f}±{best_ms * result.p99_error:.1f}"
        shown = [int(np.searchsorted(result.alphas_centi, a)) for a in SHOWN_CENTI]
        values = [result.shown_p99_ms(i) for i in shown]
        print(
            f"{result.cell.hot_share:>5.2f}{result.requests_per_s:>7.0f}"
            f"{result.utilisation[result.best]:>6.2f}{best:>14}{f'{low:.2f}-{high:.2f}':>13}{p99:>11}"
            + "".join(f"{'sat' if v is None else f'{v:.1f}':>7}" for v in values)
        )


def conclusions(results: Sequence[Measured]) -> list[str]:
    """What the cells say, in sentences."""
    by_cell = {result.cell: result for result in results}
    lengths = sorted(
        {c.history_tokens for c in by_cell if c == Cell(c.hot_share, c.history_tokens)}
    )
    shares = sorted({cell.hot_share for cell in by_cell})
    sentences, spans, surely = [], {}, {}
    for tokens in lengths:
        row = [by_cell[Cell(share, tokens)] for share in shares]
        spans[tokens] = row[0].best_alpha - row[-1].best_alpha
        surely[tokens] = row[0].near_best[0] - row[-1].near_best[1]
        rises = [
            f"{a.cell.hot_share:.2f} to {b.cell.hot_share:.2f}"
            for a, b in pairwise(row)
            if b.best_alpha - a.best_alpha > 2 * np.hypot(a.best_alpha_error, b.best_alpha_error)
        ]
        course = "falls" if spans[tokens] > 0 and not rises else "does not fall throughout"
        sentences.append(
            f"{tokens:,} tokens: best alpha {course} as the hot share rises from {shares[0]:.2f} to"
            f" {shares[-1]:.2f} ({', '.join(f'{r.best_alpha:.2f}' for r in row)}; span"
            f" {spans[tokens]:.2f})" + (f"; it rises from {', '.join(rises)}." if rises else ".")
        )
    long = {tokens: span for tokens, span in spans.items() if tokens >= SPAN_FROM_TOKENS}
    if long:
        tokens, least = min(long.items(), key=lambda item: item[1])
        verdict = "met" if least >= SPAN_BAR - 1e-9 else "missed"
        sentences.append(
            f"Span of best alpha from {SPAN_FROM_TOKENS:,} tokens on: {least:.2f} at least (at"
            f" {tokens:,}); the bar of {SPAN_BAR:.2f} is {verdict}. From the least alpha within"
            f" 5 % of the best P99 at the lowest hot share to the greatest at the highest it is"
            f" {min(surely[tokens] for tokens in long):.2f} at least."
        )
    pairs = [
        (by_cell[Cell(share)], by_cell[Cell(share, kv_policy="lru")])
        for share in shares
        if Cell(share) in by_cell and Cell(share, kv_policy="lru") in by_cell
    ]
    if pairs:
        sentences += _about_lru(pairs)
    errors = [r.p99_error for r in results if not r.is_saturated]
    if errors:
        sentences.append(
            f"Noise over the repeats: the best P99 has a standard error of {np.median(errors):.1%}"
            f" (median over cells; {max(errors):.1%} at most), the best alpha one of"
            f" {np.median([r.best_alpha_error for r in results]):.3f}"
            f" (median; {max(r.best_alpha_error for r in results):.2f} at most)."
        )
    sources = {result.load for result in results}
    if sources != {"table"}:
        sentences.append("Some of the rates are closed-form estimates, not simulated tables.")
    return sentences


def _about_lru(pairs: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """Scan-resistant and plain LRU on the same requests."""
    alphas, gains, known_alphas, known_gains = [], [], [], []
    for resistant, lru in pairs:
        share = lru.cell.hot_share
        alphas.append(f"{lru.best_alpha:.2f}" + (" (saturated)" if lru.is_saturated else ""))
        if resistant.best_p99_ms is None or lru.best_p99_ms is None:
            gains.append("saturated")
        else:
            gains.append(f"{1 - resistant.best_p99_ms / lru.best_p99_ms:.0%}")
        if share in PROTOTYPE_P99_MS:
            known_alphas.append(f"{PROTOTYPE_LRU_ALPHA[share]:.2f}")
            known_gains.append(f"{1 - PROTOTYPE_P99_MS[share] / PROTOTYPE_LRU_P99_MS[share]:.0%}")
    shares = ", ".join(f"{lru.cell.hot_share:.2f}" for _, lru in pairs)
    sentences = [
        f"Plain LRU at {BASE_TOKENS:,} tokens, hot shares {shares}: best alpha"
        f" {', '.join(alphas)}.",
        f"Scan resistance lowers the best P99 there by {', '.join(gains)}.",
    ]
    if known_alphas:
        sentences.append(
            f"For comparison, {PROTOTYPE}: best alpha of LRU {', '.join(known_alphas)};"
            f" P99 lowered by {', '.join(known_gains)}."
        )
    return sentences


def draw(results: Sequence[Measured], path: Path) -> None:
    """P99 against alpha by hot share, and best alpha against hot share by length; one PNG."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    curves, optima = figure.subplots(1, 2)
    base = [r for r in results if r.cell == Cell(r.cell.hot_share)]
    lru = [r for r in results if r.cell == Cell(r.cell.hot_share, kv_policy="lru")]
    for i, result in enumerate(base):
        p99_ms = np.where(result.saturated, np.nan, result.mean_p99_ms)
        colour = f"C{i}"
        curves.plot(
            result.alphas_centi / 100, p99_ms, color=colour, label=f"{result.cell.hot_share:.2f}"
        )
        if not result.is_saturated:
            curves.plot(result.best_alpha, p99_ms[result.best], "o", color=colour)
    if base:
        lowest = min(float(r.mean_p99_ms.min()) for r in base)
        curves.set_ylim(0.8 * lowest, 4 * lowest)
        curves.legend(title="hot share")
    curves.set_xlabel("alpha, the embedding cache's share of the pool")
    curves.set_ylabel("P99 latency, ms")
    curves.set_title(
        f"{BASE_TOKENS:,} tokens, utilisation {BASE_UTILISATION:.2f}, scan-resistant", fontsize=10
    )
    lengths = sorted(
        {r.cell.history_tokens for r in results if r.cell.utilisation == BASE_UTILISATION}
    )
    for i, tokens in enumerate(lengths):
        row = [r for r in results if r.cell == Cell(r.cell.hot_share, tokens)]
        if not row:
            continue
        shares = [r.cell.hot_share for r in row]
        low, high = np.array([r.near_best for r in row]).T
        optima.plot(shares, [r.best_alpha for r in row], "o-", color=f"C{i}", label=f"{tokens:,}")
        optima.fill_between(shares, low, high, color=f"C{i}", alpha=0.10, linewidth=0)
    if lru:
        optima.plot(
            [r.cell.hot_share for r in lru], [r.best_alpha for r in lru], "s--", color="grey",
            label=f"{BASE_TOKENS:,}, plain LRU",
        )  # fmt: skip
    optima.set_ylim(-0.02, 1.02)
    optima.set_xlabel("hot share of requests")
    optima.set_ylabel("best alpha (shade: P99 within 5 %)")
    optima.legend(title="mean history, tokens")
    optima.set_title(f"utilisation {BASE_UTILISATION:.2f}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None, "Description": command("eval.shape")})


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


if __name__ == "__main__":
    run_command("eval.shape", main, Args)
