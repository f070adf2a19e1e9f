"""A hardware profile from measured batches: a nonnegative fit, then what is left unexplained.

The model is that of `hlem_env.surrogate.hardware.NodeProfile`. Batches of one kind, length, depth and
alpha are one cell, with the median of its times; a batch of a stream is a cell of its own. Cells weigh by
the inverse of their time, so that residuals are relative, and it is their absolute values that are least:
a few slow batches do not move the fit. What is the host's goes with how fast the host was meanwhile, where
that was recorded: else a depth whose turn came while it was slow would seem to have slower layers. A missed
row takes what it took where rows alone were gathered: which stream misses more goes with how fast the host
was, too, and in a batch it is one part of many. What evicting takes is told by batches of one stream, beside
one another, and so is storing where the host's speed is not known. Mixed batches, but for those that the
host launches piece by piece, those beside refill and those that plan a prefetch come second: what they take
beyond the rest of the model. How times scatter around the model is taken from the streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.surrogate.hardware import NodeProfile
from train import host_speed
from train.fit_cells import (
    GRAPH_TOKENS,
    HOST_COLUMNS,
    IDLE_MS,
    Cell,
    Floats,
    Terms,
    cells_of,
    comes_second,
    compute_columns,
    design,
    eager,
    known_ms,
    of,
    slowed,
)
from train.host_speed import STREAM, ColdHost

ALONE_WEIGHT = 3.0
"""Of a cell of batches that were timed by themselves, over one batch of a stream."""
ITERATIONS = 30
PASSES = 4
"""Of the fit: how fast the host was depends on what evicting takes, and the other way round."""
FEWEST_TOLD = 100
"""Batches of streams with nothing cached."""
LEAST_RESIDUAL = 0.003
STRETCH = 128
"""Batches of a stream that stay together in the jitter."""
PAUSES = 6.0
"""Times the shortest tenth of the times between two batches, from which on nobody waited."""
FEWEST_GAPS = 100
MOST_JITTER = 4096
"""Batches of it that a profile keeps."""


def ahead_cost(found: Floats, host: Floats, compute_ms: Floats) -> Floats:
    """What planning a prefetch adds, [n] milliseconds: the host's time, where the device does not compute.

    Args:
        found: `ahead_ms` and `ahead_hidden`.
        host: [n], how slow the host was.
        compute_ms: [n], of the batch, if a recorded graph does it; else 0.
    """
    cost: Floats = np.maximum(found[0] * host - found[1] * compute_ms, 0.0)
    return cost


def fit_ahead(more_ms: Floats, host: Floats, compute_ms: Floats, weight: Floats) -> Floats:
    """`ahead_ms` and `ahead_hidden` with the least sum of weighted errors of `ahead_cost`.

    Args:
        more_ms: [n], what batches that plan a prefetch took beyond the rest of the model.
        host: as `ahead_cost`.
        compute_ms: as `ahead_cost`.
        weight: [n].
    """
    from scipy.optimize import brute, fmin

    if not more_ms.size:
        return np.zeros(2)

    def error(values: Floats) -> float:
        off = np.abs(ahead_cost(np.abs(values), host, compute_ms) - more_ms)
        return float((weight * off).sum())

    most = max(float(np.max(more_ms / host)), 0.0)
    begin = brute(error, ((0.0, most), (0.0, 1.0)), Ns=21, finish=None)
    found: Floats = np.abs(fmin(error, begin, xtol=1e-6, ftol=1e-9, disp=False))
    return found


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


def fit_columns(cells: Sequence[Cell], terms: Terms) -> Floats:
    """What each column of `design` takes, milliseconds."""
    weight = np.array([(1.0 if c.kind == STREAM else ALONE_WEIGHT) / c.ms for c in cells])
    return least_absolute(design(cells, terms), of(cells, "ms") - known_ms(cells, terms), weight)


def alone_and_cold(cells: Sequence[Cell]) -> list[Cell]:
    """Batches of streams of one request with nothing cached."""
    return [c for c in cells if c.kind == STREAM and c.history.size == 1 and c.cached.max() == 0]


def tells_storing(cells: Sequence[Cell]) -> bool:
    """Whether enough requests with nothing cached were stored, and enough were not."""
    stored = [cell.stored > 0 for cell in alone_and_cold(cells)]
    return FEWEST_TOLD <= sum(stored) <= len(stored) - FEWEST_TOLD


def fit_admission(cells: Sequence[Cell], terms: Terms, found: Floats) -> tuple[float, float] | None:
    """`evict_ms` and `store_layer_ms`, from batches of a stream beside others of it.

    Which stream stores and evicts goes with how fast the host was meanwhile, and that is not known so well.
    But within a stream some requests with nothing cached are stored and some are not, some find room and
    some evict: so each stream has a level of its own, and slopes over missed rows and the host's slowness.

    Args:
        cells: that are fitted.
        terms: of the fit.
        found: `fit_columns` of them.

    Returns:
        None where too few batches tell.
    """
    some = alone_and_cold(cells)
    if len(some) < FEWEST_TOLD:
        return None
    streams = list(dict.fromkeys((c.layers, c.alpha) for c in some))
    which = np.array([streams.index((c.layers, c.alpha)) for c in some])
    other = np.stack([np.ones(len(some)), of(some, "missed_rows") / 1e4, of(some, "host")], axis=1)
    of_stream = (np.eye(len(streams))[which][:, :, None] * other[:, None]).reshape(len(some), -1)
    rest = replace(terms, evict_ms=0.0, store_layer_ms=0.0)
    more_ms = of(some, "ms") - design(some, rest) @ found - known_ms(some, rest)
    columns = np.array([(c.host * c.evicted, c.layers * c.stored) for c in some])
    scale = columns.max(axis=0).clip(1e-12)
    matrix = np.hstack([columns / scale, of_stream, -of_stream])  # of either sign
    evict, store = least_absolute(matrix, more_ms, np.ones(len(some)))[:2] / scale
    return float(evict), float(store)


@dataclass(frozen=True)
class Fitted:
    """What the model takes for cells."""

    terms: Terms
    columns_ms: Floats
    """`fit_columns`."""

    @property
    def constants(self) -> tuple[Floats, Floats, float, float, Floats, Floats]:
        """Of the host, of pauses; of a row found, of a token stored in a layer; of recompute, of append."""
        terms, knots = self.terms, len(self.terms.knots)
        places = np.cumsum([HOST_COLUMNS, len(IDLE_MS), 2, knots])
        host, pauses, (key_ms, store_ms), full, few = np.split(self.columns_ms, places)
        key_ms = key_ms if terms.key_ms is None else terms.key_ms
        store_ms = store_ms if terms.store_layer_ms is None else terms.store_layer_ms
        return host, pauses, float(key_ms), float(store_ms), full, few

    def predicted_ms(self, cells: Sequence[Cell]) -> Floats:
        """[cells], without what comes second."""
        return np.asarray(design(cells, self.terms) @ self.columns_ms + known_ms(cells, self.terms))

    def more_ms(self, cells: Sequence[Cell]) -> Floats:
        """What they took beyond that, [cells]."""
        return np.asarray(of(cells, "ms") - self.predicted_ms(cells))

    def compute_ms(self, cells: Sequence[Cell]) -> Floats:
        """The device's, rows left out, [cells]."""
        *_, store_ms, full, few = self.constants
        stored_ms = of(cells, "layers") * of(cells, "stored") * store_ms
        return np.asarray(
            compute_columns(cells, self.terms) @ np.concatenate([full, few]) + stored_ms
        )

    def graph_ms(self, cells: Sequence[Cell]) -> Floats:
        """The same of cells with a recorded graph, [cells]; 0 of others."""
        return np.where([eager(cell, self.terms) for cell in cells], 0.0, self.compute_ms(cells))


def fit(raw: Sequence[Mapping[str, Any]], config: LiveConfig, name: str) -> NodeProfile:
    """The profile of the machine that `raw` was measured on.

    Args:
        raw: `train.service_times.measure` of each depth.
        config: the preset.
        name: of the profile.
    """
    require(len(raw) >= 1, "records", "none", "measurements of one depth at least")
    admission = (0.0, 0.0)
    for _ in range(PASSES):
        cold_host = ColdHost.of(raw, admission[0])
        cells = cells_of(raw, cold_host)
        terms = _terms(raw, config, cells, admission)
        if cold_host.ms and tells_storing(cells):  # then streams can be held against one another
            terms = replace(terms, store_layer_ms=None)
        plain = [cell for cell in cells if not comes_second(cell, terms)]
        found = fit_columns(plain, terms)
        admission = fit_admission(plain, terms, found) or admission
    fitted = Fitted(terms, found)
    more_ms = fitted.more_ms
    second = [cell for cell in cells if comes_second(cell, terms)]
    hiding = [c for c in second if c.ahead and not c.refilling and not slowed(c, terms)]
    ahead = fit_ahead(
        more_ms(hiding), of(hiding, "host"), fitted.graph_ms(hiding), 1.0 / of(hiding, "ms")
    )
    slow = [cell for cell in second if slowed(cell, terms)]
    mixed = _slowdown(more_ms(slow), fitted.compute_ms(slow))
    refilling = [cell for cell in cells if cell.refilling]
    beside = _slowdown(more_ms(refilling), of(refilling, "missed_rows") * terms.row_ms)
    residual = fitted.predicted_ms(plain) / of(plain, "ms") - 1.0
    loop_ms, choose_ms = _loop(raw, cells)
    wake_ms = max(_median(raw, "loop", "median_ms") - loop_ms, 0.0)

    streamed = _streamed(cells)
    planned_ms = ahead_cost(ahead, of(streamed, "host"), fitted.graph_ms(streamed))
    slower_ms = mixed * fitted.compute_ms(streamed) * [slowed(cell, terms) for cell in streamed]
    whole_ms = fitted.predicted_ms(streamed) + slower_ms + of(streamed, "ahead") * planned_ms
    cold = [bool(cell.cached.min() == 0) for cell in streamed]
    ratios = list(zip(of(streamed, "ms") / whole_ms, cold, strict=True))
    jitter, jitter_cold = _series(ratios or _scatter(plain))
    host, after_idle, key_ms, store_ms, recompute, append = fitted.constants
    row_bytes = config.row_bytes
    bands = {key: _median(raw, "bandwidths", key) for key in raw[0]["bandwidths"]}
    refill = [rate for depth in raw for rate in depth["refill_gbps"].values() if rate > 0]
    return NodeProfile(
        name=name,
        estimate=False,
        hardware=str(raw[0].get("hardware", config.measured_on)),
        source="python -m train.calibrate",
        gather_gbps=_round(row_bytes / max(terms.row_ms, 1e-12) * 1e-6),
        hbm_gbps=_round(2 * row_bytes / max(key_ms, 1e-12) * 1e-6),
        link_gbps=_round(config.emulated_link_gbps or bands["link_gbps"]),
        refill_slowdown=_round(beside),
        overhead_ms=_round(host[0]),
        recompute_tokens=terms.knots,
        recompute_layer_ms=tuple(_round(v) for v in recompute),
        append_tokens=terms.append_tokens,
        append_history_tokens=terms.knots,
        append_layer_ms=tuple(_round(v) for v in append),
        store_layer_ms=_round(store_ms),
        wake_ms=_round(wake_ms),
        loop_ms=_round(loop_ms),
        choose_ms=_round(choose_ms),
        request_ms=_round(host[1]),
        graph_tokens=GRAPH_TOKENS if terms.cuda else 0,
        eager_ms=_round(host[2]),
        eager_layer_ms=_round(host[3]),
        evict_ms=_round(terms.evict_ms),
        mixed_slowdown=_round(mixed),
        lookup_overlaps=config.emulated_link_gbps is not None,
        ahead_ms=_round(ahead[0]),
        ahead_hidden=_round(ahead[1]),
        prefetch_gbps=_round(_prefetch_gbps(raw)) if terms.cuda else 0.0,
        refill_gbps=_round(min(refill)) if refill else 1e3,
        idle_ms=IDLE_MS if after_idle.any() else (),
        after_idle_ms=tuple(_round(v) for v in after_idle) if after_idle.any() else (),
        jitter=jitter,
        jitter_cold=jitter_cold,
        probe_ms={str(d["preset"]["layers"]): _round(d["probe_ms"]) for d in raw},
        host_ms={
            str(depth["preset"]["layers"]): {
                name: _round(ms) for name, ms in host_speed.mean_ms(depth, cold_host).items()
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


def _terms(
    raw: Sequence[Mapping[str, Any]],
    config: LiveConfig,
    cells: list[Cell],
    admission: tuple[float, float],
) -> Terms:
    lengths = sorted({float(c.history[0]) for c in cells if c.kind == "cold" and not c.refilling})
    link = config.emulated_link_gbps
    key_ms = 1e-6 * _median(raw, "bandwidths", "lookup_ns_per_key")
    return Terms(
        candidates=config.candidates,
        append_tokens=float(config.candidates + 2 * config.new_items),
        knots=tuple(length + config.candidates for length in lengths),
        row_ms=1e-6 * config.row_bytes / (link or _median(raw, "bandwidths", "gather_gbps")),
        key_ms=None if link is None else key_ms,
        cuda=config.device == "cuda",
        evict_ms=admission[0],
        store_layer_ms=admission[1],
    )


def _loop(raw: Sequence[Mapping[str, Any]], cells: list[Cell]) -> tuple[float, float]:
    """`loop_ms` and `choose_ms`.

    Between two batches of a queue pass two kinds of times, since one request waits or several: they are told
    apart where the variance within both is least. Without streams it is what a light load shows.
    """
    gaps = np.sort([cell.idle_ms / cell.host for cell in cells if cell.kind == STREAM])
    gaps = gaps[gaps > 0]
    gaps = gaps[gaps < PAUSES * np.percentile(gaps, 10)] if gaps.size else gaps
    if gaps.size < FEWEST_GAPS:
        # Older measurements do not say what of it keeps the server busy; most of it does.
        known = all("busy_ms" in depth["loop"] for depth in raw)
        return _median(raw, "loop", "busy_ms" if known else "median_ms"), 0.0
    n = np.arange(1, gaps.size)
    total = np.cumsum(gaps)
    one, several = total[:-1] / n, (total[-1] - total[:-1]) / (gaps.size - n)
    place = int(np.argmax(n * (gaps.size - n) * (several - one) ** 2)) + 1
    loop_ms = float(np.median(gaps[:place]))
    return loop_ms, float(np.median(gaps[place:])) - loop_ms


def _median(raw: Sequence[Mapping[str, Any]], *path: str) -> float:
    values = []
    for depth in raw:
        value: Any = depth
        for key in path:
            value = value[key]
        values.append(float(value))
    return float(np.median(values))


def _slowdown(more_ms: Floats, part_ms: Floats) -> float:
    """Median share by which parts grow, [n] each."""
    shares = more_ms[part_ms > 0] / part_ms[part_ms > 0]
    return max(float(np.median(shares)), 0.0) if shares.size else 0.0


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
