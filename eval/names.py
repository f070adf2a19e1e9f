"""Names of the controllers that a comparison itself makes, and which kind a name is of."""

from __future__ import annotations

BEST_STATIC, DESIGN_POINT = "best static in hindsight", "design-point static"
ALPHA_STAR, REACHABLE, FORESEEN = "alpha* oracle", "reachable oracle", "foreseen oracle"
ORACLES = (ALPHA_STAR, REACHABLE, FORESEEN)
REFERENCES = (*ORACLES, BEST_STATIC)
"""These know the requests or the course of the workload: nobody can run them."""


def is_policy(name: str) -> bool:
    """Whether the controller is a frozen PPO policy or built on one."""
    return name.lower().startswith(("ppo", "smart"))


def is_static(name: str) -> bool:
    """Whether the controller holds one alpha."""
    return name.startswith("static ") or name in (BEST_STATIC, DESIGN_POINT)
