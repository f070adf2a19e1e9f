"""A history store read by its format alone: whether all of it fits together."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import lmdb
import numpy as np

from hlem_env.live.prefix_hash import prefix_hash


def users_by_use(folder: Path) -> list[str]:
    """Users of a store that nobody has open, who was here longest ago first; fails if it is not sound."""
    with lmdb.open(str(folder), max_dbs=3) as env:
        names = (b"users", b"segments", b"uses")
        users, segments, uses = (env.open_db(name, create=False) for name in names)
        with env.begin() as txn:
            hash_key = json.loads(txn.get(b"format"))["hash_key"]
            records = {key: struct.unpack("<QQQQ", data) for key, data in txn.cursor(users)}
            order = [(struct.unpack(">Q", key)[0], user) for key, user in txn.cursor(uses)]
            parts: dict[int, list[bytes]] = {}
            for key, data in txn.cursor(segments):
                history, index = struct.unpack(">QI", key)
                assert index == len(parts.setdefault(history, []))
                parts[history].append(data)
    assert sorted(order) == sorted((record[3], user) for user, record in records.items())
    assert sorted(parts) == sorted(record[0] for record in records.values())
    for history, length, told, _ in records.values():
        assert all(len(part) == 8 * 510 for part in parts[history][:-1])
        items = np.frombuffer(b"".join(parts[history]), "<i8")
        assert (items.size, prefix_hash(items, hash_key)) == (length, told)
    return [user.decode() for _, user in order]
