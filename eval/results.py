"""results.json of eval.compare: read with checks, and its figures as tables show them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eval.names import BEST_STATIC, REACHABLE
from eval.records import SIZE_LIMIT
from hlem_env.errors import ArtefactError

CELL_KEYS = ("workload", "kv_policy", "scenario", "seeds", "best_static_alpha", "controllers")


@dataclass(frozen=True)
class Column:
    """A figure of a summary as tables show it."""

    key: str
    heading: str
    scale: float
    digits: int

    def of(self, cell: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
        """(value, low, high) of a controller in the table's unit, or None where there is none to give.

        A saturated controller has none, nor has a ratio to something saturated.
        """
        references = {RATIO.key: (BEST_STATIC,), ROOM.key: (BEST_STATIC, REACHABLE)}
        if any(is_saturated(cell, n) for n in (name, *references.get(self.key, ()))):
            return None
        found = estimate(cell["controllers"][name]["summary"], self.key)
        if found is None:
            return None
        value, low, high = (self.scale * v for v in found)
        return value, low, high


ROOM = Column("room_recovered", "room recovered, %", 100, 0)
RATIO = Column("p99_over_best_static", "P99 / best static", 1, 4)
P99 = Column("p99_ms", "P99, ms", 1, 2)
QOS = Column("qos", "QoS, %", 100, 2)
GAP = Column("gap", "gap", 1, 3)
DECISION = Column("decision_us_p50", "decision p50, us", 1, 0)
COLUMNS = (
    ROOM,
    RATIO,
    P99,
    QOS,
    GAP,
    Column("regret", "P99 regret, %", 100, 1),
    Column("movement", "alpha moved", 1, 1),
    DECISION,
    Column("decision_us_p99", "decision p99, us", 1, 0),
)


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


def estimate(summary: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """(value, low, high) of a summary, or None where it has no such figure."""
    found = summary.get(name)
    if not isinstance(found, Mapping):
        return None
    values = tuple(found.get(key) for key in ("value", "low", "high"))
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return None
    value, low, high = (float(v) for v in values if v is not None)
    return value, low, high


def is_saturated(cell: Mapping[str, Any], name: str) -> bool:
    """Whether a controller is there, and its cell saturated."""
    columns = cell["controllers"].get(name)
    return columns is not None and bool(columns["summary"].get("saturated"))
