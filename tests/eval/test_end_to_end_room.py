import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.end_to_end_plan import SMART
from eval.end_to_end_room import Args, main
from eval.end_to_end_room_report import (
    CONTROLLERS,
    FINE_STATIC,
    FORESEEN,
    REACHABLE,
    STATIC,
    of_live,
    of_surrogate,
)
from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.live.config import LiveConfig

NODE = {
    "preset": LiveConfig.load("h200-8gib").to_json(),
    "dataset": "books",
    "speed": 1.15,
    "epochs": 8,
}


def row(
    regime: str, allocation: str, p99_ms: list[float], saturated: bool = False
) -> dict[str, Any]:
    return {"regime": regime, "kv_policy": "scan_resistant", "allocation": allocation,
            "seeds": [3, 5], "p99_ms": p99_ms, "saturated": [saturated, False]}  # fmt: skip


def test_room_is_what_the_reachable_sequence_gains_and_recovered_is_a_part_of_it() -> None:
    static = np.array([20.0, 30.0])
    p99_ms = dict.fromkeys(CONTROLLERS, static) | {STATIC: static, REACHABLE: 0.9 * static}
    p99_ms[SMART] = 0.975 * static
    found = of_surrogate(p99_ms)
    assert found["room"] == pytest.approx(0.1)
    assert found["room_recovered"][SMART]["value"] == pytest.approx(0.25)
    assert found["room_recovered"]["ppo"]["value"] == 0.0
    # Noise over noise is no figure.
    assert of_surrogate(p99_ms | {REACHABLE: 0.985 * static})["room_recovered"] == {}


def test_live_runs_are_held_against_the_room_of_their_own_requests() -> None:
    known = [1, 3, 5]
    static = np.array([50.0, 10.0, 10.0])
    p99_ms = {STATIC: static, REACHABLE: np.array([5.0, 9.0, 7.0])}  # room 0.9, 0.1 and 0.3
    rows = [row("trend", STATIC, [20.0, 40.0]), row("trend", SMART, [19.0, 34.0])]
    found = of_live(rows, known, p99_ms)
    assert found.keys() == {SMART}
    assert found[SMART]["seeds"] == [3, 5]
    # 1 ms of 2 and 6 of 12.
    assert found[SMART]["room_recovered"]["value"] == pytest.approx(0.5)
    assert found[SMART]["room"] == pytest.approx(14 / 60)
    assert of_live([rows[0], row("trend", SMART, [19.0, 34.0], True)], known, p99_ms) == {}


def test_a_short_episode_from_the_report_to_the_figures(tmp_path: Path) -> None:
    report = tmp_path / "one-host.json"
    rows = [row("steady", STATIC, [20.0, 20.0]), row("steady", "ppo", [20.0, 20.0])]
    report.write_text(json.dumps({**NODE, "load": 0.9, "slowness": 0.8, "rows": rows}))
    args = Args(report, repeats=2, draws=1, arrivals=1, json=tmp_path / "out.json",
                plot=tmp_path / "out.png")  # fmt: skip
    assert main(args) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["load"], found["slowness"]) == (0.9, 0.8)
    assert found["regimes"].keys() == {"trend", "burst", "steady"}
    for of in found["regimes"].values():
        p99_ms = {name: np.array(values) for name, values in of["p99_ms"].items()}
        assert {len(values) for values in p99_ms.values()} == {2}
        assert (p99_ms[FINE_STATIC] <= p99_ms[STATIC]).all()
        assert {len(values) for values in of["mean_alpha"].values()} == {8}
        assert of["mean_alpha"][SMART][0] == 0.5
        # Starting anywhere, with every request known, against alphas that start at 0.50.
        assert p99_ms[REACHABLE].mean() < max(p99_ms[FORESEEN].mean(), p99_ms["ppo"].mean())
    assert (tmp_path / "out.png").stat().st_size > 10_000


def test_what_is_no_report_of_live_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"no report of eval\.end_to_end_one_host"):
        main(Args(tmp_path / "missing.json"))
    report = tmp_path / "one-host.json"
    for wrong in (
        {"load": 1.0, "slowness": 1.0, "rows": []},
        {**NODE, "load": "much", "slowness": 1.0, "rows": []},
    ):
        report.write_text(json.dumps(wrong))
        with pytest.raises(ArtefactError, match=r"no report of eval\.end_to_end_one_host"):
            main(Args(report))
    report.write_text(json.dumps({**NODE, "load": 1.0, "slowness": -1.0, "rows": []}))
    with pytest.raises(ArgumentError, match=r"slowness='-1.0 in"):
        main(Args(report))
    for name in ("repeats", "draws", "arrivals"):
        with pytest.raises(ArgumentError, match=name):
            Args(report, **{name: 0})
