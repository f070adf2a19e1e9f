"""The victim heap against a plain model: visits in a dictionary, the victim by a search."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hlem_env.eviction import recency
from hlem_env.eviction.recency import LRU, SCAN_RESISTANT

SLOTS = 12
HALF_LIFE_S = 60.0
NEAR = 1e-9
"""Relative difference of decayed counts below which either order is right."""

slots = st.integers(0, SLOTS - 1)


class Heap:
    """The arrays and sizes that the functions work on."""

    def __init__(self, policy: int, users: int) -> None:
        self.policy = policy
        self.users = np.zeros(users, recency.USER_FIELDS)
        self.heap = np.empty(users, recency.HEAP_ENTRY)
        self.size = 0
        self.origin_s = 0.0

    def touch(self, slot: int, now_s: float) -> None:
        user = self.users[slot]
        weight = 2.0 ** ((now_s - self.origin_s) / HALF_LIFE_S)
        user["score"] = recency.touch(self.policy, user["score"], now_s, weight)

    def admit(self, slot: int, pages: int = 1) -> None:
        self.users[slot]["pages"] = pages
        self.size = recency.push(self.users, self.heap, self.size, slot)

    def drop(self, slot: int) -> None:
        self.users[slot]["pages"] = 0

    def lowest(self) -> int:
        """Slot of the resident user with the lowest score, -1 for none."""
        self.size = recency.settle_root(self.users, self.heap, self.size)
        return int(self.heap[0]["slot"]) if self.size else -1

    def pop(self) -> None:
        self.size = recency.pop(self.users, self.heap, self.size)

    def rebase(self, half_lives: float) -> None:
        recency.rebase(self.users, self.heap, self.size, half_lives)
        self.origin_s += half_lives * HALF_LIFE_S


class HeapMachine(RuleBasedStateMachine):
    """Random touches, pushes, drops and evictions, as a KV cache makes them."""

    policy = LRU

    def __init__(self) -> None:
        super().__init__()
        self.real = Heap(self.policy, SLOTS)
        self.now_s = 0.0
        self.visits: dict[int, list[float]] = {slot: [] for slot in range(SLOTS)}
        self.resident: set[int] = set()

    def worth(self, slot: int) -> float:
        """What the policy's definition says of a user: the lowest goes first."""
        visits = self.visits[slot]
        if self.policy == LRU:
            return visits[-1]
        return math.fsum(0.5 ** ((self.now_s - at_s) / HALF_LIFE_S) for at_s in visits)

    def assert_lowest(self) -> int:
        victim = self.real.lowest()
        if not self.resident:
            assert victim == -1
        else:
            assert victim in self.resident
            least = min(map(self.worth, self.resident))
            assert self.worth(victim) <= least * (1 + NEAR)
        return victim

    @rule(slot=slots, gap_s=st.floats(1e-3, 200.0))
    def visit(self, slot: int, gap_s: float) -> None:
        """A request: a hit only raises the score, a miss admits."""
        self.now_s += gap_s
        self.visits[slot].append(self.now_s)
        self.real.touch(slot, self.now_s)
        self.real.admit(slot)
        self.resident.add(slot)

    @rule(slot=slots, gap_s=st.floats(1e-3, 200.0))
    def visit_unadmitted(self, slot: int, gap_s: float) -> None:
        self.now_s += gap_s
        self.visits[slot].append(self.now_s)
        self.real.touch(slot, self.now_s)

    @rule(slot=slots)
    def drop(self, slot: int) -> None:
        self.real.drop(slot)
        self.resident.discard(slot)

    @precondition(lambda self: self.resident)
    @rule()
    def evict(self) -> None:
        victim = self.assert_lowest()
        self.real.drop(victim)
        self.resident.discard(victim)

    @precondition(lambda self: len(self.resident) > 1)
    @rule(count=st.integers(1, SLOTS))
    def pick_several_and_put_them_back(self, count: int) -> None:
        """A large entry that is not admitted after all."""
        picked: list[int] = []
        everyone = set(self.resident)
        while self.resident and len(picked) < count:
            victim = self.assert_lowest()
            picked.append(victim)
            self.resident.discard(victim)
            self.real.pop()
        for slot in picked:
            self.real.size = recency.push(self.real.users, self.real.heap, self.real.size, slot)
        self.resident = everyone

    @precondition(lambda self: self.policy == SCAN_RESISTANT)
    @rule(half_lives=st.sampled_from([1.0, 7.0, 64.0]))
    def rebase(self, half_lives: float) -> None:
        self.real.rebase(half_lives)

    @invariant()
    def lowest_is_right(self) -> None:
        self.assert_lowest()

    @invariant()
    def each_resident_stands_on_the_heap_once(self) -> None:
        on_heap = self.real.heap["slot"][: self.real.size].tolist()
        assert len(on_heap) == len(set(on_heap)) <= SLOTS
        assert self.resident <= set(on_heap)
        assert set(np.flatnonzero(self.real.users["in_heap"])) == set(on_heap)


class ScanResistantMachine(HeapMachine):
    policy = SCAN_RESISTANT


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestLru(HeapMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = SETTINGS


class TestScanResistant(ScanResistantMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = SETTINGS


@given(st.floats(-300, 300) | st.floats(-2e-3, 2e-3))
def test_growth_is_a_power_of_two(half_lives: float) -> None:
    assert recency.growth(half_lives) == pytest.approx(2.0**half_lives, rel=1e-14)


@pytest.mark.parametrize("policy", [LRU, SCAN_RESISTANT])
def test_all_go_in_the_order_of_a_sort(policy: int) -> None:
    rng = np.random.default_rng(1)
    users, now_s = 500, 0.0
    heap = Heap(policy, users)
    visits: dict[int, list[float]] = {slot: [] for slot in range(users)}
    for slot in rng.zipf(1.3, 5000) % users:
        now_s += float(rng.exponential(0.5))
        visits[int(slot)].append(now_s)
        heap.touch(int(slot), now_s)
        heap.admit(int(slot))

    def worth(slot: int) -> float:
        if policy == LRU:
            return visits[slot][-1]
        return math.fsum(0.5 ** ((now_s - at_s) / HALF_LIFE_S) for at_s in visits[slot])

    expected = sorted((slot for slot in visits if visits[slot]), key=worth)
    order = []
    while (victim := heap.lowest()) >= 0:
        order.append(victim)
        heap.drop(victim)
    assert order == expected
    assert len(order) > 100


def test_a_frequent_user_outlives_a_recent_one_only_when_scans_are_resisted() -> None:
    lowest = {}
    for policy in (LRU, SCAN_RESISTANT):
        heap = Heap(policy, 2)
        for slot, now_s in ((0, 0.0), (0, 1.0), (0, 2.0), (1, 30.0)):
            heap.touch(slot, now_s)
            heap.admit(slot)
        lowest[policy] = heap.lowest()
    assert lowest == {LRU: 0, SCAN_RESISTANT: 1}


def test_a_count_halves_in_a_half_life() -> None:
    heap = Heap(SCAN_RESISTANT, 2)
    heap.touch(0, 0.0)
    heap.touch(0, 0.0)
    heap.touch(1, HALF_LIFE_S - 0.01)
    assert heap.users["score"][0] > heap.users["score"][1]
    heap.touch(1, HALF_LIFE_S - 0.01)
    assert heap.users["score"][0] < heap.users["score"][1]
    even = Heap(SCAN_RESISTANT, 2)
    even.touch(0, 0.0)
    even.touch(0, 0.0)
    even.touch(1, HALF_LIFE_S)
    assert even.users["score"][0] == even.users["score"][1]


def test_counts_keep_their_order_for_a_million_seconds() -> None:
    """Against sums kept as logarithms, which neither overflow nor need a new origin."""
    rng = np.random.default_rng(2)
    users = 40
    heap = Heap(SCAN_RESISTANT, users)
    logs = np.full(users, -np.inf)
    now_s, rebases = 0.0, 0
    while now_s < 1e6:
        now_s += float(rng.exponential(100.0))
        slot = int(rng.integers(users) ** 2 // users)
        if now_s - heap.origin_s > recency.REBASE_HALF_LIVES * HALF_LIFE_S:
            heap.rebase(recency.REBASE_HALF_LIVES)
            rebases += 1
        heap.touch(slot, now_s)
        heap.admit(slot)
        logs[slot] = np.logaddexp2(logs[slot], now_s / HALF_LIFE_S)
        scores = heap.users["score"]
        assert np.isfinite(scores).all()
        recent = np.flatnonzero(logs > logs.max() - 500)
        by_log = recent[np.argsort(logs[recent])]
        assert (np.diff(scores[by_log]) >= -NEAR * scores[by_log][:-1]).all()
        assert (scores[recent] > 0).all()
    assert rebases > 60
    resident = np.flatnonzero(np.isfinite(logs))
    assert heap.lowest() == resident[logs[resident].argmin()]
