"""HSTU's attention on a CUDA device in Triton; `attention_reference` says what it computes.

Two ideas make it fast. The activation needs no exponential: silu(x) = x/2 (1 + tanh(x/2)), and tanh is
one instruction. And without softmax the sums over parts of the keys simply add: where few queries
meet a long history, several programs share its keys and a second kernel adds their parts, always in
the same order.

Full recomputes without cached history take the kernel of `attention_hopper` where the device has it.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.kernels.common_triton import launch
from hlem_env.live.paged_kv import PagedKv

BLOCK_QUERIES = 128
BLOCK_KEYS = 64
STAGES = 3
SPLITS = (1, 2, 3, 4, 6, 8, 11, 16)
"""Programs that may share a tile's keys; each number is compiled apart, so they are few."""
PROGRAMS_PER_PROCESSOR = 2
MIN_KEYS_PER_SPLIT = 512
REDUCE_BLOCK = 1024
APPEND_TOKENS = 16


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    candidates: Tensor,
    scaling_seqlen: int,
    scale: float,
    cache: PagedKv | None,
    max_new: int,
) -> Tensor:
    """See `attention.hstu_attention`, which has checked the arguments."""
    if cache is None and _has_hopper(q.device.index):
        from hlem_env.live.kernels import attention_hopper

        if attention_hopper.takes(q, k, v):
            return attention_hopper.attend(
                q, k, v, offsets, candidates, scaling_seqlen, scale, max_new
            )
    _, heads, head_dim = q.shape
    sequences = candidates.shape[0]
    tiles = triton.cdiv(max_new, BLOCK_QUERIES)
    splits = 1 if cache is None else _splits(q, tiles * heads * sequences, cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = out if splits == 1 else q.new_empty((splits, *q.shape), dtype=torch.float32)
    launch(
        _attend,
        (tiles, heads * sequences, splits),
        {"num_warps": 8 if head_dim == 128 else 4, "num_stages": STAGES},
        (q, k, v, parts, offsets, candidates, *_pages(cache, offsets, out)),
        (scale / 2, 1 / scaling_seqlen),
        (q.stride(0), k.stride(0), v.stride(0)),
        (*((0, 0) if cache is None else (cache.page_table.shape[1], cache.layer)), out.numel()),
        (*_sizes(cache), heads, head_dim, BLOCK_QUERIES, BLOCK_KEYS, splits),
    )
    if splits > 1:
        elements = out.numel()
        launch(
            _add_parts,
            (triton.cdiv(elements, REDUCE_BLOCK), 1, 1),
            {},
            (parts, out),
            (1 / scaling_seqlen,),
            (),
            (elements,),
            (splits, REDUCE_BLOCK),
        )
    return out


def append(
    k: Tensor, v: Tensor, offsets: Tensor, candidates: Tensor, cache: PagedKv, max_new: int
) -> None:
    """See `attention.append_history`, which has checked the arguments."""
    width = k.shape[1] * k.shape[2]
    launch(
        _append,
        (triton.cdiv(max_new, APPEND_TOKENS), candidates.shape[0], 1),
        {},
        (k, v, offsets, candidates, *_pages(cache, offsets, k)),
        (),
        (k.stride(0), v.stride(0)),
        (cache.page_table.shape[1], cache.layer),
        (*_sizes(cache), width, triton.next_power_of_2(width), APPEND_TOKENS),
    )


def _pages(cache: PagedKv | None, any_int32: Tensor, any_float: Tensor) -> tuple[Tensor, ...]:
    """The kernels' pointers into the cache; for none, pointers that are not followed."""
    if cache is None:
        return any_float, any_int32, any_int32
    return cache.blocks, cache.page_table, cache.cached


def _sizes(cache: PagedKv | None) -> tuple[int, int, int]:
    """LAYERS, BLOCKS_PER_PAGE and BLOCK_TOKENS; 0 tokens stand for no cache."""
    if cache is None:
        return 1, 1, 0
    return cache.layers, cache.blocks_per_page, cache.blocks.shape[2]


def _splits(q: Tensor, programs: int, cache: PagedKv) -> int:
    """Programs that share the keys of one tile of queries: enough to fill the device twice."""
    chunks = cache.page_table.shape[1] * cache.blocks_per_page // cache.layers
    most_keys = chunks * cache.blocks.shape[2]
    wanted = PROGRAMS_PER_PROCESSOR * _processors(q.device.index) // programs
    most = max(min(wanted, most_keys // MIN_KEYS_PER_SPLIT), 1)
    return max(splits for splits in SPLITS if splits <= most)


@functools.cache
def _processors(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def _has_hopper(device: int) -> bool:
    """Whether the device is a Hopper and this Triton has what the kernel for it needs."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        from hlem_env.live.kernels import attention_hopper
    except ImportError:
        return False
    return attention_hopper.AVAILABLE


@triton.jit
def _silu_of_double(half):  # type: ignore[no-untyped-def]
    """silu(2 * half) in float32."""
    tanh = tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
    )
    return half * tanh + half


@triton.jit
def _block_start(  # type: ignore[no-untyped-def]
    page_table, chunk, layer, LAYERS: tl.constexpr, BLOCKS_PER_PAGE: tl.constexpr
):
    """Index of the block that holds a sequence's chunk, in int64; negative where it has no page."""
    ordinal = chunk * LAYERS + layer
    page = tl.load(page_table + ordinal // BLOCKS_PER_PAGE).to(tl.int64)
    return page * BLOCKS_PER_PAGE + ordinal % BLOCKS_PER_PAGE


@triton.jit(do_not_specialize=["layer", "table_width", "part_stride"])
def _attend(  # type: ignore[no-untyped-def]
    q_rows,
    k_rows,
    v_rows,
    out,
    offsets,
    candidates,
    blocks,
    page_table,
    cached,
    half_scale,
    out_scale,
    q_stride,
    k_stride,
    v_stride,
    table_width,
    layer,
    part_stride,
    LAYERS: tl.constexpr,
    BLOCKS_PER_PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One tile of queries of one head of one sequence against its share of the keys.

    BLOCK_TOKENS = 0 means no cache. With SPLITS > 1 the result is a part in float32, not yet scaled;
    the last of the programs that share a tile also takes the new tokens.
    """
    tl.static_assert(BLOCK_M % BLOCK_N == 0)
    # The last tiles have most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    sequence = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    split = tl.program_id(2)
    start = tl.load(offsets + sequence)
    length = tl.load(offsets + sequence + 1) - start
    first = tile * BLOCK_M
    if first >= length:
        return
    history = length - tl.load(candidates + sequence)
    start = start.to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)
    query = first + tl.arange(0, BLOCK_M)
    key = tl.arange(0, BLOCK_N)
    q = tl.load(
        q_rows + (start + query[:, None]) * q_stride + head * HEAD_DIM + dim[None, :],
        mask=query[:, None] < length,
        other=0.0,
    )
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)

    if BLOCK_TOKENS > 0:
        STEP: tl.constexpr = BLOCK_N if BLOCK_N < BLOCK_TOKENS else BLOCK_TOKENS
        old = tl.arange(0, STEP)
        ROW: tl.constexpr = HEADS * HEAD_DIM
        table = page_table + sequence.to(tl.int64) * table_width
        tokens = tl.load(cached + sequence)
        whole = tokens // STEP
        share = tl.cdiv(whole, SPLITS)
        step_from = tl.minimum(split * share, whole)
        step_to = tl.minimum(step_from + share, whole)
        # The block of the next step is looked up one step ahead of its loads.
        block = tl.zeros((), tl.int64)
        if step_from < step_to:
            block = _block_start(
                table, step_from * STEP // BLOCK_TOKENS, layer, LAYERS, BLOCKS_PER_PAGE
            )
        for step in tl.range(step_from, step_to):
            at = blocks + block * (2 * BLOCK_TOKENS * ROW) + step * STEP % BLOCK_TOKENS * ROW
            at += head * HEAD_DIM
            chunk = tl.minimum(step + 1, step_to - 1) * STEP // BLOCK_TOKENS
            block = _block_start(table, chunk, layer, LAYERS, BLOCKS_PER_PAGE)
            k = tl.load(at + old[None, :] * ROW + dim[:, None])
            p = _silu_of_double(tl.dot(q, k) * half_scale)
            v = tl.load(at + BLOCK_TOKENS * ROW + old[:, None] * ROW + dim[None, :])
            acc = tl.dot(p.to(v.dtype), v, acc)
        if (split == SPLITS - 1) & (whole * STEP < tokens):
            # What lies behind the cached tokens may be anything, NaN too: it is not loaded.
            left = tokens - whole * STEP
            block = _block_start(
                table, whole * STEP // BLOCK_TOKENS, layer, LAYERS, BLOCKS_PER_PAGE
            )
            at = blocks + block * (2 * BLOCK_TOKENS * ROW) + whole * STEP % BLOCK_TOKENS * ROW
            at += head * HEAD_DIM
            k = tl.load(at + old[None, :] * ROW + dim[:, None], mask=old[None, :] < left, other=0.0)
            p = _silu_of_double(tl.dot(q, k) * half_scale)
            v = tl.load(
                at + BLOCK_TOKENS * ROW + old[:, None] * ROW + dim[None, :],
                mask=old[:, None] < left,
                other=0.0,
            )
            acc = tl.dot(p.to(v.dtype), v, acc)

    if split == SPLITS - 1:
        k_first = k_rows + start * k_stride + head * HEAD_DIM
        v_first = v_rows + start * v_stride + head * HEAD_DIM
        whole = tl.minimum(first, history) // BLOCK_N * BLOCK_N
        for at_key in tl.range(0, whole, BLOCK_N):
            far = at_key.to(tl.int64)
            k = tl.load(k_first + far * k_stride + (key[None, :] * k_stride + dim[:, None]))
            p = _silu_of_double(tl.dot(q, k) * half_scale)
            v = tl.load(v_first + far * v_stride + (key[:, None] * v_stride + dim[None, :]))
            acc = tl.dot(p.to(v.dtype), v, acc)
        # Then the keys that some query of the tile must not see: the rest of the history, and the
        # tile itself, where it has candidates. Between the two may lie candidates of other tiles.
        last = tl.minimum(first + BLOCK_M, length)
        apart = (first > history).to(tl.int32)
        before = apart * tl.cdiv(history - whole, BLOCK_N)
        near = tl.where(apart > 0, first, whole)
        for step in tl.range(0, before + tl.cdiv(last - near, BLOCK_N)):
            new = tl.where(step < before, whole, near + (step - before) * BLOCK_N) + key
            inside = new < length
            far = new.to(tl.int64)
            k = tl.load(
                k_first + far[None, :] * k_stride + dim[:, None],
                mask=inside[None, :],
                other=0.0,
            )
            seen = (new[None, :] <= query[:, None]) & (new[None, :] < history)
            seen = seen | (new[None, :] == query[:, None])
            p = tl.where(seen, _silu_of_double(tl.dot(q, k) * half_scale), 0.0)
            v = tl.load(
                v_first + far[:, None] * v_stride + dim[None, :],
                mask=inside[:, None],
                other=0.0,
            )
            acc = tl.dot(p.to(v.dtype), v, acc)

    to = out + (start + query[:, None]) * (HEADS * HEAD_DIM) + head * HEAD_DIM + dim[None, :]
    if SPLITS == 1:
        acc = acc * out_scale
    else:
        to += split.to(tl.int64) * part_stride
    tl.store(to, acc.to(out.dtype.element_ty), mask=query[:, None] < length)


@triton.jit(do_not_specialize=["elements"])
def _add_parts(  # type: ignore[no-untyped-def]
    parts, out, out_scale, elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(parts + part * elements.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out + at, (total * out_scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["layer", "table_width"])
def _append(  # type: ignore[no-untyped-def]
    k_rows,
    v_rows,
    offsets,
    candidates,
    blocks,
    page_table,
    cached,
    k_stride,
    v_stride,
    table_width,
    layer,
    LAYERS: tl.constexpr,
    BLOCKS_PER_PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """K and V of TOKENS new history tokens of one sequence, all heads."""
    sequence = tl.program_id(1)
    start = tl.load(offsets + sequence)
    history = tl.load(offsets + sequence + 1) - start - tl.load(candidates + sequence)
    new = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = new < history
    token = tl.load(cached + sequence) + new
    ordinal = token // BLOCK_TOKENS * LAYERS + layer
    entry = page_table + sequence.to(tl.int64) * table_width + ordinal // BLOCKS_PER_PAGE
    inside = inside & (ordinal // BLOCKS_PER_PAGE < table_width)
    page = tl.load(entry, mask=inside, other=-1).to(tl.int64)
    inside = inside & (page >= 0)
    column = tl.arange(0, WIDTH_BLOCK)
    mask = inside[:, None] & (column[None, :] < WIDTH)
    block = page * BLOCKS_PER_PAGE + ordinal % BLOCKS_PER_PAGE
    to = blocks + (block * (2 * BLOCK_TOKENS) + token % BLOCK_TOKENS)[:, None] * WIDTH + column
    row = (start + new).to(tl.int64)[:, None]
    tl.store(to, tl.load(k_rows + row * k_stride + column, mask=mask), mask=mask)
    to += BLOCK_TOKENS * WIDTH
    tl.store(to, tl.load(v_rows + row * v_stride + column, mask=mask), mask=mask)
