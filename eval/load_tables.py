"""Simulates the load tables of every setting of published results.

    python -m eval.load_tables

Requests a second as a function of the hot share, such that the node is busy for 0.70 of the time
at its own best alpha under the scan-resistant KV policy. Settings that the file already holds under
the same key are kept, so that an interrupted run goes on; a change of the simulation itself does
not change a key, so run it with `--anew` after one.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlem_env.command_line import run_command
from hlem_env.errors import ArgumentError, require
from hlem_env.machine import command, write_result
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import setting_key, simulate_load

Setting = dict[str, Any]
"""Fields of a Scenario that differ from its defaults."""
Table = dict[str, Any]
"""A setting, its key, and by hot share ([n] each): requests a second, the best alpha in hundredths
(on a grid of 0.02), the mean service time there in milliseconds."""

VARIATIONS: tuple[Setting, ...] = (
    {"population_factor": 0.5},
    {"population_factor": 1.5},
    {"population_factor": 2.0},
    {"mean_history_tokens": 14_000},
    {"tables": 25},
    {"gather_scale": 0.5},
    {"hardware": "a100"},
)
"""Each in turn, on the presets default and books."""

SETTINGS: tuple[Setting, ...] = (
    {},
    {"preset": "taobao"},
    {"preset": "video-games"},
    {"preset": "books"},
    *VARIATIONS,
    *({"preset": "books"} | variation for variation in VARIATIONS),
    # the other lengths of eval.shape
    {"mean_history_tokens": 5_000},
    {"mean_history_tokens": 8_000},
    {"mean_history_tokens": 12_000},
)
"""Settings of published results, in the order of the file."""


@dataclass
class Args:
    """Simulates the load table of every setting of published results."""

    output: Path = Path("hlem_env/surrogate/load_tables.json")
    """file for the tables; tables that it holds already are kept"""
    jobs: int = 2
    """settings simulated at once, a process each"""
    anew: bool = False
    """simulate every setting, whatever the file holds"""

    def __post_init__(self) -> None:
        require(1 <= self.jobs <= 1024, "jobs", self.jobs, "1 to 1024")


def main(args: Args) -> int:
    """Simulate the tables that are missing and write the file after each."""
    kept = {} if args.anew else read_tables(args.output)
    keys = [key_of(setting) for setting in SETTINGS]
    tables = {key: kept[key] for key in keys if key in kept}
    missing = [setting for setting, key in zip(SETTINGS, keys, strict=True) if key not in tables]
    print(f"{len(SETTINGS)} settings, {len(tables)} of them in {args.output} already")
    # A new interpreter for each worker: a fork would inherit numba's locks.
    context = multiprocessing.get_context("spawn")
    start_s = time.perf_counter()
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for future in as_completed([pool.submit(simulate, setting) for setting in missing]):
            table = future.result()
            tables[table["key"]] = table
            write_tables(args.output, [tables[key] for key in keys if key in tables])
            passed_s = time.perf_counter() - start_s
            print(
                f"{len(tables):>3} of {len(SETTINGS)} {passed_s:>6.0f} s  {line(table)}", flush=True
            )
    if not missing and list(kept) != keys:
        # Settings that are no longer published go, and the order is that of SETTINGS.
        write_tables(args.output, [tables[key] for key in keys])
    return 0


def key_of(setting: Setting) -> str:
    """The key under which `hlem_env.surrogate.load.load_curve` looks the setting up."""
    scenario = Scenario.parse(setting)
    return setting_key(scenario.regime_config(), scenario.node(), scenario.profile())


def simulate(setting: Setting) -> Table:
    """The table of one setting."""
    scenario = Scenario.parse(setting)
    table = simulate_load(scenario.regime_config(), scenario.node(), scenario.profile())
    return {"setting": setting, **table}


def read_tables(path: Path) -> dict[str, Table]:
    """Tables of an earlier run by key, in their order; none where there is no such file.

    Raises:
        ArgumentError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        return {table["key"]: table for table in json.loads(path.read_text("utf-8"))["tables"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError("output", str(path), "a file of this command, or none") from error


def write_tables(path: Path, tables: list[Table]) -> None:
    """Write the tables beside command and machine."""
    write_result(path, command("eval.load_tables"), {"tables": tables})


def name_of(setting: Setting) -> str:
    """The setting in words."""
    words = [str(setting.get("preset", "default"))]
    words += [f"{name}={value}" for name, value in setting.items() if name != "preset"]
    return " ".join(words)


def line(table: Table) -> str:
    """One line about a table: its ends."""
    share, rate, alpha = table["hot_share"], table["requests_per_s"], table["alpha_centi"]
    ends = ", ".join(
        f"{rate[i]:.0f}/s and alpha {alpha[i] / 100:.2f} at hot share {share[i]:.2f}"
        for i in (0, -1)
    )
    return f"{name_of(table['setting'])}: {ends}"


if __name__ == "__main__":
    run_command("eval.load_tables", main, Args)
