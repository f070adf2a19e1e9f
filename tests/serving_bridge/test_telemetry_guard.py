"""The telemetry guard: every field, every kind of fault, and nothing that a sound node does."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from hlem_env.errors import ArgumentError
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats
from serving_bridge.telemetry_guard import TelemetryGuard, TelemetrySettings
from tests.serving_bridge.made_epochs import stats_of

ARRAYS = ("latency_ms", "service_ms", "arrival_s")
SCALARS = [f.name for f in fields(EpochStats) if f.name not in (*ARRAYS, "is_hot")]


@pytest.mark.parametrize("workload", ["steady", "burst"])
@pytest.mark.parametrize("seconds", [0.02, 0.5, 5.0])
def test_a_sound_node_is_never_suspected(workload: str, seconds: float) -> None:
    backend = Scenario.parse(workload).build()
    backend.reset(1)
    guard = TelemetryGuard()
    assert [guard.fault(backend.run(50 + i % 3, seconds)) for i in range(40)] == 40 * [""]


@pytest.mark.parametrize("name", SCALARS)
@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "missing"), (np.nan, "not a number"), (np.inf, "not a number"), (-1, "out of range"),
     (1e30, "out of range"), ("0.5", "out of range"), (np.zeros(3), "out of range")],
)  # fmt: skip
def test_a_wrong_scalar_is_named(name: str, value: object, said: str) -> None:
    found = TelemetryGuard().fault(replace(stats_of(), **{name: value}))
    assert said in found and name in found


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30, -1e30])
def test_one_wrong_entry_is_found(name: str, value: float) -> None:
    array = getattr(stats_of(), name).copy()
    array[37] = value
    found = TelemetryGuard().fault(replace(stats_of(), **{name: array}))
    assert name in found and "1 of 100" in found


@pytest.mark.parametrize("name", [*ARRAYS, "is_hot"])
@pytest.mark.parametrize(
    "value", [None, np.zeros(99), np.zeros((10, 10)), [0.0] * 100, np.zeros(100, np.int64)]
)
def test_a_wrong_array_is_named(name: str, value: object) -> None:
    assert name in TelemetryGuard().fault(replace(stats_of(), **{name: value}))


def test_nothing_and_something_else() -> None:
    assert TelemetryGuard().fault(None) == "telemetry is missing"
    assert "a dict came" in TelemetryGuard().fault({})  # type: ignore[arg-type]
    partial = EpochStats.of(**{k: v for k, v in vars(stats_of()).items() if k != "rows_hit"})
    assert "missing: rows_hit" in TelemetryGuard().fault(partial)


@pytest.mark.parametrize(
    ("part", "whole"), [("reused_tokens", "history_tokens"), ("rows_hit", "rows_looked_up")]
)
def test_a_part_is_not_more_than_the_whole(part: str, whole: str) -> None:
    assert "more than" in TelemetryGuard().fault(replace(stats_of(), **{part: 9, whole: 8}))


def test_the_same_epoch_twice_is_stale_and_the_next_is_not() -> None:
    guard = TelemetryGuard()
    assert guard.fault(stats_of(1)) == ""
    assert "came twice" in guard.fault(stats_of(1))
    other = replace(stats_of(1), utilisation=0.1, alpha_target=0.6)
    assert "came twice" in guard.fault(other)
    assert guard.fault(stats_of(2)) == ""


def test_a_clock_that_stands_still_or_goes_back_is_stale() -> None:
    guard = TelemetryGuard()
    assert guard.fault(stats_of(5)) == ""
    assert "went back" in guard.fault(stats_of(3))
    assert guard.fault(stats_of(4)) == ""  # a clock that was set back goes on


def test_completions_out_of_order_are_no_standstill() -> None:
    first = replace(stats_of(0, 2), arrival_s=np.array([1.0, 4.9]), latency_ms=np.array([9.0, 9.0]))
    slow = replace(stats_of(1, 1), arrival_s=np.array([1.5]), latency_ms=np.array([4000.0]))
    guard = TelemetryGuard()
    assert guard.fault(first) == "" and guard.fault(slow) == ""


def test_old_stats_are_stale() -> None:
    assert TelemetryGuard().fault(stats_of(), age_s=14.0) == ""
    assert "15.1 s old" in TelemetryGuard().fault(stats_of(), age_s=15.1)
    assert "stale" in TelemetryGuard().fault(stats_of(), age_s=np.nan)


def test_idle_epochs_are_sound_unless_requests_were_served() -> None:
    idle = replace(stats_of(0, 0), backlog=0, history_tokens=0, reused_tokens=0)
    guard = TelemetryGuard()
    assert guard.fault(idle) == "" and guard.fault(replace(idle)) == ""
    assert "7 requests completed and none is in it" in guard.fault(replace(idle), served=7)


def test_settings_are_checked() -> None:
    for name in ("max_age_s", "max_latency_s", "max_epoch_s"):
        for value in (0.0, -1.0, np.nan, np.inf, True, "1"):
            with pytest.raises(ArgumentError, match=name):
                TelemetrySettings(**{name: value})
