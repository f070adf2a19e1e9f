"""An epoch log as a trace: the existing readers take it, and the environment runs on it."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import hlem_env
from hlem_env.errors import ArtefactError
from hlem_env.scenario import Scenario
from hlem_env.workload.trace_readers import read_trace
from serving_bridge.epoch_log import EpochLog
from serving_bridge.log_dataset import read_episodes
from serving_bridge.log_workload import read_requests, write_trace
from tests.serving_bridge.made_epochs import CONFIG, entry


def write(folder: Path, runs: int, users_last: bool = False) -> None:
    for _ in range(runs):
        log = EpochLog(folder, CONFIG, users_last=users_last)
        for epoch in range(4):
            log.put(entry(epoch))
        log.close()


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_the_trace_readers_take_it(suffix: str, tmp_path: Path) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    write(tmp_path / "log", 1)
    trace = read_requests(tmp_path / "log")
    served = [entry(i).served for i in range(4)]
    arrivals = np.concatenate([s.requests.arrival_s for s in served if s is not None])
    np.testing.assert_allclose(trace.arrival_s, arrivals - arrivals[0], atol=1e-9)
    assert (trace.users, len(trace)) == (40, 400)
    path = tmp_path / f"log.{suffix}"
    write_trace(trace, path)
    again = read_trace(path)
    np.testing.assert_allclose(again.arrival_s, trace.arrival_s, atol=1e-5)
    for name in ("user", "history_length", "new_items"):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))


def test_runs_follow_each_other_and_users_are_kept_apart_unless_they_last(tmp_path: Path) -> None:
    for users_last, users in ((False, 80), (True, 40)):
        folder = tmp_path / str(users_last)
        write(folder, 2, users_last)
        trace = read_requests(folder)
        assert (trace.users, len(trace)) == (users, 800)
        assert trace.arrival_s[400] - trace.arrival_s[399] == pytest.approx(5.0)


def test_the_environment_runs_on_it(tmp_path: Path) -> None:
    write(tmp_path / "log", 1)
    write_trace(read_requests(tmp_path / "log"), tmp_path / "log.csv")
    scenario = Scenario(
        trace=str(tmp_path / "log.csv"), trace_histories="native", time_scale=1.0, episode_epochs=3
    )
    env = gym.make(hlem_env.ENV_ID, workload=scenario)
    env.reset(seed=1)
    *_, info = env.step(3)
    assert 60 <= info["requests"] <= 140  # 20 a second, as logged
    env.close()


def test_requests_without_a_history_are_left_out_and_counted(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, CONFIG)
    one = entry(0)
    assert one.served is not None
    length = one.served.requests.history_length.copy()
    length[:7] = 0
    requests = one.served.requests.__class__(
        one.served.requests.arrival_s, one.served.requests.user, length, np.minimum(length, 10)
    )
    log.put(one._replace(served=one.served._replace(requests=requests)))
    log.close()
    trace = read_requests(tmp_path)
    assert len(trace) == 93 and trace.metadata["notes"] == [
        "requests without a history, left out: 7"
    ]


def test_a_log_without_requests_is_refused(tmp_path: Path) -> None:
    EpochLog(tmp_path, CONFIG).close()
    with pytest.raises(ArtefactError, match="no requests"):
        read_requests(tmp_path)


def test_faulty_telemetry_ends_an_episode_and_rewards_are_of_the_epoch_after(
    tmp_path: Path,
) -> None:
    log = EpochLog(tmp_path, CONFIG)
    for epoch in range(9):
        one = entry(epoch)
        log.put(one._replace(stats=None, observation=None) if epoch == 5 else one)
    log.close()
    first, second = read_episodes(tmp_path, "busy_time")
    assert (first.first_epoch, second.first_epoch) == (0, 6)
    assert [len(first.actions), len(second.actions)] == [4, 2]
    stats = entry(1).stats
    assert stats is not None
    assert first.rewards[0] == pytest.approx(-stats.mean_service_ms / CONFIG.slo_ms, rel=1e-6)
