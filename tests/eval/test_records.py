import json
from dataclasses import replace
from pathlib import Path

import pytest

from agents.static import Static
from agents.working_set import WorkingSetRule
from eval import records
from eval import replay as command
from eval.records import Record, replay, run_record
from hlem_env.errors import ArtefactError
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario

SCENARIO = Scenario(regime="burst", episode_epochs=6, warmup_epochs=2, epoch_seconds=0.5)
CONFIG = MdpConfig(epoch_seconds=0.5, features="working_set")


@pytest.fixture(scope="module")
def record() -> Record:
    """A controller that moves, over six short epochs."""
    return run_record(WorkingSetRule(), SCENARIO.build(), SCENARIO, CONFIG, 7)


def test_a_record_survives_saving(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "new" / "7.json"
    record.save(path)
    assert Record.load(path) == record
    assert [p.name for p in path.parent.iterdir()] == ["7.json"]


def test_a_record_says_what_happened(record: Record) -> None:
    assert (record.controller, record.seed) == ("working-set rule", 7)
    assert Scenario.parse(record.scenario) == SCENARIO
    assert MdpConfig(**record.mdp_config) == CONFIG
    columns = (record.alpha_centi, record.p99_ms, record.qos, record.requests, record.hot_share)
    assert {len(column) for column in columns} == {6}
    assert len(set(record.alpha_centi)) > 1
    assert all(0 <= q <= 1 for q in record.qos)


def test_figures_by_hand(record: Record) -> None:
    made = replace(
        record, alpha_centi=[50, 44, 46], p99_ms=[10.0, 20.0, 60.0], qos=[1.0, 0.5, 0.0],
        requests=[100, 300, 0], utilisation=[0.9, 0.9, 0.9], backlog=0,
    )  # fmt: skip
    assert made.movement == pytest.approx(0.08)
    assert made.mean_p99_ms == pytest.approx(30)
    assert made.mean_qos == pytest.approx(250 / 400)
    assert not made.saturated
    assert replace(made, utilisation=[0.99, 0.94, 0.95]).saturated
    assert replace(made, backlog=134).saturated  # an epoch has 133.3 requests on average
    assert not replace(made, backlog=133).saturated


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not a record"),
        ("{", "is not a record"),
        ("[1]", "format 1"),
        ("{}", "format 1"),
        ('{"format": 2}', "format 1"),
        ('{"format": 1}', "missing"),
        ('{"format": 1, "unknown": 2}', "unknown"),
    ],
)
def test_something_else_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ArtefactError, match=reason) as caught:
        Record.load(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtefactError, match="not a record"):
        Record.load(path)


def test_a_missing_record_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ArtefactError, match="cannot read"):
            Record.load(path)


def test_a_cut_record_is_refused(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    record.save(path)
    text = path.read_text()
    for size in (len(text) // 2, len(text) - 1):
        path.write_text(text[:size])
        with pytest.raises(ArtefactError):
            Record.load(path)


def test_a_large_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    with path.open("wb") as file:
        file.truncate(records.SIZE_LIMIT + 1)  # sparse
    monkeypatch.setattr(Path, "read_text", lambda *_: pytest.fail("it was read"))
    with pytest.raises(ArtefactError, match="larger than"):
        Record.load(path)


def test_a_record_replays_to_itself(record: Record, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    record.save(path)
    again, differences = replay(Record.load(path))
    assert differences == []
    assert again == record


@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"p99_ms": [1.0] * 6}, {"p99_ms"}),
        ({"workload_digest": "0"}, {"workload_digest"}),
        ({"load_tables": "0"}, {"load_tables"}),
        ({"backlog": 10_000}, {"backlog"}),
        ({"requests": [1, 2, 3]}, {"requests"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_replay_names_what_was_altered(
    record: Record, change: dict[str, object], differing: set[str]
) -> None:
    assert set(replay(replace(record, **change))[1]) == differing  # type: ignore[arg-type]


def test_replay_of_other_requests_or_alphas_differs(record: Record) -> None:
    assert {"requests", "p99_ms"} <= set(replay(replace(record, seed=8))[1])
    other = replace(record, alpha_centi=[90] * 6)
    assert "emb_hit" in replay(other)[1]


def test_the_command_says_which_record_differs(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, result = (tmp_path / name for name in ("good.json", "bad.json", "out.json"))
    record.save(good)
    replace(record, qos=[0.0] * 6).save(bad)
    assert command.main(command.Args((good,))) == 0
    assert command.main(command.Args((good, bad), json=result)) == 1
    assert "bad.json: differs in qos" in capsys.readouterr().out
    differences = [row["differences"] for row in json.loads(result.read_text())["records"]]
    assert differences == [[], ["qos"]]


def test_a_static_split_stays(record: Record) -> None:
    held = run_record(Static(50), SCENARIO.build(), SCENARIO, CONFIG, 7)
    assert held.alpha_centi == [50] * 6
    assert held.movement == 0
    assert held.requests == record.requests
