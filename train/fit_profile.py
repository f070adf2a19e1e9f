"""A hardware profile from measured batches: a nonnegative fit, then what is left unexplained.

The model is that of `hlem_env.surrogate.hardware.NodeProfile`. Batches of one kind, length, depth and
alpha are one cell, with the median of its times; a batch of a stream is a cell of its own. Cells weigh by
the inverse of their time, so that residuals are relative, and it is their absolute values that are least:
a few slow batches do not move the fit. What is the host's goes with how fast the host was meanwhile, where
that was recorded: else a depth whose turn came while it was slow would seem to have slower layers. Mixed
batches, but for those that the host launches piece by piece, and those beside refill come second: what they
take beyond the rest of the model, over the part of it that slows down. How times scatter around the model
is taken from the streams.
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
from train import host_speed
from train.host_speed import STREAM

Floats = NDArray[np.float64]

GRAPH_TOKENS = 256
"""`hlem_env.live.hstu_graphs.SMALL_TOKENS`, which needs CUDA to import."""
IDLE_MS = (0.5, 8.0, 20.0)
"""Pauses after which a batch's extra time is fitted."""
ALONE_WEIGHT = 3.0
"""Of a cell of batches that were timed by themselves, over one batch of a stream."""
ITERATIONS = 30
LEAST_RESIDUAL = 0.003
STRETCH = 128
"""Batches of a stream that stay together in the jitter."""
MOST_JITTER = 4096
"""Batches of it that a profile keeps."""


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
    idle_ms: float = 0.0
    """How long the server had had nothing to do."""
    host: float = 1.0
    """What is the host's took so many times as long as in the profile that is fitted."""

    @property
    def mixed(self) -> bool:
        """Whether some requests are cached and some not."""
        return bool(self.cached.min() == 0 < self.cached.max())


@dataclass(frozen=True)
class Terms:
    """Parts of the model that are fixed before the fit."""

    candidates: int
    append_tokens: float
    knots: tuple[float, ...]
    """Tokens of a sequence, history and candidates, at which compute is fitted."""
    key_ms: float
    """Of a lookup beside an emulated link; else the fit finds it."""
    link_row_ms: float | None
    """An emulated link's, beside which lookups run; None: the fit finds the link."""
    cuda: bool


def cells_of(raw: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Cells of the measurements of all depths, but for batches while the host was slow."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    reference_ms = host_speed.mean_of_streams(raw)
    for depth in raw:
        layers = depth["preset"]["layers"]
        slowness = host_speed.of_samples(depth) / reference_ms if reference_ms else None
        for i in np.flatnonzero(host_speed.kept(depth)):
            sample = depth["samples"][i]
            host = 1.0 if slowness is None else float(slowness[i]) or 1.0
            key = (
                sample["kind"], layers, sample["alpha"], tuple(sample["history"]),
                tuple(sample["cached"]), sample["ahead"], sample["refilling"], sample.get("idle_ms", 0.0),
                host,
            )  # fmt: skip
            groups.setdefault(key, []).append(sample)
    cells = []
    for (kind, layers, alpha, history, cached, *rest), samples in groups.items():
        ahead, refilling, idle, host = rest
        times = tuple(float(sample["ms"]) for sample in samples)
        cells.append(
            Cell(
                kind, layers, alpha, np.array(history, float), np.array(cached, float),
                float(np.mean([s["missed_rows"] for s in samples])),
                float(np.mean([s["hit_rows"] for s in samples])),
                ahead, refilling, float(np.median(times)), times, idle, host,
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
    """Time of the rows that is known before the fit: beside an emulated link."""
    if terms.link_row_ms is None:
        return 0.0
    return max(cell.hit_rows * terms.key_ms, cell.missed_rows * terms.link_row_ms)


def eager(cell: Cell, terms: Terms) -> bool:
    """Whether the batch has no recorded graph."""
    new = cell.history + terms.candidates - cell.cached
    return terms.cuda and new.size > 1 and float(new.max()) > GRAPH_TOKENS


HOST_COLUMNS = 6
"""Of `design`: overhead; further requests; no graph, each layer of it; ahead with a graph, without."""


def design(cell: Cell, terms: Terms) -> Floats:
    """Columns: those of the host, pauses; missed rows, rows found; compute."""
    launched = float(eager(cell, terms))
    ahead = float(cell.ahead)
    host = [
        1.0, cell.history.size - 1.0, launched, cell.layers * launched, ahead * (1.0 - launched),
        ahead * launched,
    ]  # fmt: skip
    pauses = [
        np.interp(cell.idle_ms, (0.0, *IDLE_MS), (0.0, *unit)) for unit in np.eye(len(IDLE_MS))
    ]
    rows = [cell.missed_rows, cell.hit_rows] if terms.link_row_ms is None else [0.0, 0.0]
    return np.concatenate([cell.host * np.array(host + pauses), rows, compute_columns(cell, terms)])


def comes_second(cell: Cell, terms: Terms) -> bool:
    """Whether it takes longer than what the columns say, by a share of its compute or of its missed rows."""
    return cell.refilling or (cell.mixed and not eager(cell, terms))


def least_absolute(matrix: Floats, target: Floats, weight: Floats) -> Floats:
    """Nonnegative x [k] for which the sum of weight * |matrix x - target| is least.

    By least squares again and again, each time with weights over the last residuals.

    Args:
        matrix: [n, k].
        target: [n].
        weight: [n], above 0; residuals of `LEAST_RESIDUAL` over it and less count as that.
    """
    from scipy.optimize import nnls

    scale = weight
    for _ in range(ITERATIONS):
        found, _ = nnls(matrix * scale[:, None], target * scale, maxiter=10_000)
        residual = np.abs(matrix @ found - target) * weight
        scale = weight / np.sqrt(np.maximum(residual, LEAST_RESIDUAL))
    return np.asarray(found, np.float64)


def fit(raw: Sequence[Mapping[str, Any]], config: LiveConfig, name: str) -> NodeProfile:
    """The profile of the machine that `raw` was measured on.

    Args:
        raw: `train.service_times.measure` of each depth.
        config: the preset.
        name: of the profile.
    """
    require(len(raw) >= 1, "records", "none", "measurements of one depth at least")
    cells = cells_of(raw)
    terms = _terms(raw, config, cells)
    second = [cell for cell in cells if comes_second(cell, terms)]
    plain = [cell for cell in cells if not comes_second(cell, terms)]
    matrix = np.stack([design(cell, terms) for cell in plain])
    target = np.array([cell.ms - rows_ms(cell, terms) for cell in plain])
    weight = np.array([(1.0 if c.kind == STREAM else ALONE_WEIGHT) / c.ms for c in plain])
    found = least_absolute(matrix, target, weight)
    knots = len(terms.knots)
    places = np.cumsum([HOST_COLUMNS, len(IDLE_MS), 2, knots])
    host, after_idle, (row_ms, key_ms), recompute, append = np.split(found, places)
    if terms.link_row_ms is not None:
        row_ms, key_ms = terms.link_row_ms, terms.key_ms

    def predicted(cell: Cell) -> float:
        return float(design(cell, terms) @ found) + rows_ms(cell, terms)

    def compute(cell: Cell) -> float:
        return float(compute_columns(cell, terms) @ found[places[2] :])

    mixed = _slowdown([(c.ms - predicted(c), compute(c)) for c in second if c.mixed])
    beside = _slowdown(
        [(c.ms - predicted(c), c.missed_rows * row_ms) for c in cells if c.refilling]
    )
    residual = np.array([predicted(cell) / cell.ms - 1.0 for cell in plain])
    # Older measurements do not say what of it keeps the server busy; most of it does.
    added_ms = _median(raw, "loop", "median_ms")
    known = all("busy_ms" in depth["loop"] for depth in raw)
    loop_ms = _median(raw, "loop", "busy_ms") if known else added_ms
    wake_ms = max(added_ms - loop_ms, 0.0)

    def whole(cell: Cell) -> float:
        slower = mixed if cell.mixed and comes_second(cell, terms) else 0.0
        return predicted(cell) + slower * compute(cell)

    streamed = _streamed(cells)
    ratios = [(cell.ms / whole(cell), cell.cached.min() == 0) for cell in streamed]
    jitter, jitter_cold = _series(ratios or _scatter(plain))
    row_bytes = config.row_bytes
    bands = {key: _median(raw, "bandwidths", key) for key in raw[0]["bandwidths"]}
    refill = [rate for depth in raw for rate in depth["refill_gbps"].values() if rate > 0]
    return NodeProfile(
        name=name,
        estimate=False,
        hardware=str(raw[0].get("hardware", config.measured_on)),
        source="python -m train.calibrate",
        gather_gbps=_round(row_bytes / max(row_ms, 1e-12) * 1e-6),
        hbm_gbps=_round(2 * row_bytes / max(key_ms, 1e-12) * 1e-6),
        link_gbps=_round(config.emulated_link_gbps or bands["link_gbps"]),
        refill_slowdown=_round(beside),
        overhead_ms=_round(host[0]),
        recompute_tokens=terms.knots,
        recompute_layer_ms=tuple(_round(v) for v in recompute),
        append_tokens=terms.append_tokens,
        append_history_tokens=terms.knots,
        append_layer_ms=tuple(_round(v) for v in append),
        wake_ms=_round(wake_ms),
        loop_ms=_round(loop_ms),
        request_ms=_round(host[1]),
        graph_tokens=GRAPH_TOKENS if terms.cuda else 0,
        eager_ms=_round(host[2]),
        eager_layer_ms=_round(host[3]),
        mixed_slowdown=_round(mixed),
        lookup_overlaps=config.emulated_link_gbps is not None,
        ahead_ms=_round(host[4]),
        ahead_eager_ms=_round(host[5]),
        prefetch_gbps=_round(_prefetch_gbps(raw)) if terms.cuda else 0.0,
        refill_gbps=_round(min(refill)) if refill else 1e3,
        idle_ms=IDLE_MS if after_idle.any() else (),
        after_idle_ms=tuple(_round(v) for v in after_idle) if after_idle.any() else (),
        jitter=jitter,
        jitter_cold=jitter_cold,
        probe_ms={str(d["preset"]["layers"]): _round(d["probe_ms"]) for d in raw},
        host_ms={
            str(depth["preset"]["layers"]): {
                name: _round(ms) for name, ms in host_speed.mean_ms(depth, raw).items()
            }
            for depth in raw
        },
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
    """Median share by which the second number of each pair grows by the first."""
    shares = [more / part for more, part in pairs if part > 0]
    return max(float(np.median(shares)), 0.0) if shares else 0.0


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


def _streamed(cells: list[Cell]) -> list[Cell]:
    """Batches of streams; these take turns, a stretch of each, in which what follows what stays."""
    streams: dict[tuple[int, float], list[Cell]] = {}
    for cell in cells:
        if cell.kind == STREAM and not cell.refilling:
            streams.setdefault((cell.layers, cell.alpha), []).append(cell)
    longest = max((len(stream) for stream in streams.values()), default=0)
    return [
        cell for begin in range(0, longest, STRETCH) for stream in streams.values()
        for cell in stream[begin : begin + STRETCH]
    ]  # fmt: skip


def _scatter(cells: list[Cell]) -> list[tuple[float, bool]]:
    """Times over their cell's median, in no order, and whether nothing was cached: without streams.

    What happens once in hundreds of batches, as a kernel's compilation, does not happen in service.
    """
    some = [cell for cell in cells if len(cell.times_ms) >= 5]
    ratios = np.concatenate([np.array(cell.times_ms) / cell.ms for cell in some])
    ratios = ratios.clip(*np.percentile(ratios, (0.5, 99.5)))
    cold = [cell.cached.min() == 0 for cell in some for _ in cell.times_ms]
    return [(ratios[i], cold[i]) for i in np.random.default_rng(0).permutation(ratios.size)]


def _series(ratios: list[tuple[float, bool]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each batch its ratio, and the last one of the other kind: of all cached, of some not."""
    last = dict.fromkeys((False, True), 1.0)
    series: dict[bool, list[float]] = {False: [], True: []}
    for ratio, nothing_cached in ratios:
        last[bool(nothing_cached)] = float(f"{ratio:.3g}")
        for kind, values in series.items():
            values.append(last[kind])
    return tuple(series[False][:MOST_JITTER]), tuple(series[True][:MOST_JITTER])


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
