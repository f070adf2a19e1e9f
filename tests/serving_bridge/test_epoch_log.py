"""The epoch log: nothing acknowledged is lost, whatever is done to the process or the file."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlem_env import mdp
from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.mdp import MdpConfig
from serving_bridge import epoch_log
from serving_bridge.control_loop import Entry
from serving_bridge.epoch_log import EpochLog, LogSettings
from serving_bridge.log_parquet import compact, parquet_files
from serving_bridge.log_reader import read_epochs
from serving_bridge.log_segments import MAGIC, encode, read_segment, scan
from tests.serving_bridge.made_epochs import CONFIG, entry

SMALL = LogSettings(segment_bytes=20_000, retry_s=0.02)


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


def write(folder: Path, count: int, settings: LogSettings | None = None, first: int = 0) -> None:
    log = EpochLog(folder, CONFIG, settings, about={"tables": 10})
    assert all(log.put(entry(epoch)) for epoch in range(first, first + count))
    log.close()
    assert (log.written, log.dropped) == (count, 0)


def numbers(folder: Path) -> list[int]:
    return [epoch.record.epoch for epoch in read_epochs(folder)]


def same(logged: object, put: Entry) -> None:
    assert logged.record == put.record
    assert put.stats is not None and put.served is not None
    np.testing.assert_array_equal(logged.observation, put.observation)
    np.testing.assert_array_equal(logged.requests.user, put.served.requests.user)
    np.testing.assert_array_equal(logged.requests.arrival_s, put.served.requests.arrival_s)
    np.testing.assert_array_equal(logged.stats.is_hot, put.stats.is_hot)
    np.testing.assert_allclose(logged.stats.latency_ms, put.stats.latency_ms, rtol=1e-6)
    assert logged.stats.working_set == put.stats.working_set
    assert logged.rewards["eq5"] == pytest.approx(mdp.reward(put.stats, CONFIG))


@pytest.mark.parametrize("compacted", [False, True])
def test_what_was_put_is_read_back(tmp_path: Path, compacted: bool) -> None:
    if compacted:
        pytest.importorskip("pyarrow")
    write(tmp_path, 12, LogSettings(segment_bytes=20_000, compact=compacted))
    assert bool(parquet_files(tmp_path)) == compacted
    for epoch, logged in enumerate(read_epochs(tmp_path)):
        same(logged, entry(epoch))
    assert epoch == 11


def test_an_epoch_without_telemetry_is_logged_without_stats(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, CONFIG)
    log.put(entry(0)._replace(stats=None, observation=None))
    log.put(entry(1)._replace(stats=None, observation=None, served=None))
    log.close()
    first, second = read_epochs(tmp_path)
    assert first.stats is None and first.observation is None and first.rewards == {}
    assert first.requests is not None and second.requests is None


def test_a_restart_begins_a_new_run_and_tells_of_the_last_epoch(tmp_path: Path) -> None:
    write(tmp_path, 3)
    log = EpochLog(tmp_path, CONFIG)
    assert log.last_record is not None and log.last_record["epoch"] == 2
    log.put(entry(0))
    log.close()
    assert numbers(tmp_path) == [0, 1, 2, 0]
    assert len({epoch.run.name for epoch in read_epochs(tmp_path)}) == 2


@pytest.mark.parametrize("damaged", [False, True])
def test_the_last_epoch_is_told_where_all_have_been_compacted(
    tmp_path: Path, damaged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pyarrow")
    write(tmp_path, 3, LogSettings(compact=False))
    write(tmp_path, 2, LogSettings(compact=False), first=3)
    path = compact(tmp_path / "epochs-00000002.log")
    if damaged:
        path.write_bytes(b"PAR1 nothing PAR1")
    log = EpochLog(tmp_path, CONFIG)
    log.close()
    assert log.last_record["epoch"] == (2 if damaged else 4)
    assert ("epochs-00000002.parquet" in caplog.text) == damaged


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, CONFIG)
    with pytest.raises(ArtefactError, match="another process logs"):
        EpochLog(tmp_path, CONFIG)
    log.close()
    EpochLog(tmp_path, CONFIG).close()


WRITER = """
import sys, itertools, time
from dataclasses import replace
from serving_bridge.epoch_log import EpochLog, LogSettings
from tests.serving_bridge.made_epochs import CONFIG, entry
log = EpochLog(sys.argv[1], CONFIG, LogSettings(segment_bytes=60_000))
for epoch in itertools.count():
    made = entry(epoch % 16)
    while not log.put(made._replace(record=replace(made.record, epoch=epoch))):
        pass
    time.sleep(0.001)
    print(log.written, flush=True)
"""


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as writer:  # fmt: skip
        assert writer.stdout is not None
        acknowledged = 0
        while acknowledged < 60:
            acknowledged = int(writer.stdout.readline())
        writer.kill()
        acknowledged = max([acknowledged, *map(int, writer.stdout.read().split()[:-1])])
    EpochLog(tmp_path, CONFIG).close()
    found = numbers(tmp_path)
    assert len(found) >= acknowledged
    assert found == list(range(len(found)))


@given(cut=st.integers(1, 10**6))
def test_a_torn_end_is_cut_and_told(cut: int) -> None:
    whole = [encode({"record": i}, {"x": np.arange(i)}) for i in range(4)]
    data = MAGIC + b"".join(whole)
    cut = len(data) - cut % (len(whole[3]) - 1) - 1
    found = scan(data[:cut])
    assert [p.values["record"] for p in found.payloads] == [0, 1, 2]
    assert (found.good_end, found.torn_bytes) == (len(data) - len(whole[3]), cut - found.good_end)
    assert not found.damaged_bytes


def test_a_torn_end_is_cut_at_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 3)
    path = tmp_path / "epochs-00000001.log"
    sound = path.read_bytes()
    path.write_bytes(sound + sound[8:500])
    log = EpochLog(tmp_path, CONFIG)
    log.close()
    assert log.cut_bytes > 0 and "torn end" in caplog.text
    assert path.read_bytes()[: len(sound)] == sound and numbers(tmp_path) == [0, 1, 2]


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_costs_one_record(place: int, bit: int) -> None:
    whole = [encode({"record": i}, {"x": np.arange(20) + i}) for i in range(5)]
    data = bytearray(MAGIC + b"".join(whole))
    place = place % len(data)
    data[place] ^= 1 << bit
    found = [p.values["record"] for p in scan(bytes(data)).payloads]
    hit = -1
    for i in range(5):
        begin = len(MAGIC) + sum(map(len, whole[:i]))
        if begin <= place < begin + len(whole[i]):
            hit = i
    assert found == [i for i in range(5) if i != hit]


@given(junk=st.binary(max_size=300))
def test_any_bytes_are_read_without_an_error(junk: bytes) -> None:
    record = encode({"record": 1}, {})
    assert [p.values["record"] for p in scan(MAGIC + junk + record).payloads][-1:] == [1]
    scan(junk)


def test_damage_in_the_middle_is_told_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 3)
    path = tmp_path / "epochs-00000001.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    log = EpochLog(tmp_path, CONFIG)
    log.close()
    assert log.damaged_bytes > 0 and not log.cut_bytes and path.read_bytes() == data
    assert numbers(tmp_path) == [0, 2] and "damaged" in caplog.text


def test_a_damaged_header_costs_no_epoch(tmp_path: Path) -> None:
    write(tmp_path, 3, LogSettings(compact=False))
    path = tmp_path / "epochs-00000001.log"
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    assert numbers(tmp_path) == [0, 1, 2]


def test_a_file_without_records_is_kept_aside(tmp_path: Path) -> None:
    (tmp_path / "epochs-00000004.log").write_bytes(MAGIC + b"half a head")
    write(tmp_path, 1)
    assert (tmp_path / "epochs-00000004.log.bad").read_bytes() == MAGIC + b"half a head"
    assert numbers(tmp_path) == [0]


class FullDisk:
    """Stands for os.write: takes a part of the bytes, then says that there is no space."""

    def __init__(self) -> None:
        self.full = False

    def __call__(self, file: int, data: memoryview) -> int:
        if not self.full:
            return os.write(file, data)
        if len(data) > 100:
            return os.write(file, data[:100])
        raise OSError(errno.ENOSPC, "No space left on device")


class Os:
    """The os module with another write."""

    def __init__(self, write: FullDisk) -> None:
        self.write = write

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)


def test_a_full_disk_drops_and_counts_and_is_got_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk()
    monkeypatch.setattr(epoch_log, "os", Os(disk))
    log = EpochLog(tmp_path, CONFIG, LogSettings(queue_bytes=60_000, retry_s=0.01))
    log.put(entry(0))
    wait_until(lambda: log.written == 1)
    disk.full = True
    taken = [epoch for epoch in range(1, 30) if log.put(entry(epoch))]
    wait_until(lambda: "No space left" in log.trouble)
    assert 1 <= len(taken) < 29 and log.dropped == 29 - len(taken)
    disk.full = False
    wait_until(lambda: log.written == 1 + len(taken))
    assert log.trouble == "" and f"{log.dropped} epochs were dropped" in caplog.text
    assert log.put(entry(40))
    log.close()
    assert numbers(tmp_path) == [0, *taken, 40]
    assert read_segment(tmp_path / "epochs-00000001.log").damaged_bytes == 0


def test_a_disk_that_stays_full_does_not_hold_up_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk()
    disk.full = True
    monkeypatch.setattr(epoch_log, "os", Os(disk))
    log = EpochLog(tmp_path, CONFIG, SMALL)
    log.put(entry(0))
    log.close()
    assert (log.written, log.dropped) == (0, 1)
    assert numbers(tmp_path) == []


def test_the_oldest_files_go_first(tmp_path: Path) -> None:
    settings = LogSettings(segment_bytes=20_000, retain_bytes=100_000, compact=False)
    write(tmp_path, 60, settings)
    found = numbers(tmp_path)
    assert found[-1] == 59 and found == list(range(found[0], 60)) and found[0] > 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 120_000


def test_an_interrupted_compaction_shows_no_epoch_twice(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write(tmp_path, 3, LogSettings(compact=False))
    segment = tmp_path / "epochs-00000001.log"
    before = segment.read_bytes()
    compact(segment)
    segment.write_bytes(before)  # as if the last step had not happened
    assert numbers(tmp_path) == [0, 1, 2]
    EpochLog(tmp_path, CONFIG).close()
    assert not segment.exists() and numbers(tmp_path) == [0, 1, 2]


def test_parquet_reads_with_other_tools(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write(tmp_path, 3, LogSettings(compact=False))
    path = compact(tmp_path / "epochs-00000001.log")
    table = parquet.read_table(path)
    assert table["epoch"].to_pylist() == [0, 1, 2]
    assert table["p99_ms"].to_pylist() == [entry(i).record.p99_ms for i in range(3)]
    assert len(table["latency_ms"][1]) == entry(1).record.requests


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "epochs-00000001.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(ArtefactError, match=r"epochs-00000001\.parquet"):
        numbers(tmp_path)


def test_put_of_what_is_no_json_is_counted(tmp_path: Path) -> None:
    log = EpochLog(tmp_path, MdpConfig())
    bad = entry(0)
    log.put(bad._replace(record=bad.record.__class__(**{**bad.record.to_json(), "p99_ms": np.nan})))
    log.put(entry(1))
    log.close()
    assert log.dropped == 1 and numbers(tmp_path) == [1]


def test_no_folder_and_settings_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="the folder of an epoch log"):
        list(read_epochs(tmp_path / "none"))
    with pytest.raises(ArgumentError, match="queue_bytes"):
        LogSettings(queue_bytes=0)
