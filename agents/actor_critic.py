"""The network that PPO trains: an actor and a critic that share nothing."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hlem_env.errors import require
from hlem_env.mdp import ACTIONS_CENTI

HIDDEN = (64, 128)
"""Units of the hidden layers, of the actor and of the critic alike."""
LEAST_SPREAD = 0.05
"""A feature that hardly moves is not stretched beyond 1 / this."""


class ActorCritic(nn.Module):
    """Actor n_features-64-128-n_actions and critic n_features-64-128-1, tanh, float32.

    Weights are orthogonal with gain sqrt(2), the actor's head with 0.01 (a new policy is nearly
    uniform), the critic's with 1; biases are 0: as in CleanRL's `ppo.py`. With 7 features and 7
    actions the two have 18,696 parameters, with 8 features 18,824.

    Both see the state standardised by `standardise`. A step of alpha is 0.06 of a feature's range of
    1: unstretched, tanh units are near linear across it, and the same training comes less far.
    `actor_weights` folds this into the first layer, so a frozen policy takes the state as it is.

    Args:
        n_features: length of the state, 7 or 8 for `mdp.observe`.
        n_actions: number of discrete actions.
        generator: draws the initial weights; None is a new one with seed 0. Global random state is
            neither read nor changed.

    Raises:
        ArgumentError: `n_features` or `n_actions` below 1.
    """

    center: Tensor
    stretch: Tensor

    def __init__(
        self,
        n_features: int,
        n_actions: int = len(ACTIONS_CENTI),
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        require(n_features >= 1, "n_features", n_features, "1 or more")
        require(n_actions >= 1, "n_actions", n_actions, "1 or more")
        if generator is None:
            generator = torch.Generator().manual_seed(0)
        self.n_features, self.n_actions = n_features, n_actions
        self.actor = _mlp((n_features, *HIDDEN, n_actions), 0.01, generator)
        self.critic = _mlp((n_features, *HIDDEN, 1), 1.0, generator)
        self.register_buffer("center", torch.zeros(n_features))
        self.register_buffer("stretch", torch.ones(n_features))

    def standardise(self, states: NDArray[np.float32]) -> None:
        """Give every feature mean 0 and deviation 1 over these states, once, before training.

        Args:
            states: [n, n_features], as the environment gives them.
        """
        spread = np.maximum(states.std(axis=0), LEAST_SPREAD)
        self.center.copy_(torch.from_numpy(states.mean(axis=0)))
        self.stretch.copy_(torch.from_numpy(1.0 / spread))

    def logits(self, obs: Tensor) -> Tensor:
        """Unnormalised log-probabilities: float32 [..., n_features] to [..., n_actions]."""
        logits: Tensor = self.actor((obs - self.center) * self.stretch)
        return logits

    def value(self, obs: Tensor) -> Tensor:
        """Estimated return of the states: float32 [..., n_features] to [...]."""
        value: Tensor = self.critic((obs - self.center) * self.stretch)
        return value.squeeze(-1)

    def act(self, obs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Action indices: float32 [..., n_features] to int64 [...].

        Without a generator the most likely action, as a frozen policy takes it; with one, a sample.
        """
        logits = self.logits(obs)
        if generator is None:
            return logits.argmax(-1)
        # What torch.multinomial draws, without its checks, which take longer than all else here.
        arrivals = torch.empty_like(logits).exponential_(generator=generator)
        return (logits.softmax(-1) / arrivals).argmax(-1)

    def actor_weights(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the actor's tensors, as `serving_bridge.policy.export_policy` takes them.

        `layers.I.weight` is float32 [out, in] and `layers.I.bias` float32 [out], I from 0. They take
        states as the environment gives them: W (x - c) s + b = (W s) x + (b - (W s) c).
        """
        weights = {
            f"layers.{index}.{kind}": getattr(linear, kind).detach().cpu().numpy().copy()
            for index, linear in enumerate(_linears(self.actor))
            for kind in ("weight", "bias")
        }
        stretched = weights["layers.0.weight"] * self.stretch.cpu().numpy().astype(np.float64)
        shifted = weights["layers.0.bias"] - stretched @ self.center.cpu().numpy()
        weights["layers.0.weight"] = stretched.astype(np.float32)
        weights["layers.0.bias"] = shifted.astype(np.float32)
        return weights

    def load_actor_weights(self, weights: Mapping[str, NDArray[np.float32]]) -> None:
        """Set the actor to weights in the form of `actor_weights`, states no longer standardised.

        The critic's weights stay as they are.

        Raises:
            ArgumentError: a tensor is missing, is unknown or has another shape.
        """
        mine = {
            f"layers.{index}.{kind}": getattr(linear, kind)
            for index, linear in enumerate(_linears(self.actor))
            for kind in ("weight", "bias")
        }
        have = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        need = {name: tuple(tensor.shape) for name, tensor in mine.items()}
        require(have == need, "weights", have, f"tensors of these shapes: {need}")
        with torch.no_grad():
            for name, parameter in mine.items():
                parameter.copy_(torch.tensor(weights[name]))
            self.center.zero_()
            self.stretch.fill_(1.0)

    def parity_vectors(
        self, rng: np.random.Generator, count: int = 64
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Random states and torch's logits of them, to be stored with an exported policy.

        Args:
            rng: draws the states, uniform in [0, 1].
            count: number of states.

        Returns:
            inputs, float32 [count, n_features], and logits, float32 [count, n_actions].
        """
        inputs = rng.random((count, self.n_features), dtype=np.float32)
        device = next(self.parameters()).device
        with torch.inference_mode():
            logits = self.logits(torch.from_numpy(inputs).to(device)).cpu().numpy().copy()
        return inputs, logits


def _mlp(sizes: tuple[int, ...], head_gain: float, generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in pairwise(sizes):
        # By way of "meta", as nn.Linear draws its own first weights from the global generator.
        linear = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
        is_head = len(layers) == 2 * (len(sizes) - 2)
        gain = head_gain if is_head else sqrt(2)
        nn.init.orthogonal_(linear.weight, gain, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if is_head else [linear, nn.Tanh()]
    return nn.Sequential(*layers)


def _linears(network: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in network if isinstance(layer, nn.Linear)]
