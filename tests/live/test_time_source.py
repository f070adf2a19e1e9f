import time

from hlem_env.live.time_source import CpuTime, WallTime


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
