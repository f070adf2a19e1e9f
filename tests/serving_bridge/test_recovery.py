import logging

import numpy as np
import pytest

from hlem_env.backend import Runner, run_controller
from hlem_env.controller import Decision
from hlem_env.errors import ArgumentError
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats
from serving_bridge.recovery import RecoverySettings, State, WithRecovery
from tests.hlem_env.epochs import make_stats

NORMAL, BURST, RECOVERING = State.NORMAL, State.BURST, State.RECOVERING


class Counting:
    """Asks for 0.77; keeps what it was asked with."""

    name, initial_alpha_centi = "counting", 60

    def __init__(self, period: int = 1) -> None:
        self.period = period
        self.asked: list[EpochStats] = []
        self.resets: list[int] = []

    def reset(self, seed: int) -> None:
        self.resets.append(seed)

    def decide(self, observation: np.ndarray, stats: EpochStats) -> Decision:
        self.asked.append(stats)
        return Decision(77, "counted")


def play(
    p99s: list[float], hot: bool = True, **settings: float
) -> tuple[WithRecovery, list[int], list[State]]:
    agent = WithRecovery(Counting(), RecoverySettings(**settings), MdpConfig(slo_ms=30))
    alphas, states = [], []
    for p99 in p99s:
        stats = make_stats([p99] * 4, is_hot=[hot] * 4, alpha_target=0.5)
        alphas.append(agent.decide(np.zeros(8, np.float32), stats).alpha_centi)
        states.append(agent.state)
    return agent, alphas, states


def test_a_burst_is_above_three_sigma() -> None:
    # Constant P99: sigma is its floor of 0.05 x 30 ms, so the limit is at 20 + 4.5 ms.
    assert play([20.0] * 20 + [24.4])[2][-1] is NORMAL
    assert play([20.0] * 20 + [24.6])[2][-1] is BURST
    assert play([20.0] * 20 + [24.6], sigma_floor_slos=0.1)[2][-1] is NORMAL


def test_sigma_is_that_of_the_series() -> None:
    rng = np.random.default_rng(0)
    # A factor 2 / 11 weighs about the last ten; over white noise the recursion's mean is sigma^2.
    series = rng.normal(20.0, 3.0, 5000)
    agent = WithRecovery(Counting(), RecoverySettings(), MdpConfig(slo_ms=30))
    sigmas = []
    for p99 in series:
        agent.detector.learn(make_stats([p99]))
        sigmas.append(agent.detector.sigma_ms)
    assert np.sqrt(np.square(sigmas[100:]).mean()) == pytest.approx(3.0, rel=0.1)
    assert agent.detector.ema_ms == pytest.approx(20.0, abs=5.0)


def test_moves_towards_kv_only_if_hot_users_ask() -> None:
    assert play([20.0] * 20 + [40.0])[1][-1] == 44
    assert play([20.0] * 20 + [40.0], step_centi=20)[1][-1] == 30
    assert play([20.0] * 20 + [40.0], hot=False)[1][-1] == 50


def test_the_controller_is_bypassed_in_a_burst() -> None:
    agent, alphas, _ = play([20.0] * 20 + [40.0] * 3 + [20.0] * 5)
    assert alphas == [77] * 20 + [44] * 3 + [77] * 5
    assert len(agent.controller.asked) == 25  # type: ignore[attr-defined]


def test_burst_epochs_do_not_move_the_baseline() -> None:
    before = play([20.0] * 20)[0].detector
    during = play([20.0] * 20 + [90.0] * 5)[0].detector
    assert (during.ema_ms, during.sigma_ms) == (before.ema_ms, before.sigma_ms)


def test_ends_when_p99_is_back_or_after_six_epochs() -> None:
    states = play([20.0] * 20 + [40.0, 40.0, 22.0, 21.0, 20.0])[2][19:]
    # 22 ms is above EMA + sigma = 21.5 ms, 21 is not; two calm epochs end the recovering.
    assert states == [NORMAL, BURST, BURST, BURST, RECOVERING, NORMAL]
    states = play([20.0] * 20 + [40.0] * 30)[2][20:]
    assert states[:6] == [BURST] * 6
    assert states[6] is RECOVERING


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    states = play([20.0] * 20 + [40.0] * 40)[2]
    assert states[-1] is NORMAL
    assert states[20:].count(BURST) == 6


def test_no_new_burst_while_recovering() -> None:
    # Hysteresis: up again right after the end of a burst.
    states = play([20.0] * 20 + [40.0, 20.0, 40.0, 20.0, 20.0])[2][20:]
    assert states == [BURST, RECOVERING, RECOVERING, RECOVERING, NORMAL]


def test_transitions_carry_their_numbers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="serving_bridge.recovery"):
        agent, _, _ = play([20.0] * 20 + [40.0] * 2 + [20.0] * 3)
    first = agent.transitions[0]
    assert [(t.epoch, t.before, t.after) for t in agent.transitions] == [
        (21, NORMAL, BURST),
        (23, BURST, RECOVERING),
        (24, RECOVERING, NORMAL),
    ]
    assert (first.p99_ms, first.ema_ms, first.sigma_ms, first.alpha_centi) == (40.0, 20.0, 1.5, 50)
    assert "normal to burst" in caplog.text and "P99 40.0 ms, EMA 20.0, sigma 1.5" in caplog.text
    agent.reset(7)
    assert (agent.state, agent.transitions, agent.detector.ema_ms) == (NORMAL, [], -1.0)
    assert agent.controller.resets == [7]  # type: ignore[attr-defined]


def test_a_slow_controller_is_asked_at_its_period_on_merged_stats() -> None:
    inner = Counting(period=3)
    agent = WithRecovery(inner)
    alphas = [
        agent.decide(np.zeros(8, np.float32), make_stats([20.0] * 2)).alpha_centi for _ in range(7)
    ]
    assert alphas == [50, 50, 77, 50, 50, 77, 50]
    assert [stats.requests for stats in inner.asked] == [6, 6]


def test_ticks_reach_the_controller_outside_bursts_only() -> None:
    class Ticking(Counting):
        def on_tick(self, stats: EpochStats) -> Decision | None:
            return Decision(33)

    assert not hasattr(WithRecovery(Counting()), "on_tick")
    agent = WithRecovery(Ticking())
    assert agent.on_tick(make_stats()) == Decision(33)
    agent.state = BURST
    assert agent.on_tick(make_stats()) is None


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"detector='cpu' is not allowed; .* p99"):
        RecoverySettings(detector="cpu")
    with pytest.raises(ArgumentError, match="end_sigmas"):
        RecoverySettings(end_sigmas=4.0)


def test_bursts_of_the_surrogate_are_seen() -> None:
    scenario = Scenario.parse("burst", episode_epochs=120)
    inner = Counting()
    agent = WithRecovery(inner)
    runner = Runner(scenario.build(), MdpConfig(features="working_set"))
    stats = [epoch for epoch, _ in run_controller(runner, agent, 120, 3)]
    seen = [t.epoch - 1 for t in agent.transitions if t.after is BURST]
    assert seen and len(inner.asked) < 119
    usual = np.median([epoch.p99_ms for epoch in stats])
    assert all(stats[epoch].p99_ms > usual + 4.5 for epoch in seen)


# By the workload


def watching(**settings: float) -> WithRecovery:
    """One step in a burst and no more, unless the settings say so."""
    values = {"burst_creep_centi": 0, **settings}
    return WithRecovery(Counting(), RecoverySettings(detector="workload", **values))  # type: ignore[arg-type]


def run_ticks(agent: WithRecovery, shares: list[float], alpha: int = 60) -> tuple[list[int], int]:
    """An epoch of ticks with these hot shares: alpha after each, and after the decision."""
    alphas, epoch = [], None
    for share in shares:
        hot = np.arange(100) < round(100 * share)
        stats = make_stats([20.0] * 100, is_hot=hot, alpha_target=alpha / 100)
        epoch = stats if epoch is None else epoch.merge(stats)
        decision = agent.on_tick(stats)
        alpha = alpha if decision is None else decision.alpha_centi
        alphas.append(alpha)
    assert epoch is not None
    decision = agent.decide(np.full(8, epoch.alpha_target, np.float32), epoch)
    return alphas, decision.alpha_centi


def quiet(agent: WithRecovery, epochs: int = 5) -> None:
    for _ in range(epochs):
        run_ticks(agent, [0.15] * 10)


def test_an_epoch_is_in_the_baseline_of_p99_by_the_next_tick() -> None:
    watching_it, by_p99 = watching(), WithRecovery(Counting(), RecoverySettings())
    for p99 in (20.0, 24.0, 22.0):
        stats = make_stats([p99] * 100, is_hot=np.arange(100) < 15, alpha_target=0.6)
        for agent in (watching_it, by_p99):
            agent.decide(np.zeros(8, np.float32), stats)
    watching_it.on_tick(make_stats([20.0] * 100))
    assert watching_it.detector.ema_ms == by_p99.detector.ema_ms
    assert watching_it.detector.sigma_ms == by_p99.detector.sigma_ms


def test_steps_at_once_and_returns_when_the_burst_is_over() -> None:
    agent = watching()
    quiet(agent)
    alphas, after = run_ticks(agent, [0.15] * 2 + [0.5] * 8)
    assert alphas[:2] == [60, 60] and alphas[3:] == [40] * 7 and after == 40
    assert agent.state is BURST
    alphas, after = run_ticks(agent, [0.5] * 3 + [0.15] * 7, alpha=40)
    assert alphas[:3] == [40] * 3 and alphas[6:] == [60] * 4 and after == 60
    assert agent.state is RECOVERING


def test_holds_while_recovering_and_then_asks_again() -> None:
    agent = watching(hold_epochs=3)
    quiet(agent)
    run_ticks(agent, [0.5] * 10)
    decided = [run_ticks(agent, [0.15] * 10, alpha=58)[1] for _ in range(5)]
    # The first goes back to alpha before the burst; its epoch is the first of three.
    assert decided == [60, 58, 77, 77, 77]
    assert agent.state is NORMAL


def test_a_step_by_the_last_tick_is_kept_by_the_decision() -> None:
    agent = watching()
    quiet(agent)
    # One tick of nothing but hot requests is enough; it is the epoch's last.
    alphas, after = run_ticks(agent, [0.15] * 9 + [1.0])
    assert alphas[-2:] == [60, 40]
    assert after == 40
    assert agent.state is BURST


def test_a_return_by_the_last_tick_is_kept_too() -> None:
    agent = watching()
    quiet(agent)
    run_ticks(agent, [0.5] * 10)
    _, after = run_ticks(agent, [0.5] * 9 + [0.0], alpha=40)
    assert (agent.state, after) == (RECOVERING, 60)


def test_a_burst_that_stays_is_the_new_level() -> None:
    agent = watching()
    quiet(agent)
    alpha, states = 60, []
    for _ in range(20):
        _, alpha = run_ticks(agent, [0.5] * 10, alpha=alpha)
        states.append(agent.state)
    assert states[:5] == [BURST] * 5
    assert states[6:] == [NORMAL] * 14
    assert alpha == 77


def test_a_second_burst_while_recovering_is_seen_and_returns_to_the_first_ones_alpha() -> None:
    agent = watching()
    quiet(agent)
    alpha = 60
    for shares in ([0.5] * 10, [0.15] * 10, [0.5] * 10):
        _, alpha = run_ticks(agent, shares, alpha=alpha)
    assert (agent.state, alpha) == (BURST, 40)
    _, alpha = run_ticks(agent, [0.15] * 10, alpha=alpha)
    assert alpha == 60


def test_the_step_waits_until_hot_users_ask() -> None:
    agent = watching(hot_share=0.4)
    quiet(agent)
    alphas, _ = run_ticks(agent, [0.35] * 6 + [0.5] * 4)
    assert agent.state is BURST
    assert alphas == [60] * 6 + [40] * 4


def test_without_ticks_the_epoch_is_looked_at() -> None:
    agent = watching()

    def decide(share: float) -> int:
        hot = np.arange(1000) < round(1000 * share)
        stats = make_stats([20.0] * 1000, is_hot=hot, alpha_target=0.6)
        return agent.decide(np.zeros(8, np.float32), stats).alpha_centi

    assert [decide(0.15) for _ in range(5)] == [77] * 5
    assert decide(0.5) == 40


def test_the_workload_sees_bursts_of_the_surrogate_within_an_epoch() -> None:
    scenario = Scenario.parse("burst", episode_epochs=120)
    agent, backend = watching(), scenario.build()
    runner = Runner(backend, MdpConfig(features="working_set"))
    for _ in run_controller(runner, agent, 120, 40_003):
        pass
    burst = backend.workload.path.burst  # type: ignore[attr-defined]
    begins = [int(np.flatnonzero(burst == n)[0]) for n in range(1, burst.max() + 1)]
    seen = [t.epoch + t.tick / 10 for t in agent.transitions if t.after is BURST]
    assert len(begins) >= 2 and len(seen) == len(begins)
    assert all(0 < at - begin <= 1 for at, begin in zip(seen, begins, strict=True))


def test_creeps_on_while_the_burst_lasts_up_to_a_limit() -> None:
    agent = watching(burst_creep_centi=2, burst_most_centi=31)
    quiet(agent)
    alphas, after = run_ticks(agent, [0.15] * 2 + [0.5] * 8)
    assert alphas == [60, 60, 40, 38, 36, 34, 32, 30, 29, 29] and after == 29
    # There it stays; at the end it goes back all the way.
    assert run_ticks(agent, [0.5] * 10, alpha=29)[1] == 29
    assert run_ticks(agent, [0.15] * 10, alpha=29)[1] == 60


def test_without_ticks_it_creeps_by_the_epoch() -> None:
    agent = watching(burst_creep_centi=1, burst_most_centi=40)

    def decide(share: float, alpha: int) -> int:
        hot = np.arange(1000) < round(1000 * share)
        stats = make_stats([20.0] * 1000, is_hot=hot, alpha_target=alpha / 100)
        return agent.decide(np.zeros(8, np.float32), stats).alpha_centi

    assert [decide(0.15, 60) for _ in range(5)] == [77] * 5
    assert [decide(0.5, 60), decide(0.5, 40), decide(0.5, 30), decide(0.5, 20)] == [40, 30, 20, 20]
