import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from eval.shape import Args, Cell, Measured, conclusions, hold_whole, main, measure
from hlem_env.surrogate.optimum import hold, record_episode
from hlem_env.workload.requests import Requests


def measured(cell: Cell, p99_ms: list[float], utilisation: list[float] | None = None) -> Measured:
    """A cell with a given curve, the same in both repeats."""
    n = len(p99_ms)
    busy = np.array([0.7] * n if utilisation is None else utilisation)
    return Measured(
        cell=cell,
        requests_per_s=200.0,
        load="table",
        alphas_centi=np.linspace(0, 100, n).astype(np.int64),
        p99_ms=np.array([p99_ms, p99_ms]),
        utilisation=busy,
        saturated=busy > 0.95,
    )


def test_a_small_run_falls_with_the_hot_share_and_says_how_it_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "shape.json", tmp_path / "shape.png"
    args = Args(
        json=file,
        plot=plot,
        hot_shares=(0.10, 0.32, 0.60),
        history_tokens=(10_000,),
        utilisations=(),
        step_centi=10,
        repeats=2,
        epochs=9,
    )
    assert main(args) == 0
    result = json.loads(file.read_text("utf-8"))
    assert result["command"].startswith("python -m eval.shape")
    assert result["machine"]["cpu"]
    best = [c["best_alpha"] for c in result["cells"] if c["kv_policy"] == "scan_resistant"]
    assert best == sorted(best, reverse=True)
    assert best[0] - best[-1] >= 0.35
    assert "best alpha falls" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_one_run_gives_the_p99_of_epoch_by_epoch() -> None:
    backend = Cell(0.32).scenario.build()
    backend.workload.reset(np.random.default_rng(0), -backend.warmup_s)
    episode = record_episode(backend, 5)
    joined = reduce(Requests.then, episode.epochs)
    for alpha_centi in (0, 40):
        whole = hold_whole(backend.twin(), episode, joined, alpha_centi)
        expected = hold(backend.twin(), episode, alpha_centi).mean()
        assert whole.p99_ms == pytest.approx(expected, rel=1e-9)


def test_overload_is_saturated_and_has_no_p99() -> None:
    cell = Cell(0.20, utilisation=1.2)
    with ThreadPoolExecutor(1) as pool:
        result = measure(cell, np.array([0, 60]), repeats=2, epochs=6, pool=pool, jobs=1)
    assert result.saturated.all()
    assert result.best_p99_ms is None
    assert result.to_json(whole_curve=True)["curve"]["p99_ms"] == [None, None]


def test_a_saturated_cell_is_in_no_percentage() -> None:
    cell = Cell(0.60)
    lru = replace(cell, kv_policy="lru")
    fine = measured(cell, [50, 40, 60])
    text = " ".join(conclusions([fine, measured(lru, [90, 80, 100])]))
    assert "lowers the best P99 there by 50%" in text
    text = " ".join(conclusions([fine, measured(lru, [90, 80, 100], [0.99, 0.99, 0.99])]))
    assert "lowers the best P99 there by saturated" in text


def test_a_rising_optimum_is_said_to_rise() -> None:
    low, high = measured(Cell(0.05), [50, 40, 60]), measured(Cell(0.60), [60, 50, 40])
    text = " ".join(conclusions([low, high]))
    assert "does not fall throughout" in text
    assert "it rises from 0.05 to 0.60" in text
    assert "bar of 0.35 is missed" in text


def test_near_best_is_within_five_percent() -> None:
    result = measured(Cell(0.20), [50, 41.9, 40, 42.1, 60])
    assert result.best_alpha == 0.50
    assert result.near_best == (0.25, 0.50)
