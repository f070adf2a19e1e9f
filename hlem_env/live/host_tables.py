# mypy: disallow-untyped-calls=False
"""The embedding tables in host memory: what a cache misses is read from here.

On a machine with CUDA the memory is registered (pinned and mapped), so that a kernel reads rows from
it over the link. Every value follows from the seed, the row and the column alone, the same on every
device: a test can say which row it was given.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from hlem_env.errors import BackendError, require
from hlem_env.live.hashing import mix

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROW_BYTES_MULTIPLE = 16
_CHUNK_VALUES = {"cuda": 2**25, "cpu": 2**20}


class HostTables:
    """T tables of N rows, one below the other.

    Values are uniform over the multiples of 1/128 in [-1, 1), exact in every dtype allowed.

    Args:
        tables: T.
        rows_per_table: N.
        dim: values in a row.
        dtype: float16, bfloat16 or float32.
        seed: of the values and of `keys`.
        device: "cuda" fills on the GPU and registers the memory with it; "cpu" is plain memory.

    Raises:
        ArgumentError: an argument is out of range, or a row is no multiple of 16 bytes.
        BackendError: the memory cannot be registered.
    """

    def __init__(
        self,
        tables: int,
        rows_per_table: int,
        dim: int,
        dtype: torch.dtype = torch.float16,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        require(tables >= 1, "tables", tables, "1 or more")
        require(rows_per_table >= 1, "rows_per_table", rows_per_table, "1 or more")
        require(dtype in DTYPES, "dtype", dtype, ", ".join(str(kind) for kind in DTYPES))
        self.row_bytes = dim * dtype.itemsize
        require(
            dim >= 1 and self.row_bytes % ROW_BYTES_MULTIPLE == 0,
            "dim",
            dim,
            f"rows of a multiple of {ROW_BYTES_MULTIPLE} bytes, these have {self.row_bytes}",
        )
        self.tables, self.rows_per_table, self.dim, self.dtype = tables, rows_per_table, dim, dtype
        self.seed = seed
        self.device = torch.device(device)
        require(self.device.type in _CHUNK_VALUES, "device", device, "cpu or cuda")
        self.n_rows = tables * rows_per_table
        # Threads of the CPU touch the memory here: registering would do it with one.
        self.rows: Tensor = torch.zeros(self.n_rows, dim, dtype=dtype)
        """[tables * rows_per_table, dim], in host memory."""
        if self.device.type == "cuda":
            _register(self, self.rows)
        for first, last in self._chunks():
            rows = torch.arange(first, last, device=self.device)
            self.rows[first:last].copy_(self.expected(rows), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def keys(self, items: Tensor) -> Tensor:
        """Rows of items, int64 [n] -> int64 [n, tables]: table * N + hash(item, table) mod N."""
        table = torch.arange(self.tables, device=items.device)
        hashed = mix(mix(items + self.seed)[:, None] + table)
        return table * self.rows_per_table + (hashed & (2**63 - 1)) % self.rows_per_table

    def expected(self, rows: Tensor) -> Tensor:
        """The values [n, dim] of rows, int64 [n], computed on their device without a look at memory."""
        row = mix(rows + mix(torch.tensor(self.seed, device=rows.device)))
        column = mix(torch.arange(self.dim, device=rows.device)) | 1
        top = (row[:, None] * column) >> 56  # arithmetic: -128 to 127
        return top.to(self.dtype) / 128

    def _chunks(self) -> Iterator[tuple[int, int]]:
        step = max(_CHUNK_VALUES[self.device.type] // self.dim, 1)
        for first in range(0, self.n_rows, step):
            yield first, min(first + step, self.n_rows)


def _register(owner: HostTables, memory: Tensor) -> None:
    """Pin and map memory with CUDA for as long as its owner lives.

    Half the time of a pinned allocation, and no rounding up to a power of two.
    """
    runtime = torch.cuda.cudart()
    pointer, size = memory.data_ptr(), memory.numel() * memory.itemsize
    mapped = 2  # cudaHostRegisterMapped
    torch.cuda.init()
    error = int(runtime.cudaHostRegister(pointer, size, mapped))
    if error != 0:
        raise BackendError(
            f"{size / 2**30:.1f} GiB of host tables cannot be registered with CUDA (error {error}); "
            "fewer or shorter tables, or a higher limit of locked memory, are needed"
        )
    # `memory` stays alive in the closure until it is unregistered.
    weakref.finalize(owner, _unregister, memory)


def _unregister(memory: Tensor) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
