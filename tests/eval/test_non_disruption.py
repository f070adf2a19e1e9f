import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval.non_disruption import NO_MOVE, Args, main, report
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig


def piece(after_move_ms: float) -> dict[str, Any]:
    """A record in which requests after a move up by 0.06 take so long."""
    rng = np.random.default_rng(1)

    def window(arm: str, step: int, mean: float) -> dict[str, Any]:
        latency = (mean + rng.uniform(-0.1, 0.1, 40)).tolist()
        return {"arm": arm, "step_centi": step, "latency_ms": latency}

    windows = []
    for _ in range(4):
        windows += [
            window("throttled", 6, after_move_ms), window("throttled", -6, 10.0),
            window(NO_MOVE, 0, 10.0),
        ]  # fmt: skip
    return {"windows": windows, "utilisation": 0.6, "requests_per_s": 100.0}


def test_what_a_move_costs_shows_in_its_direction() -> None:
    found = report([piece(15.0), piece(15.0)])
    rows = {row["direction"]: row for row in found["rows"]}
    assert rows["up"]["seconds"] == rows["down"]["seconds"] == 8
    assert rows["either"]["seconds"] == 16
    assert rows["up"]["over_no_move"]["value"] == pytest.approx(1.5, rel=0.02)
    assert rows["up"]["second_over_no_move"]["value"] == pytest.approx(1.5, rel=0.02)
    assert rows["down"]["over_no_move"]["low"] < 1.01
    assert rows["down"]["over_no_move"]["high"] > 0.99
    assert found["no_move"]["seconds"] == 8


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [({"steps": (6, 11)}, "1 to 10"), ({"refill": ("none",)}, "throttled or unthrottled"),
     ({"still": 0}, "above 0"), ({"steps": ()}, "1 to 10")],
)  # fmt: skip
def test_wrong_moves_are_refused(wrong: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ArgumentError, match=allowed):
        Args(**wrong)


@pytest.mark.usefixtures("one_thread")
def test_one_kind_of_move_alone(tmp_path: Path, small_node: Path) -> None:
    file = tmp_path / "out.json"
    args = Args(preset=str(small_node), records=tmp_path / "records", moves=4, rounds=1, warm_s=0.3,
                window_s=0.2, requests_per_s=60.0, steps=(6,), refill=("throttled",), still=2,
                json=file)  # fmt: skip
    assert main(args) == 0
    found = json.loads(file.read_text())
    seconds = {
        (row["refill"], row["by_centi"], row["direction"]): row["seconds"] for row in found["rows"]
    }
    assert seconds == {
        ("throttled", 6, "up"): 2, ("throttled", 6, "down"): 2, ("throttled", 6, "either"): 4,
        (NO_MOVE, 0, "after a move"): 2, (NO_MOVE, 0, "later"): 2,
    }  # fmt: skip
    assert found["no_move"]["seconds"] == 4
    # The folder is held to what its pieces were measured with; more moves are none of it.
    others: tuple[dict[str, Any], ...] = (
        {"steps": (2,)}, {"alpha": 0.4}, {"preset": "cpu-small"}, {"utilisation": 0.5},
    )  # fmt: skip
    for other in others:
        for only_shown in (False, True):
            with pytest.raises(ArgumentError, match=next(iter(other))):
                main(replace(args, report=only_shown, **other))
    assert main(replace(args, report=True, moves=8)) == 0
    (args.records / "options.json").unlink()
    assert main(replace(args, report=True)) == 0
    with pytest.raises(ArgumentError, match="a new folder"):
        main(args)


@pytest.fixture
def small_node(tmp_path: Path) -> Path:
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, layers=1, mean_history_tokens=40,
        max_history_tokens=100, rows_per_table=10_000, emulated_link_gbps=None,
        hot_share=(0.3,), requests_per_s=(50.0,),
    )  # fmt: skip
    preset = tmp_path / "preset.json"
    preset.write_text(json.dumps(config.to_json()))
    return preset


@pytest.mark.usefixtures("one_thread")
def test_a_small_node(tmp_path: Path, small_node: Path) -> None:
    file = tmp_path / "out.json"
    args = Args(preset=str(small_node), records=tmp_path / "records", moves=2, rounds=1, warm_s=0.3,
                window_s=0.2, requests_per_s=60.0, json=file)  # fmt: skip
    assert main(args) == 0
    found = json.loads(file.read_text())
    assert {row["by_centi"] for row in found["rows"]} == {2, 6, 10}
    assert {row["refill"] for row in found["rows"]} == {"throttled", "unthrottled"}
    assert found["no_move"]["seconds"] == 6
    record = json.loads((tmp_path / "records" / "round-001.json").read_text())
    assert sum(len(window["latency_ms"]) for window in record["windows"]) > 0.5 * 60 * 0.2 * 18
