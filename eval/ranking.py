"""Which controller is best in a cell, and which baselines tie or beat the best PPO policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.names import BEST_STATIC, REFERENCES, is_policy
from eval.results import P99, RATIO, ROOM, Column, is_saturated
from eval.statistics import Estimate, difference_of_means


@dataclass(frozen=True)
class Place:
    """A controller's place in a cell's ranking."""

    name: str
    rank: int | None
    """From 1; None where it is saturated or nobody can run it."""


def basis(cell: Mapping[str, Any]) -> Column:
    """What the cell is ranked by: room recovered, or else P99 / best static, or else P99."""
    for column in (ROOM, RATIO):
        if any(column.of(cell, name) is not None for name in cell["controllers"]):
            return column
    return P99


def ranking(cell: Mapping[str, Any]) -> list[Place]:
    """All controllers, the best first, saturated ones last; references have a place, but no rank."""
    column = basis(cell)
    best_is_high = column is ROOM

    def order(name: str) -> float:
        figure = column.of(cell, name)
        if figure is None:
            return math.inf
        return -figure[0] if best_is_high else figure[0]

    places, rank = [], 0
    for name in sorted(cell["controllers"], key=order):
        ranked = name not in REFERENCES and order(name) < math.inf
        rank += ranked
        places.append(Place(name, rank if ranked else None))
    return places


def best_policy(cell: Mapping[str, Any]) -> Place | None:
    """The highest ranked PPO policy; None where there is none or all are saturated."""
    ranked = (place for place in ranking(cell) if place.rank is not None)
    return next((place for place in ranked if is_policy(place.name)), None)


def against_best_policy(cell: Mapping[str, Any]) -> dict[str, Estimate]:
    """P99 of each controller less the best policy's, ms, paired by seed.

    Saturated controllers and the policy itself are left out; empty without a policy.
    """
    policy = best_policy(cell)
    if policy is None:
        return {}
    own = np.array(cell["controllers"][policy.name]["p99_ms"], float)
    return {
        name: difference_of_means(np.array(columns["p99_ms"], float), own)
        for name, columns in cell["controllers"].items()
        if name != policy.name and not is_saturated(cell, name)
    }


@dataclass(frozen=True)
class Verdict:
    """Baselines by how their P99 compares with the best policy's: names, the best first."""

    policy: Place
    ahead: tuple[str, ...]
    """The 95 % interval of the paired difference lies below 0."""
    tied: tuple[str, ...]
    """It includes 0."""
    behind: tuple[str, ...]
    """It lies above 0."""


def verdict(cell: Mapping[str, Any]) -> Verdict | None:
    """How the baselines stand to the best policy; None without one, or with a single seed."""
    policy = best_policy(cell)
    if policy is None or len(cell["seeds"]) < 2:
        return None
    differences = against_best_policy(cell)
    baselines = [place.name for place in ranking(cell) if place.rank and not is_policy(place.name)]
    return Verdict(
        policy,
        tuple(name for name in baselines if differences[name].high < 0),
        tuple(name for name in baselines if differences[name].low <= 0 <= differences[name].high),
        tuple(name for name in baselines if differences[name].low > 0),
    )


def verdict_sentences(cell: Mapping[str, Any]) -> list[str]:
    """The verdict in words; empty where no policy was run."""
    if not any(map(is_policy, cell["controllers"])):
        return []
    policy, found = best_policy(cell), verdict(cell)
    if policy is None:
        return ["Every PPO policy is saturated here."]
    column = basis(cell)
    figure = column.of(cell, policy.name)
    assert figure is not None  # it has a rank
    value, low, high = (f"{v:.{column.digits}f}" for v in figure)
    what, _, unit = column.heading.partition(", ")
    measured = " ".join(filter(None, (what, value, unit)))
    said = [f"Best PPO policy: {policy.name}, rank {policy.rank} ({measured} [{low}, {high}])."]
    if found is None:
        return [*said, "One seed gives no interval: what ties or beats it cannot be told."]
    if found.ahead:
        said.append(f"Beaten by {_listed(found.ahead)}.")
    if found.tied:
        said.append(f"Tied with {_listed(found.tied)}: the difference's interval includes 0.")
    if not found.ahead and not found.tied and found.behind:
        said.append("No baseline beats or ties it.")
    hindsight = against_best_policy(cell).get(BEST_STATIC)
    if hindsight is not None:
        is_ahead, is_behind = hindsight.high < 0, hindsight.low > 0
        how = "beats it" if is_ahead else "is behind it" if is_behind else "ties it"
        said.append(
            f"The best static split in hindsight, which nobody can choose beforehand, {how}."
        )
    return said


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
