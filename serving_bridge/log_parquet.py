"""Closed segments of the epoch log as Parquet: one row an epoch, needs pyarrow (extra `parquet`).

The plain fields of the epoch's record are columns of their own, `json` is the record as it was logged,
and each array is a list. The segment's header stands in the file's metadata under `hlem`.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError
from serving_bridge.durable import replace_file
from serving_bridge.log_segments import Payload, read_segment

logger = logging.getLogger(__name__)

_ARRAYS = {
    "observation": "f4",
    "latency_ms": "f4",
    "service_ms": "f4",
    "arrival_s": "f8",
    "is_hot": "b1",
    "requests.arrival_s": "f8",
    "requests.user": "i8",
    "requests.history_length": "i4",
    "requests.new_items": "i4",
}


def has_parquet() -> bool:
    """Whether pyarrow is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def parquet_files(folder: Path) -> list[Path]:
    """Compacted segments, in order."""
    return sorted(folder.glob("epochs-" + 8 * "[0-9]" + ".parquet"))


def covered(folder: Path) -> list[Path]:
    """Segments whose Parquet file is there, as after a compaction that was interrupted."""
    segments = (path.with_suffix(".log") for path in parquet_files(folder))
    return [path for path in segments if path.exists()]


def compact(segment: Path) -> Path | None:
    """Replace a closed segment by its Parquet file.

    None if it holds no epoch, and it is removed; None also if its header is lost, and it stays.

    At every moment the epochs are in one of the two or in both, and readers take the Parquet file.

    Raises:
        OSError: the disk refuses; the segment stays.
    """
    import pyarrow
    import pyarrow.parquet

    found = read_segment(segment)
    headers = [p.values["header"] for p in found.payloads if "header" in p.values]
    epochs = [p for p in found.payloads if "record" in p.values]
    if epochs and not headers:
        return None
    if found.damaged_bytes or found.torn_bytes:
        lost = found.damaged_bytes + found.torn_bytes
        logger.warning("%s: %d damaged bytes are not kept in Parquet", segment, lost)
    path = segment.with_suffix(".parquet")
    if epochs:
        columns: dict[str, Any] = _plain_columns(epochs)
        columns["json"] = [json.dumps(epoch.values) for epoch in epochs]
        for name, kind in _ARRAYS.items():
            columns[name] = _lists([epoch.arrays.get(name) for epoch in epochs], kind)
        table = pyarrow.table(columns)
        header = json.dumps(headers[0])
        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(
            table.replace_schema_metadata({"hlem": header}), sink, compression="zstd"
        )
        replace_file(path, sink.getvalue().to_pybytes())
    segment.unlink()
    return path if epochs else None


def read_parquet(path: Path) -> list[Payload]:
    """Header and epochs, as `read_segment` gives them.

    Raises:
        ArtefactError: it cannot be read as what `compact` writes.
        ImportError: without pyarrow.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = "this epoch log holds Parquet files: pip install 'hlem[parquet]'"
        raise ImportError(hint) from error
    try:
        table = pyarrow.parquet.read_table(path)
        payloads = [Payload({"header": json.loads(table.schema.metadata[b"hlem"])}, {})]
        arrays = {
            name: _split(table[name].combine_chunks(), kind) for name, kind in _ARRAYS.items()
        }
        for i, text in enumerate(table["json"].to_pylist()):
            own = {name: values[i] for name, values in arrays.items()}
            payloads.append(
                Payload(json.loads(text), {k: v for k, v in own.items() if v is not None})
            )
    except (pyarrow.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise ArtefactError(f"{path}: not a part of an epoch log: {error}") from error
    return payloads


def _plain_columns(epochs: list[Payload]) -> dict[str, list[Any]]:
    first = epochs[0].values["record"]
    names = [name for name, value in first.items() if isinstance(value, str | int | float | None)]
    return {name: [epoch.values["record"][name] for epoch in epochs] for name in names}


def _lists(arrays: list[NDArray[Any] | None], kind: str) -> Any:
    """A column of lists; None is null."""
    import pyarrow

    dtype = np.dtype(kind)
    sizes = [0 if array is None else array.size for array in arrays]
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    missing = np.array([array is None for array in arrays] + [False])
    values = [array for array in arrays if array is not None]
    flat = np.concatenate(values).astype(dtype) if values else np.empty(0, dtype)
    return pyarrow.ListArray.from_arrays(
        pyarrow.array(offsets, pyarrow.int32(), mask=missing), pyarrow.array(flat)
    )


def _split(column: Any, kind: str) -> list[NDArray[Any] | None]:
    """The column's lists as arrays."""
    flat = column.flatten().to_numpy(zero_copy_only=False).astype(kind)
    sizes = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part if there else None for part, there in zip(parts, valid, strict=True)]
