"""What forecasters of alpha* share: their state, their settings, their folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.steps import towards
from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.mdp import FEATURES
from hlem_env.telemetry import EpochStats

FEATURE_NAMES = FEATURES["working_set"]
PRETRAINED = Path(__file__).resolve().parent / "pretrained"
ABOUT_FILE = "about.json"
_SIZE_LIMIT = 1 << 20


@dataclass(frozen=True)
class AimSettings:
    """How a controller goes to the alpha* that it forecasts."""

    share: float = 1.0
    """Of the way there that is gone in an epoch, the step limit aside."""
    dead_centi: float = 0.0
    """Distance at which it stays where it is: the forecast is noisy."""


def aim(stats: EpochStats, forecast: float, settings: AimSettings) -> int:
    """The next alpha (hundredths) on the way to a forecast alpha* of 0 to 1."""
    alpha = 100 * stats.alpha_target
    distance = 100 * forecast - alpha
    if abs(distance) <= settings.dead_centi:
        return round(alpha)
    return towards(stats, alpha + settings.share * distance)


def full_state(observation: NDArray[np.float32]) -> NDArray[np.float32]:
    """The eight features, float32 [8].

    Raises:
        ArgumentError: the observation has not all of them, or is not finite.
    """
    state = np.asarray(observation, np.float32)
    if state.shape != (len(FEATURE_NAMES),) or not np.isfinite(state).all():
        allowed = f"finite, [{len(FEATURE_NAMES)}]: {', '.join(FEATURE_NAMES)}"
        raise ArgumentError("observation", np.asarray(observation).tolist(), allowed)
    return state


def read_about(folder: Path, needed: tuple[str, ...]) -> dict[str, Any]:
    """The description of a trained forecaster.

    Raises:
        ArtefactError: missing, damaged, without a needed entry, or for other features.
    """
    path = folder / ABOUT_FILE
    try:
        if path.stat().st_size > _SIZE_LIMIT:
            raise ArtefactError(f"{path} is larger than {_SIZE_LIMIT} bytes")
        about = json.loads(path.read_text())
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ArtefactError(f"{path} is not JSON: {error}") from error
    missing = [
        k for k in ("feature_names", *needed) if not isinstance(about, dict) or k not in about
    ]
    if missing:
        raise ArtefactError(f"{path} has no {', '.join(missing)}")
    if tuple(about["feature_names"]) != FEATURE_NAMES:
        raise ArtefactError(f"{path} is for {about['feature_names']}, not {list(FEATURE_NAMES)}")
    return dict(about)
