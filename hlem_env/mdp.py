"""The Markov decision process: state, actions, grid of alpha and reward (HLEM paper, section IV-A).

Nothing else defines these. Training and serving call the same two functions, `observe` and `reward`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require, require_choice, require_number
from hlem_env.telemetry import EpochStats

ACTIONS_CENTI: tuple[int, ...] = (-6, -4, -2, 0, 2, 4, 6)
"""Steps of alpha in hundredths. alpha is an integer on a grid of 0.01, since 0.5 + 4 x 0.05 is not 0.7."""

HOT_REQUESTS = 3
"""A user with this many requests in the hot window is hot."""
HOT_WINDOW_EPOCHS = 12
TICKS_PER_EPOCH = 10
EMA_WEIGHT = 2.0 / (10 + 1)
"""Of the last epoch in the exponential mean of P99, which goes over 10 epochs."""
KV_HALF_LIFE_EPOCHS = 12
"""Half-life of the decayed request counts that admit users to the KV cache."""

FEATURES: dict[str, tuple[str, ...]] = {
    "paper": ("hot_share", "kv_hit", "emb_hit", "length", "violation", "alpha", "p99"),
    "working_set": (
        "hot_share",
        "kv_hit",
        "emb_hit",
        "length",
        "violation",
        "alpha",
        "p99",
        "working_set",
    ),
}
REWARDS = ("eq5", "busy_time", "queueing")
REWARD_FLOOR = -4.0
"""Rewards are clipped here, or one saturated epoch would outweigh an episode."""
P99_SCALE_SLOS = 4.0
MOST_UTILISATION = 0.9
"""At which the queueing model's utilisation is clipped: one busy epoch must not outweigh a hundred."""


@dataclass(frozen=True)
class MdpConfig:
    """What turns an epoch's measurements into a state and a reward.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    slo_ms: float = 30.0
    max_history_tokens: int = 15_000
    alpha_min_centi: int = 10
    alpha_max_centi: int = 90
    epoch_seconds: float = 5.0
    features: str = "paper"
    reward: str = "eq5"

    def __post_init__(self) -> None:
        require_number("slo_ms", self.slo_ms)
        require_number("epoch_seconds", self.epoch_seconds)
        require(0 < self.slo_ms < 1e6, "slo_ms", self.slo_ms, "above 0 and below 1e6 milliseconds")
        require(
            1 <= self.max_history_tokens <= 10_000_000,
            "max_history_tokens",
            self.max_history_tokens,
            "1 to 10,000,000",
        )
        require(
            0 <= self.alpha_min_centi < self.alpha_max_centi <= 100,
            "alpha_bounds",
            (self.alpha_min_centi / 100, self.alpha_max_centi / 100),
            "two multiples of 0.01 with 0 <= low < high <= 1",
        )
        require(
            0.01 <= self.epoch_seconds <= 3600,
            "epoch_seconds",
            self.epoch_seconds,
            "0.01 to 3600 seconds",
        )
        require_choice("features", self.features, FEATURES)
        require_choice("reward", self.reward, REWARDS)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the state's entries, in order."""
        return FEATURES[self.features]

    @cached_property
    def feature_scales(self) -> tuple[float, ...]:
        """What `observe` divides each raw feature by, in order."""
        scales = {
            "length": float(self.max_history_tokens),
            "p99": P99_SCALE_SLOS * float(self.slo_ms),
        }
        return tuple(scales.get(name, 1.0) for name in self.feature_names)

    @cached_property
    def scales_array(self) -> NDArray[np.float64]:
        """`feature_scales` as `observe` takes them: making an array of them takes longer than dividing."""
        return np.array(self.feature_scales)

    def clip(self, alpha_centi: int) -> int:
        """The nearest alpha (hundredths) within the bounds."""
        if alpha_centi < self.alpha_min_centi:
            return self.alpha_min_centi
        return self.alpha_max_centi if alpha_centi > self.alpha_max_centi else alpha_centi

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `MdpConfig(**values)` takes them back."""
        return asdict(self)


def observe(stats: EpochStats, config: MdpConfig) -> NDArray[np.float32]:
    """The state after an epoch: float32 [7] or [8], each entry in [0, 1], in `config.feature_names` order."""
    raw = [
        stats.hot_share,
        stats.kv_hit,
        stats.emb_hit,
        stats.mean_history_tokens,
        1.0 - stats.qos(config.slo_ms),
        stats.alpha_target,
        stats.p99_ms,
    ]
    if config.features == "working_set":
        raw.append(stats.working_set)
    state = np.array(raw) / config.scales_array
    return np.minimum(state, 1.0).astype(np.float32)


def reward(stats: EpochStats, config: MdpConfig) -> float:
    """Reward of an epoch, in [REWARD_FLOOR, 1].

    "eq5" is the paper's Eq. 5 with lambda = 1 / SLO: share within the SLO - max(0, P99 - SLO) / SLO.
    "busy_time" is minus the mean service time over the SLO. "queueing" is minus the logarithm of the
    P99, over the SLO, that a queue with the epoch's service times and request rate has in the long
    run. The last two prefer much the same splits with less noise.
    """
    if config.reward == "eq5":
        value = stats.qos(config.slo_ms) - max(0.0, stats.p99_ms / config.slo_ms - 1.0)
    elif stats.backlog and not stats.requests:
        value = REWARD_FLOOR  # nothing completes: no service time tells of it
    elif config.reward == "busy_time":
        value = smooth_reward(stats.mean_service_ms, 0.0, 0.0, config)
    else:
        square = float(np.add.reduce(np.square(stats.service_ms))) / max(stats.requests, 1)
        rate = stats.requests / stats.duration_s if stats.duration_s > 0 else 0.0
        value = smooth_reward(stats.mean_service_ms, square, rate, config)
    return min(max(value, REWARD_FLOOR), 1.0)


def smooth_reward(
    mean_service_ms: float, square_service_ms2: float, requests_per_s: float, config: MdpConfig
) -> float:
    """Smooth reward of `config.reward`, without the floor, from two moments of the service time."""
    if config.reward == "busy_time":
        return -mean_service_ms / config.slo_ms
    p99_ms = queueing_p99_ms(mean_service_ms, square_service_ms2, requests_per_s)
    return -math.log(max(p99_ms, 1e-3) / config.slo_ms)


@numba.njit(cache=True, nogil=True)
def queueing_p99_ms(
    mean_service_ms: float, square_service_ms2: float, requests_per_s: float
) -> float:
    """P99 latency of an M/G/1 queue, with an exponential tail of the wait.

    Pollaczek and Khinchine's mean wait of those who wait is E[S^2] / (2 E[S] (1 - rho)); a share
    rho waits, so that the wait's P99 is that mean x ln(100 rho). To it comes the mean service time.

    Args:
        mean_service_ms: E[S], 0 without requests.
        square_service_ms2: E[S^2].
        requests_per_s: arrivals.
    """
    if mean_service_ms <= 0.0:
        return 0.0
    rho = min(requests_per_s * mean_service_ms / 1000.0, MOST_UTILISATION)
    mean_wait_ms = square_service_ms2 / (2.0 * mean_service_ms * (1.0 - rho))
    return mean_service_ms + mean_wait_ms * max(math.log(100.0 * rho), 0.0)
