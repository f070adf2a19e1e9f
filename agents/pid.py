"""PID control of alpha, by how far P99 is from its setpoint and which cache is the shorter one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.settings import tuned
from agents.steps import LARGEST_STEP_CENTI
from hlem_env.controller import Decision
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats

Floats = NDArray[np.float64]


class PidLoop:
    """Discrete PID loops, one for each entry of the error, with anti-windup.

    u = bias + kp e + I + kd (e - e'), I the running sum of ki e, u held to [low, high] and to
    `most_change` from the output before. Where u is held back and the error would drive it further
    into the limit, I is not added to: it cannot wind up.

    Args:
        kp, ki, kd: gains, scalars or [n], per sample.
        low, high: limits of the output.
        bias: output at the start.
        most_change: limit of the output's change in one sample.
    """

    def __init__(
        self,
        kp: float | Floats,
        ki: float | Floats,
        kd: float | Floats,
        low: float = -np.inf,
        high: float = np.inf,
        bias: float | Floats = 0.0,
        most_change: float = np.inf,
    ) -> None:
        self.kp, self.ki, self.kd = kp, ki, kd
        self.low, self.high, self.most_change = low, high, most_change
        self.output = np.asarray(bias, np.float64)
        self._integral = self.output
        self._last_error: Floats | None = None

    def update(self, error: float | Floats) -> Floats:
        """The output [n] after an error [n]."""
        error = np.asarray(error, np.float64)
        change = 0.0 if self._last_error is None else error - self._last_error
        self._last_error = error
        integral = self._integral + self.ki * error
        wanted = self.kp * error + integral + self.kd * change
        low = np.maximum(self.low, self.output - self.most_change)
        high = np.minimum(self.high, self.output + self.most_change)
        self.output = np.clip(wanted, low, high)
        drive = self.ki * error
        winds_up = ((wanted > high) & (drive > 0)) | ((wanted < low) & (drive < 0))
        self._integral = np.where(winds_up, self._integral, integral)
        return self.output


@dataclass(frozen=True)
class PidSettings:
    """Gains in hundredths of alpha per unit of error, and what the error is."""

    kp: float = 4.0
    ki: float = 8.0
    kd: float = 0.0
    setpoint: float = 0.5
    """P99 below this many SLOs is no error."""
    kv_weight: float = 2.0
    """Worth of a history token not reused, in embedding rows not found."""
    band: float = 0.2
    """The imbalance at which its sign counts in full; nearer to balance it counts in proportion."""


class Pid:
    """PID on (P99 - setpoint) / SLO, signed by which cache gains more from the pool's next page.

    P99 says how bad a split is and not which way to go. The sign is that of the marginal hit-rate
    imbalance: embedding rows not found against history tokens of hot users not reused, which a
    larger embedding or KV cache would have. Without a band about balance the loop would chatter.

    Args:
        settings: None is the tuned ones.
        slo_ms: of the node.
    """

    name = "PID"
    period = 1
    initial_alpha_centi = 50

    def __init__(self, settings: PidSettings | None = None, slo_ms: float | None = None) -> None:
        self.settings = settings or tuned("pid", PidSettings)
        self.slo_ms = MdpConfig().slo_ms if slo_ms is None else slo_ms
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget error and integral."""
        s = self.settings
        self._loop = PidLoop(
            s.kp, s.ki, s.kd, 0.0, 100.0, self.initial_alpha_centi, LARGEST_STEP_CENTI
        )

    def error(self, stats: EpochStats) -> float:
        """The signed error: above 0 the embedding cache is short, below 0 the KV cache."""
        s = self.settings
        excess = min(max(stats.p99_ms / self.slo_ms - s.setpoint, 0.0), 1.0)
        rows = 1.0 - stats.emb_hit
        tokens = max(stats.hot_share - stats.kv_hit, 0.0)
        imbalance = rows - s.kv_weight * tokens
        return excess * min(max(imbalance / s.band, -1.0), 1.0)

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """The loop's output after the epoch."""
        error = self.error(stats)
        # The bounds of alpha may have held the last output back: go on from what is in force.
        self._loop.output = np.asarray(100.0 * stats.alpha_target)
        return Decision(round(float(self._loop.update(error))), f"error {error:+.3f}")
