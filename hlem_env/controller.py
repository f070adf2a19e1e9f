"""What decides alpha: the Controller protocol, which every policy and baseline follows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hlem_env.telemetry import EpochStats


class Decision(NamedTuple):
    """An alpha to apply, and why. A tuple: made in a third of a frozen dataclass's time."""

    alpha_centi: int
    """Commanded embedding share in hundredths; the runner clips it to the bounds."""
    reason: str = ""
    parts: Mapping[str, float] = MappingProxyType({})
    """Contributions of the layers that made it, in hundredths of alpha."""


class Controller(Protocol):
    """Chooses the next alpha from the last epoch.

    A controller may also have `on_tick(stats) -> Decision | None`, called between decisions.
    """

    name: str
    period: int
    """Epochs between decisions."""
    initial_alpha_centi: int
    """alpha from the start of an episode, warm-up included, to the first decision."""

    def reset(self, seed: int) -> None:
        """Forget the previous episode."""

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """Next alpha.

        Args:
            observation: [7] or [8], from `mdp.observe`.
            stats: the epoch (or `period` epochs, merged) behind it.
        """
