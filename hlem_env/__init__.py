"""HLEM: how a GPU's memory is split, at run time, between an embedding cache and a KV cache.

Importing this package registers `HBMPartitionEnv-v0` with Gymnasium.
"""

from gymnasium.envs.registration import register, registry

from hlem_env.errors import (
    ArgumentError,
    ArtefactError,
    BackendError,
    HlemError,
    TraceFormatError,
)

__all__ = [
    "ENV_ID",
    "LIVE_ENV_ID",
    "ArgumentError",
    "ArtefactError",
    "BackendError",
    "HlemError",
    "TraceFormatError",
    "__version__",
]
__version__ = "0.1.0"

ENV_ID = "HBMPartitionEnv-v0"
LIVE_ENV_ID = "HBMPartitionLiveEnv-v0"
"""The same environment on a live node, whose measurements no seed repeats."""

if ENV_ID not in registry:
    register(
        id=ENV_ID,
        entry_point="hlem_env.env:HBMPartitionEnv",
        vector_entry_point="hlem_env.env:HBMPartitionVectorEnv",
    )

if LIVE_ENV_ID not in registry:
    register(
        id=LIVE_ENV_ID,
        entry_point="hlem_env.env:HBMPartitionEnv",
        nondeterministic=True,
        kwargs={"backend": "live"},
    )
