"""A hardware profile from measured batches: nonnegative least squares, then what is left unexplained.

The model is that of `hlem_env.surrogate.hardware.NodeProfile`. Batches of one kind, length, depth and
alpha are one cell, with the median of its times; cells weigh by the inverse of their time, so that
residuals are relative. Mixed batches and those beside refill come second: what they take beyond the
rest of the model, over the part of it that slows down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.surrogate.hardware import NodeProfile, _extrapolate

Floats = NDArray[np.float64]

GRAPH_TOKENS = 256
"""`hlem_env.live.hstu_graphs.SMALL_TOKENS`, which needs CUDA to import."""
JITTER_POINTS = 64
OTHER_KINDS = ("mixed",)
"""Left out of the first fit."""


@dataclass(frozen=True)
class Cell:
    """Batches of one kind, length, depth and alpha."""

    kind: str
    layers: int
    alpha: float
    history: Floats
    """[requests], tokens; the same in all of them."""
    cached: Floats
    missed_rows: float
    """Mean over the batches, as all that follows but `ms`."""
    hit_rows: float
    ahead: bool
    refilling: bool
    ms: float
    """Median."""
    times_ms: tuple[float, ...]


@dataclass(frozen=True)
class Terms:
    """Parts of the model that are fixed before the fit."""

    candidates: int
    append_tokens: float
    knots: tuple[float, ...]
    """Tokens of a sequence, history and candidates, at which compute is fitted."""
    key_ms: float
    link_row_ms: float | None
    """An emulated link's, beside which lookups run; None: the fit finds the link."""
    cuda: bool


def cells_of(raw: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Cells of the measurements of all depths."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for depth in raw:
        layers = depth["preset"]["layers"]
        for sample in depth["samples"]:
            key = (
                sample["kind"], layers, sample["alpha"], tuple(sample["history"]),
                tuple(sample["cached"]), sample["ahead"], sample["refilling"],
            )  # fmt: skip
            groups.setdefault(key, []).append(sample)
    cells = []
    for (kind, layers, alpha, history, cached, ahead, refilling), samples in groups.items():
        times = tuple(float(sample["ms"]) for sample in samples)
        cells.append(
            Cell(
                kind, layers, alpha, np.array(history, float), np.array(cached, float),
                float(np.mean([s["missed_rows"] for s in samples])),
                float(np.mean([s["hit_rows"] for s in samples])),
                ahead, refilling, float(np.median(times)), times,
            )
        )  # fmt: skip
    return cells


def compute_columns(cell: Cell, terms: Terms) -> Floats:
    """Layers x what each knot of recompute, then of append, adds to the batch's compute, [2 knots]."""
    units = np.eye(len(terms.knots))
    sequence = cell.history + terms.candidates
    full = np.stack([
        _extrapolate(sequence, (0.0, *terms.knots), (0.0, *unit)) for unit in units
    ])  # fmt: skip
    few = np.stack([_extrapolate(sequence, terms.knots, tuple(unit)) for unit in units])
    new = sequence - cell.cached
    share = np.clip((new - terms.append_tokens) / (sequence - terms.append_tokens), 0.0, 1.0)
    share = np.where(cell.cached == 0, 1.0, share)
    columns: Floats = np.concatenate([(full * share).sum(1), (few * (1.0 - share)).sum(1)])
    return cell.layers * columns


def rows_ms(cell: Cell, terms: Terms) -> float:
    """Time of the rows that is known before the fit."""
    lookups_ms = cell.hit_rows * terms.key_ms
    if terms.link_row_ms is None:
        return lookups_ms
    return max(lookups_ms, cell.missed_rows * terms.link_row_ms)


def eager(cell: Cell, terms: Terms) -> bool:
    """Whether the batch has no recorded graph."""
    new = cell.history + terms.candidates - cell.cached
    return terms.cuda and new.size > 1 and float(new.max()) > GRAPH_TOKENS


def design(cell: Cell, terms: Terms) -> Floats:
    """Columns: overhead, further requests, eager, ahead, missed rows, compute."""
    missed = cell.missed_rows if terms.link_row_ms is None else 0.0
    first = [1.0, cell.history.size - 1.0, float(eager(cell, terms)), float(cell.ahead), missed]
    return np.concatenate([first, compute_columns(cell, terms)])


def fit(raw: Sequence[Mapping[str, Any]], config: LiveConfig, name: str) -> NodeProfile:
    """The profile of the machine that `raw` was measured on.

    Args:
        raw: `train.service_times.measure` of each depth.
        config: the preset.
        name: of the profile.
    """
    from scipy.optimize import nnls

    require(len(raw) >= 1, "records", "none", "measurements of one depth at least")
    cells = cells_of(raw)
    terms = _terms(raw, config, cells)
    plain = [c for c in cells if c.kind.split()[0] not in OTHER_KINDS and not c.refilling]
    matrix = np.stack([design(cell, terms) for cell in plain])
    target = np.array([cell.ms - rows_ms(cell, terms) for cell in plain])
    weight = 1.0 / np.array([cell.ms for cell in plain])
    found, _ = nnls(matrix * weight[:, None], target * weight, maxiter=10_000)
    knots = len(terms.knots)
    recompute, append = found[5 : 5 + knots], found[5 + knots :]

    def predicted(cell: Cell) -> float:
        return float(design(cell, terms) @ found) + rows_ms(cell, terms)

    mixed = _slowdown(
        [(c.ms - predicted(c), float(compute_columns(c, terms) @ found[5:]))
         for c in cells if c.kind.startswith("mixed")]
    )  # fmt: skip
    beside = _slowdown(
        [(c.ms - predicted(c), c.missed_rows * found[4]) for c in cells if c.refilling]
    )
    residual = np.array([predicted(cell) / cell.ms - 1.0 for cell in plain])
    # Older measurements do not say what of it keeps the server busy; most of it does.
    added_ms = _median(raw, "loop", "median_ms")
    loop_ms = _median(raw, "loop", "busy_ms") if "busy_ms" in raw[0]["loop"] else added_ms
    wake_ms = max(added_ms - loop_ms, 0.0)
    row_bytes = config.row_bytes
    bands = {key: _median(raw, "bandwidths", key) for key in raw[0]["bandwidths"]}
    gather = config.emulated_link_gbps or row_bytes / max(found[4], 1e-12) * 1e-6
    refill = [rate for depth in raw for rate in depth["refill_gbps"].values() if rate > 0]
    return NodeProfile(
        name=name,
        estimate=False,
        hardware=str(raw[0].get("hardware", config.measured_on)),
        source="python -m train.calibrate",
        gather_gbps=_round(gather),
        hbm_gbps=_round(2 * row_bytes / max(terms.key_ms, 1e-12) * 1e-6),
        link_gbps=_round(config.emulated_link_gbps or bands["link_gbps"]),
        refill_slowdown=_round(beside),
        overhead_ms=_round(found[0]),
        recompute_tokens=terms.knots,
        recompute_layer_ms=tuple(_round(v) for v in recompute),
        append_tokens=terms.append_tokens,
        append_history_tokens=terms.knots,
        append_layer_ms=tuple(_round(v) for v in append),
        wake_ms=_round(wake_ms),
        loop_ms=_round(loop_ms),
        request_ms=_round(found[1]),
        graph_tokens=GRAPH_TOKENS if terms.cuda else 0,
        eager_ms=_round(found[2]),
        mixed_slowdown=_round(mixed),
        lookup_overlaps=config.emulated_link_gbps is not None,
        ahead_ms=_round(found[3]),
        prefetch_gbps=_round(_prefetch_gbps(raw)) if terms.cuda else 0.0,
        refill_gbps=_round(min(refill)) if refill else 1e3,
        jitter=_jitter(plain, lambda cell: min(cell.cached) > 0),
        jitter_cold=_jitter(plain, lambda cell: min(cell.cached) == 0),
        probe_ms={str(d["preset"]["layers"]): _round(d["probe_ms"]) for d in raw},
        fit={
            "cells": len(plain),
            "samples": sum(len(cell.times_ms) for cell in cells),
            "median_relative_residual": _round(float(np.median(np.abs(residual)))),
            "p90_relative_residual": _round(float(np.percentile(np.abs(residual), 90))),
            "largest_relative_residual": _round(float(np.abs(residual).max())),
            "by_kind": _by_kind(plain, residual),
            "bandwidths": {key: _round(value) for key, value in bands.items()},
            "refill_gbps": [depth["refill_gbps"] for depth in raw],
        },
    )  # fmt: skip


def _terms(raw: Sequence[Mapping[str, Any]], config: LiveConfig, cells: list[Cell]) -> Terms:
    lengths = sorted({float(c.history[0]) for c in cells if c.kind == "cold" and not c.refilling})
    link = config.emulated_link_gbps
    return Terms(
        candidates=config.candidates,
        append_tokens=float(config.candidates + 2 * config.new_items),
        knots=tuple(length + config.candidates for length in lengths),
        key_ms=1e-6 * _median(raw, "bandwidths", "lookup_ns_per_key"),
        link_row_ms=None if link is None else config.row_bytes / link * 1e-6,
        cuda=config.device == "cuda",
    )


def _median(raw: Sequence[Mapping[str, Any]], *path: str) -> float:
    values = []
    for depth in raw:
        value: Any = depth
        for key in path:
            value = value[key]
        values.append(float(value))
    return float(np.median(values))


def _slowdown(pairs: list[tuple[float, float]]) -> float:
    """Share by which the second number of each pair grows by the first, over all of them."""
    more, part = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return max(more / part, 0.0) if part > 0 else 0.0


def _prefetch_gbps(raw: Sequence[Mapping[str, Any]]) -> float:
    """Bytes brought ahead over the time of the batches that ran meanwhile.

    Of the longest histories: shorter ones may have had all that they wanted.
    """
    rates = []
    for depth in raw:
        ahead = [s for s in depth["samples"] if s["kind"] == "ahead"]
        most = max((s["history"][0] for s in ahead), default=0)
        rates += [1e-6 * s["prefetch_bytes"] / s["ms"] for s in ahead if s["history"][0] == most]
    return float(np.median(rates)) if rates else 0.0


def _jitter(cells: list[Cell], wanted: Any) -> tuple[float, ...]:
    """Quantiles of times over their cell's median."""
    ratios = [t / c.ms for c in cells if wanted(c) and len(c.times_ms) >= 5 for t in c.times_ms]
    if len(ratios) < JITTER_POINTS:
        return ()
    at = 100 * (np.arange(JITTER_POINTS) + 0.5) / JITTER_POINTS
    return tuple(_round(float(v)) for v in np.percentile(ratios, at))


def _by_kind(cells: list[Cell], residual: Floats) -> dict[str, float]:
    kinds = dict.fromkeys(cell.kind for cell in cells)
    return {
        kind: _round(
            float(np.mean([r for c, r in zip(cells, residual, strict=True) if c.kind == kind]))
        )
        for kind in kinds
    }


def _round(value: float) -> float:
    return float(f"{value:.5g}")
