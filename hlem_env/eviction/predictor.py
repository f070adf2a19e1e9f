"""What a learned policy needs of a predictor, and predictors that need no training."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require
from hlem_env.eviction.protocol import Keys

Floats = NDArray[np.float64]


class Predictor(Protocol):
    """Says how long it is until a key's next request.

    It hears of every access once, so it may learn from them. Nothing here raises because a model
    failed: then `usable` is false, and the policy that asks goes by recency.
    """

    @property
    def usable(self) -> bool:
        """Whether predictions are worth following now."""

    def access(self, keys: Keys, times: Floats) -> Floats:
        """The keys [n] are requested at times [n]: predicted gaps [n] to their next requests.

        Units are those of the times; infinity means never.
        """

    def again(self, keys: Keys, now: float) -> Floats:
        """Predicted gaps [n] from `now` of keys [n] that were requested before and are overdue."""

    def describe(self, keys: Keys, sizes: NDArray[np.int64]) -> None:
        """Sizes [n] of what the keys stand for, such as history lengths, before their access."""

    def forget(self, keys: Keys) -> None:
        """Whatever gets these numbers next is new."""

    def close(self) -> None:
        """Stop what runs in the background."""


class GivenGaps:
    """Gaps from a function of keys and times: for tests, and for predictors of one's own."""

    usable = True

    def __init__(self, gaps: object) -> None:
        require(callable(gaps), "gaps", gaps, "a function of keys [n] and times [n]")
        self._gaps = gaps

    def access(self, keys: Keys, times: Floats) -> Floats:
        """See `Predictor.access`."""
        gaps: Floats = np.asarray(self._gaps(keys, times), np.float64)  # type: ignore[operator]
        return gaps

    def again(self, keys: Keys, now: float) -> Floats:
        """See `Predictor.again`."""
        return self.access(keys, np.full(keys.size, now))

    def describe(self, keys: Keys, sizes: NDArray[np.int64]) -> None:
        """See `Predictor.describe`."""

    def forget(self, keys: Keys) -> None:
        """See `Predictor.forget`."""

    def close(self) -> None:
        """See `Predictor.close`."""
