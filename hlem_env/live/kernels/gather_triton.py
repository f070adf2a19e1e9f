# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Reads of rows over the link to host memory, in order.

Programs draw tickets: each takes the rows that come next. What is under way then stays close together
in host memory, and its addresses are translated faster; programs that stride over the rows drift
apart. And the programs are few, so that other kernels find room beside them.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.kernels.common_triton import aligned, blocks, launcher

LINK = {"num_warps": 2}
"""Options of kernels that read over the link."""
READERS_PER_PROCESSOR = 2
WORDS_PER_TICKET = 512


@triton.jit(do_not_specialize=["n"])
def _gather(
    source, rows, slot_of, out, staged, tickets, n, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)[None, :]
    first = tl.atomic_add(tickets, ROWS, sem="relaxed")
    while first < n:
        j = first + tl.arange(0, ROWS)
        row = tl.load(rows + j, mask=j < n, other=-1)
        wanted = row >= 0
        if SKIP:
            wanted = wanted & (tl.load(slot_of + row, mask=wanted, other=0) < 0)
            tl.store(staged + j, tl.where(wanted, row, -1), mask=j < n)
        moved = wanted[:, None] & (column < WORDS)
        value = tl.load(source + row[:, None] * WORDS + column, mask=moved, other=0)
        # The next ticket is drawn while these rows are under way.
        first = tl.atomic_add(tickets, ROWS, sem="relaxed")
        tl.store(out + j.to(tl.int64)[:, None] * WORDS + column, value, mask=moved)


def gather_rows(host: Tensor, rows: Tensor, out: Tensor) -> None:
    """Copy rows, int64 [n], from registered host memory [rows, dim] to out [n, dim]."""
    _read(host, rows, None, out, rows, link_programs(rows.device))


def stage_rows(
    host: Tensor, rows: Tensor, slot_of: Tensor, out: Tensor, staged: Tensor, programs: int
) -> None:
    """The same but for negative rows and resident ones; those that were copied to staged, int64 [n].

    The others are -1 there.
    """
    _read(host, rows, slot_of, out, staged, programs)


@functools.cache
def link_programs(device: torch.device) -> int:
    """Programs that together keep the link busy."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return READERS_PER_PROCESSOR * int(processors)


def rows_per_ticket(words: int) -> int:
    """Rows of so many words that a program reads at once."""
    return max(1, WORDS_PER_TICKET // int(triton.next_power_of_2(words)))


def _read(
    host: Tensor, rows: Tensor, slot_of: Tensor | None, out: Tensor, staged: Tensor, programs: int
) -> None:
    n = rows.shape[0]
    if n == 0:
        return
    source, rows = host.view(torch.int32), aligned(rows)
    words = source.shape[1]
    ticket = rows_per_ticket(words)
    tickets = torch.zeros(4, dtype=torch.int32, device=rows.device)
    launcher(rows.device)(
        torch.cuda.current_stream(rows.device), _gather,
        max(min(programs, blocks(n, ticket)), 1),
        (source, rows, rows if slot_of is None else slot_of, out.view(torch.int32), staged, tickets,
         n),
        (words, triton.next_power_of_2(words), ticket, slot_of is not None), LINK,
    )  # fmt: skip
