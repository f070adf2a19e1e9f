"""Runs of the surrogate in the place of live ones: it is its own twin, as fast as their host was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.end_to_end import Args as PlanArgs
from eval.end_to_end import make_bench
from eval.end_to_end_plan import Run
from eval.end_to_end_twin import Args, main
from eval.host_slowness import ColdWork
from eval.pieces import Slice
from hlem_env.errors import ArgumentError
from hlem_env.surrogate.hardware import NodeProfile

EPOCHS = 5


def write(folder: Path, runs: list[Run], slowness: float = 1.0) -> None:
    """Records as of a live node whose host was so much slower than the calibration's."""
    part = Slice(folder, 60.0, "test")
    plan = PlanArgs(preset="h200-8gib", profile="h200-live", records=folder)
    bench, profile = make_bench(plan, part), NodeProfile.load("h200-live")
    assert isinstance(profile, NodeProfile)
    then = profile.host_ms["6"]
    for run in runs:
        record: dict[str, Any] = bench.run(run, EPOCHS, 0.6)
        work = ColdWork.of(bench.config, record)
        cold_ms = slowness * (
            then["cold_host_ms"]
            + then["cold_host_row_ms"] * work.missed_rows
            + then["cold_host_evict_ms"] * work.evicted
        )
        states = [{"cold_host_ms": cold_ms, "python_ms": 1.0}] * EPOCHS
        part.write(run.name, record | {"clock": "wall", "machine_state": states})


def twin(folder: Path, out: Path, host_speed: bool = True) -> dict[str, Any]:
    assert main(Args(records=(folder,), draws=1, host_speed=host_speed, json=out)) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_it_measures_the_same_with_the_same_host(tmp_path: Path) -> None:
    runs = [
        Run("steady", "scan_resistant", f"static-{alpha}", 1) for alpha in ("010", "050", "090")
    ]
    runs.append(Run("trend", "scan_resistant", "smart", 3))
    write(tmp_path / "a", runs)
    found = twin(tmp_path / "a", tmp_path / "out.json")
    assert found["summary"]["runs"] == 4 and found["summary"]["disturbed"] == 0
    for row in found["rows"]:
        held = row["run"]["allocation"].startswith("static-")
        # A controller's alphas are known at the ends of epochs alone.
        assert row["error"]["p99_ms"] == pytest.approx(0.0, abs=1e-4 if held else 0.2)
        assert row["error"]["mean_service_ms"] == pytest.approx(0.0, abs=0.02 if held else 0.05)
        assert row["error"]["kv_hit_points"] == pytest.approx(0.0, abs=0.01 if held else 1.0)
    (group,) = found["over_alpha"]
    assert group["alphas"] == [0.1, 0.5, 0.9]
    assert group["rank_correlation"] == pytest.approx(1.0)


def test_what_the_host_does_is_no_error(tmp_path: Path) -> None:
    runs = [Run("steady", "scan_resistant", "static-030", 1)]
    write(tmp_path / "fast", runs)
    write(tmp_path / "slow", runs, slowness=1.5)
    fast, slow = (
        twin(tmp_path / name, tmp_path / f"{name}.json")["rows"][0] for name in ("fast", "slow")
    )
    assert slow["live"] == fast["live"]  # of the same run
    assert slow["sim"]["p99_ms"] > 1.1 * fast["sim"]["p99_ms"]
    assert slow["sim"]["kv_hit"] == pytest.approx(fast["sim"]["kv_hit"], abs=0.01)
    calibrated = twin(tmp_path / "slow", tmp_path / "calibrated.json", host_speed=False)["rows"][0]
    assert calibrated["sim"] == fast["sim"]


def test_a_run_with_a_slow_spell_does_not_count(tmp_path: Path) -> None:
    runs = [
        Run("steady", "scan_resistant", f"static-{alpha}", 1) for alpha in ("030", "050", "070")
    ]
    write(tmp_path, runs)
    path = tmp_path / f"{runs[0].name}.json"
    record = json.loads(path.read_text())
    for state in record["machine_state"][1:4]:
        state["cold_host_ms"] *= 2
    path.write_text(json.dumps(record))
    found = twin(tmp_path, tmp_path.parent / "out.json")
    assert [row["disturbed"] for row in found["rows"]] == [True, False, False]
    assert found["summary"]["disturbed"] == 1 and found["over_alpha"] == []
    # It slows that run down, in the surrogate alone; how far off it is with it is told, too.
    with_it = found["summary"]["largest_p99_error_with_disturbed"]
    assert with_it > found["summary"]["largest_p99_error"]


def test_what_is_no_live_run_is_refused(tmp_path: Path) -> None:
    args = Args(records=(tmp_path,))
    with pytest.raises(ArgumentError, match="folders of"):
        main(args)
    with pytest.raises(ArgumentError, match="calibrate has fitted"):
        main(replace(args, profile="h100"))
    Slice(tmp_path, 1.0, "test").write("one", {"run": {}})
    with pytest.raises(ArgumentError, match=r"records of eval\.end_to_end"):
        main(args)
    Slice(tmp_path, 1.0, "test").write("one", {"run": {}, "epochs": {}, "clock": "simulated"})
    with pytest.raises(ArgumentError, match="clock simulated"):
        main(args)
