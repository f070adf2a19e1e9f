"""The online adapter: a small residual on the frozen policy's step, learnt on the node (Eq. 6, 7).

    residual   mu(x) = 0.02 tanh(...) of five features, zero at first          (residual_network.py)
    applied    a = mu(x) + noise, noise Gaussian and at most 0.01, a within +-0.02
    advantage  A = (reward - mean of the replay's) / their deviation, within +-3
    step       weights += eta mean(min(pi(a) / pi_then(a), 2) A sigma d log pi(a) / d weights)
    rate       eta = 1e-3 |P99 - EMA of P99| / SLO

over samples drawn from a replay of the last 1,000 epochs. sigma, the noise's deviation, makes the
step the same for any noise: without it little noise makes large steps, of chance alone. The paper
names neither the five inputs nor the loss; both are ours. Learning never runs in a decision: that
reads a snapshot of the weights, which nothing changes afterwards. In simulation the steps run between
decisions (`background=False`), so that a seed fixes the run; on a node a thread takes them, without the
interpreter's lock and at a lower priority.

To the network's residual comes a pull to where both caches are worth the same (cache_worth.py), learnt
beside it from the same epochs. What a decision computes of all this is in adapted_step.py.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require
from serving_bridge.adapted_step import MOST, UNKNOWN, Memory, Proposed, adapted_step
from serving_bridge.cache_worth import Seen, WorthLearner, by_kind
from serving_bridge.compiled import entry
from serving_bridge.residual_network import (
    HIDDEN,
    INPUTS,
    ascend,
    copied,
    forward,
    frozen,
    initial_weights,
    packed,
)

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

FEATURES = ("kv_hit", "emb_hit", "hot_share", "p99_over_ema_slos", "base_step")
"""(P99 - EMA) / SLO clipped to +-1; the base step over 0.06."""
_DRAWN = 1000
"""Values of noise, at a time."""
_COLUMNS = INPUTS + 3
"""Of the replay: features, applied residual, mean residual then, reward."""


@dataclass(frozen=True)
class AdapterSettings:
    """How the adapter explores and learns.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    bound: float = 0.02
    """Of the residual, in alpha."""
    pull: float = 1.0
    """Share of the gap to the target (`cache_worth`) that the residual closes in an epoch, within the bound.
    0: the residual is the network's alone."""
    explore: float = 0.002
    """Deviation of the noise, in alpha; it is cut at 0.01. 0: no exploration, nothing is learnt."""
    learning_rate: float = 1e-3
    """eta at a P99 one SLO away from its EMA."""
    steps: int = 64
    """Of replay, an epoch."""
    batch: int = 16
    """Samples a step."""
    replay: int = 1000
    """Epochs kept; the oldest goes first."""
    most_weight: float = 2.0
    """Of importance."""

    def __post_init__(self) -> None:
        require(0 < self.bound <= 0.02, "bound", self.bound, "above 0, at most 0.02")
        require(0 <= self.pull <= 1, "pull", self.pull, "0 to 1")
        require(0 <= self.explore <= 0.01, "explore", self.explore, "0 to 0.01")
        require(0 <= self.learning_rate <= 1, "learning_rate", self.learning_rate, "0 to 1")
        require(0 <= self.steps <= 64, "steps", self.steps, "0 to 64")
        require(1 <= self.batch <= 1024, "batch", self.batch, "1 to 1024")
        require(1 <= self.replay <= 1000, "replay", self.replay, "1 to 1,000")
        require(self.most_weight >= 1, "most_weight", self.most_weight, "1 or more")


class Sample(NamedTuple):
    """One epoch: what was seen before it, what was applied, and what came of it."""

    features: tuple[float, ...]
    """The five of FEATURES."""
    applied: float
    mean: float
    """mu(x) when it was applied."""
    reward: float
    surprise: float
    """|P99 - EMA| / SLO of the epoch: scales the learning rate."""
    seen: Seen | None = None
    """What its requests tell of the worth of the caches."""


Waiting = Sample | Callable[[], Sample]


class Learner:
    """Replay, statistics of the rewards, and the weights that are being learnt."""

    def __init__(self, settings: AdapterSettings, seed: int) -> None:
        self.settings = settings
        first, self.rng = np.random.default_rng(seed).spawn(2)
        self.weights = initial_weights(first)
        self.worth = WorthLearner()
        self.replay = np.zeros((settings.replay, _COLUMNS))
        self.seen = 0
        """Samples ever taken; the replay holds the last ones, at `seen % replay`."""

    def take(self, sample: Sample) -> None:
        """Put a sample into the replay and take the epoch's steps. What is no sensible number is left out."""
        if sample.seen is not None and _sensible(sample.seen):
            self.worth.take(sample.seen)
        row = [*sample.features, sample.applied, sample.mean, sample.reward]
        if not _sensible([*row, sample.surprise]):
            return
        self.replay[self.seen % len(self.replay)] = row
        self.seen += 1
        rate = self.settings.learning_rate * min(sample.surprise, 1.0)
        if rate > 0.0 and self.settings.explore > 0.0 and self.seen > 1:
            self._learn_from_replay(rate)

    def rehearse(self) -> None:
        """Compile, or load what was compiled."""
        by_kind(np.zeros(1), np.zeros(1, np.bool_))
        _climb(
            copied(self.weights), self.replay[:1], np.zeros((0, self.settings.batch), np.int64),
            0.0, self.settings.bound, 1.0, self.settings.most_weight,
        )  # fmt: skip

    def _learn_from_replay(self, rate: float) -> None:
        """The epoch's steps, on samples drawn with replacement."""
        settings = self.settings
        held = self.replay[: min(self.seen, len(self.replay))]
        order = self.rng.integers(0, len(held), (settings.steps, settings.batch))
        weights = copied(self.weights)
        _climb(
            weights, held, order, rate, settings.bound, settings.bound / settings.explore,
            settings.most_weight,
        )  # fmt: skip
        self.weights = frozen(weights)


@numba.njit(cache=True, nogil=True)
def _climb(weights, held, order, rate, bound, sharpness, most_weight):  # type: ignore[no-untyped-def]
    """Take a step for each row of `order`, [steps, batch] indices of the samples `held`.

    A sample's slope is importance x A x deviation x d log pi / d mean, residuals over the bound.
    """
    rewards = held[:, INPUTS + 2]
    deviation = max(rewards.std(), 1e-6)
    advantages = (rewards - rewards.mean()) / deviation
    hidden, slopes = np.empty((order.shape[1], HIDDEN)), np.empty(order.shape[1])
    for rows in order:
        features = held[rows, :INPUTS]
        out = forward(weights, features, hidden)
        for k in range(len(rows)):
            applied, then = held[rows[k], INPUTS] / bound, held[rows[k], INPUTS + 1] / bound
            away = applied - out[k]
            apart = (applied - then) ** 2 - away * away
            odds = math.exp(min(0.5 * sharpness**2 * apart, 50.0))
            advantage = min(max(advantages[rows[k]], -3.0), 3.0)
            slopes[k] = min(odds, most_weight) * advantage * away * sharpness
        ascend(weights, features, hidden, out, slopes, rate)


def _noise(rng: np.random.Generator, deviation: float) -> Iterator[float]:
    """Gaussian, cut at +-0.01; drawn many at a time, since a draw alone takes a microsecond."""
    some = iter(
        lambda: np.clip(deviation * rng.standard_normal(_DRAWN), -0.01, 0.01).tolist(), None
    )
    return chain.from_iterable(some)


def _sensible(values: Iterable[float]) -> bool:
    """Whether all are numbers, finite and not huge. NaN is not below anything."""
    return sum(map(abs, values)) < MOST


class OnlineAdapter:
    """Proposes residuals and learns from what comes of them.

    Args:
        settings: see there.
        background: learn on a thread of its own; `close` ends it. Samples that come while WAITING of
            them wait are dropped, and counted in `dropped`: memory is bounded.
        on_hand_over: in the background, keep samples until `hand_over` is called: the thread would
            compete with the rest of the decision for the interpreter.
        seed: of weights and noise.
    """

    WAITING = 64
    """Samples that may wait for the thread."""
    POLL_S = 0.05
    """How often the thread looks for samples. To wake it would cost the decision a system call."""
    NICENESS = 10
    """Of the thread, where the system gives threads their own: decisions go first on a shared core."""

    def __init__(
        self,
        settings: AdapterSettings | None = None,
        background: bool = False,
        seed: int = 0,
        on_hand_over: bool = False,
    ) -> None:
        self.settings = settings or AdapterSettings()
        self._bound, self._pull = float(self.settings.bound), float(self.settings.pull)
        self.background, self._on_hand_over = background, on_hand_over
        self.dropped = 0
        self.learning = threading.Lock()
        """Held while a sample is learnt: who holds it sees weights and replay that belong together."""
        self.busy_s = 0.0
        """CPU time that the thread has taken."""
        self._thread: threading.Thread | None = None
        self.reset(seed)

    def reset(self, seed: int) -> None:
        """Forget all that was learnt."""
        self.close()
        self.learner = Learner(self.settings, seed)
        self.learner.rehearse()
        self._noise = _noise(np.random.default_rng((seed, 1)), self.settings.explore)
        self._samples: deque[Waiting] = deque()
        self.snapshot: Floats = packed(self.learner.weights)
        """What decisions read."""
        self.worth = self.learner.worth.worth
        """The same, of the caches."""
        # Compiled, or loaded, before there is a decision that would wait for it.
        self._step = entry(
            adapted_step, self.snapshot, self.worth, self._bound, self._pull, 0.0, UNKNOWN,
            30.0, 50, 0, 0.0, 0.0, 0.0, 0.0, 0.0,
        )  # fmt: skip

    def step(
        self, memory: Memory, slo_ms: float, alpha_centi: int, base_centi: int,
        kv_hit: float, emb_hit: float, hot_share: float, p99_ms: float, working_set: float,
    ) -> tuple[int, float, Proposed, Memory]:  # fmt: skip
        """The step to take instead of the policy's; see `adapted_step`."""
        found: tuple[int, float, Proposed, Memory] = self._step(
            self.snapshot, self.worth, self._bound, self._pull, next(self._noise), memory,
            slo_ms, alpha_centi, base_centi, kv_hit, emb_hit, hot_share, p99_ms, working_set,
        )  # fmt: skip
        return found

    def learn(self, sample: Waiting) -> None:
        """Learn from an epoch, now or on the thread; what makes a sample is called there too."""
        if not self.background:
            self._take(sample)
            return
        if len(self._samples) >= self.WAITING:
            self.dropped += 1
            return
        self._samples.append(sample)
        if self._thread is None and not self._on_hand_over:
            self._start()

    def hand_over(self) -> None:
        """Have the thread learn what waits, now."""
        if self._thread is None and self._samples:
            self._start()
        if self._thread is not None:
            self._wake.set()

    def close(self) -> None:
        """End the thread, after what waits is learnt. May be called twice."""
        if self._thread is not None:
            self._stop.set()
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _take(self, sample: Waiting) -> None:
        with self.learning:
            self.learner.take(sample() if callable(sample) else sample)
            self.snapshot = packed(self.learner.weights)
            self.worth = self.learner.worth.worth

    def _start(self) -> None:
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hlem-adapter", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Of the thread: learns what waits, every so often; the last time after `close`."""
        _lower_priority(self.NICENESS)
        stopped = False
        while not stopped:
            self._wake.wait(None if self._on_hand_over else self.POLL_S)
            self._wake.clear()
            stopped = self._stop.is_set()
            while self._samples:
                self._take_waiting(self._samples.popleft())
            self.busy_s = time.thread_time()

    def _take_waiting(self, sample: Waiting) -> None:
        """A fault ends one sample's learning, never the thread or the service."""
        try:
            self._take(sample)
        except Exception:
            logger.exception("the adapter could not learn from %r", sample)


def _lower_priority(niceness: int) -> None:
    """Of the calling thread; left as it is where threads have none of their own, or it is refused."""
    if sys.platform != "linux":
        return
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
    except OSError as error:
        logger.warning("the adapter learns at the priority of the decisions: %s", error.strerror)
