"""report.html of a comparison, drawn again from its results: `python -m eval.report OUTPUT`.

    python -m eval.report runs/compare --picture docs/images/trend.png

One page that needs nothing else. A record or a curve that is missing is named in the page.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from eval.figures import (
    PAGE_SIZE,
    SERIES,
    STATIC,
    Course,
    Floats,
    draw_episode,
    draw_latency,
    draw_learning,
    smoothed,
    to_svg,
)
from eval.records import SIZE_LIMIT, Record
from eval.report_page import (
    ALPHA_STAR,
    BEST_STATIC,
    DESIGN_POINT,
    ORACLES,
    Drawing,
    Learning,
    Policy,
    Section,
    escaped,
    render,
)
from hlem_env.errors import ArtefactError, HlemError, require

CELL_KEYS = ("workload", "kv_policy", "scenario", "seeds", "best_static_alpha", "controllers")
RETURN_WINDOW = 5
"""Points of the moving mean of episodic returns."""
PICTURE_SIZE = (8.0, 5.6)


@dataclass
class Args:
    """Draw the report of a comparison again."""

    output: Annotated[Path, tyro.conf.Positional]
    """folder that eval.compare wrote, with results.json and the records"""
    policies: tuple[Path, ...] = ()
    """folders of the compared policies, for their learning curves; none: those of results.json"""
    picture: Path | None = None
    """write the picture of one episode as well (.png or .svg)"""
    workload: str = "default/trend"
    """of the picture"""


def write_report(output: Path, results: Path, policies: tuple[str, ...]) -> Path:
    """Write `output`/report.html from results.json, the records and the policies' learning curves.

    Args:
        output: folder of the records; the page is replaced in one step.
        results: results.json of eval.compare.
        policies: folders of the compared policies.

    Raises:
        ArtefactError: `results` is missing, damaged or something else; says why.
        OSError: the page cannot be written.
    """
    values = load_results(results)
    colours = assign_colours(values["cells"])
    sections = [
        read_section(output, cell, f"c{i}", float(values["slo_ms"]), colours)
        for i, cell in enumerate(values["cells"])
    ]
    learned = [read_policy(Path(folder), f"p{i}") for i, folder in enumerate(policies)]
    try:
        page = render(values, sections, learned)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtefactError(f"{results} is damaged: {error!r}") from error
    path = output / "report.html"
    _replace(path, lambda partial: partial.write_text(page, encoding="utf-8"))
    return path


def load_results(path: Path) -> dict[str, Any]:
    """results.json of eval.compare.

    Raises:
        ArtefactError: missing, damaged or something else; says why.
    """
    try:
        if path.stat().st_size > SIZE_LIMIT:
            raise ArtefactError(f"{path} is larger than {SIZE_LIMIT} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"cannot read {path}: {error.strerror}; python -m eval.compare writes it"
        raise ArtefactError(reason) from error
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path} is damaged: not JSON ({error})") from error
    if not isinstance(values, dict) or not isinstance(values.get("cells"), list):
        raise ArtefactError(f"{path} is not a result of eval.compare: it has no list of cells")
    slo_ms = values.get("slo_ms")
    if not isinstance(slo_ms, int | float) or not 0 < slo_ms < np.inf:
        raise ArtefactError(f"{path} is damaged: slo_ms={slo_ms!r}, allowed: above 0")
    for i, cell in enumerate(values["cells"]):
        absent = [key for key in CELL_KEYS if not isinstance(cell, dict) or key not in cell]
        if absent:
            raise ArtefactError(f"{path} is damaged: cell {i} has no {', '.join(absent)}")
        for kind, keys in ((dict, ("scenario", "controllers")), (list, ("seeds",))):
            for key in keys:
                if not isinstance(cell[key], kind) or not cell[key]:
                    raise ArtefactError(
                        f"{path} is damaged: {key} of cell {i} is empty or no {kind.__name__}"
                    )
        for name, columns in cell["controllers"].items():
            if not isinstance(columns, dict) or not isinstance(columns.get("summary"), dict):
                raise ArtefactError(f"{path} is damaged: {name!r} of cell {i} has no summary")
    return values


def interesting(cell: Mapping[str, Any]) -> list[str]:
    """Controllers whose course is drawn: the best static split and those that move."""
    best = [BEST_STATIC] if BEST_STATIC in cell["controllers"] else []
    # Policies first: there are colours for six.
    ranked = sorted(_moving(cell), key=lambda name: not name.lower().startswith(("ppo", "smart")))
    return best + ranked[: len(SERIES)]


def assign_colours(cells: list[dict[str, Any]]) -> dict[str, str]:
    """A controller's colour, the same in all figures."""
    names = dict.fromkeys(name for cell in cells for name in interesting(cell))
    names.pop(BEST_STATIC, None)
    moving = {name: SERIES[i % len(SERIES)] for i, name in enumerate(names)}
    return {BEST_STATIC: STATIC} | moving


def read_section(
    output: Path, cell: dict[str, Any], prefix: str, slo_ms: float, colours: Mapping[str, str]
) -> Section:
    """A cell's figures, and what is missing for them."""
    missing: list[str] = []
    drawings: list[Drawing] = []
    name = f"{cell['workload']}, KV {cell['kv_policy']}"
    try:
        figure, starred = _episode(output, cell, slo_ms, colours, missing)
        if figure is not None:
            label = escaped(f"Alpha, P99 and hot share over one episode of {name}")
            left_out = len(_moving(cell)) - len(SERIES)
            caption = f"Seed {cell['seeds'][0]}."
            if starred:
                caption += " Wide and pale: alpha* and, where known, P99 at alpha*."
            if left_out > 0:
                caption += f" {left_out} more controllers are in the table only."
            drawings.append(Drawing(to_svg(figure, f"{prefix}e", label), caption))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        missing.append(f"the episode's figure: damaged values ({error})")
    star = cell.get("alpha_star")
    try:
        if star and star["by_hot_share"]:
            figure = draw_latency(star["alphas_centi"], star["by_hot_share"], slo_ms)
            label = escaped(f"P99 against alpha by hot share, {name}")
            caption = f"Seed {cell['seeds'][0]}'s course, arrivals redrawn. Dashed: the SLO."
            drawings.append(Drawing(to_svg(figure, f"{prefix}l", label), caption))
        else:
            missing.append(
                "latency against alpha: results.json has no alpha* curve for this KV policy"
            )
    except (KeyError, TypeError, ValueError) as error:
        missing.append(f"latency against alpha: damaged values ({error!r})")
    return Section(cell, tuple(drawings), tuple(missing))


def _moving(cell: Mapping[str, Any]) -> list[str]:
    fixed = (*ORACLES, BEST_STATIC, DESIGN_POINT)
    return [n for n in cell["controllers"] if n not in fixed and not n.startswith("static ")]


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


def _episode(
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


Series = tuple[Floats, Floats]


def read_learning(path: Path) -> tuple[Learning, tuple[Series, Series], int]:
    """metrics.jsonl of train.ppo: figures, (returns, evaluations) by step, damaged lines.

    Raises:
        ArtefactError: missing or without a curve; says why.
    """
    episodes: dict[float, float] = {}
    returns: dict[float, float] = {}
    ratios: dict[float, float] = {}
    skipped = 0
    for line in _lines(path):
        try:
            row = json.loads(line)
            step = float(row["global_step"])
            for key, series in (
                ("charts/episodes", episodes),
                ("charts/episodic_return", returns),
                ("slo/eval_p99_ratio", ratios),
            ):
                if key in row and np.isfinite(float(row[key])):
                    series[step] = float(row[key])
        except (ValueError, TypeError, KeyError, RecursionError):
            skipped += 1
    if not returns and not ratios:
        raise ArtefactError("metrics.jsonl holds no episodic return and no evaluation")
    curves = (_series(returns), _series(ratios))
    done = _series(episodes)
    reached = step_of_share(*curves[0])
    lowest = min(ratios, key=lambda s: (ratios[s], s)) if ratios else None
    learning = Learning(
        steps=int(max(returns.keys() | ratios.keys())),
        episodes=int(done[1][-1]) if done[0].size else None,
        episodes_to_95=None if reached is None else _episodes_at(done, reached),
        best_ratio=None if lowest is None else ratios[lowest],
        best_ratio_step=None if lowest is None else int(lowest),
        best_ratio_episodes=None if lowest is None else _episodes_at(done, lowest),
    )
    return learning, curves, skipped


def step_of_share(steps: Floats, returns: Floats, share: float = 0.95) -> float | None:
    """The step by which the return made `share` of its way from the first to the final level.

    Levels are means over `RETURN_WINDOW` points, and the return must have risen by more than twice
    the standard error of such a mean (from the differences of neighbours); else there is no answer:
    the return of random workloads says how hard these were as well.

    Args:
        steps: [n] ascending.
        returns: [n].
    """
    if returns.size < 2 * RETURN_WINDOW:
        return None
    level = smoothed(returns, RETURN_WINDOW)
    first, final = returns[:RETURN_WINDOW].mean(), returns[-RETURN_WINDOW:].mean()
    noise = np.diff(returns).std() / np.sqrt(2 * RETURN_WINDOW)
    if final - first <= 2 * np.sqrt(2) * noise:
        return None
    there = np.flatnonzero(level >= first + share * (final - first))
    return float(steps[there[0]]) if there.size else None


def _lines(path: Path) -> Iterator[str]:
    try:
        if path.stat().st_size > SIZE_LIMIT:
            raise ArtefactError(f"metrics.jsonl is larger than {SIZE_LIMIT} bytes")
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ArtefactError(f"metrics.jsonl: {error.strerror}") from error
    return (line for line in text.splitlines() if line.strip())


def _series(values: dict[float, float]) -> Series:
    steps = sorted(values)
    return np.array(steps, float), np.array([values[step] for step in steps], float)


def _episodes_at(done: Series, step: float) -> int | None:
    before = int(np.searchsorted(done[0], step, side="right"))
    return int(done[1][before - 1]) if before else None


def write_picture(output: Path, results: Path, picture: Path, workload: str) -> None:
    """The first seed's episode of a workload as a picture, preferably with alpha*.

    Raises:
        ArgumentError: the picture's ending or the workload is not allowed.
        ArtefactError: no record of it can be read.
    """
    require(picture.suffix in (".png", ".svg"), "--picture", str(picture), "a name in .png or .svg")
    values = load_results(results)
    cells = [cell for cell in values["cells"] if cell["workload"] == workload]
    names = sorted({str(cell["workload"]) for cell in values["cells"]})
    require(bool(cells), "--workload", workload, "one of " + ", ".join(names))
    cell = next((c for c in cells if ALPHA_STAR in c["controllers"]), cells[0])
    missing: list[str] = []
    kv_policy = str(cell["kv_policy"]).replace("_", "-")
    title = f"{workload}, {kv_policy} KV cache, simulated, seed {cell['seeds'][0]}"
    colours = assign_colours(values["cells"])
    drawn = _episode(output, cell, float(values["slo_ms"]), colours, missing, title, PICTURE_SIZE)
    figure = drawn[0]
    if figure is None:
        raise ArtefactError(f"no picture of {workload}: {'; '.join(missing)}")
    for what in missing:
        print(f"Not in the picture: {what}", file=sys.stderr)
    kind = picture.suffix[1:]
    _replace(picture, lambda partial: figure.savefig(partial, format=kind, dpi=180))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def main(args: Args) -> None:
    """Draw the report, and the picture if asked for."""
    results = args.output / "results.json"
    named = load_results(results).get("policies") or []
    policies = tuple(str(p) for p in args.policies) or tuple(str(p) for p in named)
    print(f"Report in {write_report(args.output, results, policies)}")
    if args.picture:
        write_picture(args.output, results, args.picture, args.workload)
        print(f"Picture in {args.picture}")


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    try:
        main(arguments)
    except HlemError as error:
        raise SystemExit(f"eval.report: {error}") from error
    except OSError as error:
        raise SystemExit(f"eval.report: {error.filename}: {error.strerror}") from error
