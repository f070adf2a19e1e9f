"""Train the shipped policies: five seeds of each kind, of which the median one goes into the package.

`python -m train.ship` makes agents/pretrained/ and docs/results/training.json. Runs that have ended
are kept in the work folder, so that the same command goes on after an interruption.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hlem_env.command_line import run_command
from hlem_env.machine import command, write_result

KINDS: dict[str, tuple[str, ...]] = {
    "paper": ("--features", "paper"),
    "working_set": ("--features", "working_set"),
    "paper-eq5": ("--features", "paper", "--reward", "eq5"),
    "working_set-eq5": ("--features", "working_set", "--reward", "eq5"),
}
PARTS = ("policy.json", "policy.safetensors", "metrics.jsonl")


@dataclass
class Args:
    """Train and choose the shipped policies."""

    work: Path = Path("runs/ship")
    """folder of all runs"""
    output: Path = Path("agents/pretrained")
    """folder of the chosen policies"""
    results: Path = Path("docs/results/training.json")
    """table of all runs"""
    seeds: int = 5
    """training seeds, 1 and up"""
    jobs: int = 2
    """trainings at a time"""


def train_one(work: Path, kind: str, seed: int) -> dict[str, Any]:
    """Train one seed, unless it has been; returns its figures."""
    folder = work / kind / str(seed)
    summary = folder / "summary.json"
    if not summary.is_file():
        arguments = [*KINDS[kind], "--seed", str(seed), "--output", str(folder)]
        arguments += ["--processes", "1"]  # trainings run beside each other as it is
        start = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "train.ppo", *arguments], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise SystemExit(f"train.ship: {kind}, seed {seed}:\n{done.stderr[-2000:]}")
        figures = {"seconds": round(time.time() - start, 1)} | figures_of(folder / "metrics.jsonl")
        summary.write_text(json.dumps({"kind": kind, "seed": seed} | figures))
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def figures_of(metrics: Path) -> dict[str, Any]:
    """What a run's log says: its best evaluation, and when its return had come to 95 % of its rise.

    Returns are means over the episodes that end in a rollout. The rise goes from the first to the
    mean of the last fifth; the episode count is that of the first rollout at 95 % of it.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    ratios = [line["slo/eval_p99_ratio"] for line in lines if "slo/eval_p99_ratio" in line]
    curve = [
        (line["charts/episodes"], line["charts/episodic_return"])
        for line in lines
        if "charts/episodic_return" in line
    ]
    last = [value for _, value in curve[-max(len(curve) // 5, 1) :]]
    final, first = sum(last) / len(last), curve[0][1]
    reached = next((n for n, value in curve if value >= first + 0.95 * (final - first)), None)
    return {
        "eval_p99_ratio": min(ratios),
        "first_return": first,
        "final_return": final,
        "episodes": curve[-1][0],
        "episodes_to_95_percent": reached if final > first else None,
    }


def main(args: Args) -> None:
    """Train everything, copy the medians, write the table."""
    jobs = [(kind, seed) for kind in KINDS for seed in range(1, args.seeds + 1)]
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = list(
            tqdm(
                pool.map(lambda job: train_one(args.work, *job), jobs),
                total=len(jobs), unit="training", disable=None,
            )
        )  # fmt: skip
    shipped = {}
    for kind in KINDS:
        ranked = sorted((r for r in runs if r["kind"] == kind), key=lambda r: r["eval_p99_ratio"])
        median = ranked[len(ranked) // 2]
        shipped[kind] = median["seed"]
        target = args.output / kind
        target.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            shutil.copy(args.work / kind / str(median["seed"]) / part, target / part)
        spread = ", ".join(f"{r['eval_p99_ratio']:.4f}" for r in ranked)
        print(f"{kind}: seed {median['seed']} of {args.seeds} shipped; P99 ratios {spread}")
    write_result(args.results, command("train.ship"), {"shipped": shipped, "runs": runs})


if __name__ == "__main__":
    run_command("train.ship", main, Args)
