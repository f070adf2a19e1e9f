"""An LSTM that forecasts alpha* from the last 16 states, frozen or tuned on the way."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from agents.forecast import FEATURE_NAMES, PRETRAINED, AimSettings, aim, full_state, read_about
from agents.settings import tuned
from hlem_env.controller import Decision
from hlem_env.errors import ArtefactError, require
from hlem_env.mdp import EMA_WEIGHT, MdpConfig
from hlem_env.telemetry import EpochStats
from serving_bridge.recovery import RecoverySettings, WithRecovery

WINDOW = 16
"""States that a forecast sees."""
WEIGHTS_FILE = "lstm.safetensors"


class LstmForecaster(nn.Module):
    """`torch.nn.LSTM` over standardised states, and a line from its last output to alpha*.

    Args:
        hidden: units.
        n_features: of a state.
    """

    center: Tensor
    stretch: Tensor

    def __init__(self, hidden: int, n_features: int = len(FEATURE_NAMES)) -> None:
        super().__init__()
        require(1 <= hidden <= 1024, "hidden", hidden, "1 to 1024")
        self.hidden = hidden
        self.lstm = nn.LSTM(n_features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)
        self.register_buffer("center", torch.zeros(n_features))
        self.register_buffer("stretch", torch.ones(n_features))

    def encode(self, windows: Tensor) -> Tensor:
        """Last outputs [n, hidden] of windows [n, WINDOW, n_features]."""
        outputs, _ = self.lstm((windows - self.center) * self.stretch)
        last: Tensor = outputs[:, -1]
        return last

    def forward(self, windows: Tensor) -> Tensor:
        """Forecasts [n], 0 to 1 but for errors, of windows [n, WINDOW, n_features]."""
        forecast: Tensor = self.head(self.encode(windows)).squeeze(-1)
        return forecast

    @classmethod
    def load(cls, folder: Path) -> LstmForecaster:
        """A trained one.

        Raises:
            ArtefactError: missing, damaged, or of another shape.
        """
        about = read_about(folder, ("hidden",))
        model = cls(about["hidden"])
        try:
            model.load_state_dict(safetensors.torch.load_file(folder / WEIGHTS_FILE))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise ArtefactError(f"cannot read {folder / WEIGHTS_FILE}: {error}") from error
        return model.eval()

    def save(self, folder: Path) -> None:
        """Write the weights; `about.json` is the training script's."""
        folder.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(self.state_dict(), folder / WEIGHTS_FILE)


class Lstm:
    """Goes, each epoch, towards the alpha* that the LSTM forecasts.

    At an episode's start the first state stands for those before it.

    Args:
        settings: None is the tuned ones.
        forecaster: None is the shipped one.
    """

    name = "LSTM"
    period = 1
    initial_alpha_centi = 50

    def __init__(
        self, settings: AimSettings | None = None, forecaster: LstmForecaster | None = None
    ) -> None:
        self.settings = settings or tuned("lstm-aim", AimSettings)
        self.forecaster = forecaster or LstmForecaster.load(PRETRAINED / "lstm")
        self._window = np.zeros((0, len(FEATURE_NAMES)), np.float32)

    def reset(self, seed: int) -> None:
        """Forget the states."""
        self._window = np.zeros((0, len(FEATURE_NAMES)), np.float32)

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """A step towards the forecast.

        Raises:
            ArgumentError: the observation lacks the working set.
        """
        forecast = self._forecast(full_state(observation))
        return Decision(aim(stats, forecast, self.settings), f"forecast {forecast:.2f}")

    def _forecast(self, state: NDArray[np.float32]) -> float:
        if not len(self._window):
            self._window = np.repeat(state[None], WINDOW, axis=0)
        self._window = np.concatenate((self._window[1:], state[None]))
        with torch.inference_mode():
            return float(self.forecaster(torch.from_numpy(self._window[None])))


@dataclass(frozen=True)
class FineTuningSettings:
    """Of the tuning on the way. Ours: the paper does not say how its LSTM learns online."""

    learning_rate: float = 1e-3
    steps: int = 4
    """Gradient steps an epoch."""
    batch: int = 32
    temperature: float = 0.1
    """Advantage, in SLOs, that makes an epoch count e times as much."""
    explore_centi: float = 1.0
    """Deviation of the noise on the aim, hundredths: without it nothing else is ever tried."""
    replay: int = 1000
    """Epochs kept."""


class FineTunedLstm(Lstm):
    """The LSTM whose last layer goes on learning which alphas did better than usual.

    No label tells alpha* on a running node. After each epoch the alpha that it ran at is a target for
    the states before it, weighted by exp((EMA of P99 - P99) / SLO / temperature): what went better
    than usual is imitated. The encoder stays as it was trained.

    Args:
        settings, forecaster: as of `Lstm`.
        tuning: None is the tuned ones.
        slo_ms: of the node.
    """

    name = "LSTM+OFT"

    def __init__(
        self,
        settings: AimSettings | None = None,
        forecaster: LstmForecaster | None = None,
        tuning: FineTuningSettings | None = None,
        slo_ms: float | None = None,
    ) -> None:
        super().__init__(settings, forecaster)
        self.tuning = tuning or tuned("lstm-oft", FineTuningSettings)
        self.slo_ms = MdpConfig().slo_ms if slo_ms is None else slo_ms
        self._trained_head = copy.deepcopy(self.forecaster.head.state_dict())
        self.forecaster = copy.deepcopy(self.forecaster)
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget states, replay and all that was learnt."""
        super().reset(seed)
        self.forecaster.head.load_state_dict(self._trained_head)
        self._rng = np.random.default_rng(seed)
        self._replay: deque[tuple[Tensor, float, float]] = deque(maxlen=self.tuning.replay)
        self._code: Tensor | None = None
        self._ema_ms: float | None = None
        self._optimizer = torch.optim.Adam(
            self.forecaster.head.parameters(), lr=self.tuning.learning_rate
        )

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """Learn from the epoch, then a step towards the forecast and a little noise."""
        self._remember(stats)
        forecast = self._forecast(full_state(observation))
        noise = self._rng.normal(0.0, self.tuning.explore_centi) / 100
        return Decision(
            aim(stats, forecast + noise, self.settings),
            f"forecast {forecast:.2f}",
            parts={"explore": 100 * noise},
        )

    def _forecast(self, state: NDArray[np.float32]) -> float:
        forecast = super()._forecast(state)
        with torch.no_grad():
            self._code = self.forecaster.encode(torch.from_numpy(self._window[None]))[0]
        return forecast

    def _remember(self, stats: EpochStats) -> None:
        """The epoch that has run, as a target for the states before it; then the steps."""
        if self._ema_ms is None:
            self._ema_ms = stats.p99_ms
        if self._code is not None:
            advantage = (self._ema_ms - stats.p99_ms) / self.slo_ms / self.tuning.temperature
            weight = float(np.exp(np.clip(advantage, -4.0, 1.0)))
            self._replay.append((self._code, stats.alpha_target, weight))
            for _ in range(self.tuning.steps):
                self._learn()
        self._ema_ms += EMA_WEIGHT * (stats.p99_ms - self._ema_ms)

    def _learn(self) -> None:
        picks = self._rng.integers(0, len(self._replay), self.tuning.batch)
        codes, alphas, weights = zip(*(self._replay[i] for i in picks), strict=True)
        weight = torch.tensor(weights)
        error = self.forecaster.head(torch.stack(codes)).squeeze(-1) - torch.tensor(alphas)
        loss = (weight * error.square()).sum() / weight.sum()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


def with_recovery() -> WithRecovery:
    """LSTM, online fine-tuning and recovery: the paper's strongest baseline."""
    settings = tuned("lstm-oft-rc", RecoverySettings)
    return WithRecovery(FineTunedLstm(), settings, name="LSTM+OFT+RC")
