"""The step limit that controllers with a wanted alpha keep to: the environment's largest action."""

from __future__ import annotations

from hlem_env.mdp import ACTIONS_CENTI
from hlem_env.telemetry import EpochStats

LARGEST_STEP_CENTI = max(ACTIONS_CENTI)


def towards(stats: EpochStats, wanted_centi: float) -> int:
    """The alpha in force moved towards `wanted_centi` by at most the largest step, hundredths."""
    alpha_centi = round(100 * stats.alpha_target)
    step = round(wanted_centi) - alpha_centi
    return alpha_centi + min(max(step, -LARGEST_STEP_CENTI), LARGEST_STEP_CENTI)
