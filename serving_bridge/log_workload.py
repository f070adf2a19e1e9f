"""The requests of an epoch log as a trace: `python -m serving_bridge.log_workload DIR OUT`.

OUT is Parquet (`.parquet`) or CSV, as `hlem_env.workload.trace_readers` reads both, so that a log drives the
environment and the comparison:

    Scenario(trace="OUT", trace_histories="native", time_scale=1.0)
    python -m eval.compare --workloads trace:OUT --trace-histories native
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError
from hlem_env.workload.requests import Requests
from hlem_env.workload.trace_readers import COLUMNS
from hlem_env.workload.traces import Trace
from serving_bridge.log_reader import read_epochs

_RUN_USERS = 2**40
"""Between the first user numbers of two runs whose users cannot be told to be the same."""


def read_requests(folder: str | Path) -> Trace:
    """All requests of all runs, on one clock.

    A run begins one of its epochs after the one before ended. Users of runs that did not say that
    their numbers last are taken for different ones. Requests without a history are left out, and the
    metadata says how many.

    Raises:
        ArtefactError: there are none.
        ArgumentError, ImportError: as of `read_epochs`.
    """
    parts: list[Requests] = []
    run, runs, offset_s, end_s = "", 0, 0.0, 0.0
    for epoch in read_epochs(folder):
        requests = epoch.requests
        if requests is None or not len(requests):
            continue
        if epoch.run.name != run:
            runs += 1
            offset_s = end_s - float(requests.arrival_s.min())
            offset_s += epoch.run.config.epoch_seconds if run else 0.0
            run = epoch.run.name
        user = requests.user if epoch.run.users_last else requests.user + runs * _RUN_USERS
        arrival_s = requests.arrival_s + offset_s
        end_s = max(end_s, float(arrival_s.max()))
        parts.append(Requests(arrival_s, user, requests.history_length, requests.new_items))
    if not parts:
        raise ArtefactError(f"{folder}: the log holds no requests")
    columns = [np.concatenate([vars(part)[name] for part in parts]) for name in vars(parts[0])]
    with_history = columns[2] >= 1
    left_out = int((~with_history).sum())
    metadata: dict[str, Any] = {"format": "epoch-log", "file": Path(folder).name, "runs": runs}
    if left_out:
        metadata["notes"] = [f"requests without a history, left out: {left_out}"]
    if not with_history.any():
        raise ArtefactError(f"{folder}: no request of the log has a history")
    arrival_s, user, length, added = (column[with_history] for column in columns)
    return Trace.from_arrays(
        arrival_s, user, length, _first_are_new(user, arrival_s, length, added), metadata
    )


def _first_are_new(
    user: NDArray[np.int64],
    arrival_s: NDArray[np.float64],
    length: NDArray[np.int32],
    added: NDArray[np.int32],
) -> NDArray[np.int32]:
    """New items [n]; the whole history at a user's first request, which a trace begins without."""
    order = np.lexsort((arrival_s, user))
    first = order[np.flatnonzero(np.diff(user[order], prepend=user[order[:1]] - 1))]
    added = added.copy()
    added[first] = length[first]
    return added


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace as Parquet (`.parquet`) or CSV, in the columns of the trace readers.

    Raises:
        OSError: the file cannot be written.
        ImportError: Parquet without pyarrow.
    """
    path = Path(path)
    arrays = (trace.arrival_s, trace.user, trace.history_length, trace.new_items)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(
            pyarrow.table(dict(zip(COLUMNS, arrays, strict=True))), path, compression="zstd"
        )
        return
    rows = np.column_stack([array.astype(np.float64) for array in arrays])
    formats = ["%.6f", "%d", "%d", "%d"]
    np.savetxt(path, rows, formats, ",", header=",".join(COLUMNS), comments="")


@dataclass
class Args:
    """Write the requests of an epoch log as a trace."""

    folder: Annotated[Path, tyro.conf.Positional]
    """of the log"""
    output: Annotated[Path, tyro.conf.Positional]
    """.parquet, or CSV otherwise"""


def main(args: Args) -> None:
    """Read, write, and say what it was."""
    trace = read_requests(args.folder)
    write_trace(trace, args.output)
    print(
        f"{len(trace)} requests of {trace.users} users in {trace.duration_s:.0f} s, "
        f"{trace.metadata['runs']} runs: {args.output}"
    )
    for note in trace.metadata.get("notes", ()):
        print(note)


if __name__ == "__main__":
    run_command("serving_bridge.log_workload", main, Args)
