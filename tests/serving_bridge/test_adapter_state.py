import json
from pathlib import Path

import numpy as np
import pytest

from serving_bridge import adapter_state
from serving_bridge.adapter import AdapterSettings, OnlineAdapter, Sample
from serving_bridge.adapter_state import STATE_FILE, restore_state, save_state
from serving_bridge.cache_worth import Seen
from tests.serving_bridge.proposals import propose

POLICY = "ab" * 32


def learnt(epochs: int = 12, seed: int = 0) -> OnlineAdapter:
    adapter, rng = OnlineAdapter(AdapterSettings(steps=8), seed=seed), np.random.default_rng(seed)
    for _ in range(epochs):
        x, applied, mean = propose(adapter, rng.random(4))
        told = Seen(0.5 + 0.1 * rng.random(), 0.4, 200, 800, 0.9, 1.5, 3.5, 0.1)
        adapter.learn(Sample(x, applied, mean, applied, 1.0, told))
    return adapter


def tensors_of(folder: Path) -> Path:
    (file,) = folder.glob("adapter-*.safetensors")
    return file


def same(one: OnlineAdapter, other: OnlineAdapter) -> bool:
    return (
        all(np.array_equal(a, b) for a, b in zip(one.snapshot, other.snapshot, strict=True))
        and np.array_equal(one.learner.replay, other.learner.replay)
        and one.learner.seen == other.learner.seen
        and one.worth == other.worth
        and np.array_equal(one.learner.worth.numbers(), other.learner.worth.numbers())
    )


def test_goes_on_where_it_was(tmp_path: Path) -> None:
    adapter, again = learnt(), OnlineAdapter(AdapterSettings(steps=8), seed=5)
    save_state(adapter, tmp_path / "new", POLICY)
    assert restore_state(again, tmp_path / "new", POLICY)
    assert same(adapter, again)
    again.learn(Sample((0.5,) * 5, 0.01, 0.0, 3.0, 1.0))
    assert not same(adapter, again)


def test_no_state_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not restore_state(OnlineAdapter(), tmp_path, POLICY)
    assert not caplog.records


def test_a_later_state_replaces_the_earlier(tmp_path: Path) -> None:
    save_state(learnt(5), tmp_path, POLICY)
    save_state(learnt(9), tmp_path, POLICY)
    assert len(list(tmp_path.iterdir())) == 2
    again = OnlineAdapter(AdapterSettings(steps=8))
    assert restore_state(again, tmp_path, POLICY)
    assert same(again, learnt(9))


@pytest.mark.parametrize("files_written", [0, 1])
def test_a_fault_while_saving_leaves_the_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_written: int
) -> None:
    save_state(learnt(5), tmp_path, POLICY)
    replace, calls = adapter_state.replace_file, []

    def failing(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) > files_written:
            raise OSError(28, "no space left")
        replace(path, data)

    monkeypatch.setattr(adapter_state, "replace_file", failing)
    with pytest.raises(OSError, match="no space"):
        save_state(learnt(9), tmp_path, POLICY)
    again = OnlineAdapter(AdapterSettings(steps=8))
    assert restore_state(again, tmp_path, POLICY)
    assert same(again, learnt(5))


def damage(folder: Path, how: str) -> None:
    about, tensors = folder / STATE_FILE, tensors_of(folder)
    if how == "cut tensors":
        tensors.write_bytes(tensors.read_bytes()[:-9])
    elif how == "no tensors":
        tensors.unlink()
    elif how == "cut json":
        about.write_text(about.read_text()[:40])
    elif how == "not an object":
        about.write_text("[]")
    elif how == "a path":
        about.write_text(json.dumps(json.loads(about.read_text()) | {"tensors": "../x"}))
    elif how == "version":
        about.write_text(json.dumps(json.loads(about.read_text()) | {"format_version": 1}))
    elif how == "huge":
        about.write_bytes(b" " * (2 << 20))


@pytest.mark.parametrize(
    "how", ["cut tensors", "no tensors", "cut json", "not an object", "a path", "version", "huge"]
)
def test_a_bad_state_is_kept_aside_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    save_state(learnt(), tmp_path, POLICY)
    damage(tmp_path, how)
    adapter = OnlineAdapter(seed=3)
    assert not restore_state(adapter, tmp_path, POLICY)
    assert same(adapter, OnlineAdapter(seed=3))
    assert "starts from zero" in caplog.text
    assert (tmp_path / f"{STATE_FILE}.bad").exists()
    assert not (tmp_path / STATE_FILE).exists()
    save_state(learnt(), tmp_path, POLICY)
    assert restore_state(OnlineAdapter(), tmp_path, POLICY)


def test_a_state_of_another_policy_or_bound_is_not_taken(tmp_path: Path) -> None:
    save_state(learnt(), tmp_path, POLICY)
    assert not restore_state(OnlineAdapter(), tmp_path, "cd" * 32)
    save_state(learnt(), tmp_path, POLICY)
    assert not restore_state(OnlineAdapter(AdapterSettings(bound=0.01)), tmp_path, POLICY)


def test_weights_that_are_no_numbers_are_not_taken(tmp_path: Path) -> None:
    adapter = learnt()
    adapter.learner.replay[0, 0] = np.nan
    save_state(adapter, tmp_path, POLICY)
    assert not restore_state(OnlineAdapter(), tmp_path, POLICY)
