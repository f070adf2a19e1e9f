"""A Markdown table of comparison results: `python -m eval.summary RESULT [RESULT ...]`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError
from hlem_env.machine import command, write_result

HEADINGS = ("P99 ms", "QoS %", "gap", "P99 / best static", "room recovered %")


@dataclass
class Args:
    """Print the results of eval.compare as Markdown."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """JSON files that eval.compare wrote"""
    json: Path | None = None
    """write the table here as well"""


def load(path: Path) -> dict[str, Any]:
    """Read a result of eval.compare.

    Raises:
        ArtefactError: missing, or something else.
    """
    try:
        result: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(result["cells"], list):
            raise KeyError("cells")
    except OSError as error:
        raise ArtefactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArtefactError(f"{path} is not a result of eval.compare ({error})") from error
    return result


def show(summary: dict[str, Any], name: str, scale: float, digits: int) -> str:
    """A value with its interval, or a dash."""
    e = summary.get(name)
    if e is None:
        return "-"
    value, low, high = (f"{scale * e[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def table(cell: dict[str, Any]) -> str:
    """One cell as a heading and a table."""
    room = cell["controllers"].get("reachable oracle", {}).get("summary", {})
    title = f"**{cell['workload']}**, KV {cell['kv_policy'].replace('_', '-')}"
    factor = cell["scenario"]["population_factor"]
    title += f", population x{factor:g}" if factor != 1 else ""
    title += f", {len(cell['seeds'])} seeds"
    if "room" in room:
        title += f", room {100 * room['room']:.1f} %"
    if "foreseen_room" in room:
        title += f" ({100 * room['foreseen_room']:.1f} % without foresight of arrivals)"
    lines = [
        title,
        "",
        "| controller | " + " | ".join(HEADINGS) + " |",
        "|---|" + "---|" * len(HEADINGS),
    ]
    for name, columns in cell["controllers"].items():
        s = columns["summary"]
        figures = (
            ["saturated"] + ["-"] * (len(HEADINGS) - 1)
            if s["saturated"]
            else [
                show(s, "p99_ms", 1, 2),
                show(s, "qos", 100, 2),
                show(s, "gap", 1, 3),
                show(s, "p99_over_best_static", 1, 3),
                show(s, "room_recovered", 100, 0),
            ]
        )
        lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    """Print every cell of every result."""
    tables = [table(cell) for path in args.results for cell in load(path)["cells"]]
    print("\n".join(tables))
    if args.json:
        write_result(args.json, command("eval.summary"), {"tables": tables})


if __name__ == "__main__":
    run_command("eval.summary", main, Args)
