"""Figures of `eval.end_to_end`: rows by regime, KV policy and allocation, paired over repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from eval.end_to_end_plan import GRID_CENTI, KV_ONLY, LRU, SCAN_RESISTANT, Run, static
from eval.host_slowness import is_disturbed, slow_epochs, typical_host_ms
from hlem_env.errors import require
from hlem_env.live.machine_state import with_queue

DESIGN_POINT, BEST_STATIC = "design point", "best static"
REFERENCES = {
    "over_lru_design": (LRU, DESIGN_POINT),
    "over_best_static": (SCAN_RESISTANT, BEST_STATIC),
}
ORDER = (KV_ONLY, DESIGN_POINT, BEST_STATIC, "working-set", "ppo", "smart")
HOST_COUNTS_NOT = ("cpu", "simulated")
"""Clocks on which others' work on the host does not show."""
Runs = dict[int, Mapping[str, Any]]
"""By seed."""


def report(records: Sequence[Mapping[str, Any]], design: Mapping[str, int]) -> dict[str, Any]:
    """Rows of what there is.

    Args:
        records: of the runs.
        design: alpha of the design point by KV policy, hundredths.
    """
    disturbed = disturbed_runs(records)
    whole = [record for record in records if Run(**record["run"]).name not in disturbed]
    return {
        "design_point_alpha": {policy: alpha / 100 for policy, alpha in design.items()},
        "load": records[0]["load"] if records else None,
        "disturbed": sorted(disturbed),
        "rows": tabulate(undisturbed_part(whole), design),
    }


def tabulate(
    records: Sequence[Mapping[str, Any]], design: Mapping[str, int]
) -> list[dict[str, Any]]:
    """A row for each regime, KV policy and allocation, paired over seeds.

    Args:
        records: of the runs, one a seed.
        design: as `report`.
    """
    cells: dict[tuple[str, str, str], Runs] = {}
    for record in records:
        run = record["run"]
        key = run["regime"], run["kv_policy"], run["allocation"]
        cells.setdefault(key, {})[run["seed"]] = record
    named: dict[tuple[str, str, str], Runs] = {}
    for regime in dict.fromkeys(regime for regime, *_ in cells):
        for policy in (LRU, SCAN_RESISTANT):
            part = {
                name: runs for (r, p, name), runs in cells.items() if (r, p) == (regime, policy)
            }
            for name, runs in _named(part, design.get(policy)).items():
                named[regime, policy, name] = runs
    return [_row(key, runs, named) for key, runs in named.items()]


def disturbed_runs(records: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the runs in which the host had a slow spell, beside its median over all of them."""
    return {
        Run(**record["run"]).name
        for record, slow in zip(records, _slow(records), strict=True)
        if is_disturbed(slow)
    }


def undisturbed_part(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records, with the epochs alone in which the host was slow in no run of the same requests."""
    found: list[Mapping[str, Any]] = []
    same: dict[tuple[str, int], list[tuple[Mapping[str, Any], NDArray[np.bool_]]]] = {}
    for record, slow in zip(records, _slow(records), strict=True):
        same.setdefault((record["run"]["regime"], record["run"]["seed"]), []).append((record, slow))
    for runs in same.values():
        kept = ~np.any([with_queue(slow) for _, slow in runs], axis=0)
        known = "an epoch in which the host was not"
        require(bool(kept.any()), "records", "slow in every epoch", known)
        found += [{**run, **_of_epochs(run["epochs"], kept)} for run, _ in runs]
    return found


def _slow(records: Sequence[Mapping[str, Any]]) -> list[NDArray[np.bool_]]:
    """Epochs of each record in which the host was slow; none where its clock does not show that."""
    typical_ms = typical_host_ms([record["machine_state"] for record in records])
    return [
        slow_epochs(
            record["machine_state"], 0.0 if record["clock"] in HOST_COUNTS_NOT else typical_ms
        )
        for record in records
    ]


def _of_epochs(epochs: Mapping[str, Any], kept: NDArray[np.bool_]) -> dict[str, Any]:
    """Figures of the epochs that are kept, bool [n]; hit rates and utilisation are means over epochs."""
    values = {name: np.array(each)[kept] for name, each in epochs.items()}
    requests = values["requests"]
    return {
        "p99_ms": float(values["p99_ms"].mean()),
        "qos": float((values["qos"] * requests).sum() / max(requests.sum(), 1)),
        **{name: float(values[name].mean()) for name in ("kv_hit", "emb_hit", "utilisation")},
        "epochs_left_out": int((~kept).sum()),
    }


def _named(part: dict[str, Runs], design: int | None) -> dict[str, Runs]:
    """Allocations as the table names them: the design point, and each seed's best of the grid."""
    found = {name: part[name] for name in part if name == KV_ONLY or not name.startswith("static-")}
    if design is not None and static(design) in part:
        found[DESIGN_POINT] = part[static(design)]
    grid = [part[static(alpha)] for alpha in GRID_CENTI if static(alpha) in part]
    if len(grid) == len(GRID_CENTI):
        seeds = set.intersection(*(set(runs) for runs in grid))
        best = {
            seed: min((runs[seed] for runs in grid), key=lambda r: r["p99_ms"]) for seed in seeds
        }
        if best:
            found[BEST_STATIC] = best
    return {name: found[name] for name in ORDER if name in found}


def _row(
    key: tuple[str, str, str], runs: Runs, named: Mapping[tuple[str, str, str], Runs]
) -> dict[str, Any]:
    regime, policy, name = key
    values = [runs[seed] for seed in sorted(runs)]

    def mean(field: str) -> float:
        return float(np.mean([value[field] for value in values]))

    row: dict[str, Any] = {
        "regime": regime,
        "kv_policy": policy,
        "allocation": name,
        "seeds": sorted(runs),
        "saturated": [bool(value["saturated"]) for value in values],
        "p99_ms": [value["p99_ms"] for value in values],
        "epochs_left_out": [value["epochs_left_out"] for value in values],
        "alpha": [float(np.mean(value["epochs"]["alpha"])) for value in values],
        **{field: mean(field) for field in ("qos", "kv_hit", "emb_hit", "utilisation", "movement")},
    }
    for ratio, reference in REFERENCES.items():
        row[ratio] = _ratio(runs, named.get((regime, *reference), {}))
    return row


def _ratio(runs: Runs, reference: Runs) -> dict[str, float] | None:
    """Mean P99 over the reference's, paired: of the means, least and largest of a seed.

    None where a seed of either is saturated, or they share none.
    """
    shared = sorted(set(runs) & set(reference))
    if not shared or any(r[seed]["saturated"] for r in (runs, reference) for seed in shared):
        return None
    mine, theirs = (np.array([r[seed]["p99_ms"] for seed in shared]) for r in (runs, reference))
    each = mine / theirs
    return {
        "value": float(mine.mean() / theirs.mean()),
        "low": float(each.min()),
        "high": float(each.max()),
        "seeds": float(len(shared)),
    }


def print_tables(found: Mapping[str, Any], console: Console) -> None:
    """A table a regime."""
    for regime in dict.fromkeys(row["regime"] for row in found["rows"]):
        table = Table(title=f"{regime}, load {found['load']:g}", title_justify="left")
        for heading in ("KV policy", "allocation", "repeats", "P99 ms", "QoS %", "busy %", "alpha",
                        "KV hit", "emb. hit", "over LRU + design point", "over best static"):  # fmt: skip
            table.add_column(heading, justify="right")
        for row in (row for row in found["rows"] if row["regime"] == regime):
            saturated = any(row["saturated"])
            p99 = "saturated" if saturated else f"{np.mean(row['p99_ms']):.1f}"
            table.add_row(
                row["kv_policy"], row["allocation"], str(len(row["seeds"])), p99,
                f"{100 * row['qos']:.1f}", f"{100 * row['utilisation']:.0f}",
                f"{np.mean(row['alpha']):.2f}", f"{row['kv_hit']:.3f}", f"{row['emb_hit']:.3f}",
                *(shown(row[name]) for name in REFERENCES),
            )  # fmt: skip
        console.print(table)
    console.print("Ratios of mean P99, in brackets the least and largest of a repeat.")
    if any(sum(row["epochs_left_out"]) for row in found["rows"]):
        console.print("Epochs with a slow host are left out.")
    if found["disturbed"]:
        console.print(
            f"Disturbed by a slow host, and counted nowhere: {', '.join(found['disturbed'])}"
        )


def shown(ratio: Mapping[str, float] | None) -> str:
    """A ratio and its range."""
    if ratio is None:
        return "-"
    return f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
