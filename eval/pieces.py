"""Long measurements as many short pieces, each a file written at once: what is there is not run again.

So a measurement of hours goes in slices of minutes, on machines that start bare each time, as long as
the folder of its records travels with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlem_env.errors import ArtefactError
from hlem_env.machine import git_revision, write_result


@dataclass(frozen=True)
class Piece:
    """Something to run and keep."""

    name: str
    """Of its file, without the suffix."""
    seconds: float
    """Estimate of its time."""


class Slice:
    """A folder of records, and the time of this run.

    Args:
        folder: of the records; made if missing.
        seconds: of this run, from now on.
        command: what goes into the records.
        commit: of the code; by default the checkout's.
    """

    def __init__(self, folder: Path, seconds: float, command: str, commit: str = "") -> None:
        self.folder, self._command = folder, command
        self._end_s = time.monotonic() + seconds
        self._commit = commit or git_revision()

    def left_s(self) -> float:
        """Seconds left of this run."""
        return self._end_s - time.monotonic()

    def has(self, name: str) -> bool:
        """Whether a piece's record is there."""
        return self._file(name).is_file()

    def read(self, name: str) -> dict[str, Any]:
        """A piece's record.

        Raises:
            ArtefactError: missing or damaged.
        """
        try:
            values = json.loads(self._file(name).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ArtefactError(f"{self._file(name)} is no record: {error}") from error
        if not isinstance(values, dict):
            raise ArtefactError(f"{self._file(name)} is no record")
        return values

    def write(self, name: str, payload: Mapping[str, Any]) -> None:
        """Keep a piece's record."""
        write_result(self._file(name), self._command, {"commit": self._commit, **payload})

    def once(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """A piece's record, made if it is not there."""
        if not self.has(name):
            self.write(name, make())
        return self.read(name)

    def run(
        self, pieces: Sequence[Piece], execute: Callable[[Piece], Mapping[str, Any]]
    ) -> list[Piece]:
        """Run what is missing, in order, while there is time for the next; returns what is left."""
        missing = [piece for piece in pieces if not self.has(piece.name)]
        while missing:
            piece, total_s = missing[0], sum(piece.seconds for piece in missing)
            print(
                f"{len(pieces) - len(missing)} of {len(pieces)} pieces, {total_s / 60:.1f} minutes left"
                f" in all, {self.left_s():.0f} s of this run; next {piece.name}",
                flush=True,
            )
            if piece.seconds > self.left_s():
                break
            self.write(piece.name, execute(piece))
            missing.pop(0)
        return missing

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def time_left(missing: Sequence[Piece], slice_s: float, start_s: float) -> str:
    """A sentence on what is left.

    Args:
        missing: pieces that have no record.
        slice_s: of a run.
        start_s: that a run needs before its first piece.
    """
    total_s = sum(piece.seconds for piece in missing)
    if not missing:
        return "all pieces are there"
    runs = -(-total_s // max(slice_s - start_s, 1.0))
    return f"{len(missing)} pieces, {total_s / 60:.1f} minutes left: {runs:.0f} runs of {slice_s:.0f} s"
