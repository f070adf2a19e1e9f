import json
from pathlib import Path

import numpy as np
import pytest

from eval import ablation
from eval.names import REACHABLE
from eval.records import Record
from eval.unit import Unit
from hlem_env.errors import ArtefactError
from hlem_env.scenario import Scenario

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
REFERENCES = RESULTS / "compare-controllers-default.json"


def unit(**fields: object) -> Unit:
    scenario = Scenario(**{"regime": "burst", "trace_jitter": True} | fields)  # type: ignore[arg-type]
    return Unit(scenario, 20_003, 50, (), (), 5.0, False, 2, 1, "")


def test_the_reference_is_of_the_same_scenario_and_seed() -> None:
    row = ablation.reachable_row(REFERENCES, unit())
    assert row is not None
    cells = json.loads(REFERENCES.read_text())["cells"]
    (cell,) = [
        c for c in cells if (c["workload"], c["kv_policy"]) == ("default/burst", "scan_resistant")
    ]
    place = cell["seeds"].index(20_003)
    assert row["p99_ms"] == cell["controllers"][REACHABLE]["p99_ms"][place]
    assert ablation.reachable_row(REFERENCES, unit(tables=11)) is None


def test_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(ArtefactError, match="cannot read"):
        ablation.reachable_row(path, unit())
    path.write_text("[]")
    with pytest.raises(ArtefactError, match="not a result"):
        ablation.reachable_row(path, unit())


def test_peaks_are_the_largest_of_each_burst(tmp_path: Path) -> None:
    scenario = Scenario(regime="burst", episode_epochs=60)
    bursts = ablation.bursts_of(scenario, 20_003)
    assert bursts
    p99 = np.ones(60)
    for i, epochs in enumerate(bursts):
        p99[epochs[-1]] = 10.0 + i
    ones = [1.0] * 60
    record = Record(
        "made up", scenario.to_json(), 20_003, "", "", {}, [50] * 60, p99.tolist(), ones, ones, ones,
        ones, ones, [1] * 60, 0,
    )  # fmt: skip
    record.save(tmp_path / "r.json")
    cell = {
        "scenario": scenario.to_json(), "seeds": [20_003],
        "controllers": {"a": {"record": ["r.json"]}, "b": {"record": [None]}},
    }  # fmt: skip
    expected = 10.0 + np.arange(len(bursts)).mean()
    assert ablation.peaks(cell, tmp_path) == {"a": [pytest.approx(expected)], "b": []}
