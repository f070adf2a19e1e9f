"""The figure of a cell's first episode, drawn from its records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.figures import PAGE_SIZE, SERIES, STATIC, Course, draw_episode
from eval.names import ALPHA_STAR, BEST_STATIC, REFERENCES, is_policy, is_static
from eval.records import Record
from hlem_env.errors import ArtefactError


def interesting(cell: Mapping[str, Any]) -> list[str]:
    """Controllers whose course is drawn: the best static split and those that move."""
    best = [BEST_STATIC] if BEST_STATIC in cell["controllers"] else []
    # Policies first: there are colours for six.
    ranked = sorted(moving(cell), key=lambda name: not is_policy(name))
    return best + ranked[: len(SERIES)]


def assign_colours(cells: list[dict[str, Any]]) -> dict[str, str]:
    """A controller's colour, the same in all figures."""
    names = dict.fromkeys(name for cell in cells for name in interesting(cell))
    names.pop(BEST_STATIC, None)
    moving = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}
    return {BEST_STATIC: STATIC} | moving


def moving(cell: Mapping[str, Any]) -> list[str]:
    """Controllers that may move alpha, oracles left out."""
    return [n for n in cell["controllers"] if n not in REFERENCES and not is_static(n)]


def _read_record(output: Path, cell: Mapping[str, Any], name: str) -> Record:
    """The first seed's record.

    Raises:
        ArtefactError: missing or damaged; says why.
    """
    files = cell["controllers"][name].get("record")
    if not files:
        raise ArtefactError("results.json names no file")
    path = (output / str(files[0])).resolve()
    if not path.is_relative_to(output.resolve()):
        raise ArtefactError(f"{files[0]} lies outside the comparison's folder")
    try:
        record = Record.load(path)
    except ArtefactError as error:
        raise ArtefactError(str(error).replace(str(path), str(files[0]))) from error
    columns = [record.alpha_centi, record.p99_ms, record.hot_share]
    try:
        sizes = {np.array(column, float).shape for column in columns}
    except (TypeError, ValueError) as error:
        raise ArtefactError(f"{files[0]} has entries that are no numbers") from error
    if len(sizes) != 1 or len(shape := sizes.pop()) != 1 or shape[0] == 0:
        raise ArtefactError(f"{files[0]} has lists of different or no length")
    return record


def _star_alphas(output: Path, cell: Mapping[str, Any], missing: list[str]) -> list[int] | None:
    """alpha* of the first seed, from results.json or from its oracle's record."""
    star = cell.get("alpha_star")
    if star:
        return list(star["alpha_centi"])
    if ALPHA_STAR not in cell["controllers"]:
        return None
    try:
        return _read_record(output, cell, ALPHA_STAR).alpha_centi
    except ArtefactError as error:
        missing.append(f"alpha*: {error}")
        return None


def episode_figure(
    output: Path,
    cell: Mapping[str, Any],
    slo_ms: float,
    colours: Mapping[str, str],
    missing: list[str],
    title: str | None = None,
    size: tuple[float, float] = PAGE_SIZE,
) -> tuple[Figure | None, bool]:
    """The first seed's figure (None where no record can be read), and whether alpha* is in it.

    Adds to `missing`.
    """
    if not (output / "records").is_dir():
        missing.append("the course of an episode: the comparison's records are not here")
        return None, False
    courses, hot_share = [], None
    for name in interesting(cell):
        try:
            record = _read_record(output, cell, name)
        except ArtefactError as error:
            missing.append(f"course of {name}: {error}")
            continue
        if hot_share is not None and len(record.hot_share) != len(hot_share):
            missing.append(f"course of {name}: its record has {len(record.hot_share)} epochs")
            continue
        hot_share = record.hot_share
        courses.append(Course(name, colours[name], record.alpha_centi, record.p99_ms))
    if hot_share is None:
        return None, False
    alphas = _star_alphas(output, cell, missing)
    best = (cell.get("alpha_star") or {}).get("best_p99_ms")
    if alphas is not None and len(alphas) != len(hot_share):
        missing.append(f"alpha*: it has {len(alphas)} epochs")
        alphas = best = None
    figure = draw_episode(
        courses, hot_share, slo_ms, alpha_star_centi=alphas, best_p99_ms=best,
        epoch_seconds=cell["scenario"].get("epoch_seconds", 5.0), title=title, size=size,
    )  # fmt: skip
    return figure, alphas is not None
