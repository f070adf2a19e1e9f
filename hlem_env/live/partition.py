"""The boundary between the two caches: moves alpha, page by page, as far as running requests allow.

Growing the embedding cache takes free pages; where those are too few, the KV cache evicts whole
entries. Shrinking it asks the embedding cache for pages, which evicts its least valuable rows and
compacts. Entries and rows in use stay where they are, and what they hold back is pending: `settle`
completes it.

The KV cache's capacity follows the target at once, so that it neither takes pages that the
embedding cache still waits for nor gives up more than it must.

Order on the device. Nothing here waits for it. A page may still be read by kernels in the queue
when it changes hands, so each side sees to its own writes: KV kernels run on the current stream,
and what an embedding cache writes on another one waits for the current stream's work before
`grow`; when `shrink` returns, the current stream is made to wait for the copies that empty the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import BackendError, require
from hlem_env.live.pool import Owner, Pool


class EmbeddingSide(Protocol):
    """What the boundary asks of the embedding cache. It changes no owner itself."""

    @property
    def shrink_evictions(self) -> int:
        """Rows that `shrink` evicted from the start; read on the host, the device is not asked."""

    def grow(self, pages: NDArray[np.int64]) -> None:
        """Use these pages [n] as well; they belong to it already."""

    def shrink(self, n: int) -> NDArray[np.int64]:
        """Stop using n pages, or fewer while others are in use; which they are [n or fewer]."""


class KvSide(Protocol):
    """What the boundary asks of the KV cache. It allocates and frees its pages itself."""

    evictions: int
    """Entries evicted from the start."""

    def resize(self, capacity_pages: int) -> int:
        """Hold so many pages from now on: evict whole entries, never pinned ones."""


@dataclass(frozen=True)
class Move:
    """What one call did to the boundary. Pages count towards the embedding cache: negative ones left it."""

    wanted_pages: int
    """From where the boundary was to the target."""
    moved_pages: int
    """Of those, the ones that changed hands in this call."""
    pending_pages: int
    """Of those, the ones that wait for running requests; wanted = moved + pending."""
    evicted_entries: int
    evicted_rows: int


_NO_MOVE = Move(0, 0, 0, 0, 0)


class Partition:
    """Moves pages of a pool between the two caches.

    Args:
        pool: of both.
        embedding: the embedding cache; the pages that it owns now are the first target.
        kv: the KV cache; gets the rest.
    """

    def __init__(self, pool: Pool, embedding: EmbeddingSide, kv: KvSide) -> None:
        self.pool = pool
        self.target_pages = pool.count(Owner.EMBEDDING)
        """Pages that the embedding cache is to own."""
        self._embedding = embedding
        self._kv = kv
        kv.resize(pool.pages - self.target_pages)

    @property
    def pending_pages(self) -> int:
        """Pages still to move, towards the embedding cache; negative ones are to leave it.

        Where it waits for pages while others that it gave up are still pinned: those it waits for.
        """
        missing = self.target_pages - self._in_use()
        return missing if missing > 0 else self.target_pages - self.pool.count(Owner.EMBEDDING)

    def move(self, alpha_centi: int) -> Move:
        """Set the embedding cache's share of the pool, in hundredths; its pages are rounded down.

        Raises:
            ArgumentError: `alpha_centi` is not 0 to 100.
            BackendError: a cache did not keep to its protocol.
        """
        require(0 <= alpha_centi <= 100, "alpha_centi", alpha_centi, "0 to 100")
        self.target_pages = self.pool.pages * alpha_centi // 100
        return self._advance()

    def settle(self) -> Move:
        """Complete what was pending as far as possible; call it whenever requests have ended."""
        return _NO_MOVE if self.pending_pages == 0 else self._advance()

    def _in_use(self) -> int:
        """Pages of the embedding cache, without those that it gave up but a pin still holds."""
        return self.pool.count(Owner.EMBEDDING) - self.pool.pending(Owner.EMBEDDING)

    def _advance(self) -> Move:
        wanted = self.pending_pages
        entries, rows = self._kv.evictions, self._embedding.shrink_evictions
        self._kv.resize(self.pool.pages - self.target_pages)
        in_use = self._in_use()
        if in_use > self.target_pages:
            self._shrink(in_use - self.target_pages)
        elif in_use < self.target_pages:
            self._grow(min(self.target_pages - in_use, self.pool.free_count))
        pending = self.pending_pages
        return Move(
            wanted_pages=wanted,
            moved_pages=wanted - pending,
            pending_pages=pending,
            evicted_entries=self._kv.evictions - entries,
            evicted_rows=self._embedding.shrink_evictions - rows,
        )

    def _grow(self, n: int) -> None:
        if n:
            self._embedding.grow(self.pool.alloc_pages(n, Owner.EMBEDDING))

    def _shrink(self, n: int) -> None:
        pages = self._embedding.shrink(n)
        if pages.size > n or (self.pool.owner[pages] != int(Owner.EMBEDDING)).any():
            raise BackendError(
                f"the embedding cache was to give up {n} pages and gave {pages.tolist()[:16]}: more, "
                "or not its own"
            )
        self.pool.free_pages(pages)
