"""The Minari export: Minari itself reads back what the log holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hlem_env.errors import ArgumentError, ArtefactError
from serving_bridge.epoch_log import EpochLog
from serving_bridge.log_dataset import read_episodes
from tests.serving_bridge.made_epochs import CONFIG, entry
from train.export_minari import Args, export

minari = pytest.importorskip("minari")
pytest.importorskip("pyarrow")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs; the first has a gap behind its fifth epoch."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for epochs in (range(5), range(6, 9)), (range(4),):
        writer = EpochLog(tmp_path / "log", CONFIG)
        for epoch in (e for part in epochs for e in part):
            writer.put(entry(epoch))
        writer.close()
    return tmp_path / "log"


def test_minari_reads_what_the_log_holds(log: Path) -> None:
    export(Args(log, "hlem/test-v0", least_steps=2))
    dataset = minari.load_dataset("hlem/test-v0")
    episodes = list(dataset.iterate_episodes())
    own = read_episodes(log, "eq5", 2)
    assert [len(e.rewards) for e in episodes] == [len(e.rewards) for e in own] == [4, 2, 3]
    for theirs, mine in zip(episodes, own, strict=True):
        np.testing.assert_array_equal(theirs.observations, mine.observations)
        np.testing.assert_array_equal(theirs.actions, 4)  # +0.02, as each record says
        np.testing.assert_array_equal(theirs.rewards, mine.rewards)
        np.testing.assert_array_equal(theirs.infos["step_centi"][1:, 0], 2)
        assert theirs.truncations.tolist() == [False] * (len(theirs.rewards) - 1) + [True]
        assert not theirs.terminations.any()
        assert all(dataset.observation_space.contains(o) for o in theirs.observations)


def test_a_taken_name_a_bad_name_and_an_empty_log_are_refused(log: Path, tmp_path: Path) -> None:
    export(Args(log, "hlem/test-v0", least_steps=2))
    with pytest.raises(ArgumentError, match="not taken yet"):
        export(Args(log, "hlem/test-v0", least_steps=2))
    with pytest.raises(ArgumentError, match="a name like"):
        export(Args(log, "no version"))
    with pytest.raises(ArtefactError, match="no episode of 50 steps"):
        export(Args(log, "hlem/other-v0", least_steps=50))
