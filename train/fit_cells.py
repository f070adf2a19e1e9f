"""Cells of measured batches, and what each has of the constants that are fitted: `train.fit_profile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.surrogate.hardware import _extrapolate
from train import host_speed
from train.host_speed import ColdHost

Floats = NDArray[np.float64]

GRAPH_TOKENS = 256
"""`hlem_env.live.hstu_graphs.SMALL_TOKENS`, which needs CUDA to import."""
IDLE_MS = (0.5, 8.0, 20.0)
"""Pauses after which a batch's extra time is fitted."""


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
    evicted: float
    stored: float
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
    row_ms: float
    """Of a missed row: an emulated link's, or of rows that were gathered with nothing else."""
    key_ms: float | None
    """Of a lookup, where an emulated link runs beside it; None: the fit finds it."""
    cuda: bool
    evict_ms: float = 0.0
    store_layer_ms: float | None = 0.0
    """None: the fit finds it."""


def cells_of(raw: Sequence[Mapping[str, Any]], cold_host: ColdHost) -> list[Cell]:
    """Cells of the measurements of all depths, but for batches while the host was slow."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for depth in raw:
        layers = depth["preset"]["layers"]
        slowness = cold_host.slowness(depth) if cold_host.ms else None
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
                float(np.mean([s.get("evicted", 0) for s in samples])),
                float(np.mean([s.get("stored", 0) for s in samples])),
                ahead, refilling, float(np.median(times)), times, idle, host,
            )
        )  # fmt: skip
    return cells


def of(cells: Sequence[Cell], name: str) -> Floats:
    """A number of each cell, [cells]."""
    return np.array([getattr(cell, name) for cell in cells], float)


def compute_columns(cells: Sequence[Cell], terms: Terms) -> Floats:
    """Layers x what a batch's compute has of each knot of recompute, then of append, [cells, 2 knots]."""
    if not cells:
        return np.zeros((0, 2 * len(terms.knots)))
    units = np.eye(len(terms.knots))
    sequence = np.concatenate([cell.history for cell in cells]) + terms.candidates
    cached = np.concatenate([cell.cached for cell in cells])
    full = np.stack([
        _extrapolate(sequence, (0.0, *terms.knots), (0.0, *unit)) for unit in units
    ])  # fmt: skip
    few = np.stack([_extrapolate(sequence, terms.knots, tuple(unit)) for unit in units])
    new = sequence - cached
    share = np.clip((new - terms.append_tokens) / (sequence - terms.append_tokens), 0.0, 1.0)
    share = np.where(cached == 0, 1.0, share)
    requests = np.array([cell.history.size for cell in cells])
    of_requests = np.concatenate([full * share, few * (1.0 - share)])
    of_cells = np.add.reduceat(of_requests, np.cumsum(requests) - requests, axis=1)
    columns: Floats = of(cells, "layers")[:, None] * of_cells.T
    return columns


def known_ms(cells: Sequence[Cell], terms: Terms) -> Floats:
    """What is known before the fit, [cells]: of evicted and perhaps stored entries, and of missed rows."""
    evicted_ms = of(cells, "host") * of(cells, "evicted") * terms.evict_ms
    stored_ms = of(cells, "layers") * of(cells, "stored") * (terms.store_layer_ms or 0.0)
    missed_ms = of(cells, "missed_rows") * terms.row_ms
    if terms.key_ms is not None:
        missed_ms = np.maximum(of(cells, "hit_rows") * terms.key_ms, missed_ms)
    known: Floats = evicted_ms + stored_ms + missed_ms
    return known


def eager(cell: Cell, terms: Terms) -> bool:
    """Whether the batch has no recorded graph."""
    new = cell.history + terms.candidates - cell.cached
    return terms.cuda and new.size > 1 and float(new.max()) > GRAPH_TOKENS


HOST_COLUMNS = 4
"""Of `design`: overhead; further requests; no graph, each layer of it."""


def design(cells: Sequence[Cell], terms: Terms) -> Floats:
    """[cells, columns]: those of the host, pauses; rows found, tokens stored in all layers; compute."""
    layers = of(cells, "layers")
    launched = np.array([eager(cell, terms) for cell in cells], float)
    more = np.array([cell.history.size - 1.0 for cell in cells])
    pauses = [
        np.interp(of(cells, "idle_ms"), (0.0, *IDLE_MS), (0.0, *unit))
        for unit in np.eye(len(IDLE_MS))
    ]
    host = np.array([np.ones(len(cells)), more, launched, layers * launched, *pauses])
    found = of(cells, "hit_rows") * (terms.key_ms is None)
    stored = layers * of(cells, "stored") * (terms.store_layer_ms is None)
    columns = (of(cells, "host") * host).T, found[:, None], stored[:, None]
    return np.hstack([*columns, compute_columns(cells, terms)])


def comes_second(cell: Cell, terms: Terms) -> bool:
    """Whether it takes longer than what the columns say."""
    return cell.refilling or cell.ahead or slowed(cell, terms)


def slowed(cell: Cell, terms: Terms) -> bool:
    """Whether its compute is slower, since some requests are cached and some not."""
    return cell.mixed and not eager(cell, terms)
