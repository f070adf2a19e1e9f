"""KV entries of a surrogate node under learned policies: bookkeeping, and unit entries against the replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlem_env.errors import BackendError
from hlem_env.eviction.replay import replay
from hlem_env.scenario import Scenario
from hlem_env.surrogate.node import SurrogateBackend
from hlem_env.workload.requests import Requests

POLICIES = ("laru", "hf", "fpb")


class GivenForecast:
    """The gaps that a test wants."""

    def __init__(self, gaps: np.ndarray) -> None:
        self.left = gaps

    def gaps(self, requests: Requests) -> np.ndarray:
        taken, self.left = self.left[: len(requests)], self.left[len(requests) :]
        return taken


def backend(policy: str, **fields: object) -> SurrogateBackend:
    pytest.importorskip("lightgbm")
    built = Scenario(kv_policy=policy, steady_hot_share=0.3, warmup_epochs=0, **fields).build()
    built.reset(1)
    return built


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_entries_of_one_page_are_the_replays(policy: str, data: st.DataObject) -> None:
    """100 pages, 10 of them for KV; a request a second, each history one block long."""
    keys = data.draw(st.lists(st.integers(0, 25), min_size=1, max_size=80))
    n = len(keys)
    gaps = np.array(data.draw(st.lists(st.integers(0, 90), min_size=n, max_size=n)), float)
    node = backend(policy)
    small = SurrogateBackend(
        node.workload, replace(node.node, pool_bytes=100 * node.node.page_bytes), node.hardware
    )
    small.empty()
    small._forecast = GivenForecast(gaps)  # type: ignore[assignment]
    once = np.ones(n, np.int32)
    times = np.arange(n) + 0.25
    stats = small.serve(Requests(times, np.array(keys), once, 0 * once), 90, float(n + 10))
    expected = replay(policy, np.array(keys), 10, np.arange(n) + gaps)
    assert stats.requests == n
    assert stats.reused_tokens == np.count_nonzero(expected.hit)
    assert stats.evictions == np.count_nonzero(expected.victim >= 0)
    assert stats.kv_pages == min(len(set(keys)), 10)


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_are_those_of_the_entries_through_moves(policy: str) -> None:
    node = backend(policy)
    for alpha in (30, 90, 10, 100, 0, 50):
        stats = node.run(alpha, 3.0)
        users = node._users
        held = users["pages"] > 0
        assert (
            stats.kv_pages
            == users["pages"].sum()
            <= node.node.pool_pages * (100 - alpha) // 100 + 1
        )
        assert np.array_equal(held, node._kv.items["place"] >= 0)
        assert int(node._kv.state["residents"][0]) == np.count_nonzero(held)
        assert (users["cached"][~held] == 0).all()


def test_a_saved_node_goes_on_alike_and_holding_is_serving() -> None:
    node = backend("laru")
    node.run(40, 10.0)
    state = node.save()
    arriving = node.workload.take(20.0)
    first = node.serve(arriving, 60, 10.0)
    node.restore(state)
    assert np.array_equal(node.serve(arriving, 60, 10.0).latency_ms, first.latency_ms)
    node.restore(state)
    assert node.hold(arriving, 60, 10.0, 1)[0] == pytest.approx(first.p99_ms)
    with pytest.raises(BackendError):
        node.close()
        node.run(40, 1.0)
