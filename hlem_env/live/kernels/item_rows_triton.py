# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Table rows of items in one launch; `HostTables.keys` says what it computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.host_tables import HostTables
from hlem_env.live.kernels.common_triton import aligned, blocks, launcher
from hlem_env.live.kernels.token_rows_triton import _mix

BLOCK = 128


def item_rows(items: Tensor, tables: HostTables) -> Tensor:
    """Rows int64 [n * tables] of items, int64 [n]."""
    n, device, numbers = items.shape[0], items.device, (tables.seed, tables.rows_per_table)
    out = torch.empty(n * tables.tables, dtype=torch.int64, device=device)
    launcher(device, *numbers)(
        torch.cuda.current_stream(device.index), _item_rows, blocks(n, BLOCK),
        (aligned(items), out, n, *numbers), (tables.tables, BLOCK), {},
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["n", "seed", "rows"])
def _item_rows(items, out, n, seed, rows, TABLES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    hashed = _mix(tl.load(items + i, mask=inside, other=0) + seed)
    to = out + i.to(tl.int64) * TABLES
    for table in tl.static_range(TABLES):
        row = (_mix(hashed + table) & 0x7FFFFFFFFFFFFFFF) % rows
        tl.store(to + table, row + rows.to(tl.int64) * table, mask=inside)
