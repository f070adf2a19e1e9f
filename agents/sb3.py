"""Policies that Stable-Baselines3 trained (`train.sb3`), as references from outside.

They run as frozen policies, without the library. Of PPO's actor the likeliest step is taken, of DQN's
action values the largest: both are the argmax of the last layer.
"""

from __future__ import annotations

from agents.forecast import PRETRAINED
from agents.ppo_only import PpoOnly
from serving_bridge.policy import FrozenPolicy

FOLDER = PRETRAINED / "sb3"
"""One level below the shipped policies, so that the name `ppo` does not take these for ours."""


def ppo() -> PpoOnly:
    """SB3's PPO with eight features."""
    return PpoOnly(FrozenPolicy.load(FOLDER / "ppo"))


def dqn() -> PpoOnly:
    """SB3's DQN with eight features."""
    return PpoOnly(FrozenPolicy.load(FOLDER / "dqn"))
