"""The Runner and run_controller, and the rules that every backend's runs follow."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hlem_env import mdp
from hlem_env.backend import Runner, run_controller
from hlem_env.controller import Decision
from hlem_env.errors import ArgumentError, BackendError
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.node import SurrogateBackend
from hlem_env.telemetry import EpochStats
from hlem_env.workload.regimes import SyntheticWorkload
from hlem_env.workload.requests import Requests
from tests.hlem_env.epochs import make_stats

CONFIG = MdpConfig()


@dataclass
class Recorder:
    """A backend that writes down what it is asked for. Run n serves one request of n ms."""

    warmup_s: float = 60.0
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def reset(self, seed: int) -> None:
        self.calls.append(("reset", seed))

    def run(self, alpha_centi: int, seconds: float) -> EpochStats:
        self.calls.append((alpha_centi, seconds))
        runs = sum(call[0] != "reset" for call in self.calls)
        return make_stats([runs], duration_s=seconds, alpha_target=alpha_centi / 100)

    def close(self) -> None:
        pass


@dataclass
class Script:
    """A controller that follows a list, and writes down what it saw."""

    alphas: list[int]
    period: int = 1
    initial_alpha_centi: int = 50
    name: str = "script"
    seen: list[list[float]] = field(default_factory=list)
    observed: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    def reset(self, seed: int) -> None:
        self.seeds.append(seed)
        self._left: Iterator[int] = iter(self.alphas)

    def decide(self, observation: Any, stats: EpochStats) -> Decision:
        self.seen.append(stats.latency_ms.tolist())
        self.observed.append(round(100 * float(observation[5])))
        return Decision(next(self._left), "next")


@dataclass
class TickScript(Script):
    """It also moves alpha after the third tick of every epoch."""

    ticks: list[float] = field(default_factory=list)
    move: int = 30

    def on_tick(self, stats: EpochStats) -> Decision | None:
        self.ticks.append(stats.duration_s)
        return Decision(self.move, "tick") if len(self.ticks) % 10 == 3 else None


# Runner


def test_runner_warms_up_and_runs_an_epoch() -> None:
    runner = Runner(Recorder(), CONFIG)
    stats = runner.reset(7, 40)
    assert runner.backend.calls == [("reset", 7), (40, 60.0), (40, 5.0)]  # type: ignore[attr-defined]
    assert stats.latency_ms.tolist() == [2.0]
    cold = Runner(Recorder(warmup_s=0.0), CONFIG)
    cold.reset(7, 40)
    assert cold.backend.calls == [("reset", 7), (40, 5.0)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("asked", "applied"), [(50, 50), (10, 10), (9, 10), (-3, 10), (90, 90), (91, 90), (1000, 90)]
)
def test_runner_clips_and_says_so(asked: int, applied: int) -> None:
    runner = Runner(Recorder(), CONFIG)
    runner.reset(0, 50)
    assert runner.step(asked).alpha_target == applied / 100
    assert (runner.alpha_centi, runner.was_clipped) == (applied, asked != applied)
    runner.step(50)
    assert not runner.was_clipped
    assert runner.reset(0, asked).alpha_target == applied / 100


def test_runner_must_be_reset_first() -> None:
    with pytest.raises(BackendError, match="reset"):
        Runner(Recorder(), CONFIG).step(50)


def test_runner_in_ticks() -> None:
    runner = Runner(Recorder(), CONFIG)
    runner.reset(0, 50)
    stats = runner.step_in_ticks(60, TickScript([]))
    ticks = runner.backend.calls[3:]  # type: ignore[attr-defined]
    assert ticks == [(60, 0.5)] * 3 + [(30, 0.5)] * 7
    assert stats.duration_s == pytest.approx(5.0)
    assert stats.latency_ms.tolist() == list(range(3, 13))
    assert (stats.alpha_target, runner.alpha_centi) == (0.30, 30)


def test_runner_clips_what_a_tick_asks_for() -> None:
    runner = Runner(Recorder(), CONFIG)
    runner.reset(0, 50)
    assert runner.step_in_ticks(60, TickScript([], move=-40)).alpha_target == 0.10


# run_controller


def course(runner: Runner, controller: Script, epochs: int) -> list[tuple[float, int]]:
    """For each epoch the alpha that it ran at and the one of the decision given with it."""
    pairs = run_controller(runner, controller, epochs, seed=11)
    return [(round(100 * s.alpha_target), d.alpha_centi) for s, d in pairs]


def test_a_controller_decides_on_each_epoch() -> None:
    backend, controller = Recorder(), Script([60, 62, 64])
    alphas = course(Runner(backend, CONFIG), controller, 4)
    assert alphas == [(50, 50), (60, 60), (62, 62), (64, 64)]
    assert controller.seen == [[2.0], [3.0], [4.0]]
    assert controller.observed == [50, 60, 62]
    assert controller.seeds == [11]
    assert backend.calls[0] == ("reset", 11)
    assert backend.calls[1:] == [(50, 60.0)] + [(a, 5.0) for a in (50, 60, 62, 64)]


@pytest.mark.parametrize("epochs", [1, 2, 3, 6, 7, 9])
def test_a_controller_with_a_period_decides_on_merged_epochs(epochs: int) -> None:
    controller = Script([60, 70, 80], period=3)
    alphas = course(Runner(Recorder(), CONFIG), controller, epochs)
    assert [applied for applied, _ in alphas] == ([50] * 3 + [60] * 3 + [70] * 3)[:epochs]
    assert controller.seen == [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]][: (epochs - 1) // 3]


def test_a_controller_out_of_bounds_is_clipped_and_keeps_its_decision() -> None:
    alphas = course(Runner(Recorder(), CONFIG), Script([120, -5]), 3)
    assert alphas == [(50, 50), (90, 120), (10, -5)]


def test_a_controller_with_ticks_gets_them_all() -> None:
    controller = TickScript([60, 70])
    alphas = course(Runner(Recorder(), CONFIG), controller, 3)
    assert controller.ticks == [0.5] * 20
    assert alphas == [(50, 50), (30, 60), (30, 70)]
    assert controller.observed == [50, 30]
    assert [len(seen) for seen in controller.seen] == [1, 10]


def test_a_move_between_decisions_stays_until_the_next_decision() -> None:
    backend = Recorder()
    course(Runner(backend, CONFIG), TickScript([60], period=3), 6)
    ticks = [call[0] for call in backend.calls if call[1] == 0.5]
    assert ticks == [50] * 3 + [30] * 17 + [60] * 3 + [30] * 27


def test_one_episode_after_another_starts_anew() -> None:
    scenario = Scenario.parse(SMALL)
    runner = Runner(scenario.build(), CONFIG)
    first = [s.p99_ms for s, _ in run_controller(runner, Script([50, 60, 70]), 4, seed=1)]
    other = [s.p99_ms for s, _ in run_controller(runner, Script([50, 60, 70]), 4, seed=2)]
    again = [s.p99_ms for s, _ in run_controller(runner, Script([50, 60, 70]), 4, seed=1)]
    assert first == again
    assert first != other


# What a run is, on the surrogate

SMALL = {
    "pool_bytes": 6_000_000_000,
    "mean_history_tokens": 2000,
    "max_history_tokens": 3000,
    "warmup_epochs": 2,
}


class Counting:
    """A workload that writes down the arrivals it gives out."""

    def __init__(self, workload: SyntheticWorkload) -> None:
        self._workload = workload
        self.arrivals: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def take(self, until_s: float) -> Requests:
        taken = self._workload.take(until_s)
        self.arrivals += taken.arrival_s.tolist()
        return taken


def counted(utilisation: float, rate_scale: float = 1.0) -> tuple[SurrogateBackend, Counting]:
    scenario = Scenario.parse(SMALL, utilisation=utilisation)
    workload = scenario.workload()
    assert isinstance(workload, SyntheticWorkload)
    workload.load = workload.load.scaled(rate_scale)
    counting = Counting(workload)
    return SurrogateBackend(counting, scenario.node(), scenario.profile()), counting  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    utilisation=st.sampled_from([0.1, 0.7, 1.5, 4.0]),
    seed=st.integers(0, 2**31),
    runs=st.lists(st.tuples(st.integers(0, 100), st.floats(0.001, 4.0)), min_size=1, max_size=12),
)
def test_every_arrival_is_completed_once_or_waits(
    utilisation: float, seed: int, runs: list[tuple[int, float]]
) -> None:
    backend, workload = counted(utilisation)
    backend.reset(seed)
    stats = [backend.run(50, backend.warmup_s)] + [backend.run(*run) for run in runs]
    completed = np.concatenate([s.arrival_s for s in stats])
    assert completed.tolist() == workload.arrivals[: completed.size]
    assert stats[-1].backlog == len(workload.arrivals) - completed.size
    now_s = -backend.warmup_s
    for run in stats:
        now_s += run.duration_s
        assert run.arrival_s.size == run.latency_ms.size == run.service_ms.size == run.is_hot.size
        done_s = run.arrival_s + 1e-3 * run.latency_ms
        assert (done_s <= now_s + 1e-6).all()
        assert (done_s >= now_s - run.duration_s - 1e-6).all()
        assert (np.diff(done_s) > 0).all()
        assert (run.latency_ms >= run.service_ms - 1e-6).all()
        assert (run.backlog == 0) == (run.backlog_age_s == 0.0)
        assert 0.0 <= run.utilisation <= 1.0 + 1e-9
    if stats[-1].backlog:
        oldest_s = workload.arrivals[completed.size]
        assert stats[-1].backlog_age_s == pytest.approx(now_s - oldest_s, abs=1e-9)


def test_in_overload_the_backlog_and_its_age_grow() -> None:
    backend, workload = counted(1.5)
    backend.reset(0)
    backend.run(50, backend.warmup_s)
    stats = [backend.run(50, 5.0) for _ in range(12)]
    backlogs, ages = [s.backlog for s in stats], [s.backlog_age_s for s in stats]
    assert backlogs == sorted(set(backlogs))
    assert ages == sorted(set(ages))
    assert all(s.utilisation == pytest.approx(1.0) for s in stats)
    # The device is busy with two thirds of the arrivals at best.
    assert sum(s.requests for s in stats) < 0.75 * len(workload.arrivals)


def test_the_backlog_is_served_when_the_load_goes() -> None:
    backend, workload = counted(1.5)
    backend.reset(0)
    loaded = backend.run(50, 60.0)
    assert loaded.backlog > 100
    now_s = 60.0 - backend.warmup_s
    left = backend.serve(Requests.empty(), 50, 600.0)
    assert (left.backlog, left.backlog_age_s) == (0, 0.0)
    assert left.requests == loaded.backlog
    assert left.arrival_s.tolist() == workload.arrivals[loaded.requests :]
    assert (left.arrival_s < now_s).all()
    assert left.utilisation < 0.5


def test_an_idle_workload() -> None:
    backend, workload = counted(0.01, rate_scale=1e-6)
    runner = Runner(backend, CONFIG)
    stats = [runner.reset(0, 50)] + [runner.step(a) for a in (56, 50, 90, 10)]
    assert workload.arrivals == []
    for run in stats:
        assert (run.requests, run.backlog, run.utilisation, run.evictions) == (0, 0, 0.0, 0)
        assert (run.kv_pages, run.working_set_bytes) == (0, 0.0)
        assert mdp.reward(run, CONFIG) == 1.0
        assert np.isfinite(mdp.observe(run, CONFIG)).all()


def test_a_request_longer_than_its_run_completes_in_a_later_one() -> None:
    backend, workload = counted(0.7)
    backend.reset(0)
    backend.run(50, backend.warmup_s)
    runs = [backend.run(50, 0.0005) for _ in range(400)]
    assert any(run.requests == 0 and run.backlog and run.utilisation == 1.0 for run in runs)
    for run in runs:
        if run.requests == 0 and run.backlog:
            assert run.p99_ms == pytest.approx(1000 * run.backlog_age_s)
            assert run.qos(1e9) == 0.0
    total = sum(run.service_ms.sum() for run in runs)
    busy_ms = sum(run.utilisation * run.duration_s for run in runs) * 1000
    assert busy_ms == pytest.approx(total, abs=5.0)
    assert busy_ms > 50


def test_the_surrogate_must_be_reset_and_refuses_wrong_alphas() -> None:
    backend = Scenario.parse(SMALL).build()
    with pytest.raises(BackendError, match="reset"):
        backend.serve(Requests.empty(), 50, 1.0)
    backend.reset(0)
    for alpha_centi in (-1, 101):
        with pytest.raises(ArgumentError, match=f"alpha_centi={alpha_centi}"):
            backend.run(alpha_centi, 1.0)
    backend.close()
    backend.close()
    with pytest.raises(BackendError, match="reset"):
        backend.run(50, 1.0)
