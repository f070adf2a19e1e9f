"""How popular the catalogue's items are: p(rank) ~ rank^-zipf, drawn by the inverse of its distribution.

Exact for the most popular items; the others by the integral between rank - 1/2 and rank + 1/2, as the
surrogate's curve has them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

EXACT_RANKS = 256


class Popularity:
    """The distribution of items, ranks counted from 0.

    Args:
        items: size of the catalogue.
        zipf: exponent.
    """

    def __init__(self, items: int, zipf: float) -> None:
        self.items = items
        head = min(items, EXACT_RANKS)
        low, high, power = head + 0.5, items + 0.5, 1.0 - zipf
        self.logarithmic = abs(power) < 1e-9
        """Whether the integral of rank^-zipf is a logarithm."""
        weight = np.arange(1, head + 1, dtype=np.float64) ** -zipf
        if self.logarithmic:
            low_value, high_value = np.log(low), np.log(high)
            mass = high_value - low_value
        else:
            low_value, high_value = low**power, high**power
            mass = (high_value - low_value) / power
        total = weight.sum() + (mass if items > head else 0.0)
        self._head = torch.from_numpy(np.cumsum(weight) / total)
        self._tail = torch.tensor(
            [self._head[-1], low_value, high_value - low_value, 1.0 if self.logarithmic else power],
            dtype=torch.float64,
        )
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The curve, on a device.

        Returns
        -------
            P(rank <= r) of the most popular items, float64 [head], and float64 [4]: their share; for
            the others the integral's value at the first and from there to the last, and its power.
        """
        if device not in self._on:
            self._on[device] = self._head.to(device), self._tail.to(device)
        return self._on[device]

    def rank(self, uniform: Tensor) -> Tensor:
        """Ranks int64 [n] at which the distribution reaches `uniform`, float64 [n] in [0, 1)."""
        head, (mass, value, rise, power) = self.on(uniform.device)
        rank = torch.searchsorted(head, uniform, right=True)
        if self.items > head.numel():
            integral = value + ((uniform - mass) / (1.0 - mass)).clamp_(min=0.0) * rise
            x = torch.exp(integral if self.logarithmic else torch.log(integral) / power)
            rank = torch.where(uniform < mass, rank, (x - 0.5).to(torch.int64))
        return rank.clamp_(0, self.items - 1)
