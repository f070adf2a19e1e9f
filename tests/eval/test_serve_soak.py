import os
from pathlib import Path

import numpy as np
import pytest

from eval.load_client import Answer
from eval.load_totals import Totals
from eval.serve_soak import Args, look, main
from hlem_env.errors import ArgumentError


def test_a_minute_tells_of_the_process_its_folder_and_what_came_since(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "data").write_bytes(os.urandom(3 * 2**20))
    before, total = Totals(), Totals()
    for outcome in ("served", "served", "refused"):
        total.add(Answer(outcome, "", False, False), 5.0)
    before.add(Answer("served", "", False, False), 5.0)
    total.sent, before.sent = 4, 1
    first = look(os.getpid(), tmp_path, total, before)
    assert (first.sent, first.served, first.refused, first.failed, first.lost) == (3, 1, 1, 0, 0)
    assert 3.0 <= first.data_mib < 3.1 and first.threads >= 1 and first.open_files >= 3
    assert 0.0 < first.own_mib < first.resident_mib
    mine = np.ones(64 * 2**20 // 8)
    assert look(os.getpid(), tmp_path, total, before).own_mib - first.own_mib > 48, mine.size


def test_no_minutes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="minutes"):
        main(Args(minutes=0, output=tmp_path))
