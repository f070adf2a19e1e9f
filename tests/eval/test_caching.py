"""eval.caching: sequences, predictors of the literature, the spoilt ones, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from eval import caching, caching_golden, eviction_effect
from eval.caching_predictors import error, pleco, popu, spoilt
from eval.caching_sequences import ORACLE_GENERAL, key_file, public
from hlem_env.errors import ArgumentError
from hlem_env.eviction.replay import next_requests, replay

KEYS = np.array([0, 1, 0, 2, 0, 1])


def test_popu_is_time_over_count() -> None:
    expected = [1 + 1 / 1, 2 + 2 / 1, 3 + 3 / 2, 4 + 4 / 1, 5 + 5 / 3, 6 + 6 / 2]
    assert popu(KEYS).tolist() == pytest.approx(expected)


def test_pleco_weighs_every_past_request() -> None:
    def weight(d: int) -> float:
        return (d + 10) ** -1.8 * math.exp(-d / 670)

    total = sum(weight(d) for d in range(1, 6))
    own = weight(1) + weight(3) + weight(5)  # key 0 at the fifth request
    assert pleco(KEYS)[4] == pytest.approx(4 + total / own)


def test_the_worst_case_turns_the_order_around() -> None:
    keys = np.random.default_rng(1).integers(0, 30, 3000)
    true, rng = next_requests(keys), np.random.default_rng(2)
    worst = spoilt(keys, true, 1.0, rng)
    assert np.array_equal(spoilt(keys, true, 0.0, rng), true)
    gaps = worst - np.arange(keys.size)
    order = np.argsort(np.minimum(true - np.arange(keys.size), keys.size), kind="stable")
    assert (np.diff(gaps[order]) <= 0).all()
    half = np.mean(spoilt(keys, true, 0.5, rng) == worst)
    assert 0.4 < half < 0.6
    bad, good = (replay("fpb", keys, 10, p).misses for p in (worst, true))
    assert bad > replay("lru", keys, 10).misses > good
    assert error(keys, true, 100.0) == 0.0
    assert error(keys, worst, 100.0) > 0.5


def test_key_files_of_both_formats_are_the_same_sequence(tmp_path: Path) -> None:
    text, binary = tmp_path / "keys.txt", tmp_path / "keys.oracleGeneral.bin"
    text.write_text("b\na\nb\nc\n", encoding="utf-8")
    records = np.zeros(4, ORACLE_GENERAL)
    records["key"] = [2**60, 5, 2**60, 9]
    records.tofile(binary)
    assert binary.stat().st_size == 4 * 24
    for path in (text, binary):
        assert key_file(path, 100).keys.tolist() == [0, 1, 0, 2]
        assert key_file(path, 3).distinct == 2
    binary.write_bytes(b"123")
    with pytest.raises(ArgumentError, match="24 bytes"):
        key_file(binary, 10)
    with pytest.raises(ArgumentError, match="a file"):
        key_file(tmp_path / "none", 10)


def test_missing_traces_are_named(tmp_path: Path) -> None:
    (tmp_path / "movietweetings-100k.dat").write_text("1::7::5::100\n2::8::5::90\n1::7::5::120\n")
    found, skipped = public(tmp_path, 100)
    assert {s.name: s.keys.tolist() for s in found} == {
        "MovieTweetings items": [0, 1, 1],
        "MovieTweetings users": [0, 1, 1],
    }
    assert len(skipped) == 6 and all("is not in" in reason for reason in skipped.values())


def test_the_command_measures_and_writes(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    keys = tmp_path / "keys.txt"
    numbers = np.random.default_rng(3).zipf(1.4, 1500) % 60
    keys.write_text("\n".join(map(str, numbers)), encoding="utf-8")
    out = tmp_path / "out.json"
    args = caching.Args(traces=tmp_path, keys=(keys,), shares=(0.1, 0.3), json=out, train_every=500)
    assert caching.main(args) == 0
    result = json.loads(out.read_text())
    assert len(result["skipped"]) == 8
    by = {(c["policy"], c["predictor"], c["share"]): c for c in result["cells"]}
    assert len(by) == 2 * (3 + 3 * 3)
    assert all(c["competitive_ratio"] >= 1 for c in by.values())
    assert by["belady", None, 0.1]["competitive_ratio"] == 1
    noise = caching.Args(
        traces=tmp_path, keys=(keys,), noise=True, probabilities=(0.0, 1.0), json=out,
        plot=tmp_path / "noise.png",
    )  # fmt: skip
    assert caching.main(noise) == 0
    first, last = (line["hit_rate"] for line in json.loads(out.read_text())["noise"])
    assert first["laru"] == first["belady"] == first["fpb"] > last["fpb"]
    with pytest.raises(ArgumentError, match="traces"):
        caching.main(caching.Args(traces=tmp_path))


def test_golden_needs_an_input_and_counts_what_differs(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="golden"):
        caching.main(caching.Args(golden=tmp_path))
    (tmp_path / caching_golden.CLOUD).write_text("1\n2\n1\n", encoding="utf-8")
    assert caching.main(caching.Args(golden=tmp_path)) == 1


def test_the_effect_command(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    out = tmp_path / "effect.json"
    args = eviction_effect.Args(
        json=out,
        hot_shares=(0.32,),
        alphas=(0.3, 0.7),
        epochs=2,
        warmup_epochs=2,
        repeats=1,
        jobs=1,
    )
    assert eviction_effect.main(args) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["kv_policy"] for row in rows] == ["lru", "scan_resistant", "laru"]
    assert len({row["requests_per_s"] for row in rows}) == 1
