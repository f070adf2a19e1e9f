"""The plain system and the whole one by load, on the surrogate."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval.end_to_end_loads import ADMISSION, PLAIN, WHOLE, Args, main
from hlem_env.errors import ArgumentError

DESIGN = Path(__file__).parents[2] / "docs/results/end-to-end-h200-8gib-simulated.json"


def test_a_higher_load_keeps_all_busier_and_later_and_is_gone_on_with(tmp_path: Path) -> None:
    args = Args(design=DESIGN, loads=(0.4, 0.7), repeats=2, epochs=6, records=tmp_path / "runs",
                json=tmp_path / "out.json", plot=tmp_path / "out.png")  # fmt: skip
    assert main(replace(args, seconds=0.1)) == 0
    assert not (tmp_path / "out.json").exists()
    assert main(args) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    rows = {(row["regime"], row["load"]): row for row in found["rows"]}
    assert len(rows) == 3 * 2 and (tmp_path / "out.png").stat().st_size > 1000
    for regime in ("trend", "burst", "steady"):
        light, heavy = rows[regime, 0.4], rows[regime, 0.7]
        for arm in (PLAIN, ADMISSION, WHOLE):
            assert light[arm]["utilisation"] < heavy[arm]["utilisation"]
            assert sum(light[arm]["p99_ms"]) < sum(heavy[arm]["p99_ms"])
            assert light[arm]["qos"] >= heavy[arm]["qos"]
            assert len(light[arm]["p99_ms"]) == 2
        ratio = heavy[f"{WHOLE} over {PLAIN}"]
        mean = sum(heavy[WHOLE]["p99_ms"]) / sum(heavy[PLAIN]["p99_ms"])
        assert ratio["low"] <= ratio["value"] <= ratio["high"]
        assert ratio["value"] == pytest.approx(mean)
    # What is there is not run again.
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*.json")}
    assert main(args) == 0
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").glob("*.json")}


def test_wrong_loads_are_refused() -> None:
    for wrong in (0.0, float("inf")):
        with pytest.raises(ArgumentError, match="above 0, up to 100"):
            Args(design=DESIGN, loads=(0.5, wrong))
