"""The report of a comparison, drawn from its results: `python -m eval.report RESULTS`.

    python -m eval.report runs/compare --picture docs/images/trend.png
    python -m eval.report docs/results/compare-controllers-default.json --page runs/report.html

One page that needs nothing else. A record or a curve that is missing is named in the page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from eval.figures import SERIES, draw_latency, to_svg
from eval.names import ALPHA_STAR
from eval.report_cell import Section
from eval.report_episode import assign_colours, episode_figure, moving
from eval.report_html import Drawing, escaped
from eval.report_learning import read_policy
from eval.report_page import render
from eval.results import load_results
from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError, require

PICTURE_SIZE = (8.0, 5.6)


@dataclass
class Args:
    """Draw the report of a comparison again."""

    source: Annotated[Path, tyro.conf.Positional]
    """folder that eval.compare wrote, or a JSON file of its results"""
    page: Path | None = None
    """where the page goes; of a folder its report.html unless said, of a file needed"""
    policies: tuple[Path, ...] = ()
    """folders of the compared policies, for their learning curves; none: those of the results"""
    picture: Path | None = None
    """write the picture of one episode as well (.png or .svg)"""
    workload: str = "default/trend"
    """of the picture"""


def write_report(results: Path, page: Path, policies: tuple[str, ...] | None = None) -> None:
    """Draw a comparison's page from its results, the records beside them and the learning curves.

    Args:
        results: JSON file of eval.compare; records are looked for in its folder.
        page: HTML file, replaced in one step.
        policies: folders of the compared policies; None: those that the results name.

    Raises:
        ArtefactError: `results` is missing, damaged or something else; says why.
        OSError: the page cannot be written.
    """
    values = load_results(results)
    colours = assign_colours(values["cells"])
    sections = [
        read_section(results.parent, cell, f"c{i}", float(values["slo_ms"]), colours)
        for i, cell in enumerate(values["cells"])
    ]
    folders = values.get("policies") or [] if policies is None else policies
    learned = [read_policy(Path(folder), f"p{i}") for i, folder in enumerate(folders)]
    try:
        text = render(values, sections, learned)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtefactError(f"{results} is damaged: {error!r}") from error
    _replace(page, lambda partial: partial.write_text(text, encoding="utf-8"))


def read_section(
    output: Path, cell: dict[str, Any], prefix: str, slo_ms: float, colours: Mapping[str, str]
) -> Section:
    """A cell's figures, and what is missing for them."""
    missing: list[str] = []
    drawings: list[Drawing] = []
    name = f"{cell['workload']}, KV {cell['kv_policy']}"
    try:
        figure, starred = episode_figure(output, cell, slo_ms, colours, missing)
        if figure is not None:
            label = escaped(f"Alpha, P99 and hot share over one episode of {name}")
            left_out = len(moving(cell)) - len(SERIES)
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


def write_picture(results: Path, picture: Path, workload: str) -> None:
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
    slo_ms = float(values["slo_ms"])
    figure, _ = episode_figure(results.parent, cell, slo_ms, colours, missing, title, PICTURE_SIZE)
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
    is_folder = not args.source.is_file()
    require(is_folder or args.page is not None, "--page", None, "given where a file is the source")
    results = args.source / "results.json" if is_folder else args.source
    page = args.page or args.source / "report.html"
    write_report(results, page, tuple(str(p) for p in args.policies) or None)
    print(f"Report in {page}")
    if args.picture:
        write_picture(results, args.picture, args.workload)
        print(f"Picture in {args.picture}")


if __name__ == "__main__":
    run_command("eval.report", main, Args)
