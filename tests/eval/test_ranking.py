"""Who is first in a cell, and what ties or beats the best policy."""

from typing import Any

import numpy as np
import pytest

from eval import cells
from eval.names import BEST_STATIC, REACHABLE
from eval.ranking import Place, against_best_policy, basis, ranking, verdict, verdict_sentences
from eval.results import P99, RATIO, ROOM

SEEDS = 16
NOISE = np.random.default_rng(3).normal(0, 5.0, SEEDS)
"""Of the requests, the same for all: far larger than the controllers' differences."""


def made_up(levels: dict[str, float], own: dict[str, float] | None = None) -> Any:
    """A cell: each controller's P99 is its level, the requests' noise and some noise of its own."""
    random = np.random.default_rng(4)
    controllers: dict[str, Any] = {}
    for name, level in levels.items():
        p99_ms = level + NOISE + (own or {}).get(name, 0.05) * random.normal(0, 1, SEEDS)
        controllers[name] = {"p99_ms": p99_ms.tolist(), "saturated": [False] * SEEDS}
    for columns in controllers.values():
        columns["summary"] = cells.summarise(columns, controllers)
    return {"seeds": list(range(SEEDS)), "controllers": controllers}


LEVELS = {
    BEST_STATIC: 50.0, REACHABLE: 40.0, "PID": 60.0, "ppo-only": 45.0, "rule": 44.0, "LSTM": 45.0,
    "ppo-only (working set)": 47.0,
}  # fmt: skip


def saturate(cell: Any, name: str) -> None:
    """Make a controller saturated, and all that is compared with it."""
    cell["controllers"][name]["saturated"] = [True] * SEEDS
    for columns in cell["controllers"].values():
        columns["summary"] = cells.summarise(columns, cell["controllers"])


def test_the_order_is_that_of_the_levels_and_references_have_no_rank() -> None:
    cell = made_up(LEVELS | {"LSTM": 45.5})
    saturate(cell, "PID")
    assert basis(cell) is ROOM
    assert ranking(cell) == [
        Place(REACHABLE, None), Place("rule", 1), Place("ppo-only", 2), Place("LSTM", 3),
        Place("ppo-only (working set)", 4), Place(BEST_STATIC, None), Place("PID", None),
    ]  # fmt: skip


def test_little_room_or_a_saturated_reference_change_what_is_ranked_by_not_the_order() -> None:
    wide = made_up(LEVELS)
    names = [place.name for place in ranking(wide) if place.name not in (REACHABLE, BEST_STATIC)]
    narrow = made_up(LEVELS | {REACHABLE: 49.5})
    assert basis(narrow) is RATIO
    saturate(wide, BEST_STATIC)
    assert basis(wide) is P99
    for cell in (narrow, wide):
        places = [place for place in ranking(cell) if place.rank]
        assert [place.name for place in places] == names
        assert [place.rank for place in places] == list(range(1, len(names) + 1))


def test_a_small_difference_shared_by_all_seeds_is_told_through_large_noise() -> None:
    cell = made_up(LEVELS | {"rule": 44.7}, {"LSTM": 3.0})
    difference = against_best_policy(cell)["rule"]
    assert difference.high < 0 and difference.value == pytest.approx(-0.3, abs=0.05)
    # Their intervals overlap all the same: the noise of the requests is in both.
    rule, policy = (cell["controllers"][n]["summary"]["p99_ms"] for n in ("rule", "ppo-only"))
    assert rule["high"] > policy["low"]
    found = verdict(cell)
    assert found is not None and found.policy.name == "ppo-only"
    assert (found.ahead, found.tied, found.behind) == (("rule",), ("LSTM",), ("PID",))


def test_sentences_say_what_beats_and_what_ties() -> None:
    said = " ".join(verdict_sentences(made_up(LEVELS, {"LSTM": 3.0})))
    assert "Beaten by rule." in said and "Tied with LSTM:" in said and "is behind it" in said
    alone = " ".join(verdict_sentences(made_up(LEVELS | {"rule": 60.0, "LSTM": 61.0})))
    assert "No baseline beats or ties it." in alone and "rank 1" in alone
    assert verdict_sentences(made_up({BEST_STATIC: 50.0, "PID": 44.0})) == []


def test_one_seed_decides_nothing() -> None:
    cell = made_up(LEVELS)
    cell["seeds"] = [0]
    for columns in cell["controllers"].values():
        columns["p99_ms"], columns["saturated"] = columns["p99_ms"][:1], [False]
    assert verdict(cell) is None
    assert "cannot be told" in verdict_sentences(cell)[-1]


def test_saturated_policies_are_said_to_be_so() -> None:
    cell = made_up(LEVELS)
    for name in ("ppo-only", "ppo-only (working set)"):
        saturate(cell, name)
    assert verdict(cell) is None and against_best_policy(cell) == {}
    assert verdict_sentences(cell) == ["Every PPO policy is saturated here."]
