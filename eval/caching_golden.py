"""Right values from outside for the caching policies, on public inputs that a user supplies.

The folder holds

    bk*.txt             BrightKite sets of github.com/adampolak/mts-with-predictions (data.zip),
                        a location a line
    cloudPhysicsIO.txt  of github.com/1a1a11a/libCacheSim (data/), a block number a line

Either may be absent; what is there is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eval.caching_predictors import pleco, popu
from hlem_env.errors import require
from hlem_env.eviction.replay import Keys, dense, replay

SLOTS = 10
"""Of the BrightKite caches."""
LEAST_MISSES = 33_990
"""Of an optimal policy over all BrightKite sets."""
RATIOS = {
    ("lru", None): 1.291,
    ("fpb", "popu"): 1.707,
    ("hf", "popu"): 1.357,
    ("laru", "popu"): 1.214,
    ("fpb", "pleco"): 2.081,
    ("hf", "pleco"): 1.386,
    ("laru", "pleco"): 1.366,
}
"""Competitive ratios on BrightKite as LCR (arXiv 2509.20979) and A. Antoniadis et al. define them."""
PREDICTORS = {"popu": popu, "pleco": pleco}
CLOUD = "cloudPhysicsIO.txt"
MISS_RATIOS = {
    ("lru", 489): 0.8380,
    ("lru", 4897): 0.8049,
    ("belady", 489): 0.7927,
    ("belady", 4897): 0.6290,
}


@dataclass(frozen=True)
class Check:
    """A right value and ours, rounded alike."""

    name: str
    expected: float
    found: float

    @property
    def good(self) -> bool:
        """Whether they are equal."""
        return self.expected == self.found


def read_lines(path: Path) -> Keys:
    """A key a line, any text, renumbered from 0."""
    keys = dense(np.array(path.read_text(encoding="utf-8").split()))
    require(keys.size > 0, "file", str(path), "a key a line, at least one")
    return keys


def checks(folder: Path, mirror: bool = False) -> Iterator[Check]:
    """Every right value that the folder has the inputs of.

    Predictions are taken as they are, overdue or not, unless `mirror`: so were the right values.

    Raises:
        ArgumentError: the folder has none of them.
    """
    sets = sorted(folder.glob("bk*.txt"))
    cloud = folder / CLOUD
    require(
        bool(sets) or cloud.is_file(), "golden", str(folder), f"a folder with bk*.txt or {CLOUD}"
    )
    if sets:
        yield from _brightkite([read_lines(path) for path in sets], mirror)
    if cloud.is_file():
        keys = read_lines(cloud)
        for (policy, slots), expected in MISS_RATIOS.items():
            found = round(replay(policy, keys, slots).miss_ratio, 4)
            yield Check(f"cloudPhysicsIO, {slots} slots, {policy}: miss ratio", expected, found)


def _brightkite(sets: list[Keys], mirror: bool) -> Iterator[Check]:
    least = sum(replay("belady", keys, SLOTS).misses for keys in sets)
    yield Check("BrightKite, belady: misses", LEAST_MISSES, least)
    for (policy, predictor), expected in RATIOS.items():
        misses = 0
        for keys in sets:
            predicted = None if predictor is None else PREDICTORS[predictor](keys)
            misses += replay(policy, keys, SLOTS, predicted, mirror=mirror).misses
        name = policy if predictor is None else f"{policy} with {predictor}"
        yield Check(f"BrightKite, {name}: competitive ratio", expected, round(misses / least, 3))
