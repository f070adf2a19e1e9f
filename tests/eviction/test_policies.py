"""Both policies against a plain model: all accesses in a dictionary, victims by sorting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hlem_env.errors import ArgumentError, BackendError
from hlem_env.eviction.policies import Lru, ScanResistant, make_policy
from hlem_env.eviction.protocol import EvictionPolicy

KEYS = 12
HALF_LIFE_S = 60.0
NOBODY = np.empty(0, np.int64)

one_key = st.integers(0, KEYS - 1)
some_keys = st.lists(one_key, min_size=1, unique=True)


def keys(*given: int) -> np.ndarray:
    return np.array(given, np.int64)


class PolicyMachine(RuleBasedStateMachine):
    """A cache's calls in any order."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.policy: EvictionPolicy = make_policy(self.name, HALF_LIFE_S)
        self.now = -100.0
        self.accesses: dict[int, list[float]] = {}
        self.cached: set[int] = set()
        self.pins: dict[int, int] = {}

    @initialize(start=st.sampled_from([-60.0, 0.0, 1.7e9]))
    def start(self, start: float) -> None:
        self.now = start

    def worth(self, key: int) -> float:
        if key not in self.accesses:
            return -math.inf
        if self.name == "lru":
            return self.accesses[key][-1]
        return math.fsum(0.5 ** ((self.now - at) / HALF_LIFE_S) for at in self.accesses[key])

    def in_order(self) -> list[int]:
        free = [key for key in self.cached if not self.pins.get(key)]
        return sorted(free, key=self.worth)

    # Time passes with every access: equal scores may be told apart either way.
    @rule(group=some_keys, seconds=st.sampled_from([0.37, 7.1, 61.3, 1e3, 2e4]))
    def access(self, group: list[int], seconds: float) -> None:
        for key in group:
            self.now += seconds
            call = self.policy.on_hit if key in self.cached else self.policy.on_miss
            call(keys(key), self.now)
            self.accesses.setdefault(key, []).append(self.now)

    @rule(group=some_keys)
    def insert(self, group: list[int]) -> None:
        new = [key for key in group if key not in self.cached and key in self.accesses]
        self.policy.on_insert(keys(*new), self.now)
        self.cached.update(new)

    @rule(group=some_keys)
    def pin(self, group: list[int]) -> None:
        self.policy.pin(keys(*group))
        for key in group:
            self.pins[key] = self.pins.get(key, 0) + 1

    @rule(key=one_key)
    def unpin(self, key: int) -> None:
        if self.pins.get(key):
            self.policy.unpin(keys(key))
            self.pins[key] -= 1
        else:
            with pytest.raises(BackendError, match="was not pinned"):
                self.policy.unpin(keys(key))

    @rule(key=one_key)
    def forget(self, key: int) -> None:
        if key in self.cached or self.pins.get(key):
            with pytest.raises(BackendError, match="cannot be forgotten"):
                self.policy.forget(keys(key))
        else:
            self.policy.forget(keys(key))
            self.accesses.pop(key, None)

    @rule(n=st.integers(1, KEYS), evict=st.integers(0, KEYS))
    def victims(self, n: int, evict: int) -> None:
        found = self.policy.pick_victims(n, NOBODY, self.now)
        self.assert_victims(found.tolist(), self.in_order()[:n])
        gone = found[:evict]
        self.policy.on_remove(gone)
        self.cached -= set(gone.tolist())

    @precondition(lambda self: self.accesses)
    @rule(n=st.integers(1, KEYS), data=st.data())
    def victims_for(self, n: int, data: st.DataObject) -> None:
        incoming = data.draw(st.sampled_from(sorted(self.accesses)))
        below = [k for k in self.in_order() if self.worth(k) < self.worth(incoming) * (1 - 1e-9)]
        if self.name == "lru":
            below = [k for k in self.in_order() if self.worth(k) < self.worth(incoming)]
        found = self.policy.pick_victims(n, keys(incoming), self.now)
        self.assert_victims(found.tolist(), below[:n])
        if found.size:
            assert self.policy.admit(keys(incoming), self.now).all()

    def assert_victims(self, found: list[int], expected: list[int]) -> None:
        """The same, where counts that are equal but for rounding may change places."""
        assert len(found) == len(expected) == len(set(found))
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == theirs or math.isclose(
                self.worth(mine), self.worth(theirs), rel_tol=1e-9, abs_tol=1e-70
            )


class ScanResistantMachine(PolicyMachine):
    name = "scan_resistant"


TestLru = PolicyMachine.TestCase
TestScanResistant = ScanResistantMachine.TestCase


def test_lru_admits_what_was_just_accessed() -> None:
    policy = Lru()
    policy.on_miss(keys(0, 1, 2), np.array([1.0, 2.0, 3.0]))
    policy.on_insert(keys(0, 1, 2), 3.0)
    policy.on_miss(keys(3), 4.0)
    assert policy.admit(keys(3), 4.0).tolist() == [True]
    assert policy.pick_victims(2, keys(3), 4.0).tolist() == [0, 1]


def test_scan_resistant_keeps_one_off_keys_out() -> None:
    policy = ScanResistant(HALF_LIFE_S)
    for _ in range(2):
        policy.on_hit(keys(0, 1), 0.0)
    policy.on_insert(keys(0, 1), 0.0)
    policy.on_miss(keys(2), 1.0)
    assert policy.admit(keys(2), 1.0).tolist() == [False]
    assert policy.pick_victims(1, keys(2), 1.0).size == 0
    # Two half-lives on, the residents' two accesses weigh half of one.
    policy.on_miss(keys(3), 121.0)
    assert policy.admit(keys(3), 121.0).tolist() == [True]


def test_admission_measures_the_best_against_the_first_victim() -> None:
    policy = ScanResistant(HALF_LIFE_S)
    for key, times in ((0, 1), (1, 4), (2, 9), (5, 5), (6, 2), (7, 3)):
        for _ in range(times):
            policy.on_miss(keys(key), 0.0)
    policy.on_insert(keys(0, 1, 2), 0.0)
    # 5 > 1 and, of the next, not 3 > 4; the third would have to beat 9.
    assert policy.admit(keys(6, 5, 7), 0.0).tolist() == [False, True, False]
    policy.pin(keys(0, 1, 2))
    assert not policy.admit(keys(5), 0.0).any(), "there is nobody to evict"


def test_a_forgotten_key_inherits_neither_recency_nor_frequency() -> None:
    for policy in (Lru(), ScanResistant(HALF_LIFE_S)):
        for now in range(1, 5):
            policy.on_miss(keys(0), float(now))
        policy.on_insert(keys(0), 4.0)
        policy.on_remove(keys(0))  # its place on the heap goes later
        policy.forget(keys(0))
        assert policy.worth(keys(0), 4.0)[0] <= 0.0
        # The number now belongs to a newcomer, who is worth less than both others.
        policy.on_miss(keys(0), 5.0)
        policy.on_insert(keys(0), 5.0)
        policy.on_miss(keys(1, 2, 1, 2)[:2], 6.0)
        policy.on_miss(keys(1, 2), 6.5)
        policy.on_insert(keys(1, 2), 6.5)
        assert policy.pick_victims(1, NOBODY, 7.0).tolist() == [0]


def test_times_that_go_back_do_not_make_a_key_older() -> None:
    policy = Lru()
    policy.on_miss(keys(0), 10.0)
    policy.on_miss(keys(1), 9.0)
    policy.on_hit(keys(0), 8.0)
    policy.on_insert(keys(0, 1), 10.0)
    assert policy.pick_victims(2, NOBODY, 10.0).tolist() == [1, 0]


def test_empty_calls_and_resize_change_nothing() -> None:
    policy = ScanResistant(HALF_LIFE_S)
    for call in (policy.on_hit, policy.on_miss, policy.on_insert):
        call(NOBODY, 0.0)
    for call in (policy.on_remove, policy.pin, policy.unpin, policy.forget):
        call(NOBODY)
    assert policy.admit(NOBODY, 0.0).size == 0
    policy.on_resize(7)
    assert policy.capacity == 7
    assert policy.pick_victims(3, NOBODY, 0.0).size == 0


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="policy='fifo'"):
        make_policy("fifo")
    with pytest.raises(ArgumentError, match="half_life_s"):
        ScanResistant(0.0)
    with pytest.raises(ArgumentError, match="n=0"):
        Lru().pick_victims(0, NOBODY, 0.0)
