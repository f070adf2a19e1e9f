"""Controllers that know the future: they play a sequence of alphas found by trying."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hlem_env.controller import Decision
from hlem_env.errors import BackendError, require
from hlem_env.telemetry import EpochStats


class Planned:
    """Plays one alpha an epoch.

    Args:
        alphas_centi: [epochs] hundredths, the first from the warm-up on.
        name: for tables.
    """

    period = 1

    def __init__(self, alphas_centi: Sequence[int] | NDArray[np.int64], name: str) -> None:
        require(len(alphas_centi) > 0, "alphas_centi", alphas_centi, "at least one alpha")
        self.alphas_centi = [int(alpha) for alpha in alphas_centi]
        self.initial_alpha_centi = self.alphas_centi[0]
        self.name = name
        self._next = 1

    def reset(self, seed: int) -> None:
        """Go back to the start of the plan."""
        self._next = 1

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The plan's next alpha.

        Raises:
            BackendError: the plan has ended.
        """
        if self._next >= len(self.alphas_centi):
            raise BackendError(f"the plan of {self.name} has {len(self.alphas_centi)} epochs only")
        self._next += 1
        return Decision(self.alphas_centi[self._next - 1], "planned")


class PlannedTicks:
    """Plays one alpha a tick.

    Args:
        alphas_centi: for each epoch the alphas of its ticks, hundredths; of the first epoch, which
            is run whole, one.
        name: for tables.
    """

    period = 1

    def __init__(self, alphas_centi: Sequence[Sequence[int]], name: str) -> None:
        good = len(alphas_centi) > 0 and all(len(epoch) > 0 for epoch in alphas_centi)
        require(
            good, "alphas_centi", alphas_centi, "at least one epoch, of at least one alpha each"
        )
        self.alphas_centi = [int(alpha) for epoch in alphas_centi for alpha in epoch]
        self.initial_alpha_centi = self.alphas_centi[0]
        self.name = name
        self._next = 0

    def reset(self, seed: int) -> None:
        """Go back to the start of the plan."""
        self._next = 0

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The alpha of the epoch's first tick.

        Raises:
            BackendError: the plan has ended.
        """
        self._next = max(self._next, 1)
        if self._next >= len(self.alphas_centi):
            raise BackendError(f"the plan of {self.name} has {len(self.alphas_centi)} ticks only")
        return Decision(self.alphas_centi[self._next], "planned")

    def on_tick(self, stats: EpochStats) -> Decision | None:
        """The alpha of the next tick; None after the last."""
        self._next += 1
        if self._next >= len(self.alphas_centi):
            return None
        return Decision(self.alphas_centi[self._next], "planned")
