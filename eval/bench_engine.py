"""What serving costs beside the model: the engine's queue, histories and their store, per request.

    python -m eval.bench_engine --json FILE

The node executes nothing: scores are zeros. One request at a time, from `submit` to its answer, and as
eight together. Histories have 15,000 items, and their store is in the folder given, on whose disk much
depends: a bare synchronised write of as many bytes stands beside. On a machine with other work the CPU
time of all threads tells more.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlem_env.command_line import run_command
from hlem_env.live.config import LiveConfig
from hlem_env.live.given_items import GivenRequests
from hlem_env.live.node import Executed, LiveNode
from hlem_env.machine import command, write_result
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests
from serving_bridge.engine import Engine
from serving_bridge.history_store import HistoryStore
from serving_bridge.scoring import ScoreRequest
from serving_bridge.ticker import Served

TOKENS, NEW, CANDIDATES = 15_000, 10, 100


@dataclass(frozen=True)
class Args:
    """The engine's own share of a request."""

    folder: Path | None = None
    """Where the store is made, in a folder of its own that is removed; by default the system's."""
    repeats: int = 200
    """Requests of each kind."""
    json: Path | None = None
    """Write the result there."""


class WithoutModel(LiveNode):
    """A node that takes no time; it reads the items that a real one would."""

    everything_cached = True
    """Of what the user's last request had."""

    def first_batch(self, waiting: Requests) -> int:
        """All at once."""
        return len(waiting)

    def execute(self, requests: Requests, waiting: Requests, now_s: float) -> Executed:
        """Scores of zero."""
        assert isinstance(requests, GivenRequests)
        nothing = np.zeros(len(requests), np.int64)
        cached = (requests.history_length - requests.new_items) * self.everything_cached
        for read, first in zip(requests.history, cached.tolist(), strict=True):
            read(first)
        candidates = self._items.candidates(requests)
        scores = torch.zeros(int(candidates.sum()))
        return Executed(scores, nothing, candidates, nothing, 0, 0, 0, 0, False, 1e-6)


class Still:
    """A controller that leaves alpha alone."""

    initial_alpha_centi = 50

    def tick(self, stats: EpochStats) -> None:
        """See `Control.tick`."""

    def epoch(self, stats: EpochStats, served: Served) -> int:
        """See `Control.epoch`."""
        return self.initial_alpha_centi


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    """Times of requests by what they bring, ms."""
    config = replace(LiveConfig.load("cpu-small"), max_history_tokens=TOKENS + repeats * NEW)
    node = WithoutModel(config)
    engine = Engine(node, HistoryStore(folder / "store"), Still())
    rng = np.random.default_rng(0)
    candidates = rng.integers(0, 2**40, CANDIDATES)
    histories = [rng.integers(0, 2**40, TOKENS) for _ in range(8)]
    grown = rng.integers(0, 2**40, TOKENS + repeats * NEW)

    def first(i: int) -> ScoreRequest:
        return ScoreRequest(f"first {i}", candidates, history=histories[i % 8])

    def same(_: int) -> ScoreRequest:
        return ScoreRequest("first 0", candidates, history=histories[0])

    def longer(i: int) -> ScoreRequest:
        return ScoreRequest("grown", candidates, history=grown[: TOKENS + i * NEW])

    def new(i: int) -> ScoreRequest:
        user = f"first {1 + i % 8}"
        return ScoreRequest(user, candidates, new_items=grown[i * NEW : (i + 1) * NEW])

    kinds = {
        "a new user's history": first,
        "a history that is stored": same,
        f"a history with {NEW} items more": longer,
        f"{NEW} new items": new,
    }
    result = {name: one_by_one(engine, kind, repeats) for name, kind in kinds.items()}
    node.everything_cached = False
    result[f"{NEW} new items, nothing cached"] = one_by_one(engine, new, repeats)
    result["8 users' first histories together, each"] = together(engine, histories, candidates)
    engine.close()
    result["bare write of a history, synchronised"] = bare_write(folder, repeats, 8 * TOKENS)
    result["bare write of a page, synchronised"] = bare_write(folder, repeats, 4096)
    return result


def one_by_one(
    engine: Engine, kind: Callable[[int], ScoreRequest], repeats: int
) -> dict[str, float]:
    """From `submit` to the answer."""
    times, cpu_s = [], 0.0
    for i in range(repeats):
        request = kind(i)
        begun, cpu_begun = time.perf_counter(), time.process_time()
        engine.submit(request).result()
        times.append(time.perf_counter() - begun)
        cpu_s += time.process_time() - cpu_begun
    return {**quantiles(times), "cpu_ms": round(1e3 * cpu_s / repeats, 3)}


def together(
    engine: Engine, histories: list[NDArray[np.int64]], candidates: NDArray[np.int64]
) -> dict[str, float]:
    """Time of eight requests over eight."""
    times = []
    for i in range(25):
        begun = time.perf_counter()
        futures = [
            engine.submit(ScoreRequest(f"group {i} {j}", candidates, history=history))
            for j, history in enumerate(histories)
        ]
        for future in futures:
            future.result()
        times.append((time.perf_counter() - begun) / len(histories))
    return quantiles(times)


def bare_write(folder: Path, repeats: int, n_bytes: int) -> dict[str, float]:
    """What the disk alone takes, in a file that has its space already."""
    data, times = bytes(n_bytes), []
    with (folder / "bare").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, repeats * n_bytes)
        for i in range(repeats):
            begun = time.perf_counter()
            os.pwrite(file.fileno(), data, i * n_bytes)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - begun)
    return quantiles(times)


def quantiles(times_s: list[float]) -> dict[str, float]:
    """Median and P90 in ms, the first tenth left out."""
    p50, p90 = np.percentile(times_s[len(times_s) // 10 :], [50, 90])
    return {"p50_ms": round(1e3 * float(p50), 3), "p90_ms": round(1e3 * float(p90), 3)}


def main(args: Args) -> int:
    """Measure, print, write."""
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = measure(Path(folder), args.repeats)
    print(f"{'ms':45} {'p50':>8} {'p90':>8} {'CPU':>8}")
    for name, times in result.items():
        cpu = f"{times['cpu_ms']:8.3f}" if "cpu_ms" in times else ""
        print(f"{name:45} {times['p50_ms']:8.3f} {times['p90_ms']:8.3f} {cpu}")
    if args.json is not None:
        write_result(args.json, command("eval.bench_engine"), {"tokens": TOKENS, "times": result})
    return 0


if __name__ == "__main__":
    run_command("eval.bench_engine", main, Args)
