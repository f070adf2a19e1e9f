from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from train.forecasters import WINDOW, samples, split
from train.labels import WANDER_CENTI, Labelled, LabelPlan, label_episode

PLAN = LabelPlan(episodes=5, epochs=12, alpha_step_centi=20, repeats=1)


def course(value: float, epochs: int = 20) -> Labelled:
    states = np.arange(epochs, dtype=np.float32)[None, :, None] + value
    return Labelled(np.repeat(states, 8, axis=2), np.full(epochs, value, np.float32))


def test_windows_end_at_the_state_before_their_label() -> None:
    data = samples([course(0.25)])
    assert data.windows.shape == (20, WINDOW, 8)
    assert data.windows[:, -1, 0].tolist() == [i + 0.25 for i in range(20)]
    assert data.windows[0, :, 0].tolist() == [0.25] * WINDOW  # the first state before the first
    assert data.windows[18, :, 3].tolist() == [i + 0.25 for i in range(3, 19)]


def test_held_out_courses_are_not_trained_on() -> None:
    training, held_out = split([course(i / 10) for i in range(10)])
    assert sorted(set(held_out.alpha_star.round(2))) == pytest.approx([0.4, 0.9])
    assert not set(training.alpha_star) & set(held_out.alpha_star)


def test_labels_are_of_the_next_epoch_and_kept_on_disk(tmp_path: Path) -> None:
    plan = replace(PLAN, cache=str(tmp_path))
    first = label_episode(plan, 3)
    kept = list(tmp_path.glob("*.npy"))
    assert len(kept) == 1
    assert first.states.shape == (len(WANDER_CENTI), 11, 8) and first.alpha_star.shape == (11,)
    p99 = np.load(kept[0])
    star = np.arange(10, 91, 20)[p99.argmin(axis=0)] / 100
    assert first.alpha_star == pytest.approx(star[1:])
    again = label_episode(plan, 3)
    assert np.array_equal(again.states, first.states)
    # What is on disk is what is used.
    np.save(kept[0], p99[::-1].copy())
    assert label_episode(plan, 3).alpha_star == pytest.approx(
        (np.arange(10, 91, 20)[p99[::-1].argmin(axis=0)] / 100)[1:]
    )


def test_walks_are_at_different_distances_from_alpha_star(tmp_path: Path) -> None:
    plan = replace(PLAN, epochs=60, cache=str(tmp_path))
    found = [label_episode(plan, index) for index in range(4)]
    distances = np.mean(
        [np.abs(c.states[:, :-1, 5] - c.alpha_star[:-1]).mean(axis=1) for c in found], axis=0
    )
    assert distances[0] < distances[1] < distances[2]
    assert distances[2] > 0.08
