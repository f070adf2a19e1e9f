"""A request's time by its parts: `python -m eval.paper_breakdown` (the paper's Fig. 1).

By history length and by number of tables, after the surrogate's service time at given hit rates: the
profile's measured constants, put together. Nothing is simulated or measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval import paper
from eval.figures import GRID, INK, RAMP, SERIES, STATIC, STYLE
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from hlem_env.surrogate.hardware import HardwareProfile, compute_ms
from hlem_env.workload.requests import Catalogue

DENSE_TOKENS = (5_000, 8_000, 10_000, 15_000)
DENSE_SHARE = (0.049 / 0.164, 0.065 / 0.279, 0.066 / 0.367, 0.088 / 0.674)
"""Of `recompute_layer_ms` of `h100`, what the layer's linears take, measured with it at these lengths;
`a100` scales both alike. No such measurement of delta attention: there the two are one."""


@dataclass
class Args:
    """Show where the time of a request goes, with the constants of a hardware profile."""

    hardware: Literal["h100", "a100"] = "h100"
    """profile"""
    lengths: tuple[int, ...] = (5_000, 8_000, 10_000, 12_000, 15_000)
    """history tokens, at --base-tables"""
    tables: tuple[int, ...] = (5, 10, 25, 50)
    """embedding tables, at --base-length"""
    base_length: int = 10_000
    """history tokens when tables vary"""
    base_tables: int = 10
    """tables when lengths vary"""
    kv_hit: float = 0.5
    """share of requests whose history is in the KV cache, of the means"""
    embedding_hit: float = 0.5
    """share of the rows looked up that are in HBM"""
    new_items: int = 200
    """history tokens since a cached one"""
    layers: int = 6
    """of the model"""
    plot: Annotated[Path | None, tyro.conf.arg(help="PNG file")] = None
    json: Annotated[Path | None, tyro.conf.arg(help="file for the parts")] = None


@dataclass(frozen=True)
class Parts:
    """Milliseconds of a request."""

    gather: float
    """Embedding rows that are not in HBM, over the link."""
    lookup: float
    """Embedding rows within HBM."""
    prefill: float
    """Attention over a history from nothing."""
    dense: float
    """The layers' linears beside it."""
    delta: float
    """Attention of new tokens against a cached history, and their linears."""
    overhead: float
    """What every request costs; an assumption in the profiles."""

    @property
    def total(self) -> float:
        """Service time."""
        return float(sum(asdict(self).values()))


LABELS = {
    "gather": "embedding gather from the host", "lookup": "embedding lookup in HBM",
    "prefill": "prefill attention", "dense": "dense compute", "delta": "delta attention and dense",
    "overhead": "overhead",
}  # fmt: skip
LEAST_LABELLED = 0.06
"""Of the highest bar, how high a part is whose share is written in it."""
COLOURS = dict(
    zip(LABELS, (SERIES[1], SERIES[5], RAMP[4], RAMP[1], SERIES[2], STATIC), strict=True)
)


@dataclass(frozen=True)
class Model:
    """What a request costs besides its length and tables."""

    profile: HardwareProfile
    layers: int
    new_items: int
    embedding_hit: float
    catalogue: Catalogue

    def parts(self, length: int, kv_is_hit: bool) -> Parts:
        """Time of a request, without refill and without waiting.

        Args:
            length: history tokens, the new items included.
            kv_is_hit: whether all but the new items is in the KV cache.
        """
        catalogue, profile = self.catalogue, self.profile
        tokens = catalogue.candidates + (self.new_items if kv_is_hit else length)
        rows, row_bytes = tokens * catalogue.tables, catalogue.row_bytes
        table = profile.compute_table(self.layers, length + catalogue.candidates)
        append_tokens = profile.append_tokens
        compute = compute_ms(table, append_tokens, tokens, length + catalogue.candidates)
        dense = float(np.interp(length, DENSE_TOKENS, DENSE_SHARE))
        return Parts(
            gather=(1 - self.embedding_hit) * rows * row_bytes / profile.gather_gbps * 1e-6,
            lookup=self.embedding_hit * rows * 2 * row_bytes / profile.hbm_gbps * 1e-6,
            prefill=0.0 if kv_is_hit else (1 - dense) * compute,
            dense=0.0 if kv_is_hit else dense * compute,
            delta=compute if kv_is_hit else 0.0,
            overhead=profile.overhead_ms,
        )

    def mean(self, length: int, kv_hit: float) -> Parts:
        """Mean over requests of which a share `kv_hit` is a hit."""
        hit, miss = (self.parts(length, is_hit) for is_hit in (True, False))
        return Parts(
            **{
                f.name: kv_hit * getattr(hit, f.name) + (1 - kv_hit) * getattr(miss, f.name)
                for f in fields(Parts)
            }
        )


Bars = dict[str, dict[int, dict[str, Parts]]]
"""By what varies ("length", "tables"), its value, and the kind of request."""


def bars(args: Args) -> Bars:
    """All bars.

    Raises:
        ArgumentError: a value outside what is allowed; says which.
    """
    for name in ("kv_hit", "embedding_hit"):
        value = getattr(args, name)
        require(0 <= value <= 1, "--" + name.replace("_", "-"), value, "0 to 1")
    lengths = (*args.lengths, args.base_length)
    require(1 <= args.layers <= 1000, "--layers", args.layers, "1 to 1000")
    require(min(lengths) >= 1000, "--lengths", min(lengths), "1,000 and above")
    good = 0 <= args.new_items < min(lengths)
    require(good, "--new-items", args.new_items, f"0 to below {min(lengths)}")
    catalogue = Catalogue(tables=args.base_tables)
    profile = HardwareProfile.load(args.hardware)
    model = Model(profile, args.layers, args.new_items, args.embedding_hit, catalogue)

    def kinds(model: Model, length: int) -> dict[str, Parts]:
        return {
            "KV miss": model.parts(length, False),
            "KV hit": model.parts(length, True),
            "mean": model.mean(length, args.kv_hit),
        }

    def with_tables(tables: int) -> Model:
        return replace(model, catalogue=Catalogue(tables=tables))

    return {
        "length": {length: kinds(model, length) for length in args.lengths},
        "tables": {n: kinds(with_tables(n), args.base_length) for n in args.tables},
    }


def table(found: dict[int, dict[str, Parts]], title: str, varied: str) -> str:
    """Total and shares of every bar."""
    rows = [
        [f"{value:,}", kind, f"{parts.total:.2f}"]
        + [f"{100 * getattr(parts, part) / parts.total:.0f}" for part in LABELS]
        for value, kinds in found.items()
        for kind, parts in kinds.items()
    ]
    headings = [varied, "request", "ms", *(f"{label}, %" for label in LABELS.values())]
    return paper.markdown(title, headings, rows)


def draw_bars(axes: Axes, found: dict[int, dict[str, Parts]], kind: str) -> None:
    """A stacked bar for each value; shares are written where there is room."""
    places = np.arange(len(found))
    total = np.array([kinds[kind].total for kinds in found.values()])
    highest = max(parts.total for kinds in found.values() for parts in kinds.values())
    bottom = np.zeros(len(found))
    for part, colour in COLOURS.items():
        height = np.array([getattr(kinds[kind], part) for kinds in found.values()])
        if height.any():
            axes.bar(places, height, 0.68, bottom, color=colour, label=LABELS[part])
        ink = "white" if part == "prefill" else INK
        for place, ms, low, whole in zip(range(len(found)), height, bottom, total, strict=True):
            if ms >= LEAST_LABELLED * highest:
                text = f"{100 * ms / whole:.0f} %"
                axes.text(place, low + ms / 2, text, ha="center", va="center", color=ink, size=8)
        bottom += height
    axes.set_xticks(places, [f"{value:,}" for value in found])
    axes.set_title(kind, color=INK)
    axes.grid(axis="y", color=GRID, lw=0.6)


def draw(found: Bars, args: Args) -> Figure:
    """A row by history length and one by tables; a panel for each kind of request."""
    labels = {
        "length": f"history tokens, {args.base_tables} tables",
        "tables": f"tables, {args.base_length:,} tokens",
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        panels: Sequence[Sequence[Axes]] = figure.subplots(2, 3, sharey="row")
        for row, (varied, values) in zip(panels, found.items(), strict=True):
            for axes, kind in zip(row, ("KV miss", "KV hit", "mean"), strict=True):
                draw_bars(axes, values, kind)
                axes.set_xlabel(labels[varied])
            row[0].set_ylabel("ms")
        handles: dict[str, Any] = {}
        for axes in (panels[0][0], panels[0][1]):
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(
            handles.values(), handles, loc="outside upper left", ncols=3, alignment="left",
            title=f"Profile {args.hardware}, {100 * args.embedding_hit:.0f} % of the rows in HBM;"
            f" mean: {100 * args.kv_hit:.0f} % of the requests hit the KV cache",
        )  # fmt: skip
    return figure


def main(args: Args) -> None:
    """Print, write, draw."""
    found = bars(args)
    shared = f"profile {args.hardware}, {100 * args.embedding_hit:.0f} % of the rows in HBM"
    by_length = f"By history length, {args.base_tables} tables, {shared}"
    print(table(found["length"], by_length, "history tokens"))
    by_tables = f"By number of tables, {args.base_length:,} tokens, {shared}"
    print(table(found["tables"], by_tables, "tables"))
    if args.json is not None:
        parts = {
            f"by_{varied}_ms": {
                str(value): {kind: asdict(p) | {"total": p.total} for kind, p in kinds.items()}
                for value, kinds in values.items()
            }
            for varied, values in found.items()
        }
        profile = HardwareProfile.load(args.hardware).to_json()
        settings = {k: v for k, v in asdict(args).items() if k not in ("plot", "json")}
        payload = {"settings": settings, "profile": profile, **parts}
        write_result(args.json, command("eval.paper_breakdown"), payload)
    if args.plot is not None:
        paper.save(draw(found, args), args.plot, "eval.paper_breakdown")


if __name__ == "__main__":
    run_command("eval.paper_breakdown", main, Args)
