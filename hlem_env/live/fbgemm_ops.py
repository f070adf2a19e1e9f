"""The FBGEMM operators that serve here: jagged tensors, and table lookups to compare with.

fbgemm-gpu pairs with exactly one minor version of torch, and a wrong pair fails at import, so it is
imported at the first call. Never called here: `lxu_cache_lookup`, `linearize_cache_indices` and the
`*_populate_byte` family, which on CPU builds return garbage or do nothing, without a word.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from hlem_env.errors import BackendError, require, require_choice
from hlem_env.live.host_tables import HostTables

PAIRS = {"1.5": "2.10", "1.6": "2.11", "1.7": "2.12", "1.8": "2.13", "1.9": "2.14"}
"""fbgemm-gpu to torch."""
_DISTRIBUTIONS = ("fbgemm-gpu", "fbgemm-gpu-cpu")
PLACEMENTS = ("host", "device", "cached", "mapped")
_SPARSE_TYPES = {torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"}


@cache
def load() -> Any:
    """`torch.ops.fbgemm`, its libraries loaded.

    Raises:
        BackendError: fbgemm-gpu is missing, or does not match the installed torch.
    """
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError) as error:
        raise BackendError(_reason(error)) from error
    return torch.ops.fbgemm


def asynchronous_complete_cumsum(lengths: Tensor) -> Tensor:
    """Offsets int64 [n + 1] of lengths [n]: 0, then the sums.

    int32 lengths are widened first, since the operator's int32 sums wrap silently.

    Raises:
        ArgumentError: the lengths are no integers [n].
        BackendError: as `load`.
    """
    integer = lengths.dtype in (torch.int32, torch.int64)
    require(integer and lengths.ndim == 1, "lengths", _kind(lengths), "int32 or int64 [n]")
    result: Tensor = load().asynchronous_complete_cumsum(lengths.long())
    return result


def jagged_to_padded_dense(
    values: Tensor, offsets: Tensor, max_length: int, padding: float = 0.0
) -> Tensor:
    """Values [sum, dim], jagged by offsets [n + 1], as [n, max_length, dim].

    What is shorter is padded; what is longer is cut.

    Raises:
        ArgumentError: the shapes are others.
        BackendError: as `load`.
    """
    _check_jagged(offsets)
    require(values.ndim == 2, "values", _kind(values), "[sum of lengths, dim]")
    require(max_length >= 0, "max_length", max_length, "0 or more")
    result: Tensor = load().jagged_to_padded_dense(values, [offsets], [max_length], padding)
    return result


def dense_to_jagged(dense: Tensor, offsets: Tensor, total: int | None = None) -> Tensor:
    """The reverse: dense [n, max_length, dim] to values [sum, dim].

    Args:
        dense: padded.
        offsets: int64 [n + 1].
        total: offsets[n] if known on the host; without it the device is waited for.

    Raises:
        ArgumentError: the shapes are others.
        BackendError: as `load`.
    """
    _check_jagged(offsets)
    fits = dense.ndim == 3 and dense.shape[0] == offsets.shape[0] - 1
    require(fits, "dense", _kind(dense), f"[{offsets.shape[0] - 1}, max_length, dim]")
    result: Tensor = load().dense_to_jagged(dense, [offsets], total)[0]
    return result


class Tbe:
    """FBGEMM's table-batched embedding for inference over a copy of the same tables.

    Args:
        tables: whose rows are copied.
        placement: "host" (rows and lookup on the CPU), "device" (all rows in device memory), "cached"
            (rows in host memory, LRU cache in device memory) or "mapped" (rows in host memory).
        cache_share: of the rows that "cached" holds.
        pooled: whether a bag's rows are summed.

    Raises:
        ArgumentError: no such placement.
        BackendError: as `load`.
    """

    def __init__(
        self,
        tables: HostTables,
        placement: str = "host",
        cache_share: float = 0.2,
        pooled: bool = False,
    ) -> None:
        require_choice("placement", placement, PLACEMENTS)
        load()
        from fbgemm_gpu.split_embedding_configs import SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            CacheAlgorithm,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
            IntNBitTableBatchedEmbeddingBagsCodegen,
        )

        location = {
            "host": EmbeddingLocation.HOST,
            "device": EmbeddingLocation.DEVICE,
            "cached": EmbeddingLocation.MANAGED_CACHING,
            "mapped": EmbeddingLocation.MANAGED,
        }[placement]
        kind = SparseType[_SPARSE_TYPES[tables.dtype]]
        self.tables = tables
        self.device = torch.device("cpu" if placement == "host" else "cuda")
        specs = [
            (f"t{t}", tables.rows_per_table, tables.dim, kind, location)
            for t in range(tables.tables)
        ]
        self.module = IntNBitTableBatchedEmbeddingBagsCodegen(
            specs,
            device=self.device,
            cache_load_factor=cache_share,
            cache_algorithm=CacheAlgorithm.LRU,
            pooling_mode=PoolingMode.SUM if pooled else PoolingMode.NONE,
            output_dtype=kind,
            uvm_host_mapped=True,
        )
        self.module.initialize_weights()
        for t, (weights, _) in enumerate(self.module.split_embedding_weights()):
            rows = tables.rows[t * tables.rows_per_table : (t + 1) * tables.rows_per_table]
            weights[:, : tables.row_bytes].copy_(rows.view(torch.uint8))

    def lookup(self, keys: Tensor, offsets: Tensor) -> Tensor:
        """Rows [n, dim] of rows-in-table, ordered by table; pooled, sums [bags, tables * dim].

        Args:
            keys: int64 [n] rows within their tables, table after table.
            offsets: int64 [tables * bags + 1] of the bags, as FBGEMM takes them.
        """
        result: Tensor = self.module(keys, offsets)
        return result


def _reason(error: Exception) -> str:
    found = [(name, version) for name in _DISTRIBUTIONS if (version := _version(name))]
    if not found:
        return (
            "fbgemm-gpu is not installed; the extra `cpu` or `cuda` of this package has it "
            f"({error})"
        )
    name, version = found[0]
    fits = PAIRS.get(".".join(version.split(".")[:2]))
    pairs = ", ".join(f"{ours} with torch {theirs}" for ours, theirs in PAIRS.items())
    belongs = f"belongs to torch {fits}" if fits else "is none that is known here"
    return (
        f"{name} {version} {belongs}, installed is torch {torch.__version__}; it pairs with exactly "
        f"one minor version: {pairs} ({error})"
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _check_jagged(offsets: Tensor) -> None:
    good = offsets.dtype in (torch.int32, torch.int64) and offsets.ndim == 1
    require(good and offsets.shape[0] >= 1, "offsets", _kind(offsets), "int32 or int64 [n + 1]")


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tensor.dtype
