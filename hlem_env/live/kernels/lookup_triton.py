# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
"""A lookup on CUDA, as `lookup_reference` defines it: three kernels, no host synchronisation anywhere.

What there is to do stays on the device; without misses all but the first leave at once.

    probe    map, recency; misses to a list. Where few are expected, hits are copied here
    resolve  distinct missing rows in order, and their victims (`resolve_triton`)
    serve    some programs read rows over the link, in order, into their slots and to the first
             position that asked, and then copy them to the others; others copy hits meanwhile, and
             count the entries of the victim queue that are still valid

Rows are moved as 32-bit words, whatever their type. Row offsets are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hlem_env.live.cache_state import INVALID, LOOKED_UP, VALID_UNTIL, CacheState
from hlem_env.live.kernels.common_triton import (
    MEETING,
    PROGRAMS_PER_PROCESSOR,
    Launcher,
    aligned,
    blocks,
    span,
)
from hlem_env.live.kernels.gather_triton import LINK, link_programs, rows_per_ticket, stage_rows
from hlem_env.live.kernels.resolve_triton import (
    N_MISSED,
    N_REPEATS,
    N_UNIQUE,
    SIZES,
    SUMS,
    TICKET,
    TICKETS_DONE,
    resolve,
    valid,
)

PROBE_BLOCK = 512
RESOLVE_BLOCK = 1024
AUDIT_BLOCK = 1024

_LOOKED_UP = tl.constexpr(LOOKED_UP)
_INVALID = tl.constexpr(INVALID)
_VALID_UNTIL = tl.constexpr(VALID_UNTIL)
_N_MISSED = tl.constexpr(N_MISSED)
_N_REPEATS = tl.constexpr(N_REPEATS)
_N_UNIQUE = tl.constexpr(N_UNIQUE)
_TICKET = tl.constexpr(TICKET)
_TICKETS_DONE = tl.constexpr(TICKETS_DONE)


@triton.jit(do_not_specialize=["n", "n_rows", "now"])
def _probe(
    keys, slot_of, stamp, count, slab, out, slots, missed, sizes, counters, n, n_rows, now, weight,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, COPY: tl.constexpr,
    LOOKUP: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    key = tl.load(keys + i, mask=inside, other=-1)
    exists = inside & (key >= 0) & (key < n_rows)
    slot = tl.load(slot_of + key, mask=exists, other=-1)
    hit = exists & (slot >= 0)
    miss = exists & (slot < 0)
    if LOOKUP:
        if COPY:
            _copy_slots(slot, hit, i, slab, out, WORDS, COLUMNS)
        else:
            tl.store(slots + i, slot, mask=inside)
        tl.store(stamp + slot, now, mask=hit)
        if COUNTED:
            tl.atomic_add(count + slot, weight, mask=hit, sem="relaxed")
        if tl.program_id(0) == 0:
            tl.atomic_add(counters + _LOOKED_UP, n.to(tl.int64), sem="relaxed")
    # Behind the copy, since a sum over the program waits for all of its keys.
    if tl.sum((inside & (hit == 0)).to(tl.int32)) > 0:
        absent = miss.to(tl.int32)
        taken = tl.atomic_add(sizes + _N_MISSED, tl.sum(absent), sem="relaxed")
        place = taken + tl.cumsum(absent) - absent
        tl.store(missed + place, i, mask=miss)
        if LOOKUP:
            invalid = tl.sum((inside & (exists == 0)).to(tl.int64))
            tl.atomic_add(counters + _INVALID, invalid, sem="relaxed")


@triton.jit
def _copy_slots(slot, wanted, i, slab, out, WORDS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of slots to positions i of the result."""
    column = tl.arange(0, COLUMNS)[None, :]
    moved = wanted[:, None] & (column < WORDS)
    row = tl.load(slab + slot.to(tl.int64)[:, None] * WORDS + column, mask=moved, other=0)
    to = out + i.to(tl.int64)[:, None] * WORDS + column
    tl.store(to, row, mask=moved, cache_modifier=".cs")


@triton.jit
def _fetch(
    source, slab, out, rows, targets, firsts, sizes, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, STAGED: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    """Read missing rows, each program the next ones; say how many tickets are done."""
    unique = tl.load(sizes + _N_UNIQUE)
    column = tl.arange(0, COLUMNS)[None, :]
    tickets = 0
    begin = tl.atomic_add(sizes + _TICKET, ROWS, sem="relaxed")
    while begin < unique:
        j = begin + tl.arange(0, ROWS)
        inside = j < unique
        first = tl.load(firsts + j, mask=inside, other=0).to(tl.int64)[:, None]
        target = tl.load(targets + j, mask=inside, other=-1).to(tl.int64)[:, None]
        if STAGED:
            where = first
        else:
            where = tl.load(rows + j, mask=inside, other=0).to(tl.int64)[:, None]
        used = column < WORDS
        wanted = inside[:, None] & used
        if not LOOKUP:
            wanted = wanted & (target >= 0)
        row = tl.load(source + where * WORDS + column, mask=wanted, other=0)
        # The next ticket is drawn while these rows are under way.
        begin = tl.atomic_add(sizes + _TICKET, ROWS, sem="relaxed")
        tl.store(slab + target * WORDS + column, row, mask=(target >= 0) & used)
        if LOOKUP:
            tl.store(out + first * WORDS + column, row, mask=wanted)
        tickets += 1
    tl.debug_barrier()
    tl.atomic_add(sizes + _TICKETS_DONE, tickets, sem="release")


@triton.jit
def _repeat(
    out, repeats, sources, sizes, readers, WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy fetched rows to the other positions that asked for them."""
    total = tl.load(sizes + _N_REPEATS)
    if total > 0:
        # Whoever holds a ticket runs, so this ends, however few of the programs do.
        tickets = tl.cdiv(tl.load(sizes + _N_UNIQUE), ROWS)
        while tl.atomic_add(sizes + _TICKETS_DONE, 0, sem="acquire") < tickets:
            pass
        tl.debug_barrier()
        column = tl.arange(0, COLUMNS)[None, :]
        for first in range(tl.program_id(0) * BLOCK, total, readers * BLOCK):
            j = first + tl.arange(0, BLOCK)
            inside = j < total
            to = tl.load(repeats + j, mask=inside, other=0).to(tl.int64)[:, None]
            origin = tl.load(sources + j, mask=inside, other=0).to(tl.int64)[:, None]
            moved = inside[:, None] & (column < WORDS)
            row = tl.load(out + origin * WORDS + column, mask=moved, other=0)
            tl.store(out + to * WORDS + column, row, mask=moved)


@triton.jit
def _audit(queue_slot, queue_score, score, counters, block, queued, BLOCK: tl.constexpr):
    """Add this block's valid queue entries to the counters."""
    j = block * BLOCK + tl.arange(0, BLOCK)
    _, current = valid(queue_slot, queue_score, score, j, j < queued)
    tl.atomic_add(counters + _VALID_UNTIL, tl.sum(current.to(tl.int64)), sem="relaxed")


@triton.jit(do_not_specialize=["n", "queued", "readers", "copiers"])
def _serve(
    source, slab, out, slots, rows, targets, firsts, repeats, sources, queue_slot, queue_score, score,
    sizes, counters, n, queued, readers, copiers,
    WORDS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    AUDIT: tl.constexpr, STAGED: tl.constexpr, LOOKUP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < readers:
        if tl.load(sizes + _N_UNIQUE) > 0:
            _fetch(
                source, slab, out, rows, targets, firsts, sizes, WORDS, COLUMNS, ROWS, STAGED, LOOKUP
            )  # fmt: skip
            if LOOKUP:
                _repeat(out, repeats, sources, sizes, readers, WORDS, COLUMNS, ROWS, BLOCK)
    elif program < readers + copiers:
        i = (program - readers) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(slots + i, mask=i < n, other=-1)
        _copy_slots(slot, slot >= 0, i, slab, out, WORDS, COLUMNS)
    else:
        block = program - readers - copiers
        _audit(queue_slot, queue_score, score, counters, block, queued, AUDIT)


class Chain:
    """The kernels with their workspace, for one cache with a dense index.

    Args:
        state: of the cache.
        slot_of: int32 [n_rows + 1], its index.
        n_rows: rows that exist.
        host: the tables' rows, registered with CUDA.
        ranked: whether predictions put slots in the queue (`RankedBackgroundQueue`).
    """

    def __init__(
        self, state: CacheState, slot_of: Tensor, n_rows: int, host: Tensor, ranked: bool = False
    ) -> None:
        self.state, self.slot_of, self.n_rows = state, slot_of, n_rows
        self.slab = state.slab.view(torch.int32)
        self.host = host.view(torch.int32)
        self.words = self.slab.shape[1]
        self.columns = triton.next_power_of_2(self.words)
        device = self.slab.device
        self.bitmap = torch.zeros((n_rows + 31) // 32, dtype=torch.int32, device=device)
        self.sizes = torch.zeros(2, SIZES, dtype=torch.int32, device=device)
        self.queue_slot = torch.empty(0, dtype=torch.int32, device=device)
        self.queue_score = state.score[:0]
        self.queue_head = torch.zeros(4, dtype=torch.int32, device=device)
        self.queue_number = 0
        """Of the queue in use."""
        self.given = 0
        """Keys given to the device so far."""
        self.audit = False
        """Whether the next batch is to count the queue's valid entries."""
        self.ranked = ranked
        known = n_rows + 1 if ranked else 1
        self.next_of = torch.zeros(known, dtype=torch.float32, device=device)
        """float32 [n_rows + 1] if ranked: seconds at which a row is expected next."""
        self.gone_in = torch.zeros(known, dtype=torch.uint8, device=device)
        """uint8 [n_rows + 1] if ranked: the phase in which a prediction evicted a row (`_judge`)."""
        self.phase, self.phase_start, self.now_s = 1, 0, 0.0
        """LARU's phase, 1 to 127, and its first batch; seconds now."""
        self._turn = 0
        self._size_rows = self.sizes[0], self.sizes[1]
        self._space: tuple[Tensor, ...] = ()
        self._keys_max = 0
        self._launch = Launcher()
        self._device = device.index  # a number is looked at faster
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._programs = processors * PROGRAMS_PER_PROCESSOR
        self._span = span(self._programs)
        self._sums = torch.empty(SUMS * self._span, dtype=torch.int32, device=device)
        self._readers = link_programs(device)
        self._ticket = rows_per_ticket(self.words)
        self._rows_block = max(1, 1024 // self.columns)

    def lookup(self, keys: Tensor, batch: int, weight: float, few: bool) -> Tensor:
        """Values [n, dim] of keys, int64 [n]; misses are inserted.

        Args:
            keys: rows to find.
            batch: its number.
            weight: of a lookup, for decayed counts.
            few: whether few misses are expected; a wrong guess costs time alone.
        """
        out = torch.empty(keys.shape[0], self.words, dtype=torch.int32, device=keys.device)
        here = torch.cuda.current_stream(self._device)
        sizes = self._find(here, keys, out, batch, batch, weight, copy=few, lookup=True)
        self._serve(here, self.host, out, sizes, keys.shape[0], not few, staged=False, lookup=True)
        return out.view(self.state.slab.dtype)

    def lookup_complete(self, keys: Tensor, batch: int, weight: float) -> Tensor:
        """The same where every row that exists is resident: there can be no miss."""
        out = torch.empty(keys.shape[0], self.words, dtype=torch.int32, device=keys.device)
        self._reserve(keys.shape[0])
        here = torch.cuda.current_stream(self._device)
        self._probe(here, aligned(keys), out, batch, weight, copy=True, lookup=True)
        return out.view(self.state.slab.dtype)

    def warm(self, rows: Tensor, staged: Tensor | None, batch: int, limit: int) -> None:
        """Insert rows, int64 [n], from the tables, or from their staged values [n, dim].

        Negative rows are ignored. Slots with a stamp below `limit` may be taken.
        """
        source = self.host if staged is None else staged.view(torch.int32)
        here = torch.cuda.current_stream(self._device)
        n, from_stage = rows.shape[0], staged is not None
        sizes = self._find(here, rows, self.slab, batch, limit, 0.0, copy=False, lookup=False)
        self._serve(here, source, self.slab, sizes, n, False, staged=from_stage, lookup=False)

    def stage(self, rows: Tensor, out: Tensor, staged: Tensor, programs: int) -> None:
        """Copy rows, int64 [n], from the tables to out [n, dim], but for negative and resident ones.

        `staged`, int64 [n], says which were, and -1 where one was left out.
        """
        stage_rows(self.host, rows, self.slot_of, out, staged, programs)

    def _find(
        self,
        here: torch.cuda.Stream,
        keys: Tensor,
        out: Tensor,
        batch: int,
        limit: int,
        weight: float,
        copy: bool,
        lookup: bool,
    ) -> Tensor:
        """Probe and resolve; returns the sizes."""
        state, keys = self.state, aligned(keys)
        self._reserve(keys.shape[0])
        sizes, next_sizes = self._size_rows[self._turn], self._size_rows[1 - self._turn]
        self._probe(here, keys, out, batch, weight, copy, lookup)
        self._turn = 1 - self._turn
        queue = self.queue_slot, self.queue_score, self.queue_head
        self._launch(
            here, resolve, self._programs,
            (keys, self.slot_of, state.row_of, state.stamp, state.count, state.score, state.sketch,
             self.bitmap, *queue, *self._space[1:], self._sums, state.ring, sizes, next_sizes,
             state.counters, self.next_of, self.gone_in, self.bitmap.shape[0],
             self.queue_slot.shape[0], limit, batch, self.given, self.queue_number, int(self.audit),
             weight, self.now_s, self.phase_start, self.phase, state.sketch.shape[1],
             state.ring.shape[0]),
            (RESOLVE_BLOCK, self._span, lookup, state.counted, self.ranked), MEETING,
        )  # fmt: skip
        return sizes

    def _probe(
        self,
        here: torch.cuda.Stream,
        keys: Tensor,
        out: Tensor,
        batch: int,
        weight: float,
        copy: bool,
        lookup: bool,
    ) -> None:
        n, state = keys.shape[0], self.state
        block = self._rows_block if copy else PROBE_BLOCK
        self._launch(
            here, _probe, blocks(n, block),
            (keys, self.slot_of, state.stamp, state.count, self.slab, out, *self._space[:2],
             self._size_rows[self._turn], state.counters, n, self.n_rows, batch, weight),
            (self.words, self.columns, block, copy, lookup, state.counted), {},
        )  # fmt: skip

    def _serve(
        self,
        here: torch.cuda.Stream,
        source: Tensor,
        out: Tensor,
        sizes: Tensor,
        n: int,
        copy: bool,
        staged: bool,
        lookup: bool,
    ) -> None:
        state, queued = self.state, self.queue_slot.shape[0]
        readers = min(self._readers, blocks(n, self._ticket))
        copiers = blocks(n, self._rows_block) if copy else 0
        auditors = blocks(queued, AUDIT_BLOCK) if lookup and self.audit else 0
        slots, _, repeats, sources, rows, _, targets, firsts = self._space
        self._launch(
            here, _serve, readers + copiers + auditors,
            (source, self.slab, out, slots, rows, targets, firsts, repeats, sources, self.queue_slot,
             self.queue_score, state.score, sizes, state.counters, n, queued, readers, copiers),
            (self.words, self.columns, self._ticket, self._rows_block, AUDIT_BLOCK, staged, lookup),
            LINK,
        )  # fmt: skip

    def _reserve(self, n: int) -> None:
        """Make the workspace large enough for n keys."""
        if n > self._keys_max:
            self._keys_max = max(triton.next_power_of_2(n), 1024)
            device = self.slab.device
            space = torch.empty(8, self._keys_max, dtype=torch.int32, device=device)
            self._space = space.unbind()
