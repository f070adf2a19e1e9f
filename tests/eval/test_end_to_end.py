import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agents.forecast import PRETRAINED
from eval.end_to_end import Args, forget_disturbed, main
from eval.end_to_end_bench import LiveBench
from eval.end_to_end_plan import GRID_CENTI, REGIMES, Run, everything, seeds_with_bursts
from eval.end_to_end_replay import node_profile
from eval.end_to_end_report import report
from eval.pieces import Slice
from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.live.config import LiveConfig
from hlem_env.live.serving import LiveBackend
from hlem_env.scenario import Scenario
from hlem_env.workload.regimes import LoadCurve, RegimeConfig, SyntheticWorkload

DESIGN = {"lru": 90, "scan_resistant": 50}


def test_what_is_required_comes_once_and_the_headline_first() -> None:
    runs = everything([1, 4, 7], DESIGN, whole=False)
    assert len(set(runs)) == len(runs) == 3 * (9 + 9 + 7)
    first = runs[: 3 * 3 * 3]
    assert {(run.seed, run.regime) for run in first} == set(product([1, 4, 7], REGIMES))
    assert {run.allocation for run in first} == {"static-090", "static-050", "smart"}
    assert [run.seed for run in runs[27:43]] == [1] * 16
    grid = {Run("burst", "scan_resistant", f"static-{alpha:03d}", 7) for alpha in GRID_CENTI}
    assert grid < set(runs)
    whole = everything([1, 4, 7], DESIGN, whole=True)
    assert whole[: len(runs)] == runs
    assert len(whole) == 3 * 3 * 2 * 9


def test_a_repeats_runs_may_come_together() -> None:
    runs = everything([1, 4, 7], DESIGN, whole=False, by_repeat=True)
    assert set(runs) == set(everything([1, 4, 7], DESIGN, whole=False))
    parts = [(run.seed, run.regime) for run in runs]
    assert list(dict.fromkeys(parts)) == list(product([1, 4, 7], REGIMES))
    assert parts == sorted(parts, key=list(dict.fromkeys(parts)).index)


def test_a_regime_may_have_a_load_of_its_own() -> None:
    runs = everything([1, 4, 7], DESIGN, whole=False, regimes=("burst",))
    assert runs == [
        run for run in everything([1, 4, 7], DESIGN, whole=False) if run.regime == "burst"
    ]
    for wrong in ((), ("burst", "burst")):
        with pytest.raises(ArgumentError, match="regimes"):
            Args(regimes=wrong)


def test_every_repeat_has_a_burst() -> None:
    config = RegimeConfig(episode_epochs=10, epoch_seconds=1.0)
    seeds = seeds_with_bursts(config, 3)
    assert len(set(seeds)) == 3
    for seed in range(1, max(seeds) + 1):
        workload = SyntheticWorkload(replace(config, regime="burst"), LoadCurve((0.2,), (10.0,)))
        workload.reset(np.random.default_rng(seed), 0.0)
        assert workload.path.burst.any() == (seed in seeds)


def record(
    run: Run, p99_ms: float, saturated: bool = False, slow: tuple[int, ...] = ()
) -> Mapping[str, Any]:
    """Eight epochs; where the host is slow P99 is a hundred times as long."""
    host = np.isin(np.arange(8), slow)
    epochs = dict.fromkeys(("alpha", "qos", "kv_hit", "emb_hit", "utilisation"), [0.5] * 8)
    epochs |= {"p99_ms": list(np.where(host, 100 * p99_ms, p99_ms)), "requests": [10] * 8}
    state = [{"cold_host_ms": 2.0 if late else 1.0} for late in host]
    return {"run": vars(run), "load": 1.0, "clock": "wall", "saturated": saturated, "movement": 0.5,
            "epochs": epochs, "machine_state": state}  # fmt: skip


def test_ratios_are_paired_and_saturated_cells_have_none() -> None:
    records = []
    for seed, scale in ((1, 1.0), (2, 3.0)):
        for alpha, p99 in zip(GRID_CENTI, (30.0, 20.0, 25.0, 40.0, 50.0), strict=True):
            name = f"static-{alpha:03d}"
            records.append(record(Run("trend", "scan_resistant", name, seed), scale * p99))
        records.append(record(Run("trend", "lru", "static-090", seed), scale * 40.0))
        records.append(record(Run("trend", "scan_resistant", "smart", seed), scale * 18.0))
        records.append(record(Run("trend", "scan_resistant", "ppo", seed), 1.0, seed == 2))
    rows = {row["allocation"]: row for row in report(records, DESIGN)["rows"]
            if row["kv_policy"] == "scan_resistant"}  # fmt: skip
    assert rows["best static"]["p99_ms"] == [20.0, 60.0]
    assert rows["design point"]["p99_ms"] == [25.0, 75.0]
    assert rows["smart"]["over_best_static"]["value"] == pytest.approx(0.9)
    assert rows["smart"]["over_lru_design"]["high"] == pytest.approx(0.45)
    assert rows["ppo"]["over_best_static"] is None


def test_epochs_with_a_slow_host_are_left_out_of_all_runs_of_the_same_requests() -> None:
    records = [
        record(Run("trend", "lru", "static-090", 1), 40.0, slow=(1,)),
        record(Run("trend", "scan_resistant", "smart", 1), 20.0, slow=(6,)),
        record(Run("trend", "scan_resistant", "smart", 2), 30.0),
    ]
    rows = {row["allocation"]: row for row in report(records, DESIGN)["rows"]}
    assert rows["design point"]["p99_ms"] == [40.0]
    assert rows["smart"]["p99_ms"] == [20.0, 30.0]
    # The slow ones and the three after each.
    assert rows["smart"]["epochs_left_out"] == [6, 0]


def test_a_run_with_a_slow_spell_counts_nowhere_and_is_measured_again(tmp_path: Path) -> None:
    spell = Run("trend", "scan_resistant", "smart", 1)
    records = [
        record(Run("trend", "lru", "static-090", 1), 40.0),
        record(spell, 20.0, slow=(2, 3, 4)),
        record(Run("trend", "scan_resistant", "smart", 2), 30.0, slow=(1, 3)),
    ]
    found = report(records, DESIGN)
    assert found["disturbed"] == [spell.name]
    rows = {row["allocation"]: row for row in found["rows"]}
    assert rows["smart"]["seeds"] == [2]
    part = Slice(tmp_path, 10.0, "test")
    for one in records:
        part.write(Run(**one["run"]).name, one)
        part.write("design-" + Run(**one["run"]).name, one)
    forget_disturbed(part)
    assert not part.has(spell.name)
    assert len(list(tmp_path.glob("*.json"))) == 5
    with pytest.raises(ArgumentError, match="again"):
        Args(again=True, report=True)


@pytest.mark.usefixtures("one_thread")
def test_a_small_node_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, layers=1, mean_history_tokens=40,
        max_history_tokens=100, rows_per_table=10_000, emulated_link_gbps=None, warmup_epochs=1,
        hot_share=(0.3,), requests_per_s=(20.0,), probe_ms=5.0,
    )  # fmt: skip
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps(config.to_json()))
    args = Args(preset=str(preset), records=tmp_path / "records", repeats=1, epochs=4,
                short_epochs=2, epoch_seconds=0.05, json=tmp_path / "out.json")  # fmt: skip
    assert main(replace(args, seconds=0.1)) == 0
    assert "minutes left" in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()
    assert main(args) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["pieces_missing"] == 0
    assert {row["regime"] for row in found["rows"]} == {"trend", "burst", "steady"}
    trend = {(row["kv_policy"], row["allocation"]) for row in found["rows"]
             if row["regime"] == "trend"}  # fmt: skip
    assert len(trend) == 6
    # The same requests for all that is compared.
    digests = {
        json.loads(path.read_text())["workload_digest"]
        for path in (tmp_path / "records").glob("trend-*.json")
    }
    assert len(digests) == 1


def test_a_run_that_comes_first_is_under_its_own_policy(tmp_path: Path) -> None:
    """The machine's speed, which is measured then, is under another one."""
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, layers=1, mean_history_tokens=40,
        max_history_tokens=100, rows_per_table=10_000, emulated_link_gbps=None,
    )  # fmt: skip
    bench = LiveBench(config, "books", Slice(tmp_path, 10.0, "test"), "wall")
    try:
        backend, _, _ = bench.backend(Scenario(preset="books", kv_policy="lru"))
        assert isinstance(backend, LiveBackend)
        assert (tmp_path / "speed.json").is_file()
        assert backend.node.kv_policy == "lru"
    finally:
        bench.close()


def test_the_surrogate_serves_the_same_plan(tmp_path: Path) -> None:
    args = Args(preset="h200-8gib", profile="h200-live", records=tmp_path / "records",
                epochs=6, short_epochs=4, repeats=1, json=tmp_path / "out.json")  # fmt: skip
    assert main(args) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["pieces_missing"] == 0 and found["clock"] == "simulated"
    assert found["preset"]["pool_bytes"] == 8 * 2**30
    rows = {(row["regime"], row["kv_policy"], row["allocation"]): row for row in found["rows"]}
    assert len(rows) == 6 + 6 + 4
    # At last the load was sought in one regime alone, the busiest, and kept to its limit there.
    tries = sorted(path.stem for path in (tmp_path / "records").glob("load-*.json"))
    last = [name for name in tries if name[:6] == tries[-1][:6]]
    assert len(last) == 1 < len([name for name in tries if name[:6] == tries[0][:6]]) == 3
    found_at = [
        record["utilisation"]
        for record in (
            json.loads((tmp_path / "records" / f"{name}.json").read_text()) for name in tries
        )
        if record["load"] == found["load"]
    ]
    assert 0 < max(found_at) <= 0.85
    others: tuple[tuple[str, dict[str, Any]], ...] = (
        ("pool_bytes", {"preset": "h200"}), ("dataset", {"dataset": "taobao"}),
        ("clock", {"preset": "cpu-small", "profile": ""}),
        ("policy", {"policy": PRETRAINED / "working_set-eq5"}),
    )  # fmt: skip
    for named, other in others:
        with pytest.raises(ArgumentError, match=f"with {named}="):
            main(replace(args, **other))
    given = replace(args, design=args.json, load=found["load"])
    assert main(given) == 0  # what is given is not measured, and the runs are the same
    with pytest.raises(ArgumentError, match=r"--load.*0.9"):
        main(replace(given, load=0.9))
    preset, profile = LiveConfig.load("h200-8gib"), node_profile("h200-live")
    speed = str(preset.probe_ms / profile.probe_ms["6"])
    with pytest.raises(ArgumentError, match=rf"--speed=1.1 .*allowed: {speed[:5]}"):
        main(replace(given, speed=1.1))
    slower = replace(given, records=tmp_path / "slower", speed=0.75, repeats=1, load=0.9)
    assert main(slower) == 0
    for wrong in ({"load": float("inf")}, {"first_load": 0.0}, {"speed": -1.0}):
        with pytest.raises(ArgumentError, match="above 0, up to 100"):
            replace(args, **wrong)
    with pytest.raises(ArgumentError, match=r"--design.*with pool_bytes="):
        main(replace(given, records=tmp_path / "other", preset="h200"))
    with pytest.raises(ArtefactError, match="no report"):
        main(replace(given, design=next((tmp_path / "records").glob("load-*.json"))))
    for path in (tmp_path / "records").glob("*-seed*.json"):
        if not path.name.startswith("design"):
            path.unlink()  # what came first is enough
    with pytest.raises(ArgumentError, match="with pool_bytes="):
        main(replace(args, preset="h200"))
    with pytest.raises(ArgumentError, match=r"--first-load.*0.5.*1.0"):
        main(replace(args, first_load=0.5))
    with pytest.raises(ArtefactError, match="no such folder"):
        main(replace(args, policy=tmp_path / "none"))
    # What visitors who come once do to plain LRU.
    admitted, flushed = (rows["steady", p, "design point"] for p in ("scan_resistant", "lru"))
    assert admitted["kv_hit"] > flushed["kv_hit"]
    assert rows["trend", "scan_resistant", "smart"]["movement"] > 0


def test_a_profile_that_was_not_calibrated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="calibrate has fitted"):
        main(Args(preset="h200", profile="h100", records=tmp_path))
