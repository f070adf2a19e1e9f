"""What a policy's metrics.jsonl says of its training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.figures import Floats, smoothed
from eval.records import SIZE_LIMIT
from hlem_env.errors import ArtefactError

RETURN_WINDOW = 5
"""Points of the moving mean of episodic returns."""


@dataclass(frozen=True)
class Learning:
    """Figures of a learning curve; None where it does not say."""

    steps: int
    episodes: int | None
    episodes_to_95: int | None
    best_ratio: float | None
    best_ratio_step: int | None
    best_ratio_episodes: int | None


Series = tuple[Floats, Floats]


def read_learning(path: Path) -> tuple[Learning, tuple[Series, Series], int]:
    """metrics.jsonl of train.ppo: figures, (returns, evaluations) by step, damaged lines.

    Raises:
        ArtefactError: missing or without a curve; says why.
    """
    episodes: dict[float, float] = {}
    returns: dict[float, float] = {}
    ratios: dict[float, float] = {}
    skipped = 0
    for line in _lines(path):
        try:
            row = json.loads(line)
            step = float(row["global_step"])
            for key, series in (
                ("charts/episodes", episodes),
                ("charts/episodic_return", returns),
                ("slo/eval_p99_ratio", ratios),
            ):
                if key in row and np.isfinite(float(row[key])):
                    series[step] = float(row[key])
        except (ValueError, TypeError, KeyError, RecursionError):
            skipped += 1
    if not returns and not ratios:
        raise ArtefactError("metrics.jsonl holds no episodic return and no evaluation")
    curves = (_series(returns), _series(ratios))
    done = _series(episodes)
    reached = step_of_share(*curves[0])
    lowest = min(ratios, key=lambda s: (ratios[s], s)) if ratios else None
    learning = Learning(
        steps=int(max(returns.keys() | ratios.keys())),
        episodes=int(done[1][-1]) if done[0].size else None,
        episodes_to_95=None if reached is None else _episodes_at(done, reached),
        best_ratio=None if lowest is None else ratios[lowest],
        best_ratio_step=None if lowest is None else int(lowest),
        best_ratio_episodes=None if lowest is None else _episodes_at(done, lowest),
    )
    return learning, curves, skipped


def step_of_share(steps: Floats, returns: Floats, share: float = 0.95) -> float | None:
    """The step by which the return made `share` of its way from the first to the final level.

    Levels are means over `RETURN_WINDOW` points, and the return must have risen by more than twice
    the standard error of such a mean (from the differences of neighbours); else there is no answer:
    the return of random workloads says how hard these were as well.

    Args:
        steps: [n] ascending.
        returns: [n].
    """
    if returns.size < 2 * RETURN_WINDOW:
        return None
    level = smoothed(returns, RETURN_WINDOW)
    first, final = returns[:RETURN_WINDOW].mean(), returns[-RETURN_WINDOW:].mean()
    noise = np.diff(returns).std() / np.sqrt(2 * RETURN_WINDOW)
    if final - first <= 2 * np.sqrt(2) * noise:
        return None
    there = np.flatnonzero(level >= first + share * (final - first))
    return float(steps[there[0]]) if there.size else None


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > SIZE_LIMIT:
            raise ArtefactError(f"metrics.jsonl is larger than {SIZE_LIMIT} bytes")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ArtefactError(f"metrics.jsonl: {error.strerror}") from error
    return (line for line in text.splitlines() if line.strip())


def _series(values: dict[float, float]) -> Series:
    steps = sorted(values)
    return np.array(steps, float), np.array([values[step] for step in steps], float)


def _episodes_at(done: Series, step: float) -> int | None:
    before = int(np.searchsorted(done[0], step, side="right"))
    return int(done[1][before - 1]) if before else None
