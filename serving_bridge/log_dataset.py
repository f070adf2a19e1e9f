"""An epoch log as an offline dataset: observations, actions, rewards, by episode.

A step is a decision: what was seen at an epoch's end, how alpha moved, and the next epoch's reward. An
episode is a run of epochs without a gap; epochs with faulty telemetry end it, and so does a restart of
the node. Actions are those of the environment, seven steps; alpha also moves by others (a residual, a
burst's move): `steps_centi` has what was done, `actions` the nearest of the seven.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require_choice
from hlem_env.mdp import ACTIONS_CENTI, REWARDS
from serving_bridge.log_reader import LoggedEpoch, read_epochs


class Episode(NamedTuple):
    """Steps that followed each other."""

    observations: NDArray[np.float32]
    """[steps + 1, 8]: the last is that after the last step."""
    actions: NDArray[np.int64]
    """[steps] index into `mdp.ACTIONS_CENTI` of the nearest step."""
    steps_centi: NDArray[np.int64]
    """[steps] what alpha moved by, hundredths."""
    rewards: NDArray[np.float64]
    """[steps] of the epoch after the move."""
    first_epoch: int
    """Epoch of the first observation, in its run."""
    run: str


def read_episodes(folder: str | Path, reward: str = "eq5", least_steps: int = 2) -> list[Episode]:
    """All episodes of at least `least_steps` steps.

    Args:
        folder: of the log.
        reward: "eq5", "busy_time" or "queueing".
        least_steps: shorter ones are left out.

    Raises:
        ArgumentError, ArtefactError, ImportError: as of `read_epochs`.
    """
    require_choice("reward", reward, REWARDS)
    episodes: list[Episode] = []
    row: list[LoggedEpoch] = []
    for epoch in read_epochs(folder):
        follows = (
            bool(row)
            and row[-1].run.name == epoch.run.name
            and row[-1].record.epoch + 1 == epoch.record.epoch
        )
        if epoch.observation is None or not follows:
            _end(row, reward, least_steps, episodes)
            row = []
        if epoch.observation is not None:
            row.append(epoch._replace(stats=None, requests=None))
    _end(row, reward, least_steps, episodes)
    return episodes


def _end(row: list[LoggedEpoch], reward: str, least_steps: int, into: list[Episode]) -> None:
    if len(row) - 1 < max(least_steps, 1):
        return
    records = [epoch.record for epoch in row]
    steps = np.array([r.next_alpha_centi - r.alpha_centi for r in records[:-1]], np.int64)
    distance = np.abs(steps[:, None] - np.array(ACTIONS_CENTI))
    into.append(
        Episode(
            np.stack([epoch.observation for epoch in row if epoch.observation is not None]),
            distance.argmin(axis=1),
            steps,
            np.array([epoch.rewards[reward] for epoch in row[1:]]),
            records[0].epoch,
            row[0].run.name,
        )
    )
