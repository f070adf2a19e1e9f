# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""Table rows of a batch's tokens in one launch; `token_rows.reference` says what it computes.

Items differ from the reference's where a draw lies within rounding of the border between two ranks:
about one in a million, since exponential and logarithm are other code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.hashing import MULTIPLIERS, STEP
from hlem_env.live.histories import USER_STEP, Histories
from hlem_env.live.host_tables import HostTables
from hlem_env.live.kernels.common_triton import aligned, blocks, launcher

BLOCK = 128

_STEP = tl.constexpr(STEP)
_FIRST = tl.constexpr(MULTIPLIERS[0])
_SECOND = tl.constexpr(MULTIPLIERS[1])


def token_rows(
    spans: Tensor, tokens: int, histories: Histories, tables: HostTables, candidate_user: int
) -> Tensor:
    """See `token_rows.token_rows`."""
    device = spans.device
    out = torch.empty(tokens * tables.tables, dtype=torch.int64, device=device)
    popularity = histories.popularity
    head, tail = popularity.on(device)
    requests, ranks = spans.shape[1], head.shape[0]
    numbers = (
        candidate_user, histories.seed * USER_STEP, popularity.items, tables.seed,
        tables.rows_per_table,
    )  # fmt: skip
    # More bits than needed do no harm, and few numbers of them mean few compilations.
    request_bits = blocks(requests.bit_length(), 4) * 4
    launcher(device, *numbers)(
        torch.cuda.current_stream(device.index), _token_rows, blocks(tokens, BLOCK),
        (aligned(spans), head, tail, out, requests, tokens, *numbers),
        (request_bits, ranks, ranks.bit_length(), popularity.items > ranks, popularity.logarithmic,
         tables.tables, BLOCK),
        {},
    )  # fmt: skip
    return out


@triton.jit
def _mix(x):
    """`hashing.mix` of int64."""
    x = x + _STEP
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _rank(
    uniform, head, tail, inside, HEAD: tl.constexpr, HEAD_BITS: tl.constexpr,
    HAS_TAIL: tl.constexpr, LOGARITHMIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Popularity.rank`, not yet clipped: how many of the head's sums are not above `uniform`."""
    rank = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(HEAD_BITS):
        more = rank + (1 << (HEAD_BITS - 1 - bit))
        known = inside & (more <= HEAD)
        below = tl.load(head + more - 1, mask=known, other=2.0) <= uniform
        rank = tl.where(known & below, more, rank)
    rank = rank.to(tl.int64)
    if HAS_TAIL:
        mass = tl.load(tail)
        share = tl.maximum((uniform - mass) / (1.0 - mass), 0.0)
        x = tl.load(tail + 1) + share * tl.load(tail + 2)
        if not LOGARITHMIC:
            x = tl.log(x) / tl.load(tail + 3)
        rank = tl.where(uniform < mass, rank, (tl.exp(x) - 0.5).to(tl.int64))
    return rank


@triton.jit(do_not_specialize=["requests", "tokens", "user_step", "items", "table_seed", "rows"])
def _token_rows(
    spans, head, tail, out, requests, tokens, candidate_user, user_step, items, table_seed, rows,
    REQUEST_BITS: tl.constexpr, HEAD: tl.constexpr, HEAD_BITS: tl.constexpr,
    HAS_TAIL: tl.constexpr, LOGARITHMIC: tl.constexpr, TABLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    # The last request that starts at or before the token.
    request = tl.zeros((BLOCK,), tl.int32)
    for bit in tl.static_range(REQUEST_BITS):
        more = request + (1 << (REQUEST_BITS - 1 - bit))
        known = inside & (more < requests)
        before = tl.load(spans + 3 * requests + more, mask=known, other=0) <= token
        request = tl.where(known & before, more, request)
    within = token - tl.load(spans + 3 * requests + request, mask=inside, other=0)
    new = tl.load(spans + 2 * requests + request, mask=inside, other=0)
    user = tl.load(spans + request, mask=inside, other=0)
    first = tl.load(spans + requests + request, mask=inside, other=0)
    serial = tl.load(spans + 4 * requests + request, mask=inside, other=0)
    history = within < new
    user = tl.where(history, user, candidate_user + serial)
    index = tl.where(history, first + within, within - new)
    drawn = _mix(_mix(user + user_step) + index)
    uniform = ((drawn >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
    item = _rank(uniform, head, tail, inside, HEAD, HEAD_BITS, HAS_TAIL, LOGARITHMIC, BLOCK)
    item = tl.minimum(tl.maximum(item, 0), items - 1)
    hashed = _mix(item + table_seed)
    to = out + token.to(tl.int64) * TABLES
    for table in tl.static_range(TABLES):
        row = (_mix(hashed + table) & 0x7FFFFFFFFFFFFFFF) % rows
        tl.store(to + table, row + rows.to(tl.int64) * table, mask=inside)
