"""The compared policies in the report: where they come from and how they learned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.figures import draw_learning, to_svg
from eval.learning import RETURN_WINDOW, Learning, read_learning
from eval.report_html import escaped, not_shown
from hlem_env.errors import ArtefactError


@dataclass(frozen=True)
class Policy:
    """A policy's folder name, its policy.json, its learning and what is missing."""

    name: str
    about: dict[str, Any]
    learning: Learning | None = None
    svg: str | None = None
    missing: tuple[str, ...] = ()


def read_policy(folder: Path, prefix: str) -> Policy:
    """What the report says of a policy: where it comes from and how it learned."""
    about: dict[str, Any] = {}
    missing: list[str] = []
    try:
        about = json.loads((folder / "policy.json").read_text(encoding="utf-8"))
        if not isinstance(about, dict):
            raise ValueError("not an object")
    except OSError as error:
        missing.append(f"policy.json: {error.strerror}")
    except (ValueError, RecursionError) as error:
        about = {}
        missing.append(f"policy.json is damaged ({error})")
    learning, drawing = None, None
    try:
        learning, (returns, evaluations), skipped = read_learning(folder / "metrics.jsonl")
        if skipped:
            missing.append(f"{skipped} damaged lines of metrics.jsonl are left out")
        figure = draw_learning(returns, evaluations, RETURN_WINDOW)
        label = escaped(f"Learning curve of {folder.name}")
        drawing = to_svg(figure, f"{prefix}c", label)
    except ArtefactError as error:
        missing.append(str(error))
    return Policy(folder.name, about, learning, drawing, tuple(missing))


def learning_html(policies: Sequence[Policy]) -> str:
    """The learning curves of the compared policies."""
    parts = ['<section><h2 id="learning">Learning curves</h2>']
    if not policies:
        parts.append('<p class="missing">Not shown: no policy folder is named in results.json.</p>')
    else:
        parts.append(
            "<p>“95 % of the final return” is the first episode at which the return, averaged over"
            " five points, made 95 % of its way from its first to its final level. Training draws"
            " another workload for every episode, so the return also says how hard these were; the"
            " evaluation always takes the same workloads.</p>"
        )
    parts.append('<div class="figures">')
    for policy in policies:
        parts.append(f"<figure><h3>{escaped(policy.name)}</h3>")
        if policy.svg:
            parts.append(policy.svg)
        if policy.learning:
            parts.append(f"<figcaption>{_learned(policy.learning)}</figcaption>")
        parts.append(not_shown(policy.missing) + "</figure>")
    return "".join(parts) + "</div></section>"


def _learned(learning: Learning) -> str:
    total = f"{learning.steps:,} steps"
    if learning.episodes is not None:
        total += f", {learning.episodes:,} episodes"
    if learning.episodes_to_95 is not None:
        final = f"95 % of the final return after {learning.episodes_to_95:,} episodes"
    else:
        final = (
            "episodes to 95 % of the final return: not measurable, the return did not rise by more"
            " than its noise"
        )
    text = f"{total}; {final}"
    if learning.best_ratio is not None:
        text += f"; lowest evaluation ratio {learning.best_ratio:.4f}"
        text += f" at {learning.best_ratio_step:,} steps"
        if learning.best_ratio_episodes is not None:
            text += f" ({learning.best_ratio_episodes:,} episodes)"
    return escaped(text + ".")
