"""A KV cache under learned policies: the surrogate's reuse, a predictor that learns beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hlem_env.eviction.learned import Learned
from hlem_env.eviction.online import OnlinePredictor, Schedule
from hlem_env.eviction.predictor import GivenGaps
from tests.live import test_kv_cache as plain


def gaps_at(times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Anything that differs from request to request, the same for both caches."""
    return np.floor(np.abs(np.sin(times * 12.9898)) * 4000.0) / 8.0


class Forecast:
    def gaps(self, requests: Any) -> NDArray[np.float64]:
        return gaps_at(requests.arrival_s)


@pytest.mark.parametrize("name", ["laru", "hf", "fpb"])
@pytest.mark.parametrize("seed", [0, 2])
def test_reuse_equals_the_surrogates(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Learned] = []

    def make_policy(policy: str, half_life_s: float = 0.0) -> Learned:
        made.append(Learned(policy, GivenGaps(lambda keys, times: gaps_at(times))))
        return made[-1]

    monkeypatch.setattr(plain, "make_policy", make_policy)
    monkeypatch.setattr("hlem_env.surrogate.node.Forecast", lambda half_life_s: Forecast())
    plain.test_reuse_equals_the_surrogates(name, seed)
    counts = made[0].counts
    assert counts["by_prediction"] > 50
    assert (counts["mispredictions"] > 0) == (name == "laru")


@pytest.mark.parametrize("name", ["laru", "fpb"])
def test_eviction_never_chooses_an_in_flight_user(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaps = GivenGaps(lambda keys, times: gaps_at(times))
    monkeypatch.setattr(plain, "make_policy", lambda policy: Learned(policy, gaps))
    plain.test_eviction_never_chooses_an_in_flight_user(name)


def test_a_cache_learns_while_it_serves() -> None:
    pytest.importorskip("lightgbm")
    schedule = Schedule(window=500, every=50, trees=10)
    predictor = OnlinePredictor(60.0, schedule=schedule)
    policy = Learned("laru", predictor, repredicted=64)
    kv = plain.make(4 * plain.pages_of(20), policy)
    rng = np.random.default_rng(1)
    for i, user in enumerate(rng.integers(0, 12, 400).tolist()):
        plain.serve(kv, user, 20)
        if i == 200:
            predictor.wait()  # whether a model is there by now does not depend on the machine
    plain.assert_whole(kv)
    counts = policy.counts
    assert predictor.trainings >= 1 and predictor.failures == 0
    assert counts["fallbacks"] > 0, "before the first model"
    assert counts["by_prediction"] > 0, "and after it"
    known = np.flatnonzero(predictor._records["visits"] > 0)
    assert (predictor._records["size"][known] == 20).all(), "history lengths are features"
    kv.close()
    assert not predictor._worker._thread.is_alive()  # type: ignore[union-attr]
