"""The oracles: nothing that obeys the step limit beats them, and results can be read again."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.mdp import ACTIONS_CENTI, MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.node import SurrogateBackend
from hlem_env.surrogate.optimum import (
    Episode,
    alpha_star,
    hold,
    hold_all,
    reachable,
    record_episode,
)

CONFIG = MdpConfig()
EPOCHS = 16


def small(**changes: Any) -> SurrogateBackend:
    values: dict[str, Any] = {
        "pool_bytes": 6_000_000_000,
        "mean_history_tokens": 2000,
        "max_history_tokens": 3000,
        "population_factor": 4.0,
        "utilisation": 0.7,
        "epoch_seconds": 1.0,
        "episode_epochs": EPOCHS,
    }
    return Scenario(**(values | changes)).build()


def episode_of(backend: SurrogateBackend, seed: int = 0) -> Episode:
    backend.reset(seed)
    return record_episode(backend, EPOCHS)


def follow(backend: SurrogateBackend, episode: Episode, alphas: Any) -> np.ndarray:
    """P99 of each epoch with alpha moved so, warmed up at the first."""
    backend.empty()
    backend.serve(episode.warmup, int(alphas[0]), episode.warmup_s)
    steps = zip(episode.epochs, alphas, strict=True)
    return np.array([backend.serve(r, int(a), episode.epoch_seconds).p99_ms for r, a in steps])


@pytest.mark.parametrize("policy", ["scan_resistant", "lru"])
@pytest.mark.parametrize("regime", ["steady", "trend", "burst"])
def test_nothing_that_obeys_the_step_limit_beats_the_reachable_oracle(
    regime: str, policy: str
) -> None:
    backend = small(regime=regime, kv_policy=policy)
    episode = episode_of(backend)
    alphas, p99_ms = reachable(backend, CONFIG, episode)
    assert alphas.shape == p99_ms.shape == (EPOCHS,)
    assert set(np.diff(alphas)) <= set(ACTIONS_CENTI)
    assert alphas.min() >= CONFIG.alpha_min_centi
    assert alphas.max() <= CONFIG.alpha_max_centi
    assert np.array_equal(follow(backend, episode, alphas), p99_ms)

    held = hold_all(backend, episode, range(10, 91, 2))
    assert p99_ms.sum() <= held.sum(axis=1).min()
    rng = np.random.default_rng(7)
    for _ in range(15):
        walk = [int(rng.integers(5, 46)) * 2]
        while len(walk) < EPOCHS:
            walk.append(CONFIG.clip(walk[-1] + int(rng.choice(ACTIONS_CENTI))))
        assert p99_ms.sum() <= follow(backend, episode, walk).sum()
    # Neither does a small change of its own course.
    for _ in range(15):
        other = alphas.copy()
        at = int(rng.integers(EPOCHS))
        other[at:] += int(rng.choice((-2, 2)))
        if set(np.diff(other)) <= set(ACTIONS_CENTI) and 10 <= other.min() <= other.max() <= 90:
            assert p99_ms.sum() <= 1.005 * follow(backend, episode, other).sum()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reachable_oracle_is_the_best_of_all_courses(seed: int) -> None:
    """Every course of three epochs is tried."""
    backend = small(steady_hot_share=0.6, population_factor=2.0)
    backend.reset(seed)
    episode = record_episode(backend, 3)
    config = MdpConfig(alpha_min_centi=40, alpha_max_centi=80)
    courses: list[tuple[float, tuple[int, ...]]] = []
    for first in range(40, 81, 2):
        for steps in itertools.product(ACTIONS_CENTI, repeat=2):
            course = (first, first + steps[0], first + sum(steps))
            if 40 <= min(course) <= max(course) <= 80:
                courses.append((follow(backend, episode, course).sum(), course))
    best_ms, best = min(courses)
    assert max(np.abs(np.diff(best))) >= 4
    alphas, p99_ms = reachable(backend, config, episode)
    assert tuple(alphas) == best
    assert p99_ms.sum() == pytest.approx(best_ms)


def test_it_does_not_hang_on_the_number_of_threads() -> None:
    backend = small(regime="trend")
    episode = episode_of(backend)
    one, two = reachable(backend, CONFIG, episode, jobs=1), reachable(backend, CONFIG, episode, 3)
    assert np.array_equal(one[0], two[0])
    assert np.array_equal(one[1], two[1])
    grid = range(10, 91, 20)
    assert np.array_equal(hold_all(backend, episode, grid, 1), hold_all(backend, episode, grid, 4))


def test_holding_is_what_the_node_itself_does() -> None:
    backend = small()
    episode = episode_of(backend, seed=3)
    p99_ms = hold(backend, episode, 30)
    live = small()
    live.reset(3)
    live.run(30, live.warmup_s)
    assert [live.run(30, 1.0).p99_ms for _ in range(EPOCHS)] == p99_ms.tolist()


def star_of(backend: SurrogateBackend, **options: Any) -> Any:
    backend.reset(0)
    return alpha_star(backend, CONFIG, epochs=8, **{"step_centi": 8, "repeats": 6} | options)


def test_alpha_star_falls_as_the_hot_share_rises() -> None:
    """On the node of the defaults."""
    means = [
        float(star_of(Scenario(steady_hot_share=share).build()).alpha_centi.mean())
        for share in (0.05, 0.20, 0.60)
    ]
    assert means[0] > means[1] > means[2]
    assert means[0] - means[2] > 25


def test_alpha_star_has_the_lowest_p99_of_each_epoch() -> None:
    seen: list[tuple[int, int]] = []
    star = star_of(small(regime="trend"), progress=lambda *counts: seen.append(counts))
    assert seen == [(n, 6) for n in range(1, 7)]
    assert star.alphas_centi.tolist() == list(range(10, 91, 8))
    assert star.p99_ms.shape == (11, 8)
    for epoch, alpha in enumerate(star.alpha_centi):
        row = star.p99_ms[star.alphas_centi.tolist().index(alpha)]
        assert row[epoch] == star.best_p99_ms[epoch] == star.p99_ms[:, epoch].min()


def test_alpha_star_is_read_back_and_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = small()
    first = star_of(backend, cache=tmp_path / "new" / "folder")
    (file,) = (tmp_path / "new" / "folder").iterdir()

    def never(*_: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr("hlem_env.surrogate.optimum.hold_all", never)
    again = star_of(backend, cache=file.parent)
    assert np.array_equal(again.p99_ms, first.p99_ms)
    assert np.array_equal(again.alphas_centi, first.alphas_centi)
    for other in ({"repeats": 7}, {"step_centi": 16}):
        with pytest.raises(AssertionError, match="computed again"):
            star_of(backend, cache=file.parent, **other)
    for changed in (small(kv_policy="lru"), small(tables=9), small(steady_hot_share=0.3)):
        with pytest.raises(AssertionError, match="computed again"):
            star_of(changed, cache=file.parent)


def test_a_damaged_cache_file_is_named(tmp_path: Path) -> None:
    backend = small()
    star_of(backend, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ArtefactError, match=file.name):
        star_of(backend, cache=tmp_path)


def test_wrong_repeats_are_refused() -> None:
    with pytest.raises(ArgumentError, match="repeats=0"):
        star_of(small(), repeats=0)
