"""Hardware profiles: what was measured comes out again, and what is no profile is refused."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.surrogate.hardware import HardwareProfile, compute_ms

FOLDER = resources.files("hlem_env.surrogate") / "profiles"
NAMES = sorted(file.name.removesuffix(".json") for file in FOLDER.iterdir())
H100 = HardwareProfile.load("h100")
TABLE = H100.compute_table(6, 20_000)


def cost_ms(new_tokens: float, all_tokens: float) -> float:
    return float(compute_ms(TABLE, H100.append_tokens, new_tokens, all_tokens))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_profiles_load(name: str) -> None:
    profile = HardwareProfile.load(name)
    assert profile.name == name
    assert profile.hardware
    assert profile.source
    assert HardwareProfile.load(Path(str(FOLDER / f"{name}.json"))) == profile
    assert profile.to_json() == HardwareProfile.load(name).to_json()


def test_profiles_survive_json(tmp_path: Path) -> None:
    scaled = H100.scaled(compute=1.25, gather=0.5)
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(scaled.to_json()))
    assert HardwareProfile.load(file) == HardwareProfile.load(str(file)) == scaled


def test_what_is_measured_and_what_is_estimated() -> None:
    assert not H100.estimate
    a100 = HardwareProfile.load("a100")
    assert a100.estimate
    assert "estimate" in a100.hardware
    assert a100.gather_gbps == H100.gather_gbps / 2
    assert a100.hbm_gbps < H100.hbm_gbps


# Measured on one H100: 6 layers, full recompute, and 300 new tokens against that history.
MEASURED = [(5000, 1.0, 0.9), (8000, 1.7, 0.9), (10_000, 2.2, 1.2), (15_000, 4.0, 1.7)]


@pytest.mark.parametrize(("tokens", "recompute", "append"), MEASURED)
def test_measured_points(tokens: int, recompute: float, append: float) -> None:
    assert cost_ms(tokens, tokens) == pytest.approx(recompute, abs=0.05)
    assert cost_ms(300, tokens) == pytest.approx(append, abs=0.05)


def test_hand_worked_points_between_the_measured_ones() -> None:
    """On a made profile whose corners lie on the table's points."""
    profile = HardwareProfile.load("h100").to_json() | {
        "recompute_tokens": (1280.0, 2560.0),
        "recompute_layer_ms": (1.0, 3.0),
        "append_tokens": 100.0,
        "append_history_tokens": (1280.0, 2560.0),
        "append_layer_ms": (0.5, 0.7),
    }
    made = HardwareProfile(**profile)
    table = made.compute_table(2, 6000)

    def at(new_tokens: float, all_tokens: float) -> float:
        return float(compute_ms(table, 100.0, new_tokens, all_tokens))

    assert at(640, 640) == pytest.approx(1.0)  # half the first point, two layers
    assert at(1280, 1280) == pytest.approx(2.0)
    assert at(1920, 1920) == pytest.approx(4.0)
    assert at(3840, 3840) == pytest.approx(10.0)  # on with the last slope
    assert at(50, 1920) == pytest.approx(1.2)
    assert at(100, 3840) == pytest.approx(1.8)
    assert at(1010, 1920) == pytest.approx((1.2 + 4.0) / 2)  # half way from 100 to 1920 new ones
    assert at(64, 128) <= at(128, 128)  # never dearer than all anew


@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_more_tokens_never_cost_less(a: int, b: int, all_tokens: int) -> None:
    few, many = sorted((min(a, all_tokens), min(b, all_tokens)))
    assert 0 < cost_ms(few, all_tokens) <= cost_ms(many, all_tokens) + 1e-12
    low, high = sorted((a, b))
    assert cost_ms(low, low) <= cost_ms(high, high) + 1e-12


def test_layers_add_up() -> None:
    one = H100.compute_table(1, 15_000)
    for new, tokens in ((10_000, 10_000), (110, 10_000), (5000, 10_000)):
        assert 6 * compute_ms(one, 300.0, new, tokens) == pytest.approx(cost_ms(new, tokens))


def test_scaling() -> None:
    scaled = H100.scaled(compute=2.0, gather=0.5, hbm=3.0)
    assert scaled.gather_gbps == 0.5 * H100.gather_gbps
    assert scaled.hbm_gbps == 3.0 * H100.hbm_gbps
    table = scaled.compute_table(6, 20_000)
    for new, tokens in ((7777, 7777), (110, 9000), (1000, 9000)):
        assert compute_ms(table, 300.0, new, tokens) == pytest.approx(2 * cost_ms(new, tokens))
    assert H100.scaled() == H100


def test_an_unknown_profile_lists_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match="hardware='v100'.*" + ".*".join(NAMES)):
        HardwareProfile.load("v100")
    with pytest.raises(ArgumentError, match="hardware='/no/such"):
        HardwareProfile.load(Path("/no/such.json"))


GOOD = H100.to_json()
BROKEN: dict[str, Any] = {
    "empty": "",
    "half a file": json.dumps(GOOD)[: len(json.dumps(GOOD)) // 2],
    "a list": "[]",
    "a number": "7",
    "a missing field": json.dumps({k: v for k, v in GOOD.items() if k != "link_gbps"}),
    "an unknown field": json.dumps(GOOD | {"colour": "green"}),
    "no bandwidth": json.dumps(GOOD | {"gather_gbps": 0}),
    "no number": json.dumps(GOOD | {"gather_gbps": "fast"}),
    "not a number": json.dumps(GOOD | {"gather_gbps": float("nan")}),
    "negative overhead": json.dumps(GOOD | {"overhead_ms": -1}),
    "one point": json.dumps(GOOD | {"recompute_tokens": [5000], "recompute_layer_ms": [1.0]}),
    "not ascending": json.dumps(GOOD | {"recompute_tokens": [5000, 8000, 8000, 15_000]}),
    "uneven": json.dumps(GOOD | {"append_layer_ms": [0.1, 0.2]}),
    "negative time": json.dumps(GOOD | {"append_layer_ms": [0.1, 0.2, -0.3, 0.4]}),
    "binary": b"\xff\xfe\x00\x81",
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_files_that_are_no_profile_are_refused(tmp_path: Path, name: str) -> None:
    content = BROKEN[name]
    file = tmp_path / "broken.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ArtefactError, match=r"broken\.json is not a hardware profile"):
        HardwareProfile.load(file)


def test_a_table_reaches_beyond_the_longest_sequence() -> None:
    table = H100.compute_table(6, 10_100)
    assert compute_ms(table, 300.0, 10_100, 10_100) == pytest.approx(cost_ms(10_100, 10_100))
    assert np.isfinite(table["recompute_ms"]).all()
