"""Oracle labels for the forecasters: states of the training domain, and alpha* of the epoch after.

alpha* is kept on disk by a hash of the trace (`hlem_env.surrogate.optimum.alpha_star`), so labelling
goes on where it stopped. A state depends on the alpha in force, so each course is run several times,
by walks at different distances from alpha*: a forecaster also has to find back from a bad split.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hlem_env import mdp
from hlem_env.backend import Runner
from hlem_env.mdp import ACTIONS_CENTI, MdpConfig
from hlem_env.scenario import Scenario, TrainingDomain
from hlem_env.surrogate.optimum import alpha_star
from hlem_env.workload.regimes import REGIMES

FIRST_SEED = 50_000
"""Of the labelled episodes: apart from those of PPO's training, of tuning and of every evaluation."""
WANDER_CENTI = (0.0, 8.0, 25.0)
"""Deviation of each walk's aim from alpha*, hundredths."""
PERSISTENCE = 0.9
"""Share of the walk's distance from alpha* that stays from epoch to epoch."""


@dataclass(frozen=True)
class LabelPlan:
    """What is labelled, and how finely."""

    episodes: int = 128
    epochs: int = 120
    alpha_step_centi: int = 2
    repeats: int = 8
    cache: str = "runs/labels"


@dataclass(frozen=True, eq=False)
class Labelled:
    """One course of the training domain."""

    states: NDArray[np.float32]
    """[walks, epochs - 1, 8] the state after each epoch."""
    alpha_star: NDArray[np.float32]
    """[epochs - 1] alpha* of the epoch after it, 0 to 1."""


def mdp_config(scenario: Scenario) -> MdpConfig:
    """State with the working set as the eighth feature."""
    return MdpConfig(
        max_history_tokens=scenario.max_history_tokens,
        epoch_seconds=scenario.epoch_seconds,
        features="working_set",
    )


def label_episode(plan: LabelPlan, index: int) -> Labelled:
    """States and labels of course `index`, alpha* from the cache where it is there."""
    rng = np.random.default_rng(FIRST_SEED + index)
    # Each regime as often: PPO's weights are for its own learning.
    domain = TrainingDomain(regimes=REGIMES)
    scenario = domain.sample(Scenario(episode_epochs=plan.epochs), rng)
    config = mdp_config(scenario)
    backend = scenario.build()
    seed = FIRST_SEED + index
    backend.reset(seed)
    star = alpha_star(
        backend, config, plan.epochs, plan.alpha_step_centi, plan.repeats, jobs=1,
        cache=Path(plan.cache),
    ).alpha_centi  # fmt: skip
    runner = Runner(backend, config)
    walks = [_walk(runner, star, wander, seed, rng) for wander in WANDER_CENTI]
    return Labelled(np.stack(walks), (star[1:] / 100).astype(np.float32))


def _walk(
    runner: Runner, star: NDArray[np.int64], wander: float, seed: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """States [epochs - 1, 8] of a walk that stays about `wander` hundredths from alpha*."""
    away = rng.normal(0.0, wander)
    stats = runner.reset(seed, round(float(star[0] + away)))
    states = []
    for wanted in star[1:]:
        states.append(mdp.observe(stats, runner.config))
        away = PERSISTENCE * away + np.sqrt(1 - PERSISTENCE**2) * rng.normal(0.0, wander)
        step = round(float(wanted + away)) - runner.alpha_centi
        largest = max(ACTIONS_CENTI)
        stats = runner.step(runner.alpha_centi + min(max(step, -largest), largest))
    return np.stack(states)


def _label(task: tuple[LabelPlan, int]) -> Labelled:
    return label_episode(*task)


def label(plan: LabelPlan, jobs: int) -> list[Labelled]:
    """All courses of the plan, in order, with a progress bar."""
    tasks = [(plan, index) for index in range(plan.episodes)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        done: Iterator[Labelled] = pool.map(_label, tasks)
        return list(tqdm(done, total=len(tasks), desc="labels", unit="episode", disable=None))
