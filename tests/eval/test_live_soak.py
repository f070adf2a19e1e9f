import json
from dataclasses import replace
from pathlib import Path

import pytest

from eval.live_soak import Args, main
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_minute_has_its_line(tmp_path: Path) -> None:
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, mean_history_tokens=60,
        max_history_tokens=160, rows_per_table=20_000, emulated_link_gbps=None, epoch_seconds=0.1,
        hot_share=(0.5,), requests_per_s=(40.0,), warmup_epochs=2,
    )  # fmt: skip
    preset, file = tmp_path / "preset.json", tmp_path / "soak.json"
    preset.write_text(json.dumps(config.to_json()))
    assert main(Args(preset=str(preset), minutes=3, minute_s=1.0, json=file)) == 0
    minutes = json.loads(file.read_text("utf-8"))["minutes"]
    assert len(minutes) == 3
    assert all(minute["requests"] > 0 and minute["resident_mb"] > 20 for minute in minutes)


def test_no_minutes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="minutes"):
        main(Args(minutes=0))
