"""Bayesian optimisation of alpha: a Gaussian process of P99 by alpha, and expected improvement."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.settings import tuned
from agents.steps import towards
from hlem_env.controller import Decision
from hlem_env.errors import require
from hlem_env.telemetry import EpochStats

WINDOW_EPOCHS = 12
"""Epochs from one suggestion to the next."""


@dataclass(frozen=True)
class BayesianSettings:
    """Of the process and of the search."""

    length_centi: float = 20.0
    """Length scale over alpha, hundredths."""
    noise: float = 0.1
    """Variance of a window's P99, in units of the variance over the windows remembered."""
    memory: int = 8
    """Windows remembered: older ones tell of another workload."""
    xi: float = 0.01
    """Least improvement worth looking for, in the same units (their deviation)."""
    low_centi: int = 10
    high_centi: int = 90


class ExpectedImprovementSearch:
    """Suggests where next to look for the minimum of a curve that is measured with noise.

    Args:
        settings: see there.
        seed: of the search's random starts.
    """

    def __init__(self, settings: BayesianSettings, seed: int) -> None:
        require(settings.memory >= 2, "memory", settings.memory, "at least 2 windows")
        self.settings = settings
        self._rng = np.random.RandomState(seed)  # the library takes no newer generator
        self._seen: deque[tuple[int, float]] = deque(maxlen=settings.memory)

    def add(self, alpha_centi: int, cost: float) -> None:
        """Remember what an alpha cost."""
        self._seen.append((alpha_centi, cost))

    def suggest(self) -> int:
        """The alpha, hundredths, that promises most."""
        from bayes_opt import BayesianOptimization
        from bayes_opt.acquisition import ExpectedImprovement
        from sklearn.gaussian_process.kernels import Matern

        s = self.settings
        alphas, index, counts = np.unique(
            [alpha for alpha, _ in self._seen], return_inverse=True, return_counts=True
        )
        if alphas.size < 2:  # one point has no slope yet
            return int(self._rng.randint(s.low_centi, s.high_centi + 1))
        costs = np.array([cost for _, cost in self._seen])
        scaled = (costs - costs.mean()) / max(float(costs.std()), 1e-9)
        search = BayesianOptimization(
            f=None,
            pbounds={"alpha_centi": (float(s.low_centi), float(s.high_centi))},
            acquisition_function=ExpectedImprovement(xi=s.xi),
            random_state=self._rng,
            verbose=0,
        )
        # The same alpha measured n times is one point, n times as certain.
        search.set_gp_params(
            kernel=Matern(length_scale=s.length_centi, nu=2.5),
            optimizer=None,
            alpha=s.noise / counts,
        )
        for alpha, cost in zip(alphas, np.bincount(index, scaled) / counts, strict=True):
            search.register({"alpha_centi": float(alpha)}, -float(cost))
        return round(float(search.suggest()["alpha_centi"]))


class BayesianOptimisation:
    """Every 12 epochs takes the alpha of the largest expected improvement and walks there.

    A window's cost is the mean P99 of those of its epochs that ran at the alpha of its end.

    Args:
        settings: None is the tuned ones.
    """

    name = "Bayesian optimisation"
    period = 1
    initial_alpha_centi = 50

    def __init__(self, settings: BayesianSettings | None = None) -> None:
        self.settings = settings or tuned("bayesian", BayesianSettings)
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget what was measured."""
        self._search = ExpectedImprovementSearch(self.settings, seed)
        self._window: list[tuple[int, float]] = []
        self._wanted_centi = self.initial_alpha_centi

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """A step towards the suggestion in force; at a window's end, a new one."""
        self._window.append((round(100 * stats.alpha_target), stats.p99_ms))
        reason = f"walks to {self._wanted_centi / 100:.2f}"
        if len(self._window) == WINDOW_EPOCHS:
            alpha_centi = self._window[-1][0]
            cost = float(np.mean([p99 for alpha, p99 in self._window if alpha == alpha_centi]))
            self._search.add(alpha_centi, cost)
            self._wanted_centi = self._search.suggest()
            self._window = []
            reason = f"P99 {cost:.1f} ms at {alpha_centi / 100:.2f}, suggests {self._wanted_centi / 100:.2f}"
        return Decision(towards(stats, self._wanted_centi), reason)
