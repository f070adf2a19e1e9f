"""The epoch log: every epoch of a node, crash-safe, in a bounded folder.

`put` never waits: a thread encodes and writes. It writes all that waits in one go, has it on the disk
(fdatasync), and only then counts it in `written`. If the disk refuses, what was half written is cut
off again and the records wait; beyond `queue_bytes` new ones are dropped and counted, until there is
space again. Closed segments are compacted to Parquet where pyarrow is there, and the oldest files go
when the folder is over `retain_bytes`.

Opening a folder never loses a sound record: a torn end is cut off and told of, a damaged place is
told of and left, and a new segment is begun.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from hlem_env import mdp
from hlem_env.errors import ArtefactError, require, require_number
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats
from serving_bridge.control_loop import Entry
from serving_bridge.durable import lock_folder
from serving_bridge.log_parquet import (
    compact,
    covered,
    has_parquet,
    parquet_files,
    read_parquet,
)
from serving_bridge.log_segments import (
    MAGIC,
    encode,
    read_segment,
    segment_name,
    segment_number,
)

logger = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "hlem-epochs", 1
STATS_ARRAYS = ("latency_ms", "service_ms", "arrival_s", "is_hot")
STATS_SCALARS = tuple(field.name for field in fields(EpochStats) if field.name not in STATS_ARRAYS)
_OVERHEAD_BYTES, _REQUEST_BYTES = 4096, 49
"""Of a waiting record, about."""


@dataclass(frozen=True)
class LogSettings:
    """How large, how often, how long.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    segment_bytes: int = 16 * 2**20
    """A segment is closed when it has reached this."""
    retain_bytes: int = 8 * 2**30
    """Of the folder; the oldest files go first, the open segment never."""
    queue_bytes: int = 32 * 2**20
    """Of records that wait for the disk."""
    retry_s: float = 1.0
    """Between attempts while the disk refuses."""
    compact: bool = True
    """To Parquet, where pyarrow is installed."""

    def __post_init__(self) -> None:
        for name, low in (("segment_bytes", 1024), ("retain_bytes", 1024), ("queue_bytes", 1024)):
            value = getattr(self, name)
            require_number(name, value, whole=True)
            require(low <= value <= 2**50, name, value, f"{low} to 2^50 bytes")
        require_number("retry_s", self.retry_s)
        require(0 < self.retry_s <= 3600, "retry_s", self.retry_s, "above 0, at most 3600 seconds")
        require(isinstance(self.compact, bool), "compact", self.compact, "True or False")


class EpochLog:
    """Writes the epochs of one run into a folder that may hold earlier ones.

    Args:
        folder: made if missing. One log at a time.
        config: of the node; its rewards are logged, and it stands in each segment's header.
        settings: see there.
        about: plain values for the header: catalogue, layers, pool, what a fit needs.
        users_last: user numbers mean the same users after a restart.

    Raises:
        OSError: the folder cannot be made or read.
        ArtefactError: another process logs to it.
    """

    def __init__(
        self,
        folder: str | Path,
        config: MdpConfig,
        settings: LogSettings | None = None,
        about: dict[str, Any] | None = None,
        users_last: bool = False,
    ) -> None:
        self.folder, self.settings = Path(folder), settings or LogSettings()
        self._rewards = {name: replace(config, reward=name) for name in mdp.REWARDS}
        self.header = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "run": secrets.token_hex(8),
            "mdp_config": config.to_json(),
            "about": about or {},
            "users_last": users_last,
        }
        self.written = 0
        """Records of this run that are on the disk."""
        self.dropped = 0
        """Records of this run that found no room while the disk refused."""
        self.trouble = ""
        """Why nothing is being written, in words; empty while all is well."""
        self.cut_bytes = self.damaged_bytes = 0
        """Found at opening: torn ends that were cut off, and damage that was left."""
        self.last_record: dict[str, Any] | None = None
        """The last epoch of the run before, as `EpochRecord.to_json` gave it; None without one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(
            self.folder / ".lock", f"{folder}: another process logs its epochs there"
        )
        try:
            self._number = self._recover() + 1
        except BaseException:
            os.close(self._lock)
            raise
        self._file = -1
        self._size = 0
        self._put_bytes = 0  # written by the caller's thread alone
        self._taken_bytes = 0  # written by the log's thread alone
        self._queue: queue.SimpleQueue[Entry | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hlem-epoch-log", daemon=True)
        self._thread.start()

    def put(self, entry: Entry) -> bool:
        """Have an epoch written, soon; False if it was dropped. Never waits. One thread puts."""
        size = _size(entry)
        waiting = self._put_bytes - self._taken_bytes
        if self._stop.is_set() or waiting + size > self.settings.queue_bytes:
            self.dropped += 1
            return False
        self._put_bytes += size
        self._queue.put(entry)
        return True

    def close(self) -> None:
        """Write what waits, once, and end the thread. May be called twice."""
        if not self._stop.is_set():
            self._stop.set()
            self._queue.put(None)
        self._thread.join()

    # The log's own thread.

    def _run(self) -> None:
        waiting: deque[tuple[bytes, int]] = deque()
        retry_at_s = 0.0
        while not self._stop.is_set():
            self._fetch(waiting, self.settings.retry_s if waiting else None)
            if waiting and time.monotonic() >= retry_at_s and not self._write(waiting):
                retry_at_s = time.monotonic() + self.settings.retry_s
        self._fetch(waiting, 0.0)
        if not self._write(waiting):
            self.dropped += len(waiting)
            logger.error("%d epochs were not logged: %s", len(waiting), self.trouble)
        self._close_segment()
        os.close(self._lock)

    def _fetch(self, waiting: deque[tuple[bytes, int]], timeout_s: float | None) -> None:
        """Encode what was put; waits for the first at most so long, None for ever."""
        while True:
            try:
                entry = self._queue.get(timeout_s != 0.0, timeout_s)
            except queue.Empty:
                return
            timeout_s = 0.0
            if entry is None:
                continue
            try:
                waiting.append((self._encoded(entry), _size(entry)))
            except Exception:
                self._taken_bytes += _size(entry)
                self.dropped += 1
                logger.exception("epoch %d cannot be logged", entry.record.epoch)

    def _encoded(self, entry: Entry) -> bytes:
        values: dict[str, Any] = {"record": entry.record.to_json()}
        arrays: dict[str, Any] = {}
        if entry.stats is not None:
            stats = entry.stats
            assert entry.observation is not None
            values["rewards"] = {k: mdp.reward(stats, c) for k, c in self._rewards.items()}
            values["stats"] = {name: _plain(getattr(stats, name)) for name in STATS_SCALARS}
            arrays["observation"] = entry.observation
            arrays["latency_ms"] = stats.latency_ms.astype(np.float32)
            arrays["service_ms"] = stats.service_ms.astype(np.float32)
            arrays["arrival_s"], arrays["is_hot"] = stats.arrival_s, stats.is_hot
        if entry.served is not None:
            for name, array in vars(entry.served.requests).items():
                arrays[f"requests.{name}"] = array
        return encode(values, arrays)

    def _write(self, waiting: deque[tuple[bytes, int]]) -> bool:
        """Write all that waits; False if the disk refused: what is not on it goes on waiting."""
        while waiting:
            batch, size = [], self._size
            for data, _ in waiting:
                batch.append(data)
                size += len(data)
                if size >= self.settings.segment_bytes:
                    break
            try:
                self._append(b"".join(batch))
            except OSError as error:
                self._refused(error)
                return False
            if self.trouble:
                logger.warning("the epoch log goes on; %d epochs were dropped", self.dropped)
                self.trouble = ""
            for _ in batch:
                self._taken_bytes += waiting.popleft()[1]
            self.written += len(batch)
            if self._size >= self.settings.segment_bytes:
                self._rotate()
        return True

    def _append(self, data: bytes) -> None:
        """Bring bytes to the disk, whole or not at all."""
        if self._file < 0:
            self._open_segment()
        end = self._size + len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        os.fdatasync(self._file)
        self._size = end

    def _refused(self, error: OSError) -> None:
        if not self.trouble:
            logger.warning("the epoch log cannot be written: %s; epochs wait", error.strerror)
        self.trouble = f"the epoch log cannot be written: {error.strerror}"
        if self._file >= 0:
            # A part of a record may be in the file: nothing may follow it.
            try:
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            except OSError:
                self._close_segment()
        self._retain()

    def _open_segment(self) -> None:
        path = self.folder / segment_name(self._number)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            self._number += 1  # left by an attempt that could not be cleared away
            raise
        try:
            # Twice: without it a segment's epochs cannot be read.
            view = memoryview(MAGIC + 2 * encode({"header": self.header}, {}))
            size = len(view)
            while view:
                view = view[os.write(file, view) :]
            os.fdatasync(file)
            _sync_folder(self.folder)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        self._file, self._size = file, size

    def _close_segment(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file, self._size = -1, 0
            self._number += 1

    def _rotate(self) -> None:
        """Close the segment, compact what is closed, make room."""
        self._close_segment()
        try:
            if self.settings.compact and has_parquet():
                for path in _segments(self.folder):
                    compact(path)
        except Exception:  # of pyarrow, of the disk: the segments stay
            logger.exception("the epoch log cannot be compacted now")
        self._retain()

    def _retain(self) -> None:
        """Remove the oldest closed files while the folder is too large."""
        try:
            files = sorted([*_segments(self.folder), *parquet_files(self.folder)], key=_first)
            sizes = {path: path.stat().st_size for path in files}
            total = sum(sizes.values())
            for path in files:
                closed = path.suffix != ".log" or segment_number(path.name) != self._number
                if total <= self.settings.retain_bytes or not closed:
                    return
                path.unlink()
                total -= sizes[path]
                logger.info("the epoch log is over its limit: %s is removed", path.name)
        except OSError as error:
            logger.warning("old epochs cannot be removed: %s", error.strerror)

    # At opening.

    def _recover(self) -> int:
        """Cut torn ends off, tell of damage, finish an interrupted compaction; the last number used."""
        for path in covered(self.folder):
            path.unlink()  # its Parquet file is whole
        last = max([_first(path) for path in parquet_files(self.folder)], default=0)
        newest, newest_in = None, 0
        for path in _segments(self.folder):
            last = max(last, segment_number(path.name) or 0)
            found = read_segment(path)
            if not found.payloads:
                # Of a start that was killed, or nothing of ours: not to be cut, and not in the way.
                logger.warning("%s: no record in it; kept aside as *.bad", path)
                os.replace(path, path.with_name(f"{path.name}.bad"))
                self.damaged_bytes += found.damaged_bytes + found.torn_bytes
                continue
            if found.torn_bytes:
                logger.warning("%s: a torn end of %d bytes is cut off", path, found.torn_bytes)
                os.truncate(path, found.good_end)
                self.cut_bytes += found.torn_bytes
            if found.damaged_bytes:
                logger.warning("%s: %d bytes are damaged and left out", path, found.damaged_bytes)
                self.damaged_bytes += found.damaged_bytes
            for payload in found.payloads:
                if "record" in payload.values:
                    newest, newest_in = payload.values["record"], _first(path)
        if newest_in < last:  # all that is newer has been compacted
            newest = _last_compacted(self.folder) or newest
        self.last_record = newest
        return last


def _size(entry: Entry) -> int:
    """Bytes that a waiting entry takes, about."""
    requests = 0 if entry.stats is None else entry.stats.requests
    if entry.served is not None:
        requests = max(requests, len(entry.served.requests))
    return _OVERHEAD_BYTES + _REQUEST_BYTES * requests


def _segments(folder: Path) -> list[Path]:
    """Segments in order."""
    return sorted(path for path in folder.iterdir() if segment_number(path.name) is not None)


def _first(path: Path) -> int:
    """Number of a segment, or of the one that a Parquet file was."""
    return int(path.stem.split("-")[1])


def _last_compacted(folder: Path) -> dict[str, Any] | None:
    """The last epoch's record of the newest Parquet file; None where it cannot be read."""
    files = parquet_files(folder)
    if not files or not has_parquet():
        return None
    try:
        return read_parquet(files[-1])[-1].values.get("record")
    except ArtefactError as error:
        logger.warning("%s", error)
        return None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _sync_folder(folder: Path) -> None:
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
