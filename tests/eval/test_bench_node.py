import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eval.bench_node import Args, main
from eval.refill_under_load import (
    NO_REFILL,
    THROTTLED,
    UNTHROTTLED,
    Cycle,
    Served,
    WatchedRefill,
    summarise,
)
from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig
from hlem_env.live.embedding_cache import EmbeddingCache
from hlem_env.live.host_tables import HostTables
from hlem_env.live.pool import Owner, Pool

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, mean_history_tokens=100,
        max_history_tokens=160, rows_per_table=20_000, emulated_link_gbps=1.0,
    )  # fmt: skip
    preset, file = tmp_path / "preset.json", tmp_path / "node.json"
    preset.write_text(json.dumps(config.to_json()))
    args = Args(
        preset=str(preset), json=file, alpha=0.4, warm_requests=10, repeats=3, move_repeats=2,
        refill_moves=2, warm_s=0.5, settle_s=0.2, observe_s=0.2,
    )  # fmt: skip
    assert main(args) == 0
    result = json.loads(file.read_text("utf-8"))
    assert result["command"].startswith("python -m eval.bench_node") and result["emulated_link"]
    assert "emulated link" in capsys.readouterr().out
    services = {(row["kind"], row["waiting"]): row for row in result["services"]}
    assert len(services) == len(result["services"]) == 10
    for (kind, _), row in services.items():
        new = {"cold": row["history_tokens"], "candidates only": 0}.get(kind, 10)
        assert row["reused"] == pytest.approx(1 - new / row["history_tokens"])
        assert row["history_tokens"] == pytest.approx(100, abs=50)
        assert 0 < row["p50_ms"] <= row["p90_ms"] and row["samples"] == 3
    moves = {row["step_centi"]: row for row in result["moves"]}
    assert sorted(moves) == [-10, -6, -2, 2, 6, 10]
    for step, row in moves.items():  # each takes from the cache that gives, and only from it
        assert (row["evicted_entries"] > 0) == (step > 0)
        assert (row["evicted_rows"] > 0) == (step < 0)
    rows = 7 * 2**20 // config.row_bytes
    assert moves[-10]["evicted_rows"] == pytest.approx(0.1 * rows, rel=0.1)
    refill = result["refill"]
    assert [(row["arm"], row["window"]) for row in refill["windows"]] == [
        (arm, window)
        for arm in ("throttled", "unthrottled")
        for window in ("before", "during", "no refill")
    ]
    assert set(refill["move_ms"]) == {"up", "down"}
    assert all(0 < median <= most for median, most in refill["move_ms"].values())
    assert refill["utilisation"] > 0 and refill["requests_per_s"] > 0


def test_requests_belong_to_the_window_in_which_they_arrived() -> None:
    """Moves at 1, 3 and 5 s; refill takes 0.5 and 0.2 s. Latencies in ms say where they belong."""
    arrival_s = np.array([0.45, 0.85, 0.95, 1.1, 1.6, 2.75, 2.95, 3.1, 3.3, 5.1, 5.3, 5.6])
    latency_ms = np.array([10, 11, 99, 20, 98, 12, 97, 21, 96, 30, 31, 95])
    served = Served(SimpleNamespace(), 6.0, [arrival_s[6:], arrival_s[:6]])  # in any order
    served.latency_ms = [latency_ms[6:], latency_ms[:6]]
    cycles = [
        Cycle(THROTTLED, 1.0, 1.5, True, 4e6),
        Cycle(UNTHROTTLED, 3.0, 3.2, False, 6e6),
        Cycle(NO_REFILL, 5.0, 5.0, True, 0.0),
    ]
    outcome = summarise(served, cycles, 2.0, 0.5, {})
    found = {(row.arm, row.window): (row.requests, row.p50_ms) for row in outcome.windows}
    medians = {key: (n, estimate and estimate.value) for key, (n, estimate) in found.items()}
    assert medians == {
        (THROTTLED, "before"): (2, 10.5),
        (THROTTLED, "during"): (1, 20.0),
        (THROTTLED, "no refill"): (2, 30.5),
        (UNTHROTTLED, "before"): (1, 12.0),
        (UNTHROTTLED, "during"): (1, 21.0),
        (UNTHROTTLED, "no refill"): (1, 30.0),
    }
    assert outcome.p99_over_before[UNTHROTTLED] is not None
    assert outcome.p99_over_before[UNTHROTTLED].value == pytest.approx(21 / 12)
    assert outcome.refill_ms == pytest.approx({THROTTLED: 500.0, UNTHROTTLED: 200.0})
    assert outcome.refill_mb == {THROTTLED: 4.0, UNTHROTTLED: 6.0}
    assert outcome.finished == {THROTTLED: 1.0, UNTHROTTLED: 0.0}


def test_windows_without_requests_have_no_percentiles() -> None:
    cycles = [Cycle(arm, 1.0, 1.5, True, 0.0) for arm in (NO_REFILL, THROTTLED, UNTHROTTLED)]
    served = Served(SimpleNamespace(), 6.0, [np.array([5.0])], [np.array([3.0])])
    outcome = summarise(served, cycles, 2.0, 0.5, {})
    assert all(row.p99_ms is None and row.requests == 0 for row in outcome.windows)
    assert set(outcome.p99_over_no_refill.values()) == {None}


def test_refill_that_is_watched_says_when_it_ended_and_can_be_left_out() -> None:
    pool = Pool(64 * 512, 512)
    cache = EmbeddingCache(pool, HostTables(1, 400, 32, torch.float16), emulated_link_gbps=64e-5)
    cache.grow(pool.alloc_pages(2, Owner.EMBEDDING))  # 16 rows of 64 bytes, 1 ms each 10 rows
    cache.lookup(torch.arange(100))
    cache.grow(pool.alloc_pages(8, Owner.EMBEDDING))
    refill = WatchedRefill(cache, chunk_rows=10, buffers=1)
    refill.refill(30)
    for turn in range(4):
        assert refill.ended_s is None
        refill.step(1.0 + turn * 2e-3)
    assert refill.ended_s == 1.0 + 3 * 2e-3 and refill.refill_bytes == 30 * 64
    refill.enabled = False
    refill.refill(30)
    assert refill.idle and refill.ended_s is None
    refill.step(2.0)
    assert refill.refill_bytes == 30 * 64 and refill.ended_s == 2.0


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"alpha": 0.95}, "alpha"),
        ({"utilisation": 1.0}, "utilisation"),
        ({"refill_moves": 0}, "refill_moves"),
        ({"observe_s": 0.0}, "observe_s"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: dict[str, float], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        Args(**arguments)
