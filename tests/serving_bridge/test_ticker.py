"""The grid of ticks and epochs, on a clock that the test turns."""

from types import SimpleNamespace

import numpy as np
import pytest

from hlem_env.telemetry import EpochStats
from serving_bridge.control_loop import Histories
from serving_bridge.ticker import Ticker
from tests.serving_bridge.small_engine import Told

NONE = np.empty(0)
HISTORIES = Histories(3, 4096, 2)


class Spans:
    """Stands for `Measured`: remembers the stretches that were taken."""

    def __init__(self) -> None:
        self.taken: list[tuple[float, float]] = []

    def take(
        self, begin_s: float, end_s: float, alpha_centi: int, waiting: int, oldest_s: float
    ) -> EpochStats:
        self.taken.append((round(begin_s, 6), round(end_s, 6)))
        zeros = dict.fromkeys(EpochStats.__dataclass_fields__, 0)
        arrays = dict.fromkeys(("latency_ms", "service_ms", "arrival_s", "is_hot"), NONE)
        told = {"duration_s": end_s - begin_s, "backlog": waiting, "alpha_target": alpha_centi}
        return EpochStats(**{**zeros, **arrays, **told, "backlog_age_s": end_s - oldest_s})


class Grid:
    """A ticker of epochs of a second."""

    def __init__(self, control: Told) -> None:
        self.moves: list[int] = []
        node = SimpleNamespace(config=SimpleNamespace(epoch_seconds=1.0), move=self.moves.append)
        self.spans, self.control = Spans(), control
        self.ticker = Ticker(
            node,
            self.spans,
            control,
            100.0,
            lambda: HISTORIES,  # type: ignore[arg-type]
        )
        self.ticker.begin()

    def at(self, now_s: float) -> None:
        while (end_s := self.ticker.due_s(now_s)) <= now_s:
            self.ticker.close_tick(end_s, [], 1)


def test_ten_ticks_are_an_epoch_and_each_is_told_of_once() -> None:
    grid = Grid(Told())
    for now_s in np.arange(0, 3.05, 0.03).tolist():
        grid.at(now_s)
    begins = [begin for begin, _ in grid.spans.taken]
    assert begins == pytest.approx(np.arange(30) / 10)
    assert [end for _, end in grid.spans.taken][:-1] == begins[1:]
    assert len(grid.control.ticks) == 30 and len(grid.control.epochs) == 3
    assert all(served.histories == HISTORIES for _, served in grid.control.epochs)
    for number, (stats, served) in enumerate(grid.control.epochs, 1):
        assert stats.duration_s == pytest.approx(1.0)
        assert served.refused == 10 and served.ended_s == pytest.approx(100.0 + number)


def test_missed_ticks_are_made_up_but_missed_epochs_are_one_long_tick() -> None:
    grid = Grid(Told())
    grid.at(0.31)
    grid.at(0.75)  # late by four
    assert len(grid.spans.taken) == 7
    grid.at(86_400.25)  # the process was stopped for a day
    assert grid.spans.taken[7:] == [(0.7, 86_400.0), (86_400.0, 86_400.1), (86_400.1, 86_400.2)]
    assert len(grid.control.epochs) == 1
    assert grid.control.epochs[0][0].duration_s == pytest.approx(86_400.0)


def test_alpha_is_moved_when_it_changes_by_ticks_and_by_epochs() -> None:
    grid = Grid(Told(40, None, 45))
    grid.at(1.05)
    grid.control.ticks_answer = 30
    grid.at(1.25)
    assert grid.moves == [40, 45, 30]
    assert [stats.alpha_target for stats in grid.control.ticks][-2:] == [45, 30]
