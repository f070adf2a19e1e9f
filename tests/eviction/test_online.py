"""The predictor that learns as it goes: labels, schedule, failures, memory, and its compiled trees."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.eviction.forest import Forest
from hlem_env.eviction.online import OnlinePredictor, Schedule
from hlem_env.eviction.policies import POLICIES, make_policy

SMALL = Schedule(window=400, every=100, trees=10, lag_limit=400)


def constant(rows: NDArray[np.float32], labels: NDArray[np.float32]) -> Forest:
    return Forest.constant(float(np.log1p(7.0)))


def feed(predictor: OnlinePredictor, keys: list[int], start: float = 0.0) -> NDArray[np.float64]:
    gaps = [predictor.access(np.array([key]), np.array([start + t])) for t, key in enumerate(keys)]
    return np.concatenate(gaps)


def test_trees_say_what_lightgbm_says() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    rng = np.random.default_rng(1)
    rows = rng.exponential(10, (2000, 22)).astype(np.float32)
    labels = np.log1p(rows[:, 0] * (rows[:, 3] > 5) + rng.random(2000)).astype(np.float32)
    settings = {"num_leaves": 31, "max_depth": 6, "verbose": -1, "use_missing": False}
    data = lightgbm.Dataset(rows, labels, params={"use_missing": False, "verbose": -1})
    for trees in (1, 60):
        booster = lightgbm.train(settings, data, trees)
        forest = Forest.parse(booster.model_to_string())
        assert forest.predict(rows) == pytest.approx(booster.predict(rows), rel=1e-12, abs=1e-12)
    flat = lightgbm.train(settings, lightgbm.Dataset(rows[:5], labels[:5] * 0 + 3), 3)
    assert Forest.parse(flat.model_to_string()).predict(rows[:2]) == pytest.approx([3.0, 3.0])
    with pytest.raises(ArtefactError):
        Forest.parse("tree\nversion=v4\n")


def test_labels_are_gaps_or_twice_the_window() -> None:
    seen: list[tuple[NDArray[np.float32], NDArray[np.float32]]] = []

    def note(rows: NDArray[np.float32], labels: NDArray[np.float32]) -> Forest:
        seen.append((rows, labels))
        return constant(rows, labels)

    predictor = OnlinePredictor(
        20.0, schedule=Schedule(window=50, every=3), background=False, train=note
    )
    feed(predictor, [0, 1, 0, 2])  # 0 after 2
    feed(predictor, [1], start=19.0)  # after 18
    assert not seen
    feed(predictor, [2], start=24.5)  # 0's second access has waited for more than 20; 2 after 21.5
    rows, labels = seen[0]
    assert np.expm1(labels) == pytest.approx([2.0, 18.0, 40.0, 40.0][: labels.size], rel=1e-5)
    assert labels.size == 4
    # Of key 0's second access: last gap 2, none before; two visits.
    assert rows[2, :3].tolist() == [2.0, -1.0, -1.0]
    assert rows[2, 20] == 2.0


def test_decayed_counts_halve() -> None:
    window = 512.0
    predictor = OnlinePredictor(window, background=False, train=constant)
    predictor.access(np.array([4]), np.array([0.0]))
    predictor.access(np.array([4]), np.array([window]))
    counts = predictor._known[4, 10:20]
    assert counts[-1] == pytest.approx(1.5), "the slowest has the window as half-life"
    assert counts[-2] == pytest.approx(1.25)
    assert counts[0] == pytest.approx(1.0)


def test_a_model_comes_every_so_many_samples_and_is_used() -> None:
    predictor = OnlinePredictor(50.0, schedule=SMALL, background=False, train=constant)
    gaps = feed(predictor, [0, 1] * 300)
    assert not np.isclose(gaps[:100], 7.0).any() and (gaps[:100] == 100.0).all()
    assert gaps[110:] == pytest.approx(7.0)
    assert predictor.trainings == 5 and predictor.usable


def test_a_training_that_fails_is_counted_and_makes_it_unusable_until_one_succeeds() -> None:
    broken = threading.Event()

    def train(rows: NDArray[np.float32], labels: NDArray[np.float32]) -> Forest:
        if broken.is_set():
            raise RuntimeError("no memory")
        return constant(rows, labels)

    predictor = OnlinePredictor(50.0, schedule=SMALL, background=False, train=train)
    assert not predictor.usable
    feed(predictor, [0, 1] * 60)
    assert predictor.usable
    broken.set()
    feed(predictor, [0, 1] * 60, 200.0)
    assert not predictor.usable
    assert predictor.failures == 1 and "no memory" in str(predictor.last_error)
    broken.clear()
    feed(predictor, [0, 1] * 60, 400.0)
    assert predictor.usable


def test_training_runs_beside_and_one_that_falls_behind_is_not_used() -> None:
    started, go = threading.Event(), threading.Event()

    def slow(rows: NDArray[np.float32], labels: NDArray[np.float32]) -> Forest:
        started.set()
        assert go.wait(60)
        return constant(rows, labels)

    predictor = OnlinePredictor(50.0, schedule=SMALL, train=slow)
    feed(predictor, [0, 1] * 60)
    assert started.wait(60) and not predictor.usable
    feed(predictor, [0, 1] * 100, 200.0)  # no look-up waits for the training
    assert predictor.skipped >= 1
    feed(predictor, [0, 1] * 250, 500.0)
    go.set()
    predictor.wait()
    assert predictor.trainings == 1
    assert not predictor.usable, "its samples are older than the limit allows"
    feed(predictor, [0, 1] * 60, 1100.0)
    predictor.wait()
    assert predictor.usable
    predictor.close()


def test_a_forgotten_key_is_new() -> None:
    predictor = OnlinePredictor(50.0, background=False, train=constant)
    feed(predictor, [3, 3, 3])
    predictor.forget(np.array([3]))
    feed(predictor, [3], 10.0)
    assert predictor._known[3, 20] == 1.0 and (predictor._known[3, :10] == -1.0).all()


def test_memory_of_hashed_keys_is_bounded() -> None:
    schedule = Schedule(window=100, every=50, waiting=64)
    predictor = OnlinePredictor(1e9, "rows", schedule, background=False, cells=128, train=constant)
    keys = np.random.default_rng(0).integers(0, 2**60, 20_000)
    gaps = predictor.access(np.concatenate((keys, keys)), np.arange(40_000.0))
    assert gaps.shape == (40_000,) and np.isfinite(gaps).all()
    assert predictor._known.shape == (128, 4)


def test_the_same_requests_give_the_same_predictions() -> None:
    pytest.importorskip("lightgbm")
    keys = np.random.default_rng(2).zipf(1.5, 1500) % 40
    runs = []
    for _ in range(2):
        predictor = OnlinePredictor(100.0, schedule=SMALL, background=False)
        runs.append(feed(predictor, keys.tolist()))
        assert predictor.trainings > 5 and predictor.failures == 0
    assert np.array_equal(*runs)


def test_it_learns_periods() -> None:
    pytest.importorskip("lightgbm")
    requests = sorted((t + 0.1 * k, k) for k in range(20) for t in range(k, 4000, 20 * (k + 1)))
    keys = np.array([k for _, k in requests])
    times = np.array([t for t, _ in requests])
    schedule = Schedule(window=2000, every=100, trees=50)
    predictor = OnlinePredictor(500.0, schedule=schedule, background=False)
    parts = [predictor.access(keys[i : i + 1], times[i : i + 1]) for i in range(keys.size)]
    late = slice(keys.size // 2, None)
    error = np.abs(np.log(np.concatenate(parts)[late] / (20.0 * (keys[late] + 1))))
    assert np.median(error) < 0.1


def test_policies_by_name_and_their_arguments() -> None:
    pytest.importorskip("lightgbm")
    for name in POLICIES:
        make_policy(name).close()
    for wrong in (
        {"label_window": 0.0},
        {"label_window": 1.0, "kind": "pages"},
        {"label_window": 1.0, "cells": 100},
    ):
        with pytest.raises(ArgumentError):
            OnlinePredictor(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="rate"):
        Schedule(rate=0.0)
