# mypy: disallow-untyped-calls=False
"""The embedding cache: rows of the host tables in pages of the pool, found and kept by whole batches.

The cache's capacity is a set of pages, and a slot is a row of the whole pool. `lookup_reference`
defines what a lookup does. On CUDA with a dense index it runs as a chain of kernels without host
synchronisation (kernels/lookup_triton.py); with a set-associative index the reference itself runs on
the device, and waits for it several times a batch. On a CPU the reference runs, and a link to host
memory can be emulated.

One stream serves: calls come from one thread, in order, on one current stream.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hlem_env.errors import ArgumentError, BackendError, require, require_choice
from hlem_env.eviction import laru
from hlem_env.eviction.online import OnlinePredictor
from hlem_env.eviction.predictor import Predictor
from hlem_env.live.cache_device import CacheDevice, DenseKernels
from hlem_env.live.cache_state import (
    EVICTED,
    FREE,
    INSERTED,
    INVALID,
    LAST_UNIQUE,
    LOOKED_UP,
    MISSED,
    SHRUNK,
    UNIQUE,
    WARMED,
    CacheCounters,
    CacheState,
)
from hlem_env.live.host_tables import HostTables
from hlem_env.live.kernels import lookup_reference as reference
from hlem_env.live.ranked_rows import RankedQueue
from hlem_env.live.row_index import DENSE_ROWS_MAX, DenseIndex, RowIndex, SetAssociativeIndex
from hlem_env.live.time_source import WallTime

POLICIES = ("lru", "scan_resistant", *laru.RULES)
INDEXES = ("dense", "set_associative")
RING_ROWS_MAX = 2**23
FEW_MISSES = 1024
"""Up to so many expected misses the hits are copied by the kernel that finds them."""
REBASE_HALF_LIVES = 48.0
"""Counts stay below 2^48 x lookups; float32 reaches 2^127."""
WARM_ROWS = 2**16
"""More rows than these are warmed in turns, which bounds the workspace."""


class RowPool(Protocol):
    """What the cache needs of the pool."""

    pages: int
    page_bytes: int
    device: torch.device

    def view_rows(self, dim: int, dtype: torch.dtype) -> Tensor:
        """The memory as rows."""


class EmbeddingCache:
    """Rows of `tables` in pages of `pool`; it starts without pages: `grow` gives it some.

    Args:
        pool: whose memory is used; pages are allocated and freed by the caller.
        tables: read on a miss.
        policy: "lru", or "scan_resistant": decayed counts of lookups, and a missing row is inserted
            only when its count exceeds that of the row it would evict; or "laru", "fpb" or "hf": by
            whole batches (`ranked_rows`), on CUDA with a dense index from a queue that serves several
            (`ranked_background_queue`).
        index: "dense" (4 bytes for every row that exists; on CUDA 5 more where predictions rank) or
            "set_associative" (24 bytes for every slot of the pool); by default dense up to
            `dense_rows_limit` rows.
        dense_rows_limit: rows; above it the set-associative index is the default.
        half_life_s: of the counts; 60 s are 12 epochs.
        emulated_link_gbps: on a CPU, a lookup takes at least as long as its missing bytes would on
            such a link (it sleeps); figures from it are those of an emulated link.
        ring_rows: rows missed lately to remember for refill, a power of two; by default twice the
            pool's slots and more, at most 2^23. A row that was missed lately is resident until as
            many others were missed, so that a shorter memory would know none that are not.
        time_source: what waits on the emulated link follow.
        predictor: of "laru", "fpb" and "hf"; by default one that learns as it goes, which needs the
            extra `baselines`.

    Raises:
        ArgumentError: an argument is out of range, or rows do not fill a page of the pool.
        ImportError: LightGBM is not installed, and a policy that needs one has no predictor.
    """

    def __init__(
        self,
        pool: RowPool,
        tables: HostTables,
        policy: str = "lru",
        index: str | None = None,
        *,
        dense_rows_limit: int = 2**30,
        half_life_s: float = 60.0,
        emulated_link_gbps: float | None = None,
        ring_rows: int | None = None,
        time_source: WallTime | None = None,
        predictor: Predictor | None = None,
    ) -> None:
        require_choice("policy", policy, POLICIES)
        if index is None:
            index = INDEXES[tables.n_rows > dense_rows_limit]
        require_choice("index", index, INDEXES)
        require(
            index != "dense" or tables.n_rows <= DENSE_ROWS_MAX,
            "index",
            index,
            f"set_associative for {tables.n_rows} rows; dense takes {DENSE_ROWS_MAX}",
        )
        require(half_life_s > 0, "half_life_s", half_life_s, "above 0")
        self.device = torch.device(pool.device)
        require(
            emulated_link_gbps is None or (emulated_link_gbps > 0 and self.device.type == "cpu"),
            "emulated_link_gbps",
            emulated_link_gbps,
            "above 0, and on a CPU only",
        )
        require(
            self.device.type == "cpu" or tables.device.type == self.device.type,
            "tables",
            tables.device,
            f"tables registered with the pool's device, {self.device}",
        )
        self.pool, self.tables, self.policy, self.index_kind = pool, tables, policy, index
        self.half_life_s, self.emulated_link_gbps = half_life_s, emulated_link_gbps
        self._time = time_source or WallTime()
        slab = pool.view_rows(tables.dim, tables.dtype)
        self.rows_per_page = slab.shape[0] // pool.pages
        slots_index: RowIndex
        if index == "dense":
            slots_index = DenseIndex(tables.n_rows, self.device)
        else:
            slots_index = SetAssociativeIndex(slab.shape[0], self.device)
        if ring_rows is None:
            ring_rows = min(1 << (2 * slab.shape[0] - 1).bit_length(), RING_ROWS_MAX)
        self.state = CacheState(slab, slots_index, policy == "scan_resistant", ring_rows)
        window_s = 2.0 * half_life_s
        if policy not in laru.RULES:
            predictor = None
        elif predictor is None:
            predictor = OnlinePredictor(window_s, "rows")
        self._device_side: CacheDevice | None = None
        if self.device.type == "cuda":
            self._device_side = CacheDevice(
                self.state, tables, self.rows_per_page, policy, predictor
            )
        self._dense = None if self._device_side is None else self._device_side.dense
        self._ranked: RankedQueue | None = None
        if predictor is not None and self._dense is None:
            self._ranked = RankedQueue(self.state, predictor, 2.0 * window_s, policy)
        ranked = self._ranked if self._dense is None else self._dense.ranked
        self._predictions = None if ranked is None else ranked.predictions
        self._queue = self._ranked or reference.VictimQueue(self.state)
        self._pages: NDArray[np.int64] = np.empty(0, np.int64)
        self._mine: NDArray[np.bool_] = np.zeros(pool.pages, np.bool_)
        self._batch = 0
        self._origin_s: float | None = None

    @property
    def pages(self) -> NDArray[np.int64]:
        """Pages of the cache, the latest last, int64 [n]."""
        return self._pages.copy()

    @property
    def capacity_rows(self) -> int:
        """Rows that fit."""
        return len(self._pages) * self.rows_per_page

    @property
    def side_stream(self) -> torch.cuda.Stream | None:
        """The stream of grow, shrink and the victim queue; None on a CPU."""
        return None if self._device_side is None else self._device_side.stream

    @property
    def resident_rows(self) -> int:
        """Rows in the cache; waits for the device."""
        counters = self.counters()
        return counters.inserted + counters.warmed - counters.evicted

    @property
    def shrink_evictions(self) -> int:
        """Rows that `shrink` evicted, as far as the host knows: the device is not asked.

        On CUDA a shrink's evictions show after the next lookup that follows it has run.
        """
        side = self._device_side
        return int(self.state.counters[SHRUNK]) if side is None else side.poll()[SHRUNK]

    @property
    def critical_bytes(self) -> int:
        """Bytes fetched for lookups, as far as the host knows: the device is not asked."""
        side = self._device_side
        unique = int(self.state.counters[UNIQUE]) if side is None else side.poll()[UNIQUE]
        return unique * self.tables.row_bytes

    def counters(self) -> CacheCounters:
        """All counters; waits for the device, so once an epoch.

        Raises:
            BackendError: a lookup had keys that do not exist.
        """
        values = self.state.counters.tolist()
        _refuse_invalid(values[INVALID], self.tables.n_rows)
        return CacheCounters(
            looked_up=values[LOOKED_UP],
            hit=values[LOOKED_UP] - values[MISSED] - values[INVALID],
            unique_misses=values[UNIQUE],
            inserted=values[INSERTED],
            warmed=values[WARMED],
            evicted=values[EVICTED],
            evicted_by_shrinking=values[SHRUNK],
            fetched_bytes=values[UNIQUE] * self.tables.row_bytes,
        )

    def contains(self, keys: Tensor) -> Tensor:
        """Which keys, int64 [n], are resident, bool [n]; changes nothing."""
        self._settle()
        return self.state.index.find(keys) >= 0

    def lookup(self, keys: Tensor, now: float = 0.0) -> Tensor:
        """Rows [n, dim] of keys, in their order.

        Args:
            keys: int64 [n] on the cache's device, each below the number of rows; may repeat.
            now: time in seconds, for the decayed counts; does not go back.

        Raises:
            ArgumentError: the keys are no int64 [n] on the device, or (on a CPU) do not exist.
            BackendError: on CUDA, a lookup before this one had keys that do not exist.
        """
        self._check(keys)
        n = keys.shape[0]
        if n == 0:
            return torch.empty(0, self.tables.dim, dtype=self.tables.dtype, device=keys.device)
        self._batch += 1
        weight = self._weight(now)
        if self._device_side is not None and self._dense is not None:
            return self._lookup_by_kernels(self._device_side, self._dense, keys, weight, now)
        self._refuse_unknown(keys)
        began = self._time.now()
        if self._ranked is not None:
            self._ranked.begin(keys, now)
        out, fetched = reference.lookup(
            self.state, self._queue, keys, self._fetch, self._batch, weight
        )
        if self._ranked is not None:
            self._ranked.end(keys)
        self.wait_for_link(fetched, began)
        return out

    def _lookup_by_kernels(
        self, side: CacheDevice, dense: DenseKernels, keys: Tensor, weight: float, now: float
    ) -> Tensor:
        n, capacity = keys.shape[0], self.capacity_rows
        values = side.poll()
        _refuse_invalid(values[INVALID], self.tables.n_rows)
        if dense.ranked is not None:
            dense.ranked.begin(self._batch, now)
        if side.complete:
            dense.queue.pass_by(n)
            out: Tensor = dense.chain.lookup_complete(keys, self._batch, weight)
        else:
            dense.queue.prepare(n, capacity)
            few = values[LAST_UNIQUE] <= FEW_MISSES
            out = dense.chain.lookup(keys, self._batch, weight, few)
            dense.queue.replenish(n, capacity)
        side.snapshot()
        if dense.ranked is not None:
            dense.ranked.ask(keys)
        return out

    def warm(self, keys: Tensor, now: float = 0.0, evict: bool = True) -> None:
        """Insert rows that are not resident, at once and on the current stream.

        Victims are free slots, and with `evict` rows that neither the last lookup used nor anything
        warmed since; when those run out, the remaining keys are left out.

        Args:
            keys: int64 [n]; may repeat or be resident; negative ones are ignored.
            now: time in seconds.
            evict: whether rows may make room.
        """
        self._check(keys)
        self._insert_ahead(keys, None, now, evict)

    def publish(self, rows: Tensor, values: Tensor, now: float = 0.0, evict: bool = False) -> None:
        """Insert rows whose values were staged before, as `warm`.

        Args:
            rows: int64 [n], -1 where nothing was staged.
            values: [n, dim], on the device.
            now: time in seconds.
            evict: whether rows may make room.
        """
        self._check(rows)
        self._insert_ahead(rows, values, now, evict)

    def stage(self, rows: Tensor, values: Tensor, staged: Tensor, programs: int = 64) -> None:
        """Read rows from the tables into a buffer, on the current stream; the cache stays as it is.

        Args:
            rows: int64 [n]; negative and resident ones are left out.
            values: [n, dim] on the device, written.
            staged: int64 [n], written: the rows, -1 where one was left out.
            programs: on CUDA, at most so many thread blocks take part.
        """
        if self._dense is not None:
            self._dense.chain.stage(rows, values, staged, programs)
            return
        known = rows.clamp(min=0)
        wanted = (rows >= 0) & (self.state.index.find(known) < 0)
        staged.copy_(torch.where(wanted, rows, -1))
        values[wanted] = self._fetch(rows[wanted])

    def grow(self, pages: ArrayLike) -> None:
        """Take pages [n]; nothing that they held is kept. The device is not waited for.

        Raises:
            ArgumentError: a page does not exist, stands twice, or is the cache's already.
        """
        new = np.asarray(pages, np.int64).reshape(-1)
        if new.size == 0:
            return
        require(
            new.min() >= 0 and new.max() < self.pool.pages,
            "pages",
            (int(new.min()), int(new.max())),
            f"0 to {self.pool.pages - 1}",
        )
        mine = self._mine.copy()
        mine[new] = True
        once = np.count_nonzero(mine) == len(self._pages) + len(new)
        require(bool(once), "pages", pages, "each page once, and none that the cache has")
        self._mine = mine
        self._pages = np.concatenate([self._pages, new])
        side = self._device_side
        with self._aside():
            if side is not None and side.dense is not None:
                side.dense.slots.grow(*side.send_pages(new, self._pages)[:2])
            else:
                reference.set_owned(self.state, self._slots(new), True)
            self._rebuild_queue()

    def shrink(self, n: int) -> NDArray[np.int64]:
        """Give up n pages, the latest first; returns them, int64 [n].

        The rows that must go are the least valuable of all; the others on those pages move to the
        slots that are freed elsewhere. On CUDA this runs on a stream of its own behind what the
        current stream was given, and the current stream is made to wait for it, on the device
        alone: what is put on that stream afterwards may write to the pages.

        Raises:
            ArgumentError: the cache has fewer pages.
        """
        require(0 <= n <= len(self._pages), "n", n, f"0 to {len(self._pages)} pages")
        kept = len(self._pages) - n
        gone, self._pages = self._pages[kept:], self._pages[:kept]
        self._mine[gone] = False
        if n == 0:
            return gone
        side, emptied = self._device_side, None
        if side is not None:
            side.forget_complete()
        with self._aside():
            if side is not None and side.dense is not None:
                side.dense.slots.shrink(*side.send_pages(gone, self._pages))
            else:
                self._give_up(self._slots(gone))
            if side is not None:
                emptied = side.stream.record_event()
            self._rebuild_queue()
        if emptied is not None:
            torch.cuda.current_stream(self.device.index).wait_event(emptied)
        return gone

    def _give_up(self, slots: Tensor) -> None:
        if self._ranked is None:
            reference.give_up(self.state, slots)
            return
        rows = self.state.row_of[self.state.row_of >= 0]
        times = self._ranked.next_of(rows)
        reference.give_up(self.state, slots)
        self._ranked.move(rows, times)
        self._ranked.begin_phase()

    def wait_for_predictions(self) -> None:
        """Until everything is predicted that lookups asked for; at once, where nothing is predicted."""
        if self._predictions is not None:
            self._predictions.wait()

    def close(self) -> None:
        """Stop what runs in the background: the predictions of "laru", "fpb" and "hf"."""
        if self._predictions is not None:
            self._predictions.close()

    def wait_for_link(self, rows: int, began: float) -> None:
        """Sleep until so many rows would have come over the emulated link since `began`."""
        if self.emulated_link_gbps is not None and rows:
            seconds = rows * self.tables.row_bytes / (self.emulated_link_gbps * 1e9)
            left = began + seconds - self._time.now()
            if left > 0:
                self._time.sleep(left)

    def hottest_missed(self, k: int) -> Tensor:
        """The k rows missed most of late that are not resident, int64 [k], -1 where there are fewer."""
        return self.state.hottest_missed(k)

    def _insert_ahead(self, rows: Tensor, values: Tensor | None, now: float, evict: bool) -> None:
        if rows.shape[0] == 0:
            return
        self._weight(now)
        limit = self._batch if evict else FREE + 1
        dense = self._dense
        if dense is not None:
            if dense.ranked is not None:
                dense.ranked.begin(self._batch, now)
            for first in range(0, rows.shape[0], WARM_ROWS):
                some = rows[first : first + WARM_ROWS]
                staged = None if values is None else values[first : first + WARM_ROWS]
                dense.queue.prepare(some.shape[0], self.capacity_rows)
                dense.chain.warm(some, staged, self._batch, limit)
                dense.queue.replenish(some.shape[0], self.capacity_rows)
            return
        self._refuse_unknown(rows[rows >= 0])
        fetch = self._fetch if values is None else _staged(rows, values)
        began = self._time.now()
        fetched = reference.warm(self.state, self._queue, rows, fetch, self._batch, evict)
        if values is None:
            self.wait_for_link(fetched, began)

    def _fetch(self, rows: Tensor) -> Tensor:
        if self._device_side is None:
            return self.tables.rows[rows]
        return self._device_side.fetch(rows)

    def _weight(self, now: float) -> float:
        """What a lookup at this time adds to a count; moves the origin before counts overflow."""
        if not self.state.counted:
            return 0.0
        if self._origin_s is None:
            self._origin_s = now
        half_lives = (now - self._origin_s) / self.half_life_s
        if half_lives > REBASE_HALF_LIVES:
            self._settle()
            self.state.rescale(2.0 ** -min(half_lives, 1000.0))
            self._origin_s, half_lives = now, 0.0
            with self._aside():
                self._rebuild_queue()
        return float(2.0**half_lives)

    def _slots(self, pages: NDArray[np.int64]) -> Tensor:
        """Slots of pages [n], int64 [n * rows_per_page], in order."""
        ids = torch.from_numpy(np.sort(pages)).to(self.device)
        row = torch.arange(self.rows_per_page, device=self.device)
        return (ids[:, None] * self.rows_per_page + row).reshape(-1)

    def _aside(self) -> Any:
        """Work on the side stream, behind what the current one was given; on a CPU, here."""
        if self._device_side is None:
            return contextlib.nullcontext()
        return self._device_side.aside()

    def _rebuild_queue(self) -> None:
        self._queue.invalidate()
        if self._dense is not None:
            self._dense.queue.rebuild_here(self.capacity_rows)

    def _settle(self) -> None:
        """Let the current stream wait for what grow and shrink do aside."""
        if self._device_side is not None:
            torch.cuda.current_stream(self.device.index).wait_stream(self._device_side.stream)

    def _check(self, keys: Tensor) -> None:
        good = keys.ndim == 1 and keys.dtype == torch.int64
        if not (good and keys.device.type == self.device.type and keys.shape[0] < 2**31 - 1):
            given = tuple(keys.shape), keys.dtype, str(keys.device)
            raise ArgumentError("keys", given, f"int64 [n] on {self.device}")

    def _refuse_unknown(self, keys: Tensor) -> None:
        if self.device.type == "cuda":
            self._settle()
        if keys.numel() == 0:
            return
        low, high = (int(value) for value in torch.aminmax(keys))
        if low < 0 or high >= self.tables.n_rows:
            raise ArgumentError("keys", (low, high), f"0 to {self.tables.n_rows - 1}")


def _staged(rows: Tensor, values: Tensor) -> reference.Fetch:
    """Reads rows, int64 [n], from a buffer that holds them, [n, dim]."""
    in_order, order = rows.sort()
    return lambda wanted: values[order[torch.searchsorted(in_order, wanted)]]


def _refuse_invalid(count: int, n_rows: int) -> None:
    if count:
        raise BackendError(f"{count} keys that were looked up do not exist: not 0 to {n_rows - 1}")
