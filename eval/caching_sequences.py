"""Sequences of keys for the caching figures: users and items of public traces, and standard key files.

A key file is text with a key a line (any text), or libCacheSim's `oracleGeneral` (a name that ends in
`.oracleGeneral.bin`): records of 24 bytes, little-endian, time u32, key u64, size u32, next i64. Sizes
are not used: every item takes one slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hlem_env.errors import ArgumentError, require
from hlem_env.eviction.replay import Keys, dense
from hlem_env.workload.trace_readers import read_items, read_trace

ORACLE_GENERAL = np.dtype([("time", "<u4"), ("key", "<u8"), ("size", "<u4"), ("next", "<i8")])
PUBLIC = {
    "MovieTweetings items": ("movietweetings-100k.dat", "items"),
    "MovieTweetings users": ("movietweetings-100k.dat", "users"),
    "Video Games items": ("amazon-video-games.txt", "items"),
    "Taobao 2 h items": ("taobao-userbehavior-2h.csv", "items"),
    "Taobao 2 h users": ("taobao-userbehavior-2h.csv", "users"),
    "Taobao users, complete": ("taobao-userbehavior-users-10k.csv", "users"),
    "Mooncake blocks": ("mooncake-conversation.jsonl", "items"),
    "Mooncake users": ("mooncake-conversation.jsonl", "users"),
}
"""Name, file in the traces' folder, and whether its users (KV entries) or items (rows) are the keys."""


@dataclass(frozen=True, eq=False)
class Sequence:
    """Requests for keys."""

    name: str
    keys: Keys
    """[n] from 0, in order of first appearance."""
    kind: str
    """"users" or "rows": which features a predictor uses."""

    @property
    def distinct(self) -> int:
        """Different keys."""
        return int(self.keys.max()) + 1


def public(folder: Path, most: int) -> tuple[list[Sequence], dict[str, str]]:
    """The first `most` requests of each public trace, and why each missing one is missing."""
    found, skipped = [], {}
    for name, (file, side) in PUBLIC.items():
        path = folder / file
        if not path.is_file():
            skipped[name] = f"{file} is not in {folder}"
            continue
        keys = read_trace(path).user if side == "users" else read_items(path)
        found.append(Sequence(name, dense(keys[:most]), "users" if side == "users" else "rows"))
    return found, skipped


def key_file(path: Path, most: int) -> Sequence:
    """The first `most` requests of a key file.

    Raises:
        ArgumentError: it is no file, or holds no key.
    """
    require(path.is_file(), "keys", str(path), "a file")
    if path.name.endswith(".oracleGeneral.bin"):
        size = path.stat().st_size
        if size % ORACLE_GENERAL.itemsize:
            raise ArgumentError("keys", f"{path} of {size} bytes", "records of 24 bytes")
        keys = np.fromfile(path, ORACLE_GENERAL, most)["key"]
    else:
        with path.open(encoding="utf-8") as file:
            keys = np.array([line.strip() for _, line in zip(range(most), file, strict=False)])
    require(keys.size > 0, "keys", str(path), "at least one key")
    return Sequence(path.name, dense(keys), "rows")
