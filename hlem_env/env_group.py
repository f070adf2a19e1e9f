"""Environments of a vector environment that are stepped together: in this process, or in a forked one."""

from __future__ import annotations

import multiprocessing
import signal
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import BackendError

Observation = NDArray[np.float32]
Info = dict[str, Any]


class Step(NamedTuple):
    """What one environment's step gave."""

    observation: Observation
    reward: float
    truncated: bool
    info: Info
    last: tuple[Observation, Info] | None = None
    """With "SameStep", the state and info of the episode that ended; the others are of the next one."""


class EnvGroup:
    """Environments that are stepped one after the other, in this process.

    Args:
        envs: the environments.
        same_step: reset in the step that ends an episode; otherwise in the one after.
    """

    def __init__(self, envs: Sequence[gym.Env[Observation, Any]], same_step: bool) -> None:
        self._envs = envs
        self._same_step = same_step
        self._ended = np.zeros(len(envs), np.bool_)

    def reset(self, seeds: Sequence[int | None]) -> list[tuple[Observation, Info]]:
        """Start an episode in each."""
        self._ended[:] = False
        return [env.reset(seed=seed) for env, seed in zip(self._envs, seeds, strict=True)]

    def step(self, actions: NDArray[np.int64]) -> list[Step]:
        """One epoch in each; where an episode ended in the last step, a reset, if not done yet."""
        return [self._step(number, action) for number, action in enumerate(actions)]

    def render(self) -> list[Any]:
        """One frame of each."""
        return [env.render() for env in self._envs]

    def close(self) -> None:
        """Close each."""
        for env in self._envs:
            env.close()

    def _step(self, number: int, action: np.int64) -> Step:
        env = self._envs[number]
        if self._ended[number]:
            self._ended[number] = False
            observation, info = env.reset()
            return Step(observation, 0.0, False, info)
        observation, reward, _, truncated, info = env.step(action)
        if not truncated:
            return Step(observation, float(reward), False, info)
        if not self._same_step:
            self._ended[number] = True
            return Step(observation, float(reward), True, info)
        first, first_info = env.reset()
        return Step(first, float(reward), True, first_info, (observation, info))


class ForkedGroup:
    """A group in a process of its own, forked from this one when it is first called.

    The fork inherits what numba has compiled and what is cached. It runs nothing but the group, so
    that it is no matter which locks other threads of this process hold at that moment.
    """

    def __init__(self, group: EnvGroup) -> None:
        self._group = group
        self._pipe: Connection | None = None

    def begin(self, method: str, *arguments: Any) -> None:
        """Have the group's method called; `answer` waits for what it returns."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        with suppress(ConnectionError):  # `answer` says that the process has died
            self._pipe.send((method, arguments))

    def answer(self) -> list[Any] | Exception:
        """What the method returned or raised, or an error that the process has died."""
        assert self._pipe is not None
        try:
            answer: list[Any] | Exception = self._pipe.recv()
        except (EOFError, ConnectionError):
            return BackendError("a process of the vector environment has died")
        return answer

    def close(self) -> None:
        """End the process, whatever it is doing. May be called twice."""
        if self._pipe is not None:
            self._pipe.close()
            self._process.terminate()
            self._process.join()
            self._pipe = None

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_answer, args=(self._group, theirs, self._pipe), daemon=True
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside threads; see the class's docstring.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()


def _answer(group: EnvGroup, pipe: Connection, other_end: Connection) -> None:
    """Call the group's methods as they are asked for, until the other end is closed."""
    other_end.close()  # a fork has both, and would never see the end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    with suppress(EOFError, ConnectionError):
        while True:
            method, arguments = pipe.recv()
            try:
                answer = getattr(group, method)(*arguments)
            except Exception as error:  # whatever it is, the process that asked raises it
                answer = error
            pipe.send(answer)
