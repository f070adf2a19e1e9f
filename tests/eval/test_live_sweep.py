import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eval.live_sweep import Args, main
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    """A node of a few megabytes with short epochs."""
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, mean_history_tokens=60,
        max_history_tokens=160, rows_per_table=20_000, emulated_link_gbps=None, epoch_seconds=0.1,
        hot_share=(0.5,), requests_per_s=(40.0,),
    )  # fmt: skip
    path = tmp_path / "preset.json"
    path.write_text(json.dumps(config.to_json()))
    return path


@pytest.mark.parametrize("kind", ["steady", "trace"])
def test_rows_of_a_small_sweep(kind: str, preset: Path, tmp_path: Path) -> None:
    times = np.sort(np.random.default_rng(0).uniform(0, 60, 400))
    lines = [f"{time_s:.3f},{i % 50},9,9" for i, time_s in enumerate(times)]
    trace, file = tmp_path / "requests.csv", tmp_path / "sweep.json"
    trace.write_text("\n".join(["arrival_s,user_id,history_length,new_items", *lines]) + "\n")
    args = Args(
        preset=str(preset),
        workload="steady" if kind == "steady" else f"trace:{trace}",
        hot_shares=(0.4,),
        alphas=(0.05, 0.9),
        settle_epochs=2,
        epochs=8,
        json=file,
    )
    assert main(args) == 0
    low, high = json.loads(file.read_text("utf-8"))["rows"]
    assert (low["alpha"], high["alpha"]) == (0.05, 0.9)
    assert low["emb_hit"] < high["emb_hit"]
    if kind == "steady":
        assert low["hot_share"] == high["hot_share"] == 0.4


def test_a_regime_without_a_hot_share_is_refused(preset: Path) -> None:
    with pytest.raises(ArgumentError, match="workload"):
        main(Args(preset=str(preset), workload="burst"))
