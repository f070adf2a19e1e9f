"""LRU and Belady of libCacheSim beside ours, as an independent reference.

libCacheSim's wheel (`pip install libcachesim`) is under the GPL: it is never a dependency, and used
only when it happens to be installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from pathlib import Path

import numpy as np

from eval.caching_sequences import ORACLE_GENERAL
from hlem_env.eviction.replay import Keys, next_requests

HASH_BITS = 16
"""Of its table, which grows; the default of 24 takes longer to fill with zeros than our traces to run."""


def missing() -> str | None:
    """Why there is no reference; None when there is one."""
    if importlib.util.find_spec("libcachesim") is None:
        return "libcachesim is not installed (pip install libcachesim)"
    return None


def misses(policy: str, keys: Keys, capacity: int) -> int:
    """Misses of "lru" or "belady" on keys [n] with unit sizes, by libCacheSim."""
    library = importlib.import_module("libcachesim")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.oracleGeneral.bin"
        records = np.zeros(keys.size, ORACLE_GENERAL)
        records["time"], records["key"], records["size"] = np.arange(keys.size), keys + 1, 1
        following = next_requests(keys)
        # Requests are numbered from 1; -1 says that there is none.
        records["next"] = np.where(np.isinf(following), -1, following + 1)
        records.tofile(path)
        reader = library.TraceReader(str(path), library.TraceType.ORACLE_GENERAL_TRACE)
        cache = {"lru": library.LRU, "belady": library.Belady}[policy](
            capacity, hashpower=HASH_BITS
        )
        ratio, _ = cache.process_trace(reader)
    return round(float(ratio) * keys.size)
