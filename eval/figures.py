"""Figures of the report: an episode, latency against alpha, a learning curve."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

INK, MUTED, GRID, LIMIT = "#1b1b1a", "#6d6c67", "#e3e2dc", "#d03b3b"
SERIES = ("#2a78d6", "#eb6834", "#1baf7a", "#4a3aa7", "#e87ba4", "#eda100")
STATIC = "#8f8d86"
RAMP = ("#9ec5f4", "#6da7ec", "#3987e5", "#256abf", "#184f95", "#0d366b")
VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    LIMIT: "--limit",
    STATIC: "--static",
    **{colour: f"--series-{i}" for i, colour in enumerate(SERIES)},
    **{colour: f"--ramp-{i}" for i, colour in enumerate(RAMP)},
}
"""The page's CSS variable of each colour, so that a figure follows the reader's light or dark."""
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "hlem",
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
}
PAGE_SIZE = (4.9, 5.8)
"""Inches; narrow, so that text stays readable on a phone."""
SMOOTHED_EPOCHS = 5
"""P99 is drawn as its mean over so many epochs, and faintly as it is."""
CURVES = len(RAMP)
WIDE_LABEL = 26
"""Characters; longer ones leave room for a column less in the legend."""
LEAST_EPOCHS = 3
"""Fewer epochs of a hot share do not give a curve."""


@dataclass(frozen=True)
class Course:
    """What one controller did in an episode."""

    name: str
    colour: str
    alpha_centi: Sequence[int]
    """[epochs]"""
    p99_ms: Sequence[float]
    """[epochs]"""


def smoothed(values: ArrayLike, window: int = SMOOTHED_EPOCHS) -> Floats:
    """Centred moving mean along [n]; at the ends over what is there."""
    values = np.asarray(values, float)
    kernel = np.ones(min(window, values.size))
    total = np.convolve(values, kernel, "same")
    return np.asarray(total / np.convolve(np.ones(values.size), kernel, "same"))


def by_hot_share(
    alphas_centi: ArrayLike, p99_ms: ArrayLike, hot_share: ArrayLike
) -> list[dict[str, Any]]:
    """Mean P99 against alpha for epochs of similar hot share.

    Args:
        alphas_centi: [alphas] in hundredths.
        p99_ms: [alphas, epochs] with alpha held.
        hot_share: [epochs].

    Returns
    -------
        For each hot share, rounded to 0.1 (coarser if these were more than six; close ones are
        one), with at least three epochs:
        {"hot_share": their mean, "epochs": their number, "p99_ms": [alphas]}.
    """
    p99, share = np.asarray(p99_ms, float), np.asarray(hot_share, float)
    if p99.shape != (np.size(alphas_centi), share.size):
        raise ValueError(f"p99_ms {p99.shape} is not [alphas, epochs]")
    width = 0.1
    while True:
        bins = np.rint(share / width).astype(int)
        kept = [b for b in np.unique(bins) if (bins == b).sum() >= LEAST_EPOCHS]
        if len(kept) <= CURVES:
            break
        width += 0.1
    # A steady share at the edge between two bins falls into both: one curve.
    for lower, upper in pairwise(kept):
        if share[bins == upper].mean() - share[bins == lower].mean() < width / 2:
            bins[bins == lower] = upper
    return [
        {
            "hot_share": float(share[bins == b].mean()),
            "epochs": int((bins == b).sum()),
            "p99_ms": p99[:, bins == b].mean(axis=1).tolist(),
        }
        for b in kept
        if (bins == b).any()
    ]


def alpha_star_summary(
    alphas_centi: ArrayLike, p99_ms: ArrayLike, hot_share: ArrayLike
) -> dict[str, Any]:
    """What the report shows of alpha*, as plain values; arguments as in `by_hot_share`."""
    alphas, p99 = np.asarray(alphas_centi), np.asarray(p99_ms, float)
    return {
        "alphas_centi": alphas.tolist(),
        "alpha_centi": alphas[p99.argmin(axis=0)].tolist(),
        "best_p99_ms": p99.min(axis=0).tolist(),
        "by_hot_share": by_hot_share(alphas, p99, hot_share),
    }


def draw_episode(
    courses: Sequence[Course],
    hot_share: Sequence[float],
    slo_ms: float,
    *,
    alpha_star_centi: Sequence[int] | None = None,
    best_p99_ms: Sequence[float] | None = None,
    epoch_seconds: float = 5.0,
    title: str | None = None,
    size: tuple[float, float] = PAGE_SIZE,
) -> Figure:
    """Alpha against alpha*, P99 against the SLO and the hot share, one below the other.

    Args:
        courses: at least one, with as many epochs as `hot_share`.
        alpha_star_centi: [epochs] the best alpha in hundredths; None where it was not searched.
        best_p99_ms: [epochs] P99 at alpha*, mean over redrawn arrivals.
        size: inches.
    """
    epochs = np.arange(1, len(hot_share) + 1)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(4, 4, 1.3))
        handles: dict[str, Line2D] = {}
        if alpha_star_centi is not None:
            (line,) = top.plot(
                epochs, np.array(alpha_star_centi) / 100, color=INK, lw=2.6, alpha=0.35,
                drawstyle="steps-mid",
            )  # fmt: skip
            handles["alpha*"] = line
        if best_p99_ms is not None:
            middle.plot(epochs, smoothed(best_p99_ms), color=INK, lw=2.6, alpha=0.35)
        for course in courses:
            alpha = np.array(course.alpha_centi) / 100
            (line,) = top.plot(epochs, alpha, color=course.colour, lw=1.5, drawstyle="steps-mid")
            handles[course.name] = line
            middle.plot(epochs, course.p99_ms, color=course.colour, lw=0.5, alpha=0.3)
            middle.plot(epochs, smoothed(course.p99_ms), color=course.colour, lw=1.5)
        handles[f"SLO, {slo_ms:g} ms"] = middle.axhline(slo_ms, color=LIMIT, lw=1, ls=(0, (4, 3)))
        bottom.fill_between(epochs, hot_share, color=MUTED, alpha=0.3, lw=0)
        bottom.plot(epochs, hot_share, color=MUTED, lw=0.8)
        top.set_ylim(0, 1)
        top.set_title("alpha, the embedding cache's share of the pool", color=INK)
        smooth = np.concatenate([smoothed(course.p99_ms) for course in courses])
        highest = max(1.15 * float(smooth.max()), 1.15 * slo_ms)
        highest = min(highest, max(3 * slo_ms, 2 * float(np.median(smooth))))
        middle.set_ylim(min(0.7 * float(smooth.min()), 0.9 * slo_ms), highest)
        middle.set_title(
            f"P99, ms (bold: mean over {min(SMOOTHED_EPOCHS, epochs.size)} epochs)", color=INK
        )
        bottom.set_ylim(0, max(0.7, 1.05 * max(hot_share)))
        bottom.set_title("hot share of requests", color=INK)
        bottom.set_xlabel(f"epoch ({epoch_seconds:g} s each)")
        bottom.set_xlim(1, max(epochs.size, 2))
        _rules(top, middle, bottom)
        _legend(figure, handles, columns=2 if size is PAGE_SIZE else 3, title=title)
    return figure


def draw_latency(
    alphas_centi: Sequence[int], curves: Sequence[Mapping[str, Any]], slo_ms: float
) -> Figure:
    """P99 against alpha, a line for each hot share, its lowest point marked.

    Args:
        curves: what `by_hot_share` gave, at least one.
    """
    alphas = np.array(alphas_centi) / 100
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_SIZE[0], 3.9), layout="constrained")
        axes = figure.subplots()
        handles: dict[str, Line2D] = {}
        lowest = []
        for i, curve in enumerate(curves):
            # Few lines take colours that lie apart.
            step = round(i * (CURVES - 1) / (len(curves) - 1)) if len(curves) > 1 else CURVES // 2
            p99, colour = np.array(curve["p99_ms"], float), RAMP[min(step, CURVES - 1)]
            (line,) = axes.plot(alphas, p99, color=colour, lw=1.7)
            best = int(p99.argmin())
            lowest.append(float(p99[best]))
            axes.plot(alphas[best], p99[best], "o", color=colour, ms=5)
            handles[f"{curve['hot_share']:.2f} ({curve['epochs']} epochs)"] = line
        axes.axhline(slo_ms, color=LIMIT, lw=1, ls=(0, (4, 3)))
        highest = max(float(np.max(curve["p99_ms"])) for curve in curves)
        least = min(slo_ms, *lowest)
        axes.set_ylim(0.8 * least, min(1.05 * highest, 3 * max(slo_ms, *lowest)))
        axes.set_xlim(0, 1)
        axes.set_title("mean P99, ms, with alpha held", color=INK)
        axes.set_xlabel("alpha")
        _rules(axes)
        _legend(figure, handles, columns=2, title="hot share (dot: its best alpha)")
    return figure


def draw_learning(
    returns: tuple[Floats, Floats], evaluations: tuple[Floats, Floats], window: int
) -> Figure:
    """Episodic return and the evaluation's P99 ratio against training steps.

    Args:
        returns: steps [n] and mean returns of the episodes that ended there [n].
        evaluations: steps [m] and P99 ratios [m].
        window: points of the return's moving mean.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE_SIZE[0], 3.9), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        if returns[0].size:
            steps = returns[0] / 1000
            top.plot(steps, returns[1], color=SERIES[0], lw=0.7, alpha=0.4, marker=".", ms=3)
            top.plot(steps, smoothed(returns[1], window), color=SERIES[0], lw=1.7)
        if evaluations[0].size:
            bottom.plot(
                evaluations[0] / 1000, evaluations[1], color=SERIES[1], lw=1.5, marker="o", ms=4
            )
            bottom.axhline(1, color=MUTED, lw=1, ls=(0, (4, 3)))
        top.set_title(f"episodic return (bold: mean over {window} points)", color=INK)
        bottom.set_title("evaluation: P99 / P99 of the closed form's alpha", color=INK)
        bottom.set_xlabel("thousand training steps (epochs of the node)")
        _rules(top, bottom)
    return figure


def to_svg(figure: Figure, prefix: str, label: str) -> str:
    """A figure as an `<svg>` element for a page: no address in it, its colours CSS variables.

    Args:
        prefix: of the element's ids, unlike any other figure's in the page.
        label: what a screen reader says; escaped already.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.patch.set_visible(False)
        for axes in figure.axes:
            axes.patch.set_visible(False)
        figure.savefig(buffer, format="svg")
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    opening = f'<svg {box[0]} role="img" aria-label="{label}">'
    text = re.sub(r"^<svg[^>]*>", lambda _: opening, text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", text)
    text = text.replace(' id="', f' id="{prefix}-')
    text = text.replace('href="#', f'href="#{prefix}-').replace("url(#", f"url(#{prefix}-")
    text = re.sub(r' d="([^"]*)"', _shorter_path, text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # Text takes the page's font: the one of the layout is wider, and not on every machine.
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def _shorter_path(match: re.Match[str]) -> str:
    numbers = re.sub(r"-?\d+\.\d+", lambda n: f"{float(n[0]):.1f}", match[1])
    return f' d="{" ".join(numbers.split())}"'


def _rules(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.grid(axis="y", color=GRID, lw=0.6)
        axes.tick_params(length=0)
        axes.spines["left"].set_visible(False)


def _legend(
    figure: Figure, handles: Mapping[str, Line2D], columns: int, title: str | None = None
) -> None:
    if max(map(len, handles)) > WIDE_LABEL:
        columns -= 1
    legend = figure.legend(
        list(handles.values()), list(handles), loc="outside upper left", ncols=columns,
        title=title, alignment="left", handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip
    for text in (legend.get_title(), *legend.get_texts()):
        text.set_parse_math(False)
