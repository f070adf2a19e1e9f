import json
from pathlib import Path

import pytest

from eval.claims import (
    BEGIN,
    CLAIMS,
    END,
    LIVE,
    MISSING,
    RESULTS,
    Args,
    hardware,
    main,
    table,
    with_table,
)
from hlem_env.errors import ArgumentError, ArtefactError

ROOT = Path(__file__).parents[2]


def test_the_readme_is_up_to_date() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert with_table(readme, table(ROOT / "docs" / "results")) == readme, (
        "run python -m eval.claims"
    )


def test_a_figure_that_was_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    readme, results = tmp_path / "README.md", ROOT / "docs" / "results"
    readme.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    assert main(Args(readme, results, check=True)) == 1
    assert main(Args(readme, results)) == 0
    assert main(Args(readme, results, check=True)) == 0
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    readme.write_text(text.replace("TFLOP/s", "PFLOP/s", 1))
    assert main(Args(readme, results, check=True)) == 1


def test_records_that_are_missing_or_wrong(tmp_path: Path) -> None:
    lines = table(tmp_path).splitlines()
    assert sum(MISSING in line for line in lines) == len(CLAIMS)
    (tmp_path / "bench_decision.json").write_text(json.dumps({"machine": {}}))
    with pytest.raises(ArtefactError, match=r"bench_decision\.json"):
        table(tmp_path)


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_without_markers_nothing_is_written(text: str, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    with pytest.raises(ArgumentError, match="claims: begin"):
        main(Args(readme, tmp_path))
    assert readme.read_text() == text


def test_a_simulation_was_measured_on_nothing() -> None:
    preset = {"device": "cuda", "measured_on": "NVIDIA H200"}
    assert hardware({"preset": preset, "clock": "wall"}) == "NVIDIA H200"
    assert hardware({"preset": preset, "clock": "simulated"}) == "simulated"


def test_what_has_no_ratio_is_missing_or_saturated(tmp_path: Path) -> None:
    row = {"regime": "trend", "kv_policy": "scan_resistant", "allocation": "smart",
           "saturated": [True, False], "over_lru_design": None, "over_best_static": None}  # fmt: skip
    burst = row | {"regime": "burst", "saturated": [False, False]}
    same = {name: {"median": 0.026, "p90": 0.061} for name in ("on one host", "live")}
    record = {"rows": [row, burst], "device": "GPU", "agreement": {"pairs": 26, **same}}
    (tmp_path / LIVE).write_text(json.dumps(record))
    lines = [line for line in table(tmp_path).splitlines() if f"({RESULTS / LIVE})" in line]
    found = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in lines}
    trend = "Live, as on one host, Books, Trend: SmartAllocator's P99 over plain LRU with its design point"
    assert found[trend] == "saturated"
    assert found["The same in Burst"] == found["Burst: admission alone"] == MISSING
    again = "P99 of the same live run again, as on one host"
    assert found[again] == "3 % apart, P90 6 %; as it was 3 % apart, P90 6 %; 26 pairs"
