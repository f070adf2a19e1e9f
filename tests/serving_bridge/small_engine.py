"""A small node behind an engine, a controller that does as told, and the right scores."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hlem_env.live.config import LiveConfig
from hlem_env.live.hstu import Hstu, HstuBatch
from hlem_env.live.node import LiveNode, model_config
from hlem_env.telemetry import EpochStats
from serving_bridge.engine import Engine
from serving_bridge.history_store import HistoryStore
from serving_bridge.scoring import Limits, Scored, ScoreRequest
from serving_bridge.ticker import Served

Items = NDArray[np.int64]
TOLERANCE = 1e-4
"""Relative; scores are in float32 and sums go in another order."""
CONFIG = replace(
    LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, mean_history_tokens=100, layers=2,
    max_history_tokens=700, rows_per_table=5000, emulated_link_gbps=None, token_budget=1500,
    epoch_seconds=0.5,
)  # fmt: skip


class Told:
    """A controller that answers what it was given, and keeps what it was told."""

    def __init__(self, initial: int = 40, ticks: object = None, epochs: object = 40) -> None:
        self.initial_alpha_centi, self.ticks_answer, self.epochs_answer = initial, ticks, epochs
        self.ticks: list[EpochStats] = []
        self.epochs: list[tuple[EpochStats, Served]] = []

    def tick(self, stats: EpochStats) -> int | None:
        self.ticks.append(stats)
        return answer(self.ticks_answer)

    def epoch(self, stats: EpochStats, served: Served) -> int:
        self.epochs.append((stats, served))
        return answer(self.epochs_answer)


def answer(given: object) -> int:
    if isinstance(given, Exception):
        raise given
    return given  # type: ignore[return-value]


@contextmanager
def engine_in(
    folder: Path,
    control: Told | None = None,
    limits: Limits | None = None,
    node: LiveNode | None = None,
    max_bytes: int = 2**26,
    known_users: int = 1000,
    retain_bytes: int | None = None,
) -> Iterator[Engine]:
    """An engine with a store in the folder."""
    store = HistoryStore(folder, max_bytes)
    engine = Engine(
        node or LiveNode(CONFIG), store, control or Told(), limits, known_users, retain_bytes
    )
    try:
        yield engine
    finally:
        engine.close()


def items(n: int, seed: int = 0) -> Items:
    return np.random.default_rng(seed).integers(0, 2**63 - 1, n)


def whole(user: str, history: Items, candidates: Items) -> ScoreRequest:
    return ScoreRequest(user, candidates, history=history)


def more(user: str, new: Items, candidates: Items) -> ScoreRequest:
    return ScoreRequest(user, candidates, new_items=new)


def result(future: Future[Scored]) -> Scored:
    return future.result(timeout=20)


class Reference:
    """The model in float64 on whole histories, from tables alone: no cache, no pages, no batch."""

    def __init__(self, node: LiveNode) -> None:
        self.tables = node.tables
        self.model = Hstu(model_config(node.config), node.config.seed, dtype=torch.float64)
        self.model.load_state_dict(node.model.state_dict())

    def scores(self, history: Items, candidates: Items) -> NDArray[np.float64]:
        tokens = np.concatenate([history, candidates])
        keys = self.tables.keys(torch.from_numpy(tokens))
        rows = self.tables.expected(keys.reshape(-1)).double()
        batch = HstuBatch.build([history.size], [candidates.size], None, self.model.config)
        summed = rows.view(tokens.size, self.tables.tables, -1).sum(1)
        return self.model(summed, batch).numpy()


def agree(scored: Scored, right: NDArray[np.float64]) -> bool:
    distance = np.linalg.norm(scored.scores - right) / np.linalg.norm(right)
    return scored.scores.dtype == np.float32 and bool(distance < TOLERANCE)
