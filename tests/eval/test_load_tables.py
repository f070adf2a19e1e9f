import json
from itertools import pairwise
from pathlib import Path

import pytest

from eval import load_tables
from eval.load_tables import SETTINGS, Args, main, name_of
from hlem_env.scenario import Scenario
from hlem_env.surrogate import load
from hlem_env.workload.regimes import LoadCurve

SHIPPED = Path(load.__file__).with_name("load_tables.json")
# Where the hot users outgrow the pool the curve is flat, and its noise shows.
NOISE = 0.01


def curve_of(setting: dict[str, object], **overrides: object) -> LoadCurve:
    scenario = Scenario.parse(setting, **overrides)
    return load.load_curve(
        scenario.regime_config(), scenario.node(), scenario.profile(), scenario.utilisation
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=name_of)
def test_every_published_setting_has_a_plausible_table(setting: dict[str, object]) -> None:
    curve = curve_of(setting)
    assert curve.source == "table"
    assert curve.hot_share == load.HOT_SHARES
    rates = curve.requests_per_s
    assert min(rates) > 0
    assert all(later > (1 - NOISE) * earlier for earlier, later in pairwise(rates))
    assert rates[-1] > 1.05 * rates[0]


@pytest.mark.parametrize(
    "overrides",
    [{"regime": "burst"}, {"kv_policy": "lru"}, {"steady_hot_share": 0.5}, {"warmup_epochs": 0}],
    ids=str,
)
def test_what_does_not_change_the_load_finds_the_same_table(overrides: dict[str, object]) -> None:
    assert curve_of({}, **overrides) == curve_of({})


def test_utilisation_scales_the_rates() -> None:
    low, usual = curve_of({}, utilisation=0.35), curve_of({})
    assert low.requests_per_s == pytest.approx([rate / 2 for rate in usual.requests_per_s])


def test_the_file_holds_the_published_settings_and_says_how_it_was_made() -> None:
    content = json.loads(SHIPPED.read_text("utf-8"))
    assert content["command"].startswith("python -m eval.load_tables")
    assert content["machine"]["cpu"]
    assert [table["setting"] for table in content["tables"]] == list(SETTINGS)


def test_the_digest_changes_with_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = load.tables_digest()
    assert before == load.tables_digest()
    changed = json.loads(SHIPPED.read_text("utf-8"))
    changed["tables"][0]["requests_per_s"][0] += 1
    (tmp_path / SHIPPED.name).write_text(json.dumps(changed), encoding="utf-8")
    monkeypatch.setattr(load.resources, "files", lambda package: tmp_path)
    load._tables.cache_clear()
    try:
        assert load.tables_digest() != before
    finally:
        load._tables.cache_clear()


def test_a_run_keeps_what_is_there_and_simulates_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Settings that are no longer published go."""
    content = json.loads(SHIPPED.read_text("utf-8"))
    kept, *_, gone = content["tables"]
    kept["requests_per_s"][0] = 123.0
    file = tmp_path / "tables.json"
    file.write_text(json.dumps({"tables": [gone, kept]}), encoding="utf-8")
    short = {"epoch_seconds": 0.05, "warmup_epochs": 0}
    monkeypatch.setattr(load_tables, "SETTINGS", ({}, short))
    assert main(Args(output=file, jobs=1)) == 0
    first, second = json.loads(file.read_text("utf-8"))["tables"]
    assert first == kept
    assert second["setting"] == short
    assert second["key"] == load_tables.key_of(short)
    assert len(second["requests_per_s"]) == len(load.HOT_SHARES)
