"""Run a record again and say whether it matches: `python -m eval.replay RECORD [RECORD ...]`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from eval.records import Record, replay
from hlem_env.errors import HlemError
from hlem_env.machine import command, write_result


@dataclass
class Args:
    """Replay records and compare."""

    records: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """JSON files that eval.compare wrote"""
    json: Path | None = None
    """write the result here as well"""


def main(args: Args) -> int:
    """Print a line a record; 0 if all match."""
    results = []
    for path in args.records:
        record = Record.load(path)
        again, differences = replay(record)
        verdict = "matches" if not differences else "differs in " + ", ".join(differences)
        print(
            f"{path}: {verdict} (mean P99 {record.mean_p99_ms:.6f} ms recorded,"
            f" {again.mean_p99_ms:.6f} ms replayed)"
        )
        results.append({"record": path.name, "differences": differences})
    if args.json:
        write_result(args.json, command("eval.replay"), {"records": results})
    return int(any(result["differences"] for result in results))


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    if not arguments.records:
        raise SystemExit(
            "eval.replay: no records given; allowed: one or more files of eval.compare"
        )
    try:
        sys.exit(main(arguments))
    except HlemError as error:
        raise SystemExit(f"eval.replay: {error}") from error
