"""Live node and surrogate on the same requests, on a node of a few megabytes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.host_slowness import (
    ColdWork,
    host_slowness,
    is_disturbed,
    slow_epochs,
    typical_host_ms,
)
from eval.sim_to_real import Args, main
from eval.sim_to_real_report import compare, rank_correlation
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig
from hlem_env.live.machine_state import with_queue
from hlem_env.surrogate.hardware import HardwareProfile, NodeProfile

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    """A live preset and a hardware profile."""
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, layers=2, mean_history_tokens=60,
        max_history_tokens=160, rows_per_table=20_000, emulated_link_gbps=None, epoch_seconds=0.25,
        hot_share=(0.3,), requests_per_s=(70.0,), warmup_epochs=8,
    )  # fmt: skip
    plain = vars(HardwareProfile.load("h100"))
    profile = NodeProfile(**(plain | {"append_tokens": 30.0, "overhead_ms": 3.0}))
    (tmp_path / "records").mkdir()
    # So that the requests do not depend on the machine.
    speed = {"probe_ms": config.probe_ms, "speed": 1.0}
    for name, values in (("preset", config.to_json()), ("profile", profile.to_json()),
                         ("records/speed-2-layers", speed)):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    return {
        "preset": str(tmp_path / "preset.json"),
        "profile": str(tmp_path / "profile.json"),
        "records": tmp_path / "records",
        "regimes": ("trend",),
        "layers": (2,),
    }


def test_hit_rates_of_the_two_agree(files: dict[str, Any], tmp_path: Path) -> None:
    args = Args(
        **files, alphas=(0.1, 0.8), epochs=12, load=1.0, json=tmp_path / "out.json",
        plot=tmp_path / "out.png",
    )  # fmt: skip
    assert main(args) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["device"].endswith(", emulated link")
    kv = [row["live"]["kv_hit"] for row in found["rows"]]
    emb = [row["live"]["emb_hit"] for row in found["rows"]]
    assert max(kv) - min(kv) > 0.02  # alpha matters to both, or agreement would mean nothing
    assert max(emb) - min(emb) > 0.2
    for row in found["rows"]:
        assert row["live"]["requests"] > 50
        assert abs(row["error"]["kv_hit_points"]) < 0.5
        assert abs(row["error"]["emb_hit_points"]) < 1.0
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_a_slice_goes_on_where_the_last_one_ended(
    files: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = Args(**files, alphas=(0.1, 0.4), settle_epochs=0, epochs=1, epoch_seconds=0.05)
    assert main(replace(args, seconds=0.1)) == 0
    assert "2 pieces" in capsys.readouterr().out
    assert main(args) == 0
    records = {path: path.read_bytes() for path in args.records.iterdir()}
    assert main(args) == 0
    assert records == {path: path.read_bytes() for path in args.records.iterdir()}
    assert len(records) == 3  # the speed of the machine beside
    states = [json.loads(text).get("machine_state") for text in records.values()]
    assert sorted(len(state or ()) for state in states) == [0, 9, 9]  # one an epoch, 8 of warm-up


def row(
    alpha_centi: int, live: float, sim: float, saturated: bool = False, disturbed: bool = False
) -> dict[str, Any]:
    run = {"layers": 6, "regime": "steady", "alpha_centi": alpha_centi, "seed": 1}
    figures = {"mean_service_ms": 1.0, "utilisation": 0.5, "kv_hit": 0.4, "emb_hit": 0.5}
    return {
        "run": run,
        "disturbed": disturbed,
        "live": figures | {"p99_ms": live, "saturated": saturated},
        "sim": figures | {"p99_ms": sim, "saturated": False},
    }


def test_figures_over_alpha() -> None:
    found = compare([row(10, 30.0, 33.0), row(30, 20.0, 19.0), row(50, 18.0, 21.0),
                     row(70, 900.0, 50.0, saturated=True),
                     row(90, 9.0, 900.0, disturbed=True)])  # fmt: skip
    group, summary = found["groups"][0], found["summary"]
    assert (group["best_alpha_live"], group["best_alpha_sim"]) == (0.5, 0.3)
    assert group["regret"] == pytest.approx(20 / 18 - 1)
    assert group["rank_correlation"] == pytest.approx(0.8)
    assert (summary["runs"], summary["disturbed"], summary["saturated"]) == (5, 1, 1)
    # The saturated one counts in no percentage, the disturbed one in nothing.
    assert summary["median_p99_error"] == pytest.approx(0.1)
    assert summary["largest_p99_error"] == pytest.approx(21 / 18 - 1)
    assert found["rows"][3]["error"]["p99"] is None


def test_rank_correlation_of_a_permutation() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal(20)
    assert rank_correlation(values, np.exp(values)) == pytest.approx(1.0)
    assert rank_correlation(values, -values) == pytest.approx(-1.0)
    assert rank_correlation([1.0], [2.0]) is None


def test_a_plain_profile_is_refused(files: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="profile"):
        main(Args(**(files | {"profile": "h100"}), report=True))


def test_only_what_was_disturbed_is_measured_again(
    files: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    args = Args(
        **files, alphas=(0.1, 0.4), settle_epochs=0, epochs=4, epoch_seconds=0.05, clock="wall"
    )  # fmt: skip
    assert main(args) == 0
    capsys.readouterr()
    steady, slow = sorted(args.records.glob("2-layers-*.json"))
    for path, late in ((steady, ()), (slow, (8,))):  # the first that is measured
        record = json.loads(path.read_text())
        for epoch, state in enumerate(record["machine_state"]):
            state["python_ms"] = 9.0 if epoch in late else 1.0
        path.write_text(json.dumps(record))
    before = steady.read_bytes()
    assert main(replace(args, again=True, seconds=0.01, share=(2, 2))) == 0
    assert steady.read_bytes() == before and not slow.exists()
    assert f"{slow.stem} was disturbed" in capsys.readouterr().out
    # Nothing is left to forget.
    assert main(replace(args, again=True, seconds=0.01, share=(1, 2))) == 0
    assert steady.read_bytes() == before
    assert "was disturbed" not in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="again"):
        replace(args, again=True, report=True)


def test_records_of_runs_with_other_epochs_are_refused(files: dict[str, Any]) -> None:
    args = Args(**files, alphas=(0.1,), settle_epochs=1, epochs=2, epoch_seconds=0.05)
    assert main(args) == 0
    others: tuple[dict[str, Any], ...] = (
        {"epochs": 3}, {"settle_epochs": 0}, {"epoch_seconds": 0.1},
    )  # fmt: skip
    for other in others:
        name = "--" + next(iter(other)).replace("_", "-")
        with pytest.raises(ArgumentError, match=name):
            main(replace(args, report=True, **other))


def test_the_hosts_speed_is_taken_from_what_both_have(files: dict[str, Any]) -> None:
    profile = NodeProfile(
        **vars(HardwareProfile.load("h100")), host_ms={"6": {"python_ms": 2.0, "cold_host_ms": 1.0}}
    )
    states = [{"python_ms": 9.0}, {"python_ms": 3.0}, {"python_ms": 8.0}, {"python_ms": 5.0}]
    kept = np.array([True, False, True])
    moments = host_slowness(states, kept, profile, 6, ColdWork(0.0, 0.0), epochs=5)
    assert moments.tolist() == [(3.0 + 5.0) / 2 / 2.0] * 5
    for state, cold in zip(states, (4.0, 0.0, 1.0, 1.5), strict=True):
        state["cold_host_ms"] = cold  # an epoch without such a batch says nothing
    found = host_slowness(states, kept, profile, 6, ColdWork(0.0, 0.0), epochs=5)
    assert found.tolist() == [1.5, 4.0, 1.5, 1.0, 1.5]
    states[0]["cold_host_ms"] = 1800.0  # no host is as slow
    assert host_slowness(states, kept, profile, 6, ColdWork(0.0, 0.0), epochs=4).max() == 5.0
    for_each = {"cold_host_row_ms": 1e-6, "cold_host_evict_ms": 0.1}
    profile = replace(profile, host_ms={"6": profile.host_ms["6"] | for_each})
    config = replace(LiveConfig.load("h200"), mean_history_tokens=9900)
    run = {"requests": 200, "kv_hit": 0.5, "emb_hit": 0.5, "evictions": 70}
    slower = host_slowness(states, kept, profile, 6, ColdWork.of(config, run), 4)
    assert slower[2] == pytest.approx(1.0 / (1.0 + 1e-6 * 50_000 + 0.1 * 0.7))
    for layers, of in ((3, states), (6, [])):
        with pytest.raises(ArgumentError, match="machine-speed"):
            host_slowness(of, kept, profile, layers, ColdWork(0.0, 0.0), epochs=5)


def test_a_slow_spell_makes_a_run_disturbed_and_moments_do_not() -> None:
    cold_ms = [1.0, 1.1, 2.0, 0.9, 1.0, 1.0, 1.0, 1.7, 1.6, 1.0]
    states = [{"cold_host_ms": ms} for ms in cold_ms]
    assert typical_host_ms([states, [{"python_ms": 1.0}]]) == 1.0
    slow = slow_epochs(states, 1.0)
    assert np.flatnonzero(slow).tolist() == [2, 7, 8]
    assert np.flatnonzero(with_queue(slow)).tolist() == [2, 3, 4, 5, 7, 8, 9]
    assert not is_disturbed(slow)
    states[9]["cold_host_ms"] = 1.5
    assert is_disturbed(slow_epochs(states, 1.0))
    assert not slow_epochs([{"python_ms": 9.0}], typical_host_ms([])).any()


def test_a_given_speed_takes_the_place_of_the_probe(files: dict[str, Any]) -> None:
    (files["records"] / "speed-2-layers.json").unlink()
    args = Args(**files, alphas=(0.1,), settle_epochs=0, epochs=1, epoch_seconds=0.05, speed=(0.8,))
    assert main(args) == 0
    record = json.loads((args.records / "2-layers-trend-010-seed1.json").read_text())
    assert record["speed"] == 0.8
    with pytest.raises(ArgumentError, match=r"--speed=0.9 .*allowed: 0.8"):
        main(replace(args, speed=(0.9,), alphas=(0.1, 0.2)))
    with pytest.raises(ArgumentError, match="one for each of 2 layers"):
        main(replace(args, speed=(0.8, 0.8)))
    with pytest.raises(ArgumentError, match="above 0"):
        replace(args, speed=(-1.0,))
