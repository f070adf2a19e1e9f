"""A split that never moves: what an operator sets, or what hindsight would have set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hlem_env.controller import Decision
from hlem_env.errors import require
from hlem_env.telemetry import EpochStats


class Static:
    """Holds one alpha from the warm-up on.

    Args:
        alpha_centi: embedding share in hundredths, 0 to 100.
        name: for tables; None is "static 0.30" and the like.
    """

    period = 1

    def __init__(self, alpha_centi: int, name: str | None = None) -> None:
        require(0 <= alpha_centi <= 100, "alpha_centi", alpha_centi, "0 to 100")
        self.initial_alpha_centi = alpha_centi
        self.name = name or f"static {alpha_centi / 100:.2f}"

    def reset(self, seed: int) -> None:
        """Do nothing."""

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The same alpha."""
        return Decision(self.initial_alpha_centi, "static")
