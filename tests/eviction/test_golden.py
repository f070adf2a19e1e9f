"""Every policy against the committed trace, and LRU and Belady against libCacheSim."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eval import caching_reference as reference
from hlem_env.eviction.replay import POLICIES, dense, replay
from hlem_env.workload.trace_readers import read_items
from tests.eviction.golden import FILE, expected

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))


def test_the_file_is_what_the_naive_forms_say() -> None:
    assert json.loads(json.dumps(expected())) == GOLDEN


@pytest.mark.parametrize("policy", POLICIES)
def test_victims_of_the_golden_trace(policy: str) -> None:
    predicted = np.array([np.inf if p is None else p for p in GOLDEN["predicted"]])
    keys = np.array(GOLDEN["keys"])
    result = replay(policy, keys, GOLDEN["capacity"], predicted, GOLDEN["half_life"])
    assert result.victim.tolist() == GOLDEN["victims"][policy]


def test_the_golden_trace_tells_the_policies_apart() -> None:
    victims = list(GOLDEN["victims"].values())
    assert len({tuple(v) for v in victims}) == len(POLICIES)


@pytest.mark.skipif(reference.missing() is not None, reason=str(reference.missing()))
@pytest.mark.parametrize(
    "name",
    ["movietweetings-100k.dat", "taobao-userbehavior-2h.csv", "mooncake-conversation.jsonl"],
)
def test_lru_and_belady_are_libcachesims(shared: Callable[[str], Path], name: str) -> None:
    keys = dense(read_items(shared(name))[:20_000])
    for share in (0.01, 0.1, 0.3):
        capacity = round(share * (int(keys.max()) + 1))
        for policy in ("lru", "belady"):
            ours = replay(policy, keys, capacity).misses
            assert ours == reference.misses(policy, keys, capacity)
