"""The one-line rule: leave KV as much room as the hot users' histories take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agents.steps import towards
from hlem_env.controller import Decision
from hlem_env.telemetry import EpochStats


class WorkingSetRule:
    """Moves alpha towards 1 - working set, at most by the largest step an epoch."""

    name = "working-set rule"
    period = 1
    initial_alpha_centi = 50

    def reset(self, seed: int) -> None:
        """Do nothing: a decision depends on its epoch alone."""

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """A step towards 1 - working set, from the epoch's stats."""
        alpha_centi = towards(stats, 100 * (1.0 - stats.working_set))
        return Decision(alpha_centi, f"working set {stats.working_set:.3f}")
