"""Holds a controller to the protocol, so that one that fails spoils nobody else's results."""

from __future__ import annotations

import numbers
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.controller import Controller, Decision
from hlem_env.errors import HlemError
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats

SET_UP_LIMIT_S = 60.0
"""For making and resetting a controller: libraries load, kernels compile."""


class ControllerFault(HlemError):
    """A controller raised, answered something that is no decision, or took too long."""


class _TimeUp(BaseException):
    """Raised by the timer. No `except Exception` of a controller holds it up."""


@contextmanager
def watched(doing: str, limit_s: float) -> Iterator[None]:
    """Turn whatever is raised inside, and running for longer than the limit, into a ControllerFault.

    On the main thread a timer interrupts Python code that does not come back. Native code, and code
    on other threads, is found out when it returns.

    Raises:
        ControllerFault: naming what was being done, and the reason.
    """
    has_timer = threading.current_thread() is threading.main_thread()

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TimeUp

    late = ControllerFault(f"{doing} took longer than {limit_s:g} s")
    before = signal.signal(signal.SIGALRM, stop) if has_timer else None
    start = time.perf_counter()
    try:
        if has_timer:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
        yield
    except _TimeUp:
        raise late from None
    except ControllerFault:
        raise
    except (Exception, SystemExit) as error:
        raise ControllerFault(f"{doing} raised {type(error).__name__}: {error}") from error
    finally:
        if has_timer:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    if time.perf_counter() - start > limit_s:
        raise late


class Guarded:
    """A controller behind checks and a clock.

    An alpha out of bounds is no fault: the runner clips it; `clipped` counts how often. An alpha that
    is not a whole number of hundredths is off the grid, and a fault.

    Args:
        build: makes the controller.
        config: has the bounds of alpha.
        limit_s: for a decision.

    Raises:
        ControllerFault: at any call; also from here, when `build` fails.
    """

    def __init__(self, build: Callable[[], Controller], config: MdpConfig, limit_s: float) -> None:
        self._config, self._limit_s = config, limit_s
        with watched("making it", SET_UP_LIMIT_S):
            self._controller = build()
            self.name = str(self._controller.name)
            self.period = int(self._controller.period)
            self.initial_alpha_centi = self._controller.initial_alpha_centi
        if self.period < 1:
            raise ControllerFault(f"period={self.period} is not allowed; allowed: at least 1")
        _check_alpha("initial_alpha_centi", self.initial_alpha_centi)
        if hasattr(self._controller, "on_tick"):
            self.on_tick = self._on_tick
        self.seconds: list[float] = []
        """Wall time of every decision."""
        self.clipped = 0

    def reset(self, seed: int) -> None:
        """Reset it."""
        self.seconds, self.clipped = [], 0
        with watched("reset", SET_UP_LIMIT_S):
            self._controller.reset(seed)

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """Its decision, checked and timed."""
        what = f"decision {len(self.seconds) + 1}"
        start = time.perf_counter()
        with watched(what, self._limit_s):
            decision = self._controller.decide(observation, stats)
        self.seconds.append(time.perf_counter() - start)
        return self._checked(what, decision)

    def _on_tick(self, stats: EpochStats) -> Decision | None:
        what = f"a tick after decision {len(self.seconds)}"
        with watched(what, self._limit_s):
            decision = self._controller.on_tick(stats)  # type: ignore[attr-defined]
        return None if decision is None else self._checked(what, decision)

    def _checked(self, what: str, decision: Any) -> Decision:
        if not isinstance(decision, Decision):
            raise ControllerFault(f"{what} is {decision!r}; allowed: a Decision")
        _check_alpha(f"alpha_centi of {what}", decision.alpha_centi)
        self.clipped += self._config.clip(decision.alpha_centi) != decision.alpha_centi
        return decision

    def times_us(self) -> dict[str, float]:
        """Decision time in microseconds: median and P99. Without decisions 0."""
        seconds = self.seconds or [0.0]
        p50, p99 = (1e6 * float(np.percentile(seconds, p)) for p in (50, 99))
        return {"decision_us_p50": p50, "decision_us_p99": p99}


def _check_alpha(what: str, alpha_centi: Any) -> None:
    if not isinstance(alpha_centi, numbers.Integral) or isinstance(alpha_centi, bool):
        raise ControllerFault(f"{what}={alpha_centi!r} is off the grid; allowed: whole hundredths")
