import time

import pytest

from hlem_env.live.time_source import AwakeTime, CpuTime, WallTime, clock_name, make_clock


def test_cpu_time_passes_over_waits_and_counts_work() -> None:
    clock, wall_s = CpuTime(), time.perf_counter()
    begin_s = clock.now()
    clock.sleep(1000.0)
    clock.sleep(-1.0)
    assert 1000.0 <= clock.now() - begin_s < 1000.0 + time.perf_counter() - wall_s
    before_s, thread_s = clock.now(), time.thread_time()
    sum(range(200_000))
    worked_s = time.thread_time() - thread_s
    assert clock.now() - before_s >= worked_s > 0


def test_what_others_do_meanwhile_does_not_count() -> None:
    clock = CpuTime()
    begin_s, wall_s = clock.now(), time.perf_counter()
    time.sleep(0.05)  # somebody else has the core
    assert clock.now() - begin_s < time.perf_counter() - wall_s - 0.04


def test_wall_time_waits() -> None:
    clock = WallTime()
    begin_s = clock.now()
    clock.sleep(0.01)
    assert clock.now() - begin_s >= 0.01


def test_a_wait_awake_never_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept_s: list[float] = []
    monkeypatch.setattr(time, "sleep", slept_s.append)
    clock = AwakeTime()
    begin_s = clock.now()
    clock.sleep(0.01)
    assert clock.now() - begin_s >= 0.01
    assert set(slept_s) == {0}
    clock.sleep(-1.0)


def test_which_clock_a_node_has() -> None:
    assert clock_name("auto", "cpu") == "cpu"
    assert clock_name("auto", "cuda") == "wall"
    assert clock_name("wall", "cpu") == "wall"
    assert type(make_clock("wall", "cuda")) is AwakeTime
    assert type(make_clock("wall", "cpu")) is WallTime
    assert type(make_clock("cpu", "cuda")) is CpuTime
