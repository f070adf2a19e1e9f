"""Long measurements as many short pieces, each a file written at once: what is there is not run again.

So a measurement of hours goes in slices of minutes, on machines that start bare each time, as long as
the folder of its records travels with it. Several processes, one a device, can share a folder: each runs
its part of the pieces and waits for the others where it needs theirs.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlem_env.errors import ArtefactError, require
from hlem_env.machine import git_revision, write_result

POLL_S = 0.5
"""Between two looks for other processes' records."""


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
        share: (k, n): every nth piece from the kth on is this process's, the first being 1.

    Raises:
        ArgumentError: the share is none.
    """

    def __init__(
        self,
        folder: Path,
        seconds: float,
        command: str,
        commit: str = "",
        share: tuple[int, int] = (1, 1),
    ) -> None:
        require(1 <= share[0] <= share[1], "share", share, "K N with K from 1 to N")
        self.folder, self._command, self._share = folder, command, share
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

    def forget(self, which: Callable[[], Iterable[str]]) -> list[str]:
        """Delete the records of some pieces, which none of the other processes has deleted.

        Args:
            which: finds them, while no other process forgets.
        """
        with self._alone():
            names = sorted(which())
            for name in names:
                self._file(name).unlink()
        return names

    def once(self, name: str, make: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """A piece's record, made if it is not there; other processes wait until it is."""
        if not self.has(name):
            with self._alone():
                if not self.has(name):
                    self.write(name, make())
        return self.read(name)

    def run(
        self, pieces: Sequence[Piece], execute: Callable[[Piece], Mapping[str, Any]]
    ) -> list[Piece]:
        """Run what is missing, in order, while there is time for the next; returns what is left.

        With a share, it runs its own pieces, then waits for the others' as long as its time lasts.
        """
        mine = [p for p in pieces[self._share[0] - 1 :: self._share[1]] if not self.has(p.name)]
        while mine:
            piece, total_s = mine[0], sum(piece.seconds for piece in mine)
            print(
                f"{len(mine)} of {len(pieces)} pieces, {total_s / 60:.1f} minutes, left for this process,"
                f" {self.left_s():.0f} s of this run; next {piece.name}",
                flush=True,
            )
            if piece.seconds > self.left_s():
                return self._missing(pieces)
            self.write(piece.name, execute(piece))
            mine.pop(0)
        while self._missing(pieces) and self.left_s() > 0:
            time.sleep(POLL_S)
        return self._missing(pieces)

    def _missing(self, pieces: Sequence[Piece]) -> list[Piece]:
        return [piece for piece in pieces if not self.has(piece.name)]

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process is in here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


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
