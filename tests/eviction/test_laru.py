"""LARU's proved properties, and the compiled forms against the naive one.

HLEM_PROPERTY_CASES sets the number of cases of each property (nightly: 10000).
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlem_env.errors import ArgumentError
from hlem_env.eviction import laru, recency_tape
from hlem_env.eviction.learned import Learned
from hlem_env.eviction.predictor import GivenGaps
from hlem_env.eviction.replay import dense, next_requests, replay
from tests.eviction.naive_laru import Naive, fewest_misses, served

CASES = int(os.environ.get("HLEM_PROPERTY_CASES") or 200)
many = settings(max_examples=CASES, deadline=None)

capacities = st.integers(1, 9)
sequences = st.lists(st.integers(0, 14), min_size=1, max_size=120)
policies = st.sampled_from(["laru", "hf", "fpb"])


@st.composite
def predicted_sequences(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Keys and arbitrary predictions: overdue ones, ties and infinity included."""
    keys = draw(sequences)
    times = st.integers(-5, 130).map(float) | st.sampled_from([0.0, 60.0, math.inf])
    predicted = draw(st.lists(times, min_size=len(keys), max_size=len(keys)))
    return np.array(keys), np.array(predicted)


def phase_lengths(keys: np.ndarray, k: int) -> int:
    """Number of phases of k distinct keys."""
    phases, distinct = 1, set()
    for key in keys.tolist():
        if key not in distinct and len(distinct) == k:
            phases, distinct = phases + 1, set()
        distinct.add(key)
    return phases


@many
@given(sequences, capacities)
def test_with_true_predictions_misses_are_beladys(sequence: list[int], k: int) -> None:
    keys = np.array(sequence)
    true = next_requests(keys)
    least = fewest_misses(k, sequence)
    assert replay("laru", keys, k, true).misses == least
    assert replay("belady", keys, k).misses == least


@many
@given(predicted_sequences(), capacities)
def test_bounds_hold_under_any_predictions(case: tuple[np.ndarray, np.ndarray], k: int) -> None:
    keys, predicted = case
    result = replay("laru", keys, k, predicted)
    by_phase = served("laru", k, keys.tolist(), predicted.tolist()).phases
    for kinds in by_phase:
        assert kinds.count("prediction") <= k and kinds.count("recency") <= k
    phases = phase_lengths(keys, k)
    assert len(by_phase) == phases
    assert result.misses <= k + 2 * k * (phases - 1)
    assert result.misses <= 2 * k * fewest_misses(k, keys.tolist())


@many
@given(sequences, capacities, st.sampled_from([-7.0, 0.0, 50.0, 1e9, math.inf]))
def test_equal_predicted_times_are_lru(sequence: list[int], k: int, time: float) -> None:
    keys = np.array(sequence)
    lru = replay("lru", keys, k)
    for policy in ("laru", "fpb", "hf"):
        same = replay(policy, keys, k, np.full(keys.size, time))
        assert same.victim.tolist() == lru.victim.tolist()
    assert lru.victim.tolist() == served("lru", k, sequence, [0.0] * len(sequence)).victims


@many
@given(predicted_sequences(), capacities, policies)
def test_the_tree_picks_the_victims_of_a_search(
    case: tuple[np.ndarray, np.ndarray], k: int, policy: str
) -> None:
    keys, predicted = case
    found = replay(policy, keys, k, predicted)
    expected = served(policy, k, keys.tolist(), predicted.tolist())
    assert found.victim.tolist() == expected.victims
    assert found.misses == expected.misses


@pytest.mark.parametrize("policy", ["laru", "hf", "fpb"])
@pytest.mark.parametrize("k", [40, 300, 600])
def test_the_tree_picks_the_victims_of_a_search_on_several_levels(policy: str, k: int) -> None:
    rng = np.random.default_rng(k)
    keys = (3 * k * rng.random(6000) ** 2).astype(np.int64)
    gaps = rng.choice([5, 50, 500, 5000], keys.size) * rng.integers(1, 9, keys.size)
    predicted = np.arange(keys.size) + gaps.astype(np.float64)
    predicted[rng.random(keys.size) < 0.05] = math.inf
    found = replay(policy, keys, k, predicted)
    expected = served(policy, k, keys.tolist(), predicted.tolist())
    assert found.victim.tolist() == expected.victims
    assert np.count_nonzero(found.victim >= 0) > 1000


def test_constant_gaps_evict_the_most_recent() -> None:
    keys = np.array([0, 1, 2, 3])
    assert replay("fpb", keys, 3, np.arange(4) + 100.0).victim.tolist() == [-1, -1, -1, 2]


class Cache:
    """A unit-size cache around the protocol's class, beside the naive one."""

    def __init__(self, name: str, k: int) -> None:
        self.following: dict[int, float] = {}
        gaps = lambda keys, times: [self.following[k] - t for k, t in zip(keys.tolist(), times)]  # noqa: B905, E731
        self.policy = Learned(name, GivenGaps(gaps))
        self.policy.on_resize(k)
        self.naive = Naive(name, k)
        self.cached: set[int] = set()

    def access(self, key: int, now: float, gap: float) -> None:
        self.following[key] = now + gap
        one = np.array([key])
        if key in self.cached:
            self.policy.on_hit(one, now)
            self.naive.access(key, now, now + gap)
            return
        self.policy.on_miss(one, now)
        full = len(self.cached) >= self.naive.k
        blocked = full and self.cached <= self.naive.pinned
        assert self.policy.admit(one, now).tolist() == [bool(self.cached - self.naive.pinned)]
        if blocked:
            assert self.policy.pick_victims(1, one, now).size == 0, "refused, not searched for"
            # Refused: the access counts for the phase, and nothing moves.
            if key not in self.naive.distinct:
                if len(self.naive.distinct) == self.naive.k:
                    self.naive.begin_phase()
                self.naive.distinct.add(key)
            return
        if full:
            offered = self.policy.pick_victims(1, one, now)
            assert offered.tolist() == self.policy.pick_victims(1, one, now).tolist()
            self.policy.on_remove(offered)
            self.cached -= set(offered.tolist())
        self.policy.on_insert(one, now)
        self.cached.add(key)
        self.naive.access(key, now, now + gap)
        assert self.cached == set(self.naive.cache)

    def pin(self, key: int) -> None:
        if key in self.naive.pinned:
            self.policy.unpin(np.array([key]))
            self.naive.pinned.remove(key)
        elif key in self.cached:
            self.policy.pin(np.array([key]))
            self.naive.pinned.add(key)

    def resize(self, k: int) -> None:
        if k == self.naive.k:
            return
        expected = self.naive.resize(k)
        self.policy.on_resize(k)
        n = len(self.cached) - k
        if n > 0:
            gone = self.policy.pick_victims(n, np.empty(0, np.int64), 0.0)
            assert gone.tolist() == expected
            self.policy.on_remove(gone)
            self.cached -= set(gone.tolist())
        assert self.policy.confidence == 1.0


steps = st.lists(
    st.tuples(
        st.sampled_from(["access"] * 8 + ["pin", "resize"]),
        st.integers(0, 11),
        st.integers(0, 40).map(float) | st.just(math.inf),
    ),
    max_size=80,
)


@many
@given(st.sampled_from(["laru", "hf", "fpb"]), st.integers(1, 6), steps)
def test_the_protocol_form_with_pins_and_resizes(
    name: str, k: int, moves: list[tuple[str, int, float]]
) -> None:
    cache = Cache(name, k)
    for now, (kind, key, gap) in enumerate(moves):
        if kind == "access":
            cache.access(key, float(now), gap)
        elif kind == "pin":
            cache.pin(key)
        elif len(cache.naive.pinned) <= key % 6 + 1:
            cache.resize(key % 6 + 1)
        assert cache.policy.confidence == cache.naive.confidence
    kinds = [kind for phase in cache.naive.phases for kind in phase]
    counts = cache.policy.counts
    assert counts["by_prediction"] == kinds.count("prediction")
    assert counts["mispredictions"] == (kinds.count("recency") if name == "laru" else 0)


class Unusable(GivenGaps):
    usable = False


def test_an_unusable_predictor_makes_it_lru_and_is_counted() -> None:
    rng = np.random.default_rng(3)
    keys = rng.integers(0, 30, 500)
    policy = Learned("laru", Unusable(lambda keys, times: np.full(keys.size, 3.0)))
    policy.on_resize(10)
    cached: set[int] = set()
    victims = []
    for now, key in enumerate(keys.tolist()):
        one = np.array([key])
        (policy.on_hit if key in cached else policy.on_miss)(one, float(now))
        victims.append(-1)
        if key not in cached:
            if len(cached) == 10:
                gone = policy.pick_victims(1, one, float(now))
                policy.on_remove(gone)
                victims[-1] = int(gone[0])
                cached -= set(gone.tolist())
            policy.on_insert(one, float(now))
            cached.add(key)
    expected = replay("lru", keys, 10)
    assert victims == expected.victim.tolist()
    assert policy.counts["fallbacks"] == sum(v >= 0 for v in victims)
    assert policy.counts["by_prediction"] == 0


def test_several_victims_are_those_that_would_go_one_after_the_other() -> None:
    following = np.array([9.0, 8.0, 30.0, 7.0, 20.0])
    policy = Learned("fpb", GivenGaps(lambda keys, times: following[keys] - times))
    policy.on_resize(5)
    policy.on_miss(np.arange(5), 0.0)
    policy.on_insert(np.arange(5), 0.0)
    policy.on_miss(np.array([0]), 1.0)
    assert policy.pick_victims(3, np.array([0]), 1.0).tolist() == [2, 4, 0]
    assert policy.pick_victims(3, np.empty(0, np.int64), 1.0).tolist() == [1, 2, 3]


def test_overdue_candidates_are_mirrored_or_predicted_again() -> None:
    following = np.array([5.0, 40.0, 2.0])
    for repredicted, victim in ((0, 2), (64, 1)):
        policy = Learned(
            "fpb", GivenGaps(lambda keys, times: following[keys] - 0 * times), repredicted
        )
        policy.on_resize(3)
        policy.on_miss(np.arange(3), 0.0)
        policy.on_insert(np.arange(3), 0.0)
        policy.on_miss(np.array([3 - 1]), 0.0)
        # At 60: 0 and 2 are overdue by 55 and 58, 1 by 20; anew they are due at 65, 100 and 62.
        assert policy.pick_victims(1, np.array([0]), 60.0).tolist() == [victim]


def test_the_tape_keeps_its_order_when_written_anew() -> None:
    items, state = laru.new_items(5), laru.new_state(laru.FPB, 5)
    tape = recency_tape.new_tape(16)
    order = [0, 1, 2, 3, 4] + [k % 5 for k in range(200)]
    for t, key in enumerate(order):
        items["next"][key] = 1000.0 + t
        laru.put(items, *tape, state[0], key)
    assert np.argsort(items["place"]).tolist() == [0, 1, 2, 3, 4]  # 195 to 199 came last
    assert recency_tape.oldest(*tape, state[0]) == items["place"][0]
    assert recency_tape.farthest(*tape, state[0], 5, 0.0) == items["place"][order[-1]]


def test_arguments_are_checked() -> None:
    keys = np.array([0, 1])
    for policy, capacity, predicted in (
        ("fifo", 1, None),
        ("laru", 0, np.zeros(2)),
        ("laru", 1, None),
        ("laru", 1, np.zeros(3)),
        ("laru", 1, np.array([0.0, np.nan])),
        ("laru", 1, np.array([0.0, -np.inf])),
    ):
        with pytest.raises(ArgumentError):
            replay(policy, keys, capacity, predicted)
    with pytest.raises(ArgumentError, match="policy='lru'"):
        Learned("lru", GivenGaps(lambda keys, times: times))


def test_keys_are_renumbered_in_order_of_appearance() -> None:
    assert dense([70, -3, 70, 12]).tolist() == [0, 1, 0, 2]
    assert next_requests(np.array([0, 1, 0, 1, 2])).tolist() == [2, 3, math.inf, math.inf, math.inf]
