import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eval.pieces import Piece, Slice, time_left
from hlem_env.errors import ArgumentError, ArtefactError

PIECES = [Piece(f"p{i}", 1.0) for i in range(4)]


def part(folder: Path, seconds: float = 100.0) -> Slice:
    return Slice(folder, seconds, "python -m something", "0" * 40)


def test_every_piece_is_kept_at_once_and_made_once(tmp_path: Path) -> None:
    made: list[str] = []

    def execute(piece: Piece) -> Mapping[str, Any]:
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(piece.name)
        return {"figure": len(made)}

    with pytest.raises(KeyboardInterrupt):
        part(tmp_path).run(PIECES, execute)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["p0", "p1"]
    rest: list[str] = []
    left = part(tmp_path).run(PIECES, lambda piece: rest.append(piece.name) or {})  # type: ignore[func-returns-value]
    assert (left, rest) == ([], ["p2", "p3"])
    record = json.loads((tmp_path / "p1.json").read_text())
    assert (record["figure"], record["commit"]) == (2, "0" * 40)


def test_a_piece_that_does_not_fit_is_left(tmp_path: Path) -> None:
    long = [*PIECES[:2], Piece("long", 1000.0), PIECES[2]]
    left = part(tmp_path).run(long, lambda piece: {})
    assert left == long[2:]
    assert time_left(left, 480.0, 80.0) == "2 pieces, 16.7 minutes left: 3 runs of 480 s"
    assert time_left([], 480.0, 80.0) == "all pieces are there"


def test_processes_share_the_pieces_and_wait_for_each_other(tmp_path: Path) -> None:
    made: list[tuple[int, str]] = []

    def process(number: int) -> tuple[float, list[Piece]]:
        mine = Slice(tmp_path, 20.0, "python -m something", "0" * 40, (number, 2))
        start = mine.once("start", lambda: {"by": made.append((0, "start")) or number})  # type: ignore[func-returns-value]
        left = mine.run(PIECES, lambda piece: made.append((number, piece.name)) or {})  # type: ignore[func-returns-value]
        return start["by"], left

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(process, (1, 2)))
    assert found[0] == found[1]
    assert found[0][1] == []
    assert sorted(made) == [(0, "start"), (1, "p0"), (1, "p2"), (2, "p1"), (2, "p3")]


def test_what_others_have_not_run_is_left(tmp_path: Path) -> None:
    alone = Slice(tmp_path, 0.0, "python -m something", "0" * 40, (2, 3))
    assert alone.run(PIECES, lambda piece: {}) == PIECES
    with pytest.raises(ArgumentError, match="share"):
        Slice(tmp_path, 1.0, "python -m something", "0" * 40, (3, 2))


def test_a_damaged_record_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "p0.json").write_text("{")
    with pytest.raises(ArtefactError, match="p0"):
        part(tmp_path).read("p0")
