"""Boosted trees that forecast alpha* from the state (XGBoost, its own JSON format)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.forecast import PRETRAINED, AimSettings, aim, full_state, read_about
from agents.settings import tuned
from hlem_env.controller import Decision
from hlem_env.errors import ArtefactError
from hlem_env.telemetry import EpochStats

MODEL_FILE = "model.json"


def load_booster(folder: Path) -> Any:
    """The trees of a folder, as `xgboost.Booster`; it predicts on one thread.

    Raises:
        ArtefactError: missing or damaged.
    """
    import xgboost

    read_about(folder, ())
    booster = xgboost.Booster({"nthread": 1})
    try:
        booster.load_model(folder / MODEL_FILE)
    except (xgboost.core.XGBoostError, OSError, ValueError) as error:
        raise ArtefactError(f"cannot read {folder / MODEL_FILE}: {error}") from error
    return booster


class BoostedTrees:
    """Goes, each epoch, towards the alpha* that trees forecast from the eight features.

    Args:
        settings: None is the tuned ones.
        booster: None is the shipped trees.
    """

    name = "XGBoost"
    period = 1
    initial_alpha_centi = 50

    def __init__(self, settings: AimSettings | None = None, booster: Any = None) -> None:
        self.settings = settings or tuned("boosted-trees-aim", AimSettings)
        self.booster = booster or load_booster(PRETRAINED / "boosted-trees")

    def reset(self, seed: int) -> None:
        """Do nothing: a decision depends on its epoch alone."""

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """A step towards the forecast.

        Raises:
            ArgumentError: the observation lacks the working set.
        """
        state = full_state(observation)[None]
        forecast = float(self.booster.inplace_predict(state)[0])
        return Decision(aim(stats, forecast, self.settings), f"forecast {forecast:.2f}")
