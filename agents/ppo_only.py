"""A frozen policy, PPO's or another algorithm's, as a controller with nothing around it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hlem_env.controller import Decision
from hlem_env.errors import ArgumentError
from hlem_env.telemetry import EpochStats
from serving_bridge.policy import FrozenPolicy


class PpoOnly:
    """Moves alpha, each epoch, by the step that a frozen policy likes best.

    Args:
        policy: with the paper's seven features, or with `working_set` as the eighth. Where its
            `env_spec` names an algorithm, it is called by that.
    """

    period = 1
    initial_alpha_centi = 50

    def __init__(self, policy: FrozenPolicy) -> None:
        self.policy = policy
        features = policy.mdp_config.features.replace("_", " ")
        self.name = str(policy.metadata["env_spec"].get("algorithm", "ppo-only"))
        if features != "paper":
            self.name += f" ({features})"

    def reset(self, seed: int) -> None:
        """Do nothing: a decision depends on its epoch alone."""

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The alpha in force and the policy's step, unclipped.

        Args:
            observation: float32 [7] or [8], from `mdp.observe`. Features beyond the policy's are
                left out; the sets of features begin alike.
            stats: the epoch behind it; gives the alpha in force.

        Raises:
            ArgumentError: the observation has fewer features than the policy, or is not finite
                float32 of one dimension.
        """
        needed = len(self.policy.feature_names)
        if np.ndim(observation) == 1:
            if len(observation) < needed:
                allowed = f"{needed} features: {', '.join(self.policy.feature_names)}"
                raise ArgumentError("the number of observed features", len(observation), allowed)
            observation = observation[:needed]
        step_centi = self.policy.actions_centi[self.policy.act(observation)]
        return Decision(
            alpha_centi=round(100 * stats.alpha_target) + step_centi,
            reason=f"policy steps by {step_centi / 100:+.2f}",
            parts={"policy": float(step_centi)},
        )
