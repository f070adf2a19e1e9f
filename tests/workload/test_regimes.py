"""Synthetic requests: the statistics that define each regime, and what a seed fixes."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlem_env.errors import ArgumentError
from hlem_env.workload.regimes import (
    PRESETS,
    LoadCurve,
    RegimeConfig,
    SyntheticWorkload,
    draw_path,
)
from hlem_env.workload.requests import Catalogue, Requests

EPOCH_S = 5.0
RATE = 200.0


def started(
    seed: int = 0, rate: LoadCurve | float = RATE, start_s: float = 0.0, **fields: Any
) -> SyntheticWorkload:
    load = rate if isinstance(rate, LoadCurve) else LoadCurve((0.0,), (rate,))
    workload = SyntheticWorkload(RegimeConfig(**fields), load)
    workload.reset(np.random.default_rng(seed), start_s)
    return workload


def by_epoch(workload: SyntheticWorkload, epochs: int) -> list[Requests]:
    return [workload.take((i + 1) * EPOCH_S) for i in range(epochs)]


def same(one: Requests, other: Requests) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("arrival_s", "user", "history_length", "new_items")
    )


# Arrivals


def test_arrivals_are_a_poisson_process() -> None:
    epochs = 600
    taken = by_epoch(started(1), epochs)
    counts = np.array([len(requests) for requests in taken])
    expected = RATE * EPOCH_S
    assert counts.mean() == pytest.approx(expected, abs=4 * np.sqrt(expected / epochs))
    # The variance of the counts is their mean; a sample's is within sqrt(2 / n) of it, relatively.
    assert counts.var(ddof=1) / expected == pytest.approx(1.0, abs=4 * np.sqrt(2 / epochs))
    arrivals = np.concatenate([requests.arrival_s for requests in taken])
    gaps = np.diff(arrivals)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / RATE, rel=4 / np.sqrt(gaps.size))
    for tenfold in (0.1, 1.0, 3.0):
        share = float((gaps > tenfold / RATE).mean())
        assert share == pytest.approx(np.exp(-tenfold), abs=4 * 0.5 / np.sqrt(gaps.size))
    # No memory: a gap says nothing of the next.
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 4 / np.sqrt(gaps.size)


def test_arrivals_are_within_what_was_asked_for() -> None:
    workload = started(2)
    for begin_s, end_s in ((0.0, 0.3), (0.3, 17.0), (17.0, 17.001), (17.001, 60.0)):
        arrivals = workload.take(end_s).arrival_s
        assert ((arrivals >= begin_s) & (arrivals < end_s)).all()
    assert len(workload.take(60.0)) == 0
    assert len(workload.take(10.0)) == 0


def test_the_rate_follows_the_hot_share() -> None:
    load = LoadCurve((0.05, 0.60), (100.0, 300.0))
    workload = started(3, load, regime="trend", episode_epochs=61)
    counts = [len(requests) for requests in by_epoch(workload, 61)]
    low, high = np.mean([counts[:3], counts[-3:]]), np.mean(counts[29:32])
    assert low / EPOCH_S == pytest.approx(100 + 200 * 1 / 30, rel=0.08)
    assert high / EPOCH_S == pytest.approx(300 - 200 * 2 / 90, rel=0.06)


# Hot users, warm users, one-off users


@pytest.mark.parametrize("share", [0.0, 0.05, 0.20, 0.60, 1.0])
def test_shares_of_requests(share: float) -> None:
    workload = started(4, steady_hot_share=share)
    requests = workload.take(200 * EPOCH_S)
    n = len(requests)
    config = workload.config
    hot_users = int(config.hot_users(np.array([share]))[0])
    hot = requests.user < hot_users
    margin = 4 * 0.5 / np.sqrt(n)
    assert hot.mean() == pytest.approx(share, abs=margin)
    one_off = requests.user >= workload.persistent_users
    assert one_off.mean() == pytest.approx(0.9 * (1 - share), abs=margin)
    if share:
        visits = np.bincount(requests.user[hot], minlength=hot_users)
        assert visits.size == hot_users
        assert visits.min() > 0
        # All hot users are alike: visits to each are Poisson.
        assert visits.var() / visits.mean() == pytest.approx(1.0, abs=4 * np.sqrt(2 / hot_users))
    warm = requests.user[~hot & ~one_off]
    if warm.size:
        assert np.unique(warm).size > 0.9 * 5000 * (1 - np.exp(-warm.size / 5000))


def test_hot_populations_are_the_tables() -> None:
    shares = np.array([0.05, 0.10, 0.20, 0.32, 0.50, 0.60])
    published = [100, 150, 200, 260, 340, 400]
    assert RegimeConfig().hot_users(shares).tolist() == published
    assert RegimeConfig(pool_bytes=30_000_000_000).hot_users(shares).tolist() == [
        n // 2 for n in published
    ]
    doubled = RegimeConfig(population_factor=2.0)
    assert doubled.hot_users(shares).tolist() == [2 * n for n in published]
    assert RegimeConfig().hot_users(np.array([0.15, 0.41])).tolist() == [175, 300]
    assert RegimeConfig(pool_bytes=10**9).hot_users(np.array([0.0, 0.001, 1.0])).tolist() == [
        0,
        1,
        7,
    ]


def test_one_off_users_come_once_and_in_order() -> None:
    workload = started(5, regime="burst")
    users = np.concatenate([requests.user for requests in by_epoch(workload, 100)])
    one_off = users[users >= workload.persistent_users]
    assert one_off.size > 10_000
    assert (np.diff(one_off) == 1).all()
    assert one_off[0] == workload.persistent_users


def test_first_histories_are_uniform_around_their_mean() -> None:
    workload = started(6)
    requests = workload.take(100 * EPOCH_S)
    one_off = requests.user >= workload.persistent_users
    lengths = requests.history_length[one_off].astype(float)
    assert np.array_equal(requests.new_items[one_off], requests.history_length[one_off])
    assert lengths.min() >= 8000 - 1
    assert lengths.max() <= 12_000
    assert lengths.mean() == pytest.approx(10_000, abs=4 * 1155 / np.sqrt(lengths.size) + 1)
    assert lengths.std() == pytest.approx(4000 / np.sqrt(12), rel=0.02)


# Histories


def test_histories_grow_by_what_is_new_and_drop_their_oldest_quarter() -> None:
    workload = started(
        7, mean_history_tokens=100, max_history_tokens=140, warm_users=50, episode_epochs=40
    )
    requests = workload.take(100 * EPOCH_S)
    last: dict[int, int] = {}
    dropped = added = 0
    for user, length, new in zip(
        requests.user.tolist(),
        requests.history_length.tolist(),
        requests.new_items.tolist(),
        strict=True,
    ):
        assert 1 <= length <= 140
        if user >= workload.persistent_users:
            continue
        assert 1 <= new <= 19
        if user in last:
            grown = last[user] + new
            if grown > 140:
                dropped += 1
                # Three quarters of 141 to 159 tokens
                assert 0.75 * grown <= length < 0.75 * grown + 1
            else:
                assert length == grown
            added += new
        else:
            assert length == pytest.approx(100, abs=20 + 19)
        last[user] = length
    assert dropped > 1000
    returning = Counter(requests.user[requests.user < workload.persistent_users].tolist())
    visits = sum(returning.values()) - len(returning)
    assert added / visits == pytest.approx(10, abs=4 * 5.5 / np.sqrt(visits))


def test_histories_outlive_the_period_of_the_regime() -> None:
    workload = started(8, regime="trend", episode_epochs=10)
    longest: dict[int, int] = {}
    for requests in by_epoch(workload, 30):
        for user, length in zip(
            requests.user.tolist(), requests.history_length.tolist(), strict=True
        ):
            if user < 100:
                assert length > longest.get(user, 0) or longest[user] > 14_900
                longest[user] = length
    assert len(longest) == 100


# Regimes


@pytest.mark.parametrize(("preset", "share"), [
    ("default", 0.20), ("taobao", 0.18), ("video-games", 0.24), ("books", 0.38),
])  # fmt: skip
def test_steady_holds_the_presets_share(preset: str, share: float) -> None:
    config = RegimeConfig.preset(preset, "steady")
    path = draw_path(config, np.random.default_rng(0))
    assert path.hot_share.tolist() == [share] * 240
    assert config.catalogue.zipf == PRESETS[preset].zipf
    assert not path.burst.any()
    assert not path.new_users.any()


def test_trend_goes_up_and_comes_back_in_straight_lines() -> None:
    path = draw_path(RegimeConfig(regime="trend"), np.random.default_rng(0))
    share = path.hot_share
    assert share.size == 240
    assert share[0] == share[-1] == pytest.approx(0.05)
    assert share.max() == pytest.approx(0.60, abs=0.003)
    steps = np.diff(share)
    assert np.allclose(steps[:119], steps[0])
    assert np.allclose(steps[120:], -steps[0])
    assert np.allclose(share, share[::-1])
    assert (path.hot_users[[0, 239]] == 100).all()
    assert path.hot_users.max() == pytest.approx(400, abs=2)


def test_bursts() -> None:
    config = RegimeConfig(regime="burst", episode_epochs=60_000)
    path = draw_path(config, np.random.default_rng(1))
    numbers = np.unique(path.burst[path.burst > 0])
    assert numbers.tolist() == list(range(1, numbers.size + 1))
    lengths, heights, gaps = [], [], []
    end = 0
    for number in numbers:
        at = np.flatnonzero(path.burst == number)
        assert (np.diff(at) == 1).all()
        lengths.append(at.size)
        assert np.unique(path.hot_share[at]).size == 1
        heights.append(path.hot_share[at[0]])
        gaps.append(at[0] - end)
        end = at[-1] + 1
    n = len(lengths)
    assert n > 1500
    shares = [lengths[:-1].count(k) / (n - 1) for k in (3, 4, 5)]
    # A burst that begins as the last ends would cut it short: as good as never.
    assert sum(shares) > 0.99
    assert shares == pytest.approx([1 / 3] * 3, abs=4 * 0.5 / np.sqrt(n))
    assert 0.50 <= min(heights) < 0.505
    assert 0.595 < max(heights) <= 0.60
    assert np.mean(heights) == pytest.approx(0.55, abs=4 * 0.029 / np.sqrt(n))
    assert np.mean(gaps) == pytest.approx(30, abs=4 * 30 / np.sqrt(n))
    assert np.std(gaps) == pytest.approx(30, rel=0.1)
    assert (path.hot_share[path.burst == 0] == 0.15).all()


def test_a_bursts_users_are_new_and_gone_after_it() -> None:
    workload = started(9, regime="burst", episode_epochs=200)
    path = workload.path
    assert 3 <= path.burst.max() <= 8
    members: dict[int, set[int]] = {}
    for epoch, requests in enumerate(by_epoch(workload, 200)):
        persistent = requests.user[requests.user < workload.persistent_users]
        # Neither the regular hot users nor the warm ones, whose ids are the last
        newcomers = persistent[
            (persistent >= 175) & (persistent < workload.persistent_users - 5000)
        ]
        burst = int(path.burst[epoch])
        assert (newcomers.size > 0) == (burst > 0)
        members.setdefault(burst, set()).update(newcomers.tolist())
        assert np.unique(persistent[persistent < 175]).size > 75
    del members[0]
    assert len(members) == path.burst.max()
    for burst, users in members.items():
        expected = int(path.new_users[path.burst == burst][0])
        assert 0.9 * expected <= len(users) <= expected
    assert sum(map(len, members.values())) == len(set().union(*members.values()))


def test_a_bursts_users_start_with_new_histories_each_time() -> None:
    """Their ids are given out again after eight bursts."""
    workload = started(10, regime="burst", episode_epochs=1000, warm_users=1)
    path = workload.path
    assert path.burst.max() > 17
    first_lengths: dict[int, dict[int, int]] = {}
    for epoch, requests in enumerate(by_epoch(workload, 1000)):
        burst = int(path.burst[epoch])
        if not burst:
            continue
        lengths = first_lengths.setdefault(burst, {})
        for user, length in zip(
            requests.user.tolist(), requests.history_length.tolist(), strict=True
        ):
            if 175 <= user < workload.persistent_users - 1:
                lengths.setdefault(user, length)
    reused = set(first_lengths[1]) & set(first_lengths[9])
    assert len(reused) > 100
    for lengths in first_lengths.values():
        assert all(8000 <= length <= 12_000 + 19 for length in lengths.values())
    changed = [first_lengths[1][user] != first_lengths[9][user] for user in reused]
    assert np.mean(changed) > 0.95


def test_bursts_of_existing_users() -> None:
    workload = started(9, regime="burst", burst_users="existing")
    path = workload.path
    assert not path.new_users.any()
    in_burst = int(np.flatnonzero(path.burst)[0])
    requests = by_epoch(workload, in_burst + 1)[-1]
    hot = requests.user[requests.user < path.hot_users[in_burst]]
    assert hot.size / len(requests) == pytest.approx(path.hot_share[in_burst], abs=0.07)
    assert hot.max() > 175


@pytest.mark.parametrize("regime", ["steady", "trend"])
def test_the_path_comes_again(regime: str) -> None:
    workload = started(11, regime=regime, episode_epochs=8)
    shares = []
    for epoch in range(24):
        workload.take((epoch + 1) * EPOCH_S)
        shares.append(workload.hot_share)
    assert shares[:8] == shares[8:16] == shares[16:]
    assert shares[:8] == workload.path.hot_share.tolist()


def test_bursts_are_drawn_anew_in_each_period() -> None:
    workload = started(12, regime="burst", episode_epochs=100)
    first = workload.path.digest()
    workload.take(100 * EPOCH_S)
    assert workload.path.digest() == first
    workload.take(100 * EPOCH_S + 1)
    assert workload.path.digest() != first


def test_the_warm_up_is_held_at_the_start() -> None:
    workload = started(
        13, start_s=-60.0, regime="trend", rate=LoadCurve((0.05, 0.6), (50.0, 500.0))
    )
    warmup = workload.take(0.0)
    assert warmup.arrival_s.min() >= -60.0
    assert warmup.arrival_s.max() < 0.0
    assert len(warmup) == pytest.approx(60 * 50, abs=4 * np.sqrt(3000))
    assert workload.hot_share == 0.05


# Seeds


@pytest.mark.parametrize("regime", ["steady", "trend", "burst"])
def test_a_seed_makes_the_requests(regime: str) -> None:
    one, other, third = (started(seed, regime=regime).take(300.0) for seed in (1, 1, 2))
    assert same(one, other)
    assert not same(one, third)


@pytest.mark.parametrize("regime", ["steady", "burst"])
def test_redraw_keeps_the_path_and_draws_other_requests(regime: str) -> None:
    workload = started(1, regime=regime)
    digest = workload.digest()
    path = asdict(workload.path)
    first = workload.take(300.0)
    drawn = []
    for seed in (5, 5, 6):
        workload.redraw(np.random.default_rng(seed), 0.0)
        drawn.append(workload.take(300.0))
    assert same(drawn[0], drawn[1])
    assert not same(drawn[0], drawn[2])
    assert not same(drawn[0], first)
    assert workload.digest() == digest
    assert all(np.array_equal(asdict(workload.path)[name], path[name]) for name in path)
    one_off = drawn[0].user[drawn[0].user >= workload.persistent_users]
    assert one_off[0] == workload.persistent_users


def test_digests_tell_workloads_apart() -> None:
    digests = {
        started(seed, regime=regime, warm_share=warm).digest()
        for seed in (1, 2)
        for regime in ("steady", "burst")
        for warm in (0.1, 0.2)
    }
    # A seed changes the path of Burst alone.
    assert len(digests) == 6


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.floats(-19.999, 59.999), max_size=6))
def test_requests_do_not_depend_on_where_they_are_cut(cuts: list[float]) -> None:
    whole, pieces = (started(3, start_s=-20.0, regime="burst", episode_epochs=5) for _ in range(2))
    requests = Requests.empty()
    for edge in [*sorted(cuts), 60.0]:
        requests = requests.then(pieces.take(edge))
    assert same(whole.take(60.0), requests)
    assert (np.diff(requests.arrival_s) >= 0).all()


def test_whole_epochs_may_be_taken_one_by_one_or_at_once() -> None:
    whole = started(3, regime="burst").take(100 * EPOCH_S)
    parts = by_epoch(started(3, regime="burst"), 100)
    joined = Requests.empty()
    for part in parts:
        joined = joined.then(part)
    assert same(whole, joined)


# Configuration


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"regime": "calm"}, "regime='calm'.*burst, steady, trend"),
        ({"burst_users": "none"}, "burst_users='none'.*existing, new"),
        ({"steady_hot_share": -0.1}, "steady_hot_share=-0.1"),
        ({"steady_hot_share": 1.1}, "steady_hot_share=1.1"),
        ({"steady_hot_share": float("nan")}, "steady_hot_share=nan"),
        ({"population_factor": 0}, "population_factor=0"),
        ({"population_factor": 101}, "population_factor=101"),
        ({"mean_history_tokens": 0.5}, "mean_history_tokens=0.5"),
        ({"mean_history_tokens": 15_001}, "mean_history_tokens=15001.*15000"),
        ({"history_spread": 1.0}, "history_spread=1.0"),
        ({"history_spread": -0.1}, "history_spread=-0.1"),
        ({"new_items": 0}, "new_items=0"),
        ({"warm_share": 1.5}, "warm_share=1.5"),
        ({"warm_users": 0}, "warm_users=0"),
        ({"episode_epochs": 0}, "episode_epochs=0"),
    ],
    ids=str,
)
def test_wrong_configs_name_themselves(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        RegimeConfig(**fields)


@pytest.mark.parametrize("fields", [{"epoch_seconds": 0.0}, {"pool_bytes": 0}], ids=str)
def test_wrong_clocks_and_pools_name_themselves(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(ArgumentError, match=name):
        RegimeConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tables": 0}, "tables=0"),
        ({"rows_per_table": 0}, "rows_per_table=0"),
        ({"row_bytes": 0}, "row_bytes=0"),
        ({"zipf": -0.1}, "zipf=-0.1"),
        ({"zipf": 3.1}, "zipf=3.1"),
        ({"candidates": -1}, "candidates=-1"),
    ],
    ids=str,
)
def test_wrong_catalogues_name_themselves(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        Catalogue(**fields)


@pytest.mark.parametrize(
    ("shares", "rates", "named"),
    [
        ((), (), "load.hot_share"),
        ((0.1, 0.2), (1.0,), "load.hot_share"),
        ((0.2, 0.1), (1.0, 2.0), "load.hot_share"),
        ((0.1,), (0.0,), "load.requests_per_s"),
        ((0.1,), (float("nan"),), "load.requests_per_s"),
        ((0.1,), (2e6,), "load.requests_per_s"),
    ],
)
def test_wrong_loads_name_themselves(shares: Any, rates: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        LoadCurve(shares, rates)


def test_loads_are_straight_between_points_and_scale() -> None:
    curve = LoadCurve((0.1, 0.3), (100.0, 200.0))
    assert curve(np.array([0.0, 0.1, 0.2, 0.9])).tolist() == [100.0, 100.0, 150.0, 200.0]
    assert curve.scaled(0.5)(np.array([0.2])).tolist() == [75.0]


def test_configs_survive_json() -> None:
    config = replace(RegimeConfig.preset("books", "burst", warm_users=7), population_factor=1.5)
    text = json.dumps(asdict(config))
    assert RegimeConfig.from_json(json.loads(text)) == config
    with pytest.raises(ArgumentError, match="colour"):
        RegimeConfig.from_json({"colour": "green"})
    with pytest.raises(ArgumentError, match=r"preset='films'.*books"):
        RegimeConfig.preset("films", "steady")
    content = started(0, regime="trend").to_json()
    assert json.loads(json.dumps(content))["config"]["regime"] == "trend"
