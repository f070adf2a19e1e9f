"""P99 of live runs as on one host: `python -m eval.end_to_end_one_host --records FOLDER... --design FILE`.

On shared machines the host's speed differs between the runs that are compared, by more than what is
compared. The surrogate knows what that does: each live run is replayed on it twice, as fast as its host was
in every second, and with one host for all, and

    P99 on one host = P99 live * P99 simulated on one host / P99 simulated with the run's own host

So the surrogate tells what the host did, and nothing else: what it gets wrong of both cancels, but for what
an eviction costs, which under plain LRU would else pass for a slow host (docs/sim_to_real.md). Epochs in
which the host was slow, and those after them in which their queue may show, are left out of the live P99 and
of the simulated one beside it; a run of nothing else counts nowhere. The share of requests within the SLO and
the utilisation are corrected by the simulated difference.

Whether that holds shows where a run was measured more than once: its P99s on one host agree, whatever the
hosts did. Runs of several folders count together if they have the same requests; of what was measured more
than once the mean counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from tqdm import tqdm

from eval.end_to_end import given_design
from eval.end_to_end_plan import (
    GRID_CENTI,
    LRU,
    PPO,
    REGIMES,
    SCAN_RESISTANT,
    SMART,
    WORKING_SET,
    Run,
    static,
)
from eval.end_to_end_replay import (
    Epochs,
    Replay,
    config_of,
    folder_of,
    mean_over,
    node_profile,
    read,
    typical_by_folder,
)
from eval.end_to_end_report import print_tables, tabulate
from eval.host_slowness import MOST_SLOWNESS, Floats, slow_epochs
from eval.records import SATURATION
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.machine_state import with_queue
from hlem_env.machine import command, write_result
from hlem_env.surrogate.hardware import NodeProfile
from hlem_env.telemetry import EpochStats

SAME = ("load", "speed", "dataset", "policy")
"""In all runs that are compared, with the node's preset; the requests go with these, regime and seed."""


@dataclass
class Args:
    """P99 by KV policy and allocation of live runs, as on one host."""

    records: tuple[Path, ...]
    """folders of `eval.end_to_end`, of the same requests"""
    design: Path
    """report of `eval.end_to_end` of the same node and dataset, whose design points were taken"""
    profile: str = "h200-live"
    """calibrated hardware profile, or the path of one"""
    slowness: float | None = None
    """of the one host over the calibration's; by default the median over all epochs that count"""
    draws: int = 4
    """runs of the surrogate for each figure, of which the mean counts; they differ in the profile's jitter"""
    json: Path | None = None
    """file for the report"""
    plot: Path | None = None
    """PNG file"""

    def __post_init__(self) -> None:
        require(self.draws > 0, "draws", self.draws, "above 0")
        require(
            self.slowness is None or 0 < self.slowness <= MOST_SLOWNESS,
            "slowness",
            self.slowness,
            f"above 0, up to {MOST_SLOWNESS}",
        )


def runs_of_plan(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The runs that are compared, without those that found a design point or the load.

    Raises:
        ArgumentError: there are none.
    """
    found = {
        name: record for name, record in records.items()
        if name == f"{folder_of(name)}/{Run(**record['run']).name}"
    }  # fmt: skip
    require(bool(found), "--records", list(records)[:3], "runs of the plan of eval.end_to_end")
    return found


def refuse_others(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse runs that cannot be compared.

    Raises:
        ArgumentError: naming what differs.
    """

    def about(record: Mapping[str, Any]) -> dict[str, Any]:
        of_all = {name: record.get(name) for name in SAME}
        epochs = len(record["epochs"]["alpha"])
        return {**of_all, "epochs": epochs, **config_of(record).to_json()}

    first_name, first = next(iter(records.items()))
    wanted = about(first)
    for name, record in records.items():
        for field, value in about(record).items():
            given, known = f"{name}, with {field}={value}", f"{field}={wanted[field]}"
            require(value == wanted[field], "--records", given, f"{known}, as {first_name}")


def epochs_that_count(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Epochs]:
    """Of each record that has any, bool [epochs]: those without a slow host or its queue.

    Raises:
        ArgumentError: no record has any.
    """
    typical_ms = typical_by_folder(records)
    kept = {}
    for name, record in records.items():
        slow = slow_epochs(record["machine_state"], typical_ms[folder_of(name)])
        kept[name] = ~with_backlog(with_queue(slow), np.array(record["epochs"]["utilisation"]))
    found = {name: of for name, of in kept.items() if of.any()}
    require(bool(found), "--records", f"{', '.join(kept)}, slow in every epoch", "other runs")
    return found


def with_backlog(left_out: Epochs, utilisation: Floats) -> Epochs:
    """Those left out [epochs], and those right after them while the node works off a queue all the time."""
    found = left_out.copy()
    for epoch in range(1, found.size):
        found[epoch] |= found[epoch - 1] and utilisation[epoch] > SATURATION
    return found


def replayed(
    replay: Replay, kept: Epochs, slowness: float, slo_ms: float, draws: int
) -> dict[str, dict[str, float]]:
    """Simulated figures with the run's own host, of the epochs that are kept, and on one host, of all."""
    hosts = {
        "own": (replay.slowness(kept), kept),
        "one": (np.full(1 + kept.size, slowness), np.ones_like(kept)),
    }

    def qos(epoch: EpochStats) -> float:
        return epoch.qos(slo_ms)

    figures: dict[str, Callable[[EpochStats], float]] = {
        "p99_ms": attrgetter("p99_ms"), "qos": qos, "utilisation": attrgetter("utilisation"),
    }  # fmt: skip
    found = {}
    for host, (of_epochs, counted) in hosts.items():
        served = [replay.serve(of_epochs, draw) for draw in range(draws)]
        found[host] = {
            name: float(np.mean([mean_over(epochs, figure, counted) for epochs in served]))
            for name, figure in figures.items()
        }
    return found


def on_one_host(
    records: Mapping[str, Mapping[str, Any]], profile: NodeProfile, args: Args
) -> tuple[float, list[dict[str, Any]]]:
    """The one host's slowness, and a row for each live run that counts: its own P99, and that on one host."""
    kept = epochs_that_count(records)
    replays = {name: Replay(records[name], profile) for name in kept}
    slowness = args.slowness or float(
        np.median(np.concatenate([replays[name].slowness(of)[1:][of] for name, of in kept.items()]))
    )
    rows = []
    for name, counted in tqdm(kept.items(), unit="run", disable=None):
        record, slo_ms = records[name], records[name]["preset"]["slo_ms"]
        epochs = record["epochs"]
        live = {
            figure: float(np.mean(epochs[figure], where=counted))
            for figure in ("p99_ms", "qos", "utilisation")
        }
        sim = replayed(replays[name], counted, slowness, slo_ms, args.draws)
        own, one = sim["own"], sim["one"]
        corrected = {
            "p99_ms": live["p99_ms"] * one["p99_ms"] / own["p99_ms"],
            "qos": min(live["qos"] + one["qos"] - own["qos"], 1.0),
            "utilisation": live["utilisation"] + one["utilisation"] - own["utilisation"],
        }
        rows.append({
            "name": name, "run": record["run"], "saturated": bool(record["saturated"]),
            "epochs_left_out": int((~counted).sum()), "whole_p99_ms": record["p99_ms"],
            "live": live, "sim": sim, "on_one_host": corrected,
        })  # fmt: skip
    return slowness, rows


def agreement(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far apart P99s of the same run are that was measured more than once, over one another less 1."""
    p99_ms: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "live": lambda row: float(row["whole_p99_ms"]),
        "live, without slow epochs": lambda row: float(row["live"]["p99_ms"]),
        "on one host": lambda row: float(row["on_one_host"]["p99_ms"]),
    }
    pairs = [pair for pair in combinations(rows, 2) if pair[0]["run"] == pair[1]["run"]]
    found: dict[str, Any] = {"pairs": len(pairs)}
    for name, of in p99_ms.items():
        apart = [np.exp(abs(np.log(of(one) / of(other)))) - 1 for one, other in pairs]
        if apart:
            found[name] = {
                "median": float(np.median(apart)),
                "p90": float(np.quantile(apart, 0.9)),
                "largest": float(max(apart)),
            }
    return found


def means(
    records: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A record for each run as `tabulate` takes it, with the mean of its figures on one host."""
    same: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        same.setdefault(Run(**row["run"]).name, []).append(row)
    found = []
    for of in same.values():
        figures = {
            name: float(np.mean([row["on_one_host"][name] for row in of]))
            for name in of[0]["on_one_host"]
        }
        about = {
            "saturated": any(row["saturated"] for row in of),
            "epochs_left_out": sum(row["epochs_left_out"] for row in of),
        }
        found.append({**records[of[0]["name"]], **figures, **about})
    return found


def kinds(design: Mapping[str, int]) -> dict[str, Callable[[Mapping[str, Any]], bool]]:
    """What the figure tells apart, by its label: whether a run is of that kind."""

    def of(policy: str, allocation: str) -> Callable[[Mapping[str, Any]], bool]:
        return lambda run: (run["kv_policy"], run["allocation"]) == (policy, allocation)

    return {
        f"plain LRU, {design[LRU] / 100:.2f}": of(LRU, static(design[LRU])),
        **{f"scan-resistant, {alpha / 100:.2f}": of(SCAN_RESISTANT, static(alpha)) for alpha in GRID_CENTI},
        "working-set rule": of(SCAN_RESISTANT, WORKING_SET),
        "PPO only": of(SCAN_RESISTANT, PPO),
        "SmartAllocator": of(SCAN_RESISTANT, SMART),
    }  # fmt: skip


def draw(rows: Sequence[Mapping[str, Any]], design: Mapping[str, int], path: Path) -> None:
    """P99 of every live run by regime and allocation: as it was, and as on one host."""
    from matplotlib.figure import Figure

    regimes = [regime for regime in REGIMES if any(row["run"]["regime"] == regime for row in rows)]
    figure = Figure(figsize=(1.2 + 3.1 * len(regimes), 3.8), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(regimes), sharey=True))
    labels = kinds(design)
    for axis, regime in zip(axes, regimes, strict=True):
        of_regime = [row for row in rows if row["run"]["regime"] == regime]
        for place, is_it in enumerate(labels.values()):
            some = [row for row in of_regime if is_it(row["run"])]
            live = [row["whole_p99_ms"] for row in some]
            one = [row["on_one_host"]["p99_ms"] for row in some]
            named = place == 0
            axis.plot(live, np.full(len(live), place - 0.17), "o", color="0.7", markersize=4,
                      label="as it was" if named else None)  # fmt: skip
            axis.plot(one, np.full(len(one), place + 0.17), "o", color="tab:blue", markersize=4,
                      label="as on one host" if named else None)  # fmt: skip
        axis.set(title=regime.capitalize(), xlabel="P99, ms")
        axis.grid(axis="x", color="0.92")
    axes[0].set_yticks(range(len(labels)), list(labels))
    axes[0].invert_yaxis()
    axes[-1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)


def main(args: Args) -> int:
    """Correct what there is, and show it."""
    profile, records = node_profile(args.profile), runs_of_plan(read(args.records))
    refuse_others(records)
    first = next(iter(records.values()))
    design = given_design(args.design, first["dataset"], config_of(first))
    slowness, rows = on_one_host(records, profile, args)
    found = {
        "design_point_alpha": {policy: alpha / 100 for policy, alpha in design.items()},
        "load": first["load"],
        "slowness": slowness,
        "disturbed": sorted(records.keys() - {row["name"] for row in rows}),
        "rows": tabulate(means(records, rows), design),
    }
    same = agreement(rows)
    print_tables(found, Console(width=130))
    print(f"One host, {slowness:.2f} times as slow as the calibration's.")
    for name, of in same.items():
        if isinstance(of, dict):
            print(f"the same run again, P99 {name}: {100 * of['median']:.1f} % apart (median),"
                  f" P90 {100 * of['p90']:.1f} %, largest {100 * of['largest']:.0f} %")  # fmt: skip
    if args.plot is not None:
        draw(rows, design, args.plot)
    if args.json is not None:
        payload = {
            "device": profile.hardware,
            "profile": profile.name,
            "preset": config_of(first).to_json(),
            **{name: first[name] for name in ("dataset", "speed")},
            "epochs": len(first["epochs"]["alpha"]),
            **found,
            "agreement": same,
            "runs": rows,
        }
        write_result(args.json, command("eval.end_to_end_one_host"), payload)
    return 0


if __name__ == "__main__":
    run_command("eval.end_to_end_one_host", main, Args)
