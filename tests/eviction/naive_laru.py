"""LARU, HF and FPB as their definition reads: lists, sets and searches, one item at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

FIXED = {"hf": 4, "lru": 1, "fpb": 10**9}


@dataclass
class Naive:
    """One cache. `victims` holds an entry a request: the key evicted for it, or -1."""

    policy: str
    k: int
    cache: list[int] = field(default_factory=list)
    """Least recent first."""
    predicted: dict[int, float] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    distinct: set[int] = field(default_factory=set)
    evicted: set[int] = field(default_factory=set)
    confidence: float = 1.0
    phases: list[list[str]] = field(default_factory=lambda: [[]])
    """By phase, the kind of each eviction: "prediction" or "recency"."""
    victims: list[int] = field(default_factory=list)
    misses: int = 0

    def begin_phase(self) -> None:
        self.distinct, self.evicted, self.confidence = set(), set(), 1.0
        self.phases.append([])

    def access(self, x: int, now: float, next_request: float) -> None:
        if x not in self.distinct:
            if len(self.distinct) == self.k:
                self.begin_phase()
            self.distinct.add(x)
        victim = -1
        if x not in self.cache:
            self.misses += 1
            if len(self.cache) == self.k:
                victim = self.evict_for(x, now)
        else:
            self.cache.remove(x)
        self.predicted[x] = next_request
        self.cache.append(x)
        self.victims.append(victim)

    def evict_for(self, x: int, now: float) -> int:
        free = [item for item in self.cache if item not in self.pinned]
        if self.policy == "laru" and x in self.evicted:
            victim = free[0]
            self.confidence /= 2
            self.phases[-1].append("recency")
        else:
            n = FIXED.get(self.policy) or max(1, math.ceil(self.confidence * self.k))
            victim = max(free[:n], key=lambda item: self.farness(item, now))  # the first of equals
            self.evicted.add(victim)
            self.phases[-1].append("prediction")
        self.cache.remove(victim)
        return victim

    def farness(self, item: int, now: float) -> float:
        """Predicted next request, mirrored where it is overdue, from now on."""
        p = self.predicted[item]
        return p - now if p >= now else now - p

    def resize(self, k: int) -> list[int]:
        """Victims, in order of recency."""
        self.k = k
        self.begin_phase()
        free = [item for item in self.cache if item not in self.pinned]
        gone = free[: max(len(self.cache) - k, 0)]
        self.cache = [item for item in self.cache if item not in gone]
        return gone


def served(policy: str, k: int, keys: Sequence[int], predicted: Sequence[float]) -> Naive:
    naive = Naive(policy, k)
    for now, (key, following) in enumerate(zip(keys, predicted, strict=True)):
        naive.access(key, float(now), following)
    return naive


def fewest_misses(k: int, keys: Sequence[int]) -> int:
    """Belady's rule by search through the rest of the sequence."""
    cache: set[int] = set()
    misses = 0
    for t, key in enumerate(keys):
        if key in cache:
            continue
        misses += 1
        if len(cache) == k:
            rest = keys[t + 1 :]
            cache.remove(max(cache, key=lambda c: rest.index(c) if c in rest else len(rest)))
        cache.add(key)
    return misses
