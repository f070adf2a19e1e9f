"""Readers of public trace formats: files become `traces.Trace`s, block by block.

movietweetings
    `user::item::rating::unix_s`. A rating is a request; its history is the user's ratings so far.
taobao-userbehavior
    `user,item,category,behaviour,unix_s`. Every event is a request, whatever its behaviour, and
    also several of a user in one second; its history is the user's events so far.
video-games
    `user item`, in each user's order. A line is a request at a drawn time; its history is the
    user's lines so far.
books-sets
    `user item item ...`. A user makes as many requests as the list is long, at drawn times; the
    history is the whole list each time.
mooncake
    A JSON object a line: timestamp (ms), input_length, hash_ids. The first two blocks of a prompt
    are the user, the prompt is the history; what it shares with the user's last prompt is not new.
csv
    A header, then a request a line, with the columns arrival_s, user_id, history_length, new_items
    in any order; others are passed over. Need not be sorted.
parquet
    The same columns; needs pyarrow.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArgumentError, TraceFormatError, require, require_choice
from hlem_env.workload.traces import Longs, Trace, top_share, visits_before, zipf_exponent

LINE_LIMIT_BYTES = 2**20
"""A longer line is a bad line."""
REASONS_KEPT = 5
MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_STEP_S = 3.0
"""The recorded timestamps are multiples of this."""
DRAWN_DURATION_S = 31 * 86_400.0
"""Seconds over which sets without times are spread: the hourly curve's 31 days."""
COLUMNS = ("arrival_s", "user_id", "history_length", "new_items")

ID_LIMIT = 10**18 - 1
TIME_LIMIT = 2**32 - 1
TOKEN_LIMIT = 2**31 - 1
WORD = -1
"""Stands for a limit where a field is one of BEHAVIOURS."""
BEHAVIOURS = ("pv", "cart", "fav", "buy")


@dataclass(frozen=True)
class _Layout:
    """Lines of a fixed number of fields: whole numbers up to a limit, or a behaviour."""

    separator: str
    limits: dict[str, int]

    def __str__(self) -> str:
        return self.separator.join(self.limits)


LAYOUTS = {
    "movietweetings": _Layout(
        "::", {"user": ID_LIMIT, "item": ID_LIMIT, "rating": 10, "unix_s": TIME_LIMIT}
    ),
    "taobao-userbehavior": _Layout(
        ",",
        {
            "user": ID_LIMIT,
            "item": ID_LIMIT,
            "category": ID_LIMIT,
            "behaviour": WORD,
            "unix_s": TIME_LIMIT,
        },
    ),
    "video-games": _Layout(" ", {"user": ID_LIMIT, "item": ID_LIMIT}),
}


@dataclass
class _Problems:
    """What happens to bad lines: the first one raises, or all are counted."""

    path: Path
    skip: bool
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def add(self, line: int, reason: str) -> None:
        error = TraceFormatError(self.path, line, reason)
        if not self.skip:
            raise error
        self.count += 1
        if len(self.reasons) < REASONS_KEPT:
            self.reasons.append(f"line {line}: {reason}")


@dataclass(frozen=True)
class _Block:
    """Whole lines of a file: bytes `starts[i]` to `ends[i]` are line `first_line + i`."""

    data: bytes
    first_line: int
    starts: Longs
    ends: Longs

    def line(self, i: int) -> bytes:
        return self.data[self.starts[i] : self.ends[i]]

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        for i in range(self.starts.size):
            yield self.first_line + i, self.line(i)


def _blocks(path: Path, block_bytes: int) -> Iterator[_Block]:
    """The file in blocks of whole lines, without line ends and byte order mark.

    Of a line over the limit only the start may come, still longer than allowed.
    """
    first_line, rest = 1, b""
    with path.open("rb") as file:
        if file.read(3) != b"\xef\xbb\xbf":
            file.seek(0)
        while True:
            chunk = file.read(block_bytes)
            if not chunk and not rest:
                return
            data = rest + chunk if chunk else rest + b"\n"
            cut = data.rfind(b"\n") + 1
            rest = data[cut:][: LINE_LIMIT_BYTES + 2]
            if not cut:
                continue
            data = data[:cut]
            text = np.frombuffer(data, np.uint8)
            ends = np.flatnonzero(text == ord("\n"))
            starts = np.concatenate(([0], ends[:-1] + 1))
            carriage_return = (ends > starts) & (text[np.maximum(ends - 1, 0)] == ord("\r"))
            yield _Block(data, first_line, starts, ends - carriage_return)
            first_line += ends.size


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:30] + "..." + text[-7:]


def _text(line: bytes) -> str:
    """The line as text. ValueError, with the reason, where it is none."""
    if len(line) > LINE_LIMIT_BYTES:
        raise ValueError("the line is longer than the 1 MiB allowed")
    if not line.strip():
        raise ValueError("the line is empty; allowed: fields")
    if b"\0" in line:
        raise ValueError(f"NUL byte at column {line.index(0) + 1}; allowed: text")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        bad = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise ValueError(f"{bad} is not UTF-8; allowed: UTF-8 text") from None


def _whole(name: str, text: str, limit: int, least: int = 0) -> int:
    """A whole number from `least` to `limit`. ValueError, with the reason, otherwise."""
    allowed = f"allowed: a whole number from {least} to {limit}"
    if not re.fullmatch(r"-?[0-9]+", text):
        raise ValueError(f"{name}={_short(text)} is not an integer; {allowed}")
    if len(text) > 18 or not least <= int(text) <= limit:
        raise ValueError(f"{name}={_short(text)} is out of range; {allowed}")
    return int(text)


def _seconds(name: str, text: str) -> float:
    """A time. ValueError, with the reason, where it is none."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e12 or "_" in text:
        raise ValueError(f"{name}={_short(text)}; allowed: seconds from 0 to 1e12")
    return value


def _fields(line: str, separator: str, count: int, layout: str) -> list[str]:
    fields = line.split(separator)
    if len(fields) != count:
        wrong = f"{len(fields)} field{'s' * (len(fields) != 1)} in {_short(line)}"
        raise ValueError(f"{wrong}; allowed: {count}, {layout}")
    return fields


@numba.njit(cache=True, nogil=True)
def _parse(
    data: NDArray[np.uint8],
    starts: Longs,
    ends: Longs,
    separator: int,
    width: int,
    limits: Longs,
    values: Longs,
    bad: NDArray[np.bool_],
) -> None:
    """Read lines of fields into `values` [lines, fields]; mark in `bad` those that do not fit."""
    for i in range(starts.size):
        at, end = starts[i], ends[i]
        ok = True
        for f in range(limits.size):
            if f > 0:
                for _ in range(width):
                    ok = ok and at < end and data[at] == separator
                    at += 1
            value = 0
            begin = at
            if limits[f] < 0:
                while at < end and data[at] != separator and at - begin < 7:
                    value = value * 256 + data[at]
                    at += 1
            else:
                while at < end and 48 <= data[at] <= 57 and at - begin < 18:
                    value = value * 10 + data[at] - 48
                    at += 1
                ok = ok and at > begin and value <= limits[f]
            values[i, f] = value
            if not ok:
                break
        bad[i] = not (ok and at == end)


def _columns(
    path: Path, layout: _Layout, problems: _Problems, block_bytes: int
) -> dict[str, Longs]:
    """The file's fields by name, [lines] each."""
    limits = np.array(list(layout.limits.values()), np.int64)
    words = [int.from_bytes(word.encode()) for word in BEHAVIOURS]
    parts: list[Longs] = []
    for block in _blocks(path, block_bytes):
        values = np.empty((block.starts.size, limits.size), np.int64)
        bad = np.empty(block.starts.size, np.bool_)
        _parse(
            np.frombuffer(block.data, np.uint8), block.starts, block.ends,
            ord(layout.separator[0]), len(layout.separator), limits, values, bad,
        )  # fmt: skip
        for f in np.flatnonzero(limits == WORD):
            bad |= ~np.isin(values[:, f], words)
        bad |= block.ends - block.starts > LINE_LIMIT_BYTES
        for i in np.flatnonzero(bad).tolist():
            problems.add(block.first_line + i, _why_bad(block.line(i), layout))
        parts.append(values[~bad])
    rows = np.concatenate(parts) if parts else np.empty((0, limits.size), np.int64)
    return {name: rows[:, f] for f, name in enumerate(layout.limits)}


def _why_bad(line: bytes, layout: _Layout) -> str:
    """Why the line does not fit the layout."""
    try:
        fields = _fields(_text(line), layout.separator, len(layout.limits), str(layout))
        for (name, limit), value in zip(layout.limits.items(), fields, strict=True):
            if limit == WORD:
                if value not in BEHAVIOURS:
                    return f"{name}={_short(value)}; allowed: {', '.join(BEHAVIOURS)}"
            else:
                _whole(name, value, limit)
    except ValueError as error:
        return str(error)
    return f"{_short(line.decode())} does not fit; allowed: {layout}"


@dataclass(frozen=True)
class _Source:
    """A file to read and how."""

    path: Path
    problems: _Problems
    block_bytes: int
    rng: np.random.Generator
    hourly: NDArray[np.float64] | None
    duration_s: float

    def lines(self) -> Iterator[tuple[int, bytes]]:
        for block in _blocks(self.path, self.block_bytes):
            yield from block

    def columns(self, format: str) -> dict[str, Longs]:
        return _columns(self.path, LAYOUTS[format], self.problems, self.block_bytes)

    def require_rows(self, rows: int) -> None:
        if not rows:
            raise TraceFormatError(self.path, 1, "no line can be read; allowed: at least one")

    def drawn_times(self, user: Longs) -> tuple[Longs, NDArray[np.float64]]:
        """An order of the rows by drawn time that keeps each user's rows in order, and the times.

        A user's n times are independent draws from the hourly curve, sorted: an inhomogeneous
        Poisson process given its count.
        """
        hours = self.duration_s / 3600
        curve = np.ones(1) if self.hourly is None else self.hourly
        hourly = np.resize(curve, math.ceil(hours))
        edges = np.minimum(np.arange(hourly.size + 1.0), hours)
        passed = np.concatenate(([0.0], np.cumsum(hourly * np.diff(edges))))
        if passed[-1] <= 0:
            raise ArgumentError("hourly", "all 0 within duration_s", "some hours above 0")
        drawn = np.interp(self.rng.random(user.size) * passed[-1], passed, edges) * 3600
        times = np.empty(user.size)
        times[np.argsort(user, kind="stable")] = drawn[np.lexsort((drawn, user))]
        order = np.argsort(times, kind="stable")
        return order, times[order]

    def drawn_metadata(self, what: str) -> dict[str, Any]:
        curve = "flat" if self.hourly is None else "hourly"
        note = f"arrival times are drawn, not recorded: {what}"
        return {"arrivals": curve, "duration_s": self.duration_s, "notes": [note]}


def _items(items: Longs) -> dict[str, Any]:
    """Metadata on the items of all rows [n]."""
    counts = np.unique(items, return_counts=True)[1]
    return {
        "items": int(counts.size),
        "top_10_items_share": top_share(counts, 0.10),
        "item_zipf": zipf_exponent(counts),
    }


def _growing(time_s: NDArray[Any], user: Longs, metadata: dict[str, Any]) -> Trace:
    """One request a row [n]; the history is the user's rows so far, this one included."""
    if bool((np.diff(time_s) < 0).any()):
        order = np.argsort(time_s, kind="stable")
        time_s, user = time_s[order], user[order]
        note = "the lines were not in order of time: sorted, ties in the file's order"
        metadata = metadata | {"notes": [*metadata.get("notes", ()), note]}
    return Trace.from_arrays(time_s, user, visits_before(user) + 1, np.ones(user.size), metadata)


def _read_movietweetings(source: _Source) -> Trace:
    columns = source.columns("movietweetings")
    source.require_rows(columns["user"].size)
    return _growing(columns["unix_s"], columns["user"], _items(columns["item"]))


def _read_taobao(source: _Source) -> Trace:
    columns = source.columns("taobao-userbehavior")
    source.require_rows(columns["user"].size)
    return _growing(columns["unix_s"], columns["user"], _items(columns["item"]))


def _read_video_games(source: _Source) -> Trace:
    columns = source.columns("video-games")
    user = columns["user"]
    source.require_rows(user.size)
    order, times = source.drawn_times(user)
    metadata = source.drawn_metadata("each user's lines at sorted draws")
    return _growing(times, user[order], metadata | _items(columns["item"]))


def _read_books(source: _Source) -> Trace:
    users: list[int] = []
    sizes: list[int] = []
    items: list[Longs] = []
    seen: set[int] = set()
    empty = 0
    for number, line in source.lines():
        try:
            text = _text(line)
            names = text.split(" ")
            if names[-1] == "" and len(names) > 1:
                names.pop()
            if not re.fullmatch(r"[0-9]{1,18}( [0-9]{1,18})* ?", text):
                for i, name in enumerate(names):
                    _whole("item" if i else "user", name, ID_LIMIT)
            if int(names[0]) in seen:
                raise ValueError(f"user={names[0]} has a line already; allowed: one line a user")
        except ValueError as error:
            source.problems.add(number, str(error))
            continue
        empty += len(names) == 1
        users.append(int(names[0]))
        seen.add(users[-1])
        sizes.append(len(names) - 1)
        items.append(np.array(names[1:], dtype="U18").astype(np.int64))
    source.require_rows(sum(sizes))
    size = np.array(sizes, np.int64)
    user = np.repeat(np.array(users, np.int64), size)
    order, times = source.drawn_times(user)
    user, length = user[order], np.repeat(size, size)[order]
    metadata = source.drawn_metadata("as many requests a user as the list is long")
    if empty:
        metadata["notes"].append(f"users with an empty list, who make no request: {empty}")
    new_items = np.where(visits_before(user) == 0, length, 0)
    metadata |= _items(np.concatenate(items))
    return Trace.from_arrays(times, user, length, new_items, metadata)


def _prompt(line: bytes, before_ms: int) -> tuple[int, int, list[int]]:
    """Timestamp, input length and hash ids. ValueError, with the reason, where the line is bad."""
    text = _text(line)
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_short(text)} is not JSON ({_short(str(error))})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{_short(values)}; allowed: an object")
    for name, least, limit in (
        ("timestamp", 0, 10**15),
        ("input_length", 1, TOKEN_LIMIT),
        ("output_length", 0, TOKEN_LIMIT),
    ):
        value = values.get(name, 0 if name == "output_length" else None)
        if type(value) is not int:
            raise ValueError(
                f"{name}={_short(value)} is not an integer; allowed: {least} to {limit}"
            )
        if not least <= value <= limit:
            raise ValueError(f"{name}={_short(value)} is out of range; allowed: {least} to {limit}")
    hashes: Any = values.get("hash_ids")
    is_list = isinstance(hashes, list) and len(hashes) > 0
    if not is_list or any(type(h) is not int or not 0 <= h <= ID_LIMIT for h in hashes):
        allowed = f"allowed: a list of integers from 0 to {ID_LIMIT}, at least one"
        raise ValueError(f"hash_ids={_short(hashes)}; {allowed}")
    if values["timestamp"] < before_ms:
        backwards = f"timestamp={values['timestamp']} goes backwards"
        raise ValueError(f"{backwards}; allowed: {before_ms} or later")
    return values["timestamp"], values["input_length"], hashes


def _read_mooncake(source: _Source) -> Trace:
    stamps, lengths, users, added, blocks = [], [], [], [], []
    number_of: dict[tuple[int, ...], int] = {}
    last: dict[int, NDArray[np.int64]] = {}
    before_ms = 0
    for number, line in source.lines():
        try:
            before_ms, length, hashes = _prompt(line, before_ms)
        except ValueError as error:
            source.problems.add(number, str(error))
            continue
        prompt = np.array(hashes, np.int64)
        user = number_of.setdefault(tuple(hashes[:2]), len(number_of))
        reused = 0
        if user in last:
            shared = min(prompt.size, last[user].size)
            differs = np.flatnonzero(prompt[:shared] != last[user][:shared])
            same = int(differs[0]) if differs.size else shared
            reused = min(same * MOONCAKE_BLOCK_TOKENS, length)
        last[user] = prompt
        stamps.append(before_ms)
        lengths.append(length)
        users.append(user)
        added.append(length - reused)
        blocks.append(prompt)
    source.require_rows(len(stamps))
    jitter_s = source.rng.uniform(0.0, MOONCAKE_STEP_S, len(stamps))
    arrival_s = np.sort(np.array(stamps) / 1000 + jitter_s)
    metadata = {
        "notes": [
            "arrivals are spread evenly within their 3 s step, in the file's order",
            "a user is the first two blocks of a prompt; items are blocks of 512 tokens",
        ]
    } | _items(np.concatenate(blocks))
    return Trace.from_arrays(arrival_s, users, lengths, added, metadata)


def _table(source: _Source, names: Iterable[str]) -> Iterator[tuple[int, list[str] | None, str]]:
    """Lines under a CSV header: number, fields of the columns `names` or None, and why None."""
    lines = source.lines()
    names = list(names)
    number, line = next(lines, (1, b""))
    try:
        header = [name.strip() for name in _text(line).split(",")]
    except ValueError as error:
        raise TraceFormatError(source.path, number, str(error)) from None
    missing = [name for name in names if name not in header]
    if missing:
        reason = f"no column {', '.join(missing)} in the header {_short(','.join(header))}"
        raise TraceFormatError(source.path, number, f"{reason}; allowed: {','.join(names)}")
    at = [header.index(name) for name in names]
    for number, line in lines:
        try:
            fields = _fields(_text(line), ",", len(header), ",".join(header))
        except ValueError as error:
            yield number, None, str(error)
            continue
        yield number, [fields[i].strip() for i in at], ""


def _read_csv(source: _Source) -> Trace:
    parts: list[tuple[NDArray[np.float64], Longs]] = []
    rows = _table(source, COLUMNS)
    while batch := list(islice(rows, 65_536)):
        times: list[float] = []
        numbers: list[tuple[int, int, int]] = []
        for number, fields, reason in batch:
            if fields is None:
                source.problems.add(number, reason)
                continue
            try:
                time_s = _seconds("arrival_s", fields[0])
                user = _whole("user_id", fields[1], ID_LIMIT)
                length = _whole("history_length", fields[2], TOKEN_LIMIT, least=1)
                added = _whole("new_items", fields[3], length)
            except ValueError as error:
                source.problems.add(number, str(error))
                continue
            times.append(time_s)
            numbers.append((user, length, added))
        parts.append((np.array(times), np.array(numbers, np.int64).reshape(-1, 3)))
    source.require_rows(sum(part[0].size for part in parts))
    values = np.concatenate([part[1] for part in parts])
    arrival_s = np.concatenate([part[0] for part in parts])
    return Trace.from_arrays(arrival_s, values[:, 0], values[:, 1], values[:, 2])


def _read_parquet(source: _Source) -> Trace:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        hint = "reading Parquet needs pyarrow: pip install 'hlem[parquet]'"
        raise ImportError(hint) from error
    parts: list[list[NDArray[Any]]] = []
    row = 1
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            schema = file.schema_arrow
            missing = [name for name in COLUMNS if name not in schema.names]
            if missing:
                reason = f"no column {', '.join(missing)} among {_short(','.join(schema.names))}"
                allowed = f"allowed: {','.join(COLUMNS)}"
                raise TraceFormatError(source.path, 1, f"{reason}; {allowed}")
            for name in COLUMNS:
                kind = schema.field(name).type
                real = pyarrow.types.is_floating(kind) and name == "arrival_s"
                if not (real or pyarrow.types.is_integer(kind)):
                    allowed = "allowed: integers" + (" or floats" * (name == "arrival_s"))
                    reason = f"column {name} is of type {kind}; {allowed}"
                    raise TraceFormatError(source.path, 1, reason)
            for batch in file.iter_batches(batch_size=65_536, columns=list(COLUMNS)):
                parts.append(_good_rows(batch, row, source.problems))
                row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        reason = f"the file cannot be read as Parquet ({_short(str(error))})"
        raise TraceFormatError(source.path, row, reason) from error
    source.require_rows(sum(part[0].size for part in parts))
    arrival_s, *others = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Trace.from_arrays(arrival_s, others[0], others[1], others[2])


def _good_rows(batch: Any, first_row: int, problems: _Problems) -> list[NDArray[Any]]:
    """Columns [rows] of a record batch without the bad rows."""
    limits = ((0, 1e12), (0, ID_LIMIT), (1, TOKEN_LIMIT), (0, TOKEN_LIMIT))
    columns, bad = [], np.zeros(batch.num_rows, np.bool_)
    for name, (low, high) in zip(COLUMNS, limits, strict=True):
        column = batch.column(name)
        values = column.fill_null(0).to_numpy(zero_copy_only=False)
        bad |= column.is_null().to_numpy(zero_copy_only=False)
        bad |= ~((values >= low) & (values <= high))
        columns.append(values)
    bad |= columns[3] > columns[2]
    for i in np.flatnonzero(bad).tolist():
        shown = ", ".join(f"{name}={_short(batch.column(name)[i].as_py())}" for name in COLUMNS)
        allowed = (
            f"allowed: arrival_s 0 to 1e12, user_id 0 to {ID_LIMIT}, "
            f"history_length 1 to {TOKEN_LIMIT}, new_items 0 to history_length"
        )
        problems.add(first_row + i, f"{shown}; {allowed}")
    return [column[~bad] for column in columns]


FORMATS: dict[str, Callable[[_Source], Trace]] = {
    "movietweetings": _read_movietweetings,
    "taobao-userbehavior": _read_taobao,
    "video-games": _read_video_games,
    "books-sets": _read_books,
    "mooncake": _read_mooncake,
    "csv": _read_csv,
    "parquet": _read_parquet,
}


def guess_format(path: str | Path) -> str:
    """The format of a file, from its name or its first lines (at most 64 KiB).

    Raises:
        ArgumentError: it is none of FORMATS, or the path is no file.
        TraceFormatError: the file is empty.
    """
    path = _existing(path)
    with path.open("rb") as file:
        start = file.read(65_536)
    if start.startswith(b"PAR1") or path.suffix == ".parquet":
        return "parquet"
    lines = start.decode("utf-8-sig", "replace").splitlines() or [""]
    lines = lines[:-1] if len(lines) > 1 and len(start) == 65_536 else lines
    if set(COLUMNS) <= {name.strip() for name in lines[0].split(",")}:
        return "csv"
    patterns = {
        "movietweetings": r"\d+::\d+::\d+::\d+",
        "taobao-userbehavior": r"\d+,\d+,\d+,(" + "|".join(BEHAVIOURS) + r"),\d+",
        "mooncake": r"\{.*\"hash_ids\".*",
        "books-sets": r"\d+( \d+)+ ?",
    }
    for line in lines[:20]:
        for format, pattern in patterns.items():
            if re.fullmatch(pattern, line):
                if format != "books-sets":
                    return format
                pairs = sum(bool(re.fullmatch(r"\d+ \d+", line)) for line in lines)
                sets = sum(bool(re.fullmatch(r"\d+( \d+){2,} ?", line)) for line in lines)
                return "video-games" if pairs > sets else format
    shown = f"{path.name}, which begins with {_short(lines[0])}"
    raise ArgumentError(
        "format", None, f"one of {', '.join(FORMATS)}; none was recognised in {shown}"
    )


def read_trace(
    path: str | Path,
    format: str | None = None,
    on_bad_line: str = "raise",
    *,
    seed: int = 0,
    hourly: str | Path | None = None,
    duration_s: float = DRAWN_DURATION_S,
    block_bytes: int = 2**22,
) -> Trace:
    """Read a file of requests, with histories of their recorded (native) lengths.

    Args:
        path: the file.
        format: one of FORMATS; None recognises it (`guess_format`).
        on_bad_line: "raise", or "skip": bad lines are passed over and counted in `Trace.skipped`,
            and the first few reasons kept.
        seed: of what is drawn: arrivals of video-games and books-sets, jitter of mooncake.
        hourly: file of the hourly curve (`read_hourly`) for the arrivals of video-games and
            books-sets, repeated as needed; a flat curve when None.
        duration_s: seconds over which those arrivals are spread.
        block_bytes: how much of the file is read at a time. It does not change the result.

    Raises:
        ArgumentError: an argument is not allowed, or `path` is no file.
        TraceFormatError: a line is bad (or a Parquet row, counted from 1), or there is none.
        ImportError: a Parquet file without pyarrow.
    """
    require_choice("on_bad_line", on_bad_line, ("raise", "skip"))
    require(seed >= 0, "seed", seed, "0 or more")
    require(1 <= duration_s <= 1e9, "duration_s", duration_s, "1 to 1e9 seconds")
    require(1 <= block_bytes <= 2**30, "block_bytes", block_bytes, "1 to 2^30")
    file = _existing(path)
    if format is None:
        format = guess_format(file)
    require_choice("format", format, FORMATS)
    problems = _Problems(file, on_bad_line == "skip")
    curve = None if hourly is None else read_hourly(hourly)
    rng = np.random.default_rng(seed)
    trace = FORMATS[format](_Source(file, problems, block_bytes, rng, curve, float(duration_s)))
    about = {"format": format, "file": file.name, "path": str(path), "rows": len(trace)}
    about |= {"skipped": problems.count, "skipped_reasons": problems.reasons}
    if format in ("video-games", "books-sets", "mooncake"):
        about["seed"] = seed
    if hourly is not None:
        about["hourly"] = Path(hourly).name
    notes = {"notes": trace.metadata.get("notes", [])}
    return replace(trace, metadata=about | trace.metadata | notes)


def read_items(
    path: str | Path, format: str | None = None, on_bad_line: str = "raise", *, seed: int = 0
) -> Longs:
    """Items [n] of a file's requests, in order of time: what the rows of a table are looked up for.

    Args:
        path: the file.
        format: movietweetings, taobao-userbehavior, video-games or mooncake, whose items are the
            blocks of the prompts; None recognises it. books-sets have no order.
        on_bad_line: see `read_trace`.
        seed: of the times of video-games, which are those of `read_trace`.

    Raises:
        ArgumentError: an argument is not allowed, or `path` is no file.
        TraceFormatError: a line is bad, or there is none.
    """
    require_choice("on_bad_line", on_bad_line, ("raise", "skip"))
    file = _existing(path)
    format = guess_format(file) if format is None else format
    require_choice("format", format, ITEM_FORMATS)
    problems = _Problems(file, on_bad_line == "skip")
    rng = np.random.default_rng(seed)
    source = _Source(file, problems, 2**22, rng, None, DRAWN_DURATION_S)
    if format == "mooncake":
        return _prompt_blocks(source)
    columns = source.columns(format)
    source.require_rows(columns["item"].size)
    if format == "video-games":
        return columns["item"][source.drawn_times(columns["user"])[0]]
    return columns["item"][np.argsort(columns["unix_s"], kind="stable")]


ITEM_FORMATS = ("mooncake", "movietweetings", "taobao-userbehavior", "video-games")


def _prompt_blocks(source: _Source) -> Longs:
    blocks: list[Longs] = []
    before_ms = 0
    for number, line in source.lines():
        try:
            before_ms, _, hashes = _prompt(line, before_ms)
        except ValueError as error:
            source.problems.add(number, str(error))
            continue
        blocks.append(np.array(hashes, np.int64))
    source.require_rows(len(blocks))
    return np.concatenate(blocks)


def read_user_counts(path: str | Path) -> Longs:
    """Interactions [m] of each user, for `traces.with_base_histories`.

    Args:
        path: CSV file with the columns user_id and total_interaction_count.

    Raises:
        ArgumentError: `path` is no file.
        TraceFormatError: a line is bad or there is none.
    """
    return _counts(path, ("total_interaction_count", "user_id"))


def read_hourly(path: str | Path) -> NDArray[np.float64]:
    """Events [hours] in each of consecutive hours.

    Args:
        path: CSV file with the columns date, hour and time_total_interaction_count.

    Raises:
        ArgumentError: `path` is no file.
        TraceFormatError: a line is bad or there is none.
    """
    return _counts(path, ("time_total_interaction_count", "date", "hour")).astype(np.float64)


def _counts(path: str | Path, names: tuple[str, ...]) -> Longs:
    """The first of the columns `names` of a CSV file: whole numbers [lines]."""
    file = _existing(path)
    problems = _Problems(file, skip=False)
    source = _Source(file, problems, 2**20, np.random.default_rng(0), None, 1.0)
    counts: list[int] = []
    for number, fields, reason in _table(source, names):
        try:
            if fields is None:
                raise ValueError(reason)
            counts.append(_whole(names[0], fields[0], TOKEN_LIMIT))
        except ValueError as error:
            problems.add(number, str(error))
    source.require_rows(len(counts))
    return np.array(counts, np.int64)


def _existing(path: str | Path) -> Path:
    """The path of a file that is there and not empty."""
    file = Path(path)
    require(file.is_file(), "path", str(path), "an existing file")
    if not file.stat().st_size:
        raise TraceFormatError(file, 1, "the file is empty; allowed: at least one line")
    return file
