# mypy: disallow-untyped-calls=False
"""One allocation of memory, cut into pages that the two caches own.

Changing a page's owner is bookkeeping on the host: nothing is copied, and the device is never asked
or waited for. So nothing is cleared either: a page that changes hands still holds its old bytes,
which may be NaN in the new owner's type, and nobody may read what they have not written.

Not safe for several threads: one serving loop owns the pool.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import ArrayLike, NDArray

from hlem_env.errors import ArgumentError, BackendError, require, require_number

MAX_PAGES = 2**31 - 1
"""Pages fit in the int32 of a page table."""


class Owner(enum.IntEnum):
    """Who owns a page."""

    FREE = 0
    EMBEDDING = 1
    KV = 2


_FREE, _EMBEDDING, _KV = (int(owner) for owner in Owner)
# Arrays compare with plain integers: numpy needs 10 us to find out what an enum's member is.


_NO_FAULT, _UNKNOWN, _TWICE, _NOT_IN_USE = range(4)
"""What can be wrong with a page that is named in a call."""


class PoolExhausted(BackendError):
    """More pages were asked for than are free."""


@dataclass(frozen=True)
class PoolStats:
    """Pages of a pool at one moment; free + embedding + kv = pages."""

    pages: int
    page_bytes: int
    free: int
    embedding: int
    kv: int
    pending: int
    """Freed but pinned: still counted with their owner."""
    pinned: int


class Pool:
    """Pages of one size over one allocation, each with exactly one owner.

    Args:
        pool_bytes: whole pages of it are used.
        page_bytes: size of a page, a multiple of 16 (no read or write straddles two pages).
        device: of the memory, as torch names it.

    Raises:
        ArgumentError: not even one page fits, or a page is no multiple of 16 bytes.
    """

    def __init__(
        self, pool_bytes: int, page_bytes: int = 2 * 2**20, device: str | torch.device = "cpu"
    ) -> None:
        require_number("page_bytes", page_bytes, whole=True)
        require_number("pool_bytes", pool_bytes, whole=True)
        require(
            page_bytes >= 16 and page_bytes % 16 == 0,
            "page_bytes",
            page_bytes,
            "a multiple of 16, at least 16",
        )
        require(
            page_bytes <= pool_bytes <= MAX_PAGES * page_bytes,
            "pool_bytes",
            pool_bytes,
            f"1 to {MAX_PAGES} pages of {page_bytes} bytes",
        )
        self.page_bytes = page_bytes
        self.pages = pool_bytes // page_bytes
        self.memory = torch.empty(self.pages * page_bytes, dtype=torch.uint8, device=device)
        """uint8 [pages * page_bytes], uninitialised."""
        self.device = self.memory.device
        self.reset()

    def reset(self) -> None:
        """All pages are free and nothing is pinned, whoever had them; the memory stays as it is."""
        self.owner: NDArray[np.int8] = np.full(self.pages, _FREE, np.int8)
        """[pages], to read only."""
        self._pins: NDArray[np.int32] = np.zeros(self.pages, np.int32)
        self._pending: NDArray[np.bool_] = np.zeros(self.pages, np.bool_)
        self._stamp: NDArray[np.int64] = np.zeros(self.pages, np.int64)
        # Lowest page on top. An array is a stack for single pages and a buffer for many.
        self._free = array("q", range(self.pages - 1, -1, -1))
        self._count = [self.pages, 0, 0]
        self._pending_count = [0, 0, 0]
        # One page at a time: a memoryview gives plain integers, five times faster than numpy.
        self._owner_of = self.owner.data
        self._pins_of = self._pins.data
        self._pending_of = self._pending.view(np.int8).data

    @property
    def free_count(self) -> int:
        """Pages that nobody owns."""
        return self._count[_FREE]

    @property
    def pending_count(self) -> int:
        """Pages freed while pinned: they stay their owner's until the last pin goes."""
        return self._pending_count[_EMBEDDING] + self._pending_count[_KV]

    def count(self, owner: Owner) -> int:
        """Pages of an owner, its pending ones included."""
        return self._count[owner]

    def pending(self, owner: Owner) -> int:
        """Pages of an owner that are freed but pinned."""
        return self._pending_count[owner]

    def alloc_page(self, owner: Owner) -> int:
        """Take a free page.

        Raises:
            PoolExhausted: no page is free.
            ArgumentError: `owner` is not EMBEDDING or KV.
        """
        if owner != 1 and owner != 2:
            raise ArgumentError("owner", owner, "EMBEDDING or KV")
        try:
            page = self._free.pop()
        except IndexError:
            raise self._exhausted(1, owner) from None
        self._owner_of[page] = owner
        count = self._count
        count[0] -= 1
        count[owner] += 1
        return page

    def free_page(self, page: int) -> None:
        """Give a page back. A pinned one stays its owner's, pending, until the last pin goes.

        Raises:
            ArgumentError: there is no such page.
            BackendError: nobody owns it, or it was freed already.
        """
        if not 0 <= page < self.pages:
            raise self._unknown(page)
        owner = self._owner_of[page]
        if owner == 0 or self._pending_of[page]:
            raise self._not_in_use([page], "freed")
        if self._pins_of[page]:
            self._pending_of[page] = 1
            self._pending_count[owner] += 1
            return
        self._owner_of[page] = 0
        count = self._count
        count[owner] -= 1
        count[0] += 1
        self._free.append(page)

    def alloc_pages(self, n: int, owner: Owner) -> NDArray[np.int64]:
        """Take n free pages, int64 [n], or none at all.

        Raises:
            PoolExhausted: fewer than n are free.
            ArgumentError: n is negative, or `owner` is not EMBEDDING or KV.
        """
        if owner != 1 and owner != 2:
            raise ArgumentError("owner", owner, "EMBEDDING or KV")
        require(n >= 0, "n", n, "0 or more")
        if n > len(self._free):
            raise self._exhausted(n, owner)
        if n == 0:
            return np.empty(0, np.int64)
        first = len(self._free) - n
        pages = np.array(self._free[first:], np.int64)[::-1].copy()  # as n pops would
        del self._free[first:]
        self.owner[pages] = int(owner)
        self._count[_FREE] -= n
        self._count[owner] += n
        return pages

    def free_pages(self, pages: ArrayLike) -> None:
        """Give pages [n] back, all or none. Pinned ones stay their owner's, pending.

        Raises:
            ArgumentError: a page does not exist or stands twice in the list.
            BackendError: nobody owns one of them, or it was freed already.
        """
        ids = self._ids(pages, "freed")
        pinned = self._pins[ids] > 0
        if np.count_nonzero(pinned):
            waiting = ids[pinned]
            self._pending[waiting] = True
            self._add(self._pending_count, waiting, 1)
            ids = ids[~pinned]
        self._release(ids)

    def pin(self, pages: ArrayLike) -> None:
        """Keep pages [n] with their owners, counted: as many `unpin` calls let them go.

        Raises:
            ArgumentError: a page does not exist or stands twice in the list.
            BackendError: nobody owns one of them, or it was freed already.
        """
        self._pins[self._ids(pages, "pinned")] += 1

    def unpin(self, pages: ArrayLike) -> None:
        """Undo one `pin` of pages [n]; pending ones without a pin become free.

        Raises:
            ArgumentError: a page does not exist or stands twice in the list.
            BackendError: one of them is not pinned.
        """
        ids = self._ids(pages)
        loose, pending = _unpin(self._pins, self._pending, ids)
        if loose >= 0:
            raise BackendError(f"page {ids[loose]} is unpinned but was not pinned")
        if pending:
            done = ids[(self._pins[ids] == 0) & self._pending[ids]]
            self._pending[done] = False
            self._add(self._pending_count, done, -1)
            self._release(done)

    def stats(self) -> PoolStats:
        """Pages by owner, pending and pinned."""
        free, embedding, kv = self._count
        pinned = int(np.count_nonzero(self._pins))
        return PoolStats(
            self.pages, self.page_bytes, free, embedding, kv, self.pending_count, pinned
        )

    def view_rows(self, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The memory as rows [pages * rows a page, dim]; row r lies in page r // (rows a page).

        Raises:
            ArgumentError: rows do not fill a page.
        """
        require(dim >= 1, "dim", dim, "1 or more")
        return self._view((dim,), dtype, "rows")

    def view_blocks(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The memory as blocks [pages * blocks a page, *shape].

        Raises:
            ArgumentError: blocks do not fill a page.
        """
        require(
            len(shape) > 0 and min(shape, default=0) >= 1, "shape", tuple(shape), "1 or more each"
        )
        return self._view(tuple(shape), dtype, "blocks")

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> torch.Tensor:
        unit_bytes = math.prod(shape) * dtype.itemsize
        lost = self.page_bytes % unit_bytes
        require(
            lost == 0,
            "shape",
            (*shape, dtype),
            f"{what} whose size divides a page of {self.page_bytes} bytes; with {unit_bytes} bytes "
            f"each, {lost} of every page would be lost",
        )
        return self.memory.view(dtype).view(-1, *shape)

    def _ids(self, pages: ArrayLike, verb: str = "") -> NDArray[np.int64]:
        """The pages as int64 [n], each existing and named once; with a verb, also owned and not freed."""
        given = np.asarray(pages)
        if given.dtype != np.int64 or given.ndim != 1 or not given.flags.c_contiguous:
            given = _whole(given)
        fault, at = _fault(self.owner, self._pending, self._stamp, given, bool(verb))
        if fault == _UNKNOWN:
            raise self._unknown(int(given[at]))
        if fault == _TWICE:
            raise ArgumentError("pages", int(given[at]), "each page once in a call")
        if fault == _NOT_IN_USE:
            bad = given[(self.owner[given] == _FREE) | self._pending[given]]
            raise self._not_in_use(bad, verb)
        return given

    def _release(self, ids: NDArray[np.int64]) -> None:
        self._add(self._count, ids, -1)
        self._count[_FREE] += ids.size
        self.owner[ids] = _FREE
        self._free.frombytes(ids[::-1].tobytes())

    def _add(self, counts: list[int], ids: NDArray[np.int64], sign: int) -> None:
        """Add pages, by owner, to `counts`."""
        kv = int(np.count_nonzero(self.owner[ids] == _KV))
        counts[_KV] += sign * kv
        counts[_EMBEDDING] += sign * (ids.size - kv)

    def _exhausted(self, n: int, owner: Owner) -> PoolExhausted:
        return PoolExhausted(
            f"{n} pages asked for {Owner(owner).name}, {len(self._free)} of {self.pages} are free"
        )

    def _unknown(self, page: int) -> ArgumentError:
        return ArgumentError("page", page, f"0 to {self.pages - 1}")

    def _not_in_use(self, ids: Sequence[int] | NDArray[np.int64], verb: str) -> BackendError:
        page = int(ids[0])
        state = "was freed already" if self._pending[page] else "belongs to nobody"
        more = f" (and {len(ids) - 1} more)" if len(ids) > 1 else ""
        return BackendError(f"page {page}{more} cannot be {verb}: it {state}")


def _whole(given: NDArray[Any]) -> NDArray[np.int64]:
    """A list of page numbers as int64 [n], contiguous."""
    given = np.atleast_1d(given)
    whole = np.issubdtype(given.dtype, np.integer) or given.size == 0
    require(whole and given.ndim == 1, "pages", given, "a list of page numbers")
    return np.ascontiguousarray(given, np.int64)


_PAGES = types.Array(types.int64, 1, "C", readonly=True)


@numba.njit(
    [types.UniTuple(types.int64, 2)(types.int8[::1], types.b1[::1], types.int64[::1], _PAGES, types.b1)],
    cache=True,
)  # fmt: skip
def _fault(owner: Any, pending: Any, stamp: Any, pages: Any, in_use: bool) -> tuple[int, int]:
    """What is wrong, and where first, with pages that are to be different and perhaps in use.

    Changes `stamp` alone.
    """
    for i in range(pages.size):
        if pages[i] < 0 or pages[i] >= owner.size:
            return _UNKNOWN, i
    for i in range(pages.size):
        stamp[pages[i]] = i  # of a page named twice only the last stays
    for i in range(pages.size):
        if stamp[pages[i]] != i:
            return _TWICE, i
    for i in range(pages.size):
        if in_use and (owner[pages[i]] == _FREE or pending[pages[i]]):
            return _NOT_IN_USE, i
    return _NO_FAULT, -1


@numba.njit(
    [types.UniTuple(types.int64, 2)(types.int32[::1], types.b1[::1], _PAGES)], cache=True
)  # fmt: skip
def _unpin(pins: Any, pending: Any, pages: Any) -> tuple[int, int]:
    """Undo one pin of each page, or of none where one has no pin.

    Returns:
        The place of the first one without a pin, else -1; pending pages that have none left.
    """
    for i in range(pages.size):
        if pins[pages[i]] == 0:
            return i, 0
    freed = 0
    for i in range(pages.size):
        pins[pages[i]] -= 1
        freed += pins[pages[i]] == 0 and pending[pages[i]]
    return -1, freed
