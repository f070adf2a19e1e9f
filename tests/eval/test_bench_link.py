import json
from pathlib import Path

import pytest
import torch

from eval.bench_link import Args, main
from hlem_env.errors import ArgumentError

GPU = torch.cuda.is_available()


@pytest.mark.skipif(GPU, reason="the benchmark would run")
def test_says_that_it_needs_a_device() -> None:
    with pytest.raises(SystemExit, match="torch finds none"):
        main(Args())


def test_no_rows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="rows"):
        Args(rows=(100, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_rows_are_right_and_stretches_are_counted(tmp_path: Path) -> None:
    assert main(Args(tmp_path / "link.json", gib=0.125, rows=(2000, 250_000), repeats=2)) == 0
    lines = json.loads((tmp_path / "link.json").read_text())["lines"]
    assert lines[0]["stretches"] < 2000 and lines[2]["stretches"] == 2048
