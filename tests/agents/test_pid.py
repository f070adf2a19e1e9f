import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.pid import Pid, PidLoop, PidSettings
from tests.hlem_env.epochs import make_stats

gains = st.floats(-5, 5).map(lambda x: round(x, 3))


@given(gains, gains, gains, st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_agrees_with_simple_pid(kp: float, ki: float, kd: float, errors: list[float]) -> None:
    simple_pid = pytest.importorskip("simple_pid", reason="needs the extra baselines")
    oracle = simple_pid.PID(
        kp, ki, kd, setpoint=0.0, sample_time=None, differential_on_measurement=False
    )
    loop = PidLoop(kp, ki, kd)
    for error in errors:
        assert float(loop.update(error)) == pytest.approx(oracle(-error, dt=1.0), abs=1e-9)


def test_settles_a_step_change_without_steady_error() -> None:
    """Many plants at once, each of first order with a constant disturbance of its own."""
    rng = np.random.default_rng(0)
    lag, push = rng.uniform(0.2, 0.9, 50), rng.uniform(-5, 5, 50)
    loop = PidLoop(np.full(50, 0.5), np.full(50, 0.1), np.full(50, 0.05))
    value, errors = np.zeros(50), []
    for wanted in [10.0] * 200 + [30.0] * 200:
        value += lag * (loop.update(wanted - value) + push - value)
        errors.append(np.abs(wanted - value).max())
    assert errors[0] > 1 and errors[200] > 1
    assert errors[199] < 1e-3 and errors[399] < 1e-3


def test_proportional_control_alone_would_keep_an_error() -> None:
    loop, value = PidLoop(0.5, 0.0, 0.0), 0.0
    for _ in range(400):
        value += 0.5 * (float(loop.update(10.0 - value)) - value)
    assert abs(10.0 - value) > 5


@pytest.mark.parametrize("most_change", [np.inf, 6.0])
def test_does_not_wind_up(most_change: float) -> None:
    loop = PidLoop(0.0, 1.0, 0.0, low=0.0, high=10.0, most_change=most_change)
    for _ in range(1000):
        loop.update(1.0)
    assert float(loop.output) == 10.0
    assert float(loop.update(-1.0)) == 9.0


def test_each_entry_is_a_loop_of_its_own() -> None:
    rng = np.random.default_rng(1)
    k, errors = rng.normal(size=(3, 8)), rng.normal(size=(20, 8))
    together = PidLoop(*k, low=-2, high=2, most_change=1.0, bias=np.zeros(8))
    apart = [PidLoop(*k[:, i], low=-2, high=2, most_change=1.0) for i in range(8)]
    for error in errors:
        one_by_one = [float(loop.update(e)) for loop, e in zip(apart, error, strict=True)]
        assert together.update(error).tolist() == one_by_one


def stats(p99_ms: float, rows_hit: int, reused: int, alpha: float = 0.5):  # type: ignore[no-untyped-def]
    return make_stats(
        [p99_ms] * 10,
        is_hot=[True] * 5 + [False] * 5,
        history_tokens=100,
        reused_tokens=reused,
        rows_looked_up=100,
        rows_hit=rows_hit,
        alpha_target=alpha,
    )


def test_moves_to_the_shorter_cache_and_only_when_p99_is_high() -> None:
    pid = Pid(PidSettings(kp=10, ki=0, kd=0, setpoint=0.5, kv_weight=1.0, band=0.1), slo_ms=30)
    for p99, hit, reused, direction in (
        (30, 50, 50, 1),  # half of the rows missing, every token of hot users reused
        (30, 100, 0, -1),
        (15, 50, 50, 0),
        (10, 100, 0, 0),
        (30, 80, 30, 0),  # as short of rows as of tokens
    ):
        pid.reset(0)
        alpha_centi = pid.decide(np.zeros(8, np.float32), stats(p99, hit, reused)).alpha_centi
        assert np.sign(alpha_centi - 50) == direction


def test_keeps_the_step_limit_and_forgets_at_reset() -> None:
    pid = Pid(PidSettings(kp=1000, ki=1000), slo_ms=30)
    low = stats(60, 0, 50)
    first = [pid.decide(np.zeros(8, np.float32), low).alpha_centi for _ in range(3)]
    assert first == [56, 56, 56]  # alpha in force is 50 every time
    pid.reset(0)
    assert pid.decide(np.zeros(8, np.float32), low).alpha_centi == 56
    assert pid.decide(np.zeros(8, np.float32), stats(60, 100, 0, 0.56)).alpha_centi == 50
