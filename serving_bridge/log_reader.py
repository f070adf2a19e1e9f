"""Reads an epoch log, also one that is being written: every sound epoch of every run, in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError, require
from hlem_env.mdp import MdpConfig
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests
from serving_bridge.log_parquet import parquet_files, read_parquet
from serving_bridge.log_segments import Payload, read_segment, segment_number
from serving_bridge.status import EpochRecord

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """One start of a node."""

    name: str
    config: MdpConfig
    about: dict[str, Any]
    users_last: bool
    """User numbers mean the same users in the other runs."""


class LoggedEpoch(NamedTuple):
    """One epoch as it was logged."""

    run: Run
    record: EpochRecord
    observation: NDArray[np.float32] | None
    """[8]; None where the telemetry was at fault."""
    rewards: dict[str, float]
    """By name, of `mdp.REWARDS`; empty in the same case."""
    stats: EpochStats | None
    """Times in float32 accuracy; None in the same case."""
    requests: Requests | None
    """That completed; None where none were told of."""


def read_epochs(folder: str | Path) -> Iterator[LoggedEpoch]:
    """All epochs, oldest first. What is damaged is left out, and a warning says so.

    Raises:
        ArgumentError: no such folder.
        ArtefactError: a file cannot be read, or is of another version.
        ImportError: it holds Parquet files, and pyarrow is not there.
    """
    folder = Path(folder)
    require(folder.is_dir(), "folder", str(folder), "the folder of an epoch log")
    for number in _numbers(folder):
        run: Run | None = None
        for payload in _payloads(folder, number):
            if "header" in payload.values:
                run = _run(payload.values["header"], folder)
            elif run is None:
                logger.warning("%s: part %d has lost its header; left out", folder, number)
                break
            else:
                yield _epoch(run, payload)


def _numbers(folder: Path) -> list[int]:
    """Of the log's parts, in order; each is a segment or a Parquet file, or for a moment both."""
    segments = (segment_number(path.name) for path in folder.iterdir())
    compacted = (int(path.stem.split("-")[1]) for path in parquet_files(folder))
    return sorted({n for n in segments if n is not None} | set(compacted))


def _payloads(folder: Path, number: int) -> list[Payload]:
    name = f"epochs-{number:08d}"
    for _ in range(3):  # it may be compacted, or removed for its age, while this looks
        if (folder / f"{name}.parquet").exists():
            return read_parquet(folder / f"{name}.parquet")
        if not (folder / f"{name}.log").exists():
            continue
        try:
            found = read_segment(folder / f"{name}.log")
        except ArtefactError:
            if (folder / f"{name}.log").exists():
                raise
            continue
        if found.damaged_bytes:
            logger.warning("%s.log: %d bytes are damaged and left out", name, found.damaged_bytes)
        return found.payloads
    return []


def _run(header: dict[str, Any], folder: Path) -> Run:
    try:
        known = (header["format"], header["format_version"]) == ("hlem-epochs", 1)
        if not known:
            raise ValueError(f"format {header['format']!r}, version {header['format_version']!r}")
        config = MdpConfig(**header["mdp_config"])
        return Run(header["run"], config, dict(header["about"]), bool(header["users_last"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"{folder}: not an epoch log of this version: {error}") from error


def _epoch(run: Run, payload: Payload) -> LoggedEpoch:
    values, arrays = payload
    known = {field.name for field in fields(EpochRecord)}
    record = EpochRecord(**{k: v for k, v in values["record"].items() if k in known})
    requests = stats = None
    if "requests.user" in arrays:
        requests = Requests(
            arrays["requests.arrival_s"], arrays["requests.user"],
            arrays["requests.history_length"], arrays["requests.new_items"],
        )  # fmt: skip
    if "stats" in values:
        times: dict[str, Any] = {
            name: arrays[name].astype(np.float64) for name in ("latency_ms", "service_ms")
        }
        stats = EpochStats(
            **times, arrival_s=arrays["arrival_s"], is_hot=arrays["is_hot"], **values["stats"]
        )
    return LoggedEpoch(
        run, record, arrays.get("observation"), values.get("rewards", {}), stats, requests
    )
