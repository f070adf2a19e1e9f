"""An epoch log as a Minari dataset: `python -m train.export_minari DIR --dataset hlem/node-v0`.

Needs the extra `minari`. Datasets lie in Minari's folder (`MINARI_DATASETS_PATH`, else ~/.minari).
Observations and actions are those of HBMPartitionEnv-v0 with eight features; every episode ends by
truncation. `infos["step_centi"]` is what alpha really moved by: of a residual, a burst's move or a held
alpha the action is the nearest of the seven.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from gymnasium import spaces

from hlem_env.command_line import run_command
from hlem_env.errors import ArgumentError, ArtefactError, require
from hlem_env.machine import git_revision
from hlem_env.mdp import ACTIONS_CENTI, FEATURES
from serving_bridge.log_dataset import Episode, read_episodes


@dataclass
class Args:
    """Write an epoch log as a Minari dataset."""

    folder: Annotated[Path, tyro.conf.Positional]
    """of the log"""
    dataset: str = "hlem/node-v0"
    """Minari's name: namespace/name-vN"""
    reward: Literal["eq5", "busy_time", "queueing"] = "eq5"
    """of the environment"""
    least_steps: int = 12
    """shorter episodes are left out"""


def export(args: Args) -> Any:
    """Write the dataset; returns it as Minari gives it.

    Raises:
        ArtefactError: the log has no episode, or the dataset is there already.
        ArgumentError: its name is not one.
        ImportError: without the extra.
    """
    try:
        import minari
        from minari.data_collector import EpisodeBuffer
    except ImportError as error:
        raise ImportError("the export needs Minari: pip install 'hlem[minari]'") from error
    good = re.fullmatch(r"([\w-]+/)*[\w-]+-v\d+", args.dataset)
    require(good is not None, "--dataset", args.dataset, "a name like hlem/node-v0")
    require(args.least_steps >= 1, "--least-steps", args.least_steps, "1 or more")
    episodes = read_episodes(args.folder, args.reward, args.least_steps)
    if not episodes:
        raise ArtefactError(f"{args.folder}: no episode of {args.least_steps} steps or more")
    buffers = [EpisodeBuffer(id=i, **_columns(episode)) for i, episode in enumerate(episodes)]
    features = FEATURES["working_set"]
    try:
        with warnings.catch_warnings():
            # Of authors, links and scores that a node's log does not have.
            warnings.simplefilter("ignore", UserWarning)
            return minari.create_dataset_from_buffers(
                args.dataset,
                buffers,
                observation_space=spaces.Box(0.0, 1.0, (len(features),), np.float32),
                action_space=spaces.Discrete(len(ACTIONS_CENTI)),
                algorithm_name="SmartAllocator",
                description=(
                    f"Epochs of a served node. Observation: {', '.join(features)}. Action: steps of"
                    f" alpha of {', '.join(map(str, ACTIONS_CENTI))} hundredths. Reward:"
                    f" {args.reward}. Code revision {git_revision()}."
                ),
                data_format="arrow",
            )
    except ValueError as error:
        if "already exists" not in str(error):
            raise
        raise ArgumentError("--dataset", args.dataset, "a name that is not taken yet") from error


def _columns(episode: Episode) -> dict[str, Any]:
    steps = len(episode.actions)
    return {
        "observations": episode.observations,
        "actions": episode.actions,
        "rewards": episode.rewards,
        "terminations": np.zeros(steps, np.bool_),
        "truncations": np.arange(steps) == steps - 1,
        # One for each observation, nothing was decided before the first; [steps + 1, 1] since Minari
        # 0.5.4 does not read scalars back from its Arrow format.
        "infos": {"step_centi": np.concatenate(([0], episode.steps_centi))[:, None]},
    }


def main(args: Args) -> None:
    """Export, and say what it was."""
    dataset = export(args)
    print(f"{args.dataset}: {dataset.total_episodes} episodes, {dataset.total_steps} steps")


if __name__ == "__main__":
    run_command("train.export_minari", main, Args)
