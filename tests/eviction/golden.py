"""A committed trace of 48 requests with the victims of every policy, worked out by the naive forms.

`python -m tests.eviction.golden` writes golden.json anew from `naive_laru`, which knows neither the
tree nor the heap.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("golden.json")
CAPACITY = 6
HALF_LIFE = 16.0

LOOP = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
SCAN = [5, 0, 6, 0, 7, 1, 8, 1, 9, 0, 10, 1]
RETURNS = [2, 3, 2, 4, 3, 2, 11, 4, 3, 12, 2, 13, 4]
MIXED = [0, 5, 1, 5, 0, 2, 9, 5, 1, 3, 0, 2, 5]
KEYS = LOOP + SCAN + RETURNS + MIXED


def predicted() -> list[float]:
    """Right for two requests of three; then too soon, or never."""
    out = []
    for t, key in enumerate(KEYS):
        rest = KEYS[t + 1 :]
        true = t + 1 + rest.index(key) if key in rest else math.inf
        out.append(true if t % 3 else (t + 1.0 if t % 2 else math.inf))
    return out


def scan_resistant(k: int) -> list[int]:
    """Victims by counting all accesses anew at each; -2: not admitted."""
    cache: set[int] = set()
    seen: dict[int, list[int]] = {}
    victims = []
    for t, key in enumerate(KEYS):
        seen.setdefault(key, []).append(t)
        worth = {x: math.fsum(0.5 ** ((t - at) / HALF_LIFE) for at in seen[x]) for x in seen}
        victim = -1
        if key not in cache:
            if len(cache) == k:
                lowest = min(cache, key=worth.__getitem__)
                victim = lowest if worth[lowest] < worth[key] else -2
                cache.discard(victim)
            if victim != -2:
                cache.add(key)
        victims.append(victim)
    return victims


def expected() -> dict[str, Any]:
    """Victims by policy."""
    from tests.eviction.naive_laru import served

    following = [
        t + 1 + KEYS[t + 1 :].index(key) if key in KEYS[t + 1 :] else math.inf
        for t, key in enumerate(KEYS)
    ]
    by_policy = {p: served(p, CAPACITY, KEYS, predicted()).victims for p in ("laru", "hf", "fpb")}
    by_policy["lru"] = served("lru", CAPACITY, KEYS, [0.0] * len(KEYS)).victims
    by_policy["belady"] = served("fpb", CAPACITY, KEYS, following).victims
    by_policy["scan_resistant"] = scan_resistant(CAPACITY)
    return {
        "keys": KEYS,
        "predicted": [None if math.isinf(p) else p for p in predicted()],
        "capacity": CAPACITY,
        "half_life": HALF_LIFE,
        "victims": by_policy,
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(expected()) + "\n", encoding="utf-8")
