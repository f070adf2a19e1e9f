"""Runs of the surrogate in the place of live ones, on hosts that differ: on one host they are the same."""

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.end_to_end import Args as PlanArgs
from eval.end_to_end import make_bench
from eval.end_to_end_one_host import Args, main, with_backlog
from eval.end_to_end_plan import Run
from eval.end_to_end_replay import Replay, node_profile
from eval.host_slowness import ColdWork
from eval.pieces import Slice
from hlem_env.errors import ArgumentError, ArtefactError

EPOCHS, LOAD = 8, 0.7
DESIGN = {"lru": 0.9, "scan_resistant": 0.3}
RUNS = (
    Run("steady", "lru", "static-090", 1),
    Run("steady", "scan_resistant", "static-030", 1),
    Run("steady", "lru", "static-090", 2),
    Run("steady", "scan_resistant", "static-030", 2),
)


def write(
    folder: Path, slowness: dict[Run, float], spell: slice = slice(0), load: float = LOAD
) -> None:
    """Records of runs whose host was so slow, and in a spell of epochs three times as slow."""
    part = Slice(folder, 60.0, "test")
    plan = PlanArgs(preset="h200-8gib", profile="h200-live", records=folder)
    bench, profile = make_bench(plan, part), node_profile("h200-live")
    then = profile.host_ms["6"]
    for run, slow in slowness.items():
        record: dict[str, Any] = bench.run(run, EPOCHS, load) | {"clock": "wall"}
        work = ColdWork.of(bench.config, record)
        usual_ms = (
            then["cold_host_ms"]
            + then["cold_host_row_ms"] * work.missed_rows
            + then["cold_host_evict_ms"] * work.evicted
        )
        host = np.full(EPOCHS, slow)
        host[spell] *= 3
        # The warm-up is not recorded: the mean of the epochs that count stands for it.
        served = Replay(record, profile).serve(np.array([slow, *host]), draw=0)
        record["machine_state"] = [
            {"cold_host_ms": usual_ms * now, "python_ms": 1.0} for now in host
        ]
        slo_ms = bench.config.slo_ms
        record["epochs"] |= {
            "p99_ms": [epoch.p99_ms for epoch in served],
            "qos": [epoch.qos(slo_ms) for epoch in served],
            "utilisation": [epoch.utilisation for epoch in served],
        }
        record["p99_ms"] = float(np.mean(record["epochs"]["p99_ms"]))
        part.write(run.name, record)
    about = {"design_point_alpha": DESIGN, "dataset": "books", "preset": bench.config.to_json()}
    (folder.parent / "design.json").write_text(json.dumps(about))


def args(*folders: Path, **more: Any) -> Args:
    return Args(folders, folders[0].parent / "design.json", **more)


def one_host(*folders: Path, **more: Any) -> dict[str, Any]:
    out = folders[0].parent / "out.json"
    assert main(args(*folders, draws=1, json=out, **more)) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_what_the_hosts_did_is_taken_out(tmp_path: Path) -> None:
    """Under LRU the host was slow in one repeat and under scan-resistant KV in the other."""
    even = dict.fromkeys(RUNS, 1.0)
    uneven = dict(zip(RUNS, (1.3, 0.8, 0.8, 1.3), strict=True))
    write(tmp_path / "even", even)
    write(tmp_path / "uneven", uneven)
    found = one_host(tmp_path / "even", tmp_path / "uneven", slowness=1.0)
    same = found["agreement"]
    assert same["pairs"] == 4
    assert same["live"]["median"] > 0.1
    assert same["on one host"]["largest"] < 1e-3
    (ratio,) = (row for row in found["rows"] if row["kv_policy"] == "scan_resistant"
                and row["allocation"] == "design point")  # fmt: skip
    alone = one_host(tmp_path / "even", slowness=1.0)["rows"]
    (expected,) = (row for row in alone if row["kv_policy"] == "scan_resistant"
                   and row["allocation"] == "design point")  # fmt: skip
    for name in ("value", "low", "high"):
        assert ratio["over_lru_design"][name] == pytest.approx(
            expected["over_lru_design"][name], rel=1e-3
        )
    assert ratio["qos"] == pytest.approx(expected["qos"], abs=1e-4)
    assert ratio["utilisation"] == pytest.approx(expected["utilisation"], abs=1e-3)


def test_the_one_host_is_the_median_of_those_that_count(tmp_path: Path) -> None:
    write(tmp_path / "runs", dict(zip(RUNS[:3], (0.8, 1.1, 1.25), strict=True)))
    other = json.loads((tmp_path / "runs" / f"{RUNS[0].name}.json").read_text()) | {"load": 0.9}
    (tmp_path / "runs" / "load-0-steady.json").write_text(json.dumps(other))  # no run of the plan
    found = one_host(tmp_path / "runs")
    assert found["slowness"] == pytest.approx(1.1)
    slower = one_host(tmp_path / "runs", slowness=1.4)
    for fast, slow in zip(found["runs"], slower["runs"], strict=True):
        assert slow["on_one_host"]["p99_ms"] > fast["on_one_host"]["p99_ms"]
        assert slow["on_one_host"]["qos"] <= fast["on_one_host"]["qos"]


def test_a_slow_spell_is_left_out_of_live_and_simulated_alike(tmp_path: Path) -> None:
    write(tmp_path / "even", dict.fromkeys(RUNS, 1.0))
    write(tmp_path / "spell", {RUNS[1]: 1.0}, spell=slice(2, 4))
    for name in ("even", "spell"):  # how fast a host usually is goes by its folder
        for run in RUNS:
            source = tmp_path / "even" / f"{run.name}.json"
            target = tmp_path / name / f"{run.name}.json"
            if not target.exists():
                target.write_text(source.read_text())
    found = one_host(tmp_path / "even", tmp_path / "spell", slowness=1.0)
    left_out = {row["name"]: row["epochs_left_out"] for row in found["runs"]}
    assert left_out.pop(f"spell/{RUNS[1].name}") == 2 + 3
    assert set(left_out.values()) == {0}
    assert found["agreement"]["live"]["largest"] > 0.5
    assert found["agreement"]["on one host"]["largest"] < 0.05


def test_a_run_whose_host_was_never_itself_counts_nowhere(tmp_path: Path) -> None:
    write(tmp_path / "runs", {**dict.fromkeys(RUNS[:3], 1.0), RUNS[3]: 2.0})
    found = one_host(tmp_path / "runs", slowness=1.0)
    assert found["disturbed"] == [f"runs/{RUNS[3].name}"]
    assert [row["name"] for row in found["runs"]] == [
        f"runs/{run.name}" for run in sorted_by_name(RUNS[:3])
    ]
    (ours,) = (row for row in found["rows"] if row["kv_policy"] == "scan_resistant")
    assert ours["seeds"] == [1]


def sorted_by_name(runs: tuple[Run, ...]) -> list[Run]:
    return sorted(runs, key=attrgetter("name"))


def test_what_a_spell_left_behind_is_left_out_until_it_is_worked_off() -> None:
    slow = np.array([False, True, False, False, False, False, False])
    busy = np.array([0.99, 1.0, 1.0, 0.97, 0.8, 0.99, 0.7])
    found = with_backlog(slow, busy)
    assert found.tolist() == [False, True, True, True, False, False, False]
    assert slow.sum() == 1  # as it was


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "one", {RUNS[0]: 1.0})
    write(tmp_path / "other", {RUNS[0]: 1.0}, load=0.6)
    with pytest.raises(ArgumentError, match=r"load=0\.6.*load=0\.7"):
        main(args(tmp_path / "one", tmp_path / "other"))
    with pytest.raises(ArgumentError, match="different names"):
        main(args(tmp_path / "one", tmp_path / "other" / ".." / "one"))
    with pytest.raises(ArgumentError, match="missing, no folder"):
        main(args(tmp_path / "one", tmp_path / "missing"))
    with pytest.raises(ArtefactError, match=r"no report of eval\.end_to_end"):
        main(Args((tmp_path / "one",), tmp_path / "missing.json"))
    for wrong in ({"slowness": 0.0}, {"draws": 0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            args(tmp_path / "one", **wrong)
