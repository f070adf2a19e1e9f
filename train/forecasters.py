"""Train the forecasters of alpha*, boosted trees and an LSTM: `python -m train.forecasters`.

Both regress the alpha* of the next epoch on states of the training domain, and are measured on courses
that they were not trained on, beside a constant: the median label of the training courses. Labels are
kept on disk, so that an interrupted labelling goes on; the trainings after it take a minute or two.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from tqdm import tqdm

from agents.boosted_trees import MODEL_FILE
from agents.forecast import ABOUT_FILE, FEATURE_NAMES, PRETRAINED
from agents.lstm import WINDOW, LstmForecaster
from agents.settings import tuned
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, git_revision
from train.labels import Labelled, LabelPlan, label

HELD_OUT_EVERY = 5
"""Every fifth course is held out."""
Floats = NDArray[np.float32]


@dataclass
class Args:
    """Train the forecasters of alpha*."""

    output: Path = PRETRAINED
    """each goes to a folder of its name in here"""
    models: tuple[Literal["boosted-trees", "lstm"], ...] = ("boosted-trees", "lstm")
    """what to train"""
    labels: LabelPlan = field(default_factory=LabelPlan)
    """courses and their labels"""
    seed: int = 1
    """of the trainings"""
    jobs: int = 2
    """processes that label"""


@dataclass(frozen=True)
class TreeTraining:
    """XGBoost's parameters."""

    rounds: int = 200
    max_depth: int = 5
    learning_rate: float = 0.08
    min_child_weight: float = 20.0
    subsample: float = 0.7


@dataclass(frozen=True)
class LstmTraining:
    """Adam on the squared error."""

    hidden: int = 32
    learning_rate: float = 3e-3
    passes: int = 8
    batch: int = 256
    weight_decay: float = 1e-5


@dataclass(frozen=True, eq=False)
class Samples:
    """States and labels of some courses."""

    windows: Floats
    """[n, WINDOW, 8]; the last state of a window is the one before the label's epoch."""
    alpha_star: Floats
    """[n]"""

    @property
    def states(self) -> Floats:
        """Last state of each window [n, 8]."""
        return self.windows[:, -1]


def samples(courses: list[Labelled]) -> Samples:
    """All walks of the courses, windows padded at the start as the controller pads them."""
    windows, labels = [], []
    for course in courses:
        for states in course.states:
            padded = np.concatenate((np.repeat(states[:1], WINDOW - 1, axis=0), states))
            windows.append(sliding_window_view(padded, WINDOW, axis=0).transpose(0, 2, 1))
            labels.append(course.alpha_star)
    return Samples(np.ascontiguousarray(np.concatenate(windows)), np.concatenate(labels))


def split(courses: list[Labelled]) -> tuple[Samples, Samples]:
    """Samples of the training courses and of those held out."""
    require(len(courses) >= HELD_OUT_EVERY, "episodes", len(courses), f"{HELD_OUT_EVERY} or more")
    held_out = [c for i, c in enumerate(courses) if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
    kept = [c for i, c in enumerate(courses) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return samples(kept), samples(held_out)


def train_trees(data: Samples, how: TreeTraining, seed: int, threads: int = 1) -> Any:
    """Boosted trees on single states; an `xgboost.Booster`."""
    import xgboost

    parameters = {k: v for k, v in asdict(how).items() if k != "rounds"}
    return xgboost.train(
        parameters | {"objective": "reg:squarederror", "nthread": threads, "seed": seed},
        xgboost.DMatrix(data.states, data.alpha_star, feature_names=list(FEATURE_NAMES)),
        how.rounds,
    )


def train_lstm(
    data: Samples, how: LstmTraining, seed: int, progress: bool = False
) -> LstmForecaster:
    """The LSTM, its learning rate falling to 0 by a cosine."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the layers draw their first weights from the global generator
        model = LstmForecaster(how.hidden)
    model.center.copy_(torch.from_numpy(data.states.mean(axis=0)))
    model.stretch.copy_(torch.from_numpy(1.0 / np.maximum(data.states.std(axis=0), 0.05)))
    rng = np.random.default_rng(seed)
    batches = -(-len(data.alpha_star) // how.batch)
    optimizer = torch.optim.Adam(
        model.parameters(), how.learning_rate, weight_decay=how.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.passes * batches)
    inputs, targets = torch.from_numpy(data.windows), torch.from_numpy(data.alpha_star)
    bar = tqdm(total=how.passes * batches, desc="LSTM", disable=None if progress else True)
    for _ in range(how.passes):
        for rows in np.array_split(rng.permutation(len(targets)), batches):
            loss = torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            bar.update()
    bar.close()
    return model.eval()


def errors(forecast: Floats, held_out: Samples, training: Samples) -> dict[str, float]:
    """Mean absolute errors on the courses held out: the forecast's and a constant's."""
    constant = np.median(training.alpha_star)
    return {
        "held_out_error": round(float(np.abs(forecast - held_out.alpha_star).mean()), 4),
        "constant_error": round(float(np.abs(constant - held_out.alpha_star).mean()), 4),
    }


def describe(folder: Path, args: Args, how: Any, figures: dict[str, float], **more: Any) -> None:
    """Write what the folder's model is and how good it was."""
    about = {
        "feature_names": FEATURE_NAMES,
        "training": asdict(how),
        "labels": asdict(args.labels) | {"cache": ""},
        "seed": args.seed,
        "command": command("train.forecasters"),
        "git_revision": git_revision(),
    }
    (folder / ABOUT_FILE).write_text(json.dumps(about | figures | more, indent=1) + "\n")


def main(args: Args) -> None:
    """Label, train, measure, write."""
    training, held_out = split(label(args.labels, args.jobs))
    for name in args.models:
        folder = args.output / name
        folder.mkdir(parents=True, exist_ok=True)
        if name == "boosted-trees":
            trees = tuned("boosted-trees", TreeTraining)
            booster = train_trees(training, trees, args.seed, args.jobs)
            figures = errors(booster.inplace_predict(held_out.states), held_out, training)
            booster.save_model(folder / MODEL_FILE)
            describe(folder, args, trees, figures)
        else:
            how = tuned("lstm", LstmTraining)
            model = train_lstm(training, how, args.seed, progress=True)
            with torch.inference_mode():
                forecast = model(torch.from_numpy(held_out.windows)).numpy()
            figures = errors(forecast, held_out, training)
            model.save(folder)
            describe(folder, args, how, figures, hidden=how.hidden)
        print(
            f"{name}: mean absolute error on held-out courses {figures['held_out_error']:.4f},"
            f" a constant's {figures['constant_error']:.4f}"
        )


if __name__ == "__main__":
    run_command("train.forecasters", main, Args)
