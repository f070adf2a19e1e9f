import time

import numpy as np
import pytest

from eval.guard import ControllerFault, Guarded, watched
from hlem_env.controller import Decision
from hlem_env.mdp import MdpConfig
from tests.hlem_env.epochs import make_stats


class Answers:
    """Gives one answer, or calls it."""

    name, period, initial_alpha_centi = "answers", 1, 50

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def reset(self, seed: int) -> None:
        pass

    def decide(self, observation: np.ndarray, stats: object) -> object:
        return self.answer() if callable(self.answer) else self.answer


def guarded(answer: object, limit_s: float = 10.0) -> Guarded:
    made = Guarded(lambda: Answers(answer), MdpConfig(), limit_s)  # type: ignore[arg-type,return-value]
    made.reset(0)
    return made


def ask(controller: Guarded) -> Decision:
    return controller.decide(np.zeros(8, np.float32), make_stats())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: 1 // 0, "decision 1 raised ZeroDivisionError: integer division"),
        (lambda: exit(3), "decision 1 raised SystemExit: 3"),
        (None, "decision 1 is None; allowed: a Decision"),
        (0.5, "decision 1 is 0.5; allowed: a Decision"),
        (Decision(50.5), "alpha_centi of decision 1=50.5 is off the grid"),  # type: ignore[arg-type]
        (Decision(float("nan")), "nan is off the grid"),  # type: ignore[arg-type]
        (Decision(True), "True is off the grid"),
    ],
)
def test_what_is_no_decision_is_a_fault(answer: object, reason: str) -> None:
    with pytest.raises(ControllerFault, match=reason):
        ask(guarded(answer))


def test_out_of_bounds_is_counted_and_left_to_the_runner() -> None:
    controller = guarded(Decision(95))
    assert ask(controller).alpha_centi == 95
    assert ask(guarded(Decision(np.int64(90)))).alpha_centi == 90  # type: ignore[arg-type]
    assert controller.clipped == 1
    controller.reset(1)
    assert controller.clipped == 0


def never() -> None:
    while True:
        try:
            time.sleep(1e-3)
        except Exception:  # a controller that holds on to its time
            continue


def test_code_that_does_not_come_back_is_interrupted() -> None:
    with pytest.raises(ControllerFault, match=r"decision 1 took longer than 0\.05 s"):
        ask(guarded(never, limit_s=0.05))


def test_the_timer_is_off_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    with watched("something", 5.0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_too_late_counts_even_where_nothing_could_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 3.0])
    monkeypatch.setattr("eval.guard.time.perf_counter", lambda: next(clock))
    with (
        pytest.raises(ControllerFault, match="something took longer than 2 s"),
        watched("something", 2.0),
    ):
        pass


@pytest.mark.parametrize("member", ["name", "period", "initial_alpha_centi"])
def test_an_incomplete_controller_is_a_fault(member: str) -> None:
    class Incomplete(Answers):
        def __getattribute__(self, name: str) -> object:
            if name == member:
                raise AttributeError(name)
            return super().__getattribute__(name)

    with pytest.raises(ControllerFault, match=f"making it raised AttributeError: {member}"):
        Guarded(lambda: Incomplete(None), MdpConfig(), 1.0)  # type: ignore[arg-type,return-value]


def test_ticks_are_checked_too() -> None:
    class Ticking(Answers):
        def on_tick(self, stats: object) -> object:
            return self.answer

    assert not hasattr(guarded(None), "on_tick")
    with pytest.raises(ControllerFault, match="a tick after decision 0 is 'x'"):
        Guarded(lambda: Ticking("x"), MdpConfig(), 1.0).on_tick(make_stats())  # type: ignore[arg-type,return-value]
    assert Guarded(lambda: Ticking(None), MdpConfig(), 1.0).on_tick(make_stats()) is None  # type: ignore[arg-type,return-value]
