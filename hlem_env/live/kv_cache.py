"""K and V of users' histories in pages of the pool: reused, appended, evicted a whole entry at a time.

A batch of requests begins, the model runs, and the batch is committed or aborted. In between its
entries are pinned: they are neither evicted nor replaced, and nothing says that they hold the new
tokens yet.

What makes stored tokens reusable. A request brings its history's length L, how many of those items
are new (n), and a 64-bit hash that names the history: histories of one user with equal hashes are
prefixes of one another. A hash of (user, number of edits), say, where every truncation and every
edit counts as one. Stored tokens are reused when

    the model's version is the one that computed them,
    the hash is the one that they were stored under, and
    L - n is not below the length of the user's last request (else the history shrank).

Everything else is a miss: the entry is dropped at once, and the request computes all of L.

Who is stored. The policy hears of every request; a user's entry grows to the request's whole
history, if need be at the expense of entries that the policy holds less worthy, all or nothing. A
user that is not admitted costs no page. An entry that could not grow stays as it is and serves the
next request with what it has.

Order on the device. Pages change hands on the host while kernels may still run. All kernels that
read or write blocks are queued on one stream, in the order of the batches, so an entry that is
evicted after its commit is overwritten only behind the kernels that read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numpy.typing import ArrayLike, NDArray

from hlem_env.errors import ArgumentError, BackendError, require, require_number
from hlem_env.eviction.protocol import EvictionPolicy, Times
from hlem_env.live.kv_entries import HIT, STALE, EntryKind, KvEntries, Slots
from hlem_env.live.pool import Owner, Pool

_NOBODY: Slots = np.empty(0, np.int64)
_INT64 = np.dtype(np.int64)
_MORE_VICTIMS = 4
"""Victims asked for at first, beyond what entries of average size would take."""


@dataclass(frozen=True)
class KvLayout:
    """How K and V lie in a page.

    A block holds K and V of `block_tokens` tokens in one layer. Token chunk c (of `block_tokens`)
    in layer l is a user's block number c * layers + l, so that growth only appends. Block number b
    lies in the user's page b // blocks_per_page, there at place b % blocks_per_page.
    """

    layers: int
    heads: int
    head_dim: int
    block_tokens: int = 128
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_dim", "block_tokens"):
            require_number(name, getattr(self, name), whole=True)
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """(2, block_tokens, heads, head_dim): K, then V."""
        return (2, self.block_tokens, self.heads, self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return 2 * self.block_tokens * self.heads * self.head_dim * self.dtype.itemsize

    def pages(self, tokens: NDArray[np.int64], blocks_per_page: int) -> NDArray[np.int64]:
        """Pages [n] that so many tokens [n] take."""
        counts = np.ascontiguousarray(tokens, np.int64)
        pages: NDArray[np.int64] = _pages_of(
            counts, self.block_tokens, self.layers, blocks_per_page
        )
        return pages


@dataclass(eq=False)
class KvBatch:
    """A batch of requests between `KvCache.begin` and `commit` or `abort`."""

    users: NDArray[np.int64]
    """[B] ids."""
    cached: NDArray[np.int32]
    """[B] tokens of history whose K and V are there."""
    admitted: NDArray[np.bool_]
    """[B] whether K and V of the new history go to the blocks."""
    start: NDArray[np.int32]
    """[B] first token that the request appends: `cached`."""
    stop: NDArray[np.int32]
    """[B] one after the last that it appends: the history's length; `start` if not admitted."""
    page_table: NDArray[np.int32]
    """[B, most pages of an entry]: the entry's pages, then -1."""
    slots: Slots
    """[B], the cache's own."""
    pinned: NDArray[np.int64]
    """[n] pages of the entries."""
    pages_before: NDArray[np.int32]
    """[B] pages that the entry held before the batch."""
    seen_before: NDArray[np.int32]
    """[B] length of the user's last request before this one."""
    running: bool = field(default=True)


@dataclass(frozen=True)
class KvStats:
    """The KV cache at one moment; the last three count from the start."""

    capacity_pages: int
    used_pages: int
    pinned_pages: int
    entries: int
    tokens: int
    """Whose K and V are valid."""
    users: int
    """Remembered, with an entry or without."""
    evictions: int
    """Entries given up for room."""
    invalidated: int
    """Entries dropped because the history or the model had changed."""
    not_admitted: int
    """Requests whose new history was not stored."""


class KvCache:
    """Entries of users in pages of the pool.

    Args:
        pool: its free pages are taken as far as `capacity_pages` allows, at first all that the
            embedding cache does not own.
        layout: blocks must fill a page.
        policy: who is stored; its keys are this cache's slots, so it serves no other cache.
        model_version: of the model that computes K and V. Set the attribute when it changes: entries
            of another version are misses.
        max_history_tokens: a longer history is refused.
        max_users: that are remembered; beyond, the policy's least worthy without an entry are
            forgotten. At least twice the pool's pages; about 150 bytes each.

    Raises:
        ArgumentError: naming the argument and what is allowed.
    """

    def __init__(
        self,
        pool: Pool,
        layout: KvLayout,
        policy: EvictionPolicy,
        model_version: int = 0,
        *,
        max_history_tokens: int = 15_000,
        max_users: int = 2**18,
    ) -> None:
        require_number("max_history_tokens", max_history_tokens, whole=True)
        require(
            1 <= max_history_tokens < 2**31,
            "max_history_tokens",
            max_history_tokens,
            "1 to 2^31 - 1",
        )
        self.pool = pool
        self.layout = layout
        self.model_version = model_version
        self.max_history_tokens = max_history_tokens
        self.blocks = pool.view_blocks(layout.block_shape, layout.dtype)
        """[pages * blocks_per_page, 2, block_tokens, heads, head_dim], the pool's memory."""
        self.blocks_per_page = pool.page_bytes // layout.block_bytes
        self.max_pages = int(self._pages_for(np.array([max_history_tokens]))[0])
        """Of an entry; the width of a batch's page table."""
        self.capacity_pages = pool.pages - pool.count(Owner.EMBEDDING)
        """Pages that entries may hold; `resize` changes it."""
        self.used_pages = 0
        self.evictions = self.invalidated = self.not_admitted = 0
        self._policy = policy
        self._entries = KvEntries(pool.pages, self.max_pages, max_users)
        self._count = 0
        self._tokens = 0
        self._pinned_pages = 0
        self._now = 0.0
        policy.on_resize(self.capacity_pages)

    @property
    def evictable_pages(self) -> int:
        """Pages of entries without a request in flight."""
        return self.used_pages - self._pinned_pages

    def stats(self) -> KvStats:
        """Pages, entries and counters."""
        return KvStats(
            capacity_pages=self.capacity_pages,
            used_pages=self.used_pages,
            pinned_pages=self._pinned_pages,
            entries=self._count,
            tokens=self._tokens,
            users=self._entries.users,
            evictions=self.evictions,
            invalidated=self.invalidated,
            not_admitted=self.not_admitted,
        )

    def cached_tokens(
        self, users: ArrayLike, prefix_hashes: ArrayLike | None = None
    ) -> NDArray[np.int32]:
        """Tokens stored [n] of users [n], 0 for one without an entry; changes nothing.

        With `prefix_hashes` [n], 0 also where they were stored under another one.
        """
        slots = self._entries.find(EntryKind.USER, _whole("users", users).tolist())
        records = self._entries.records
        there = slots >= 0
        if prefix_hashes is not None:
            there &= records["prefix"][slots] == _whole("prefix_hashes", prefix_hashes, np.uint64)
        return np.where(there, records["length"][slots], np.int32(0))

    def split(self, users: ArrayLike, history_lengths: ArrayLike) -> list[NDArray[np.int64]]:
        """Cut requests [n] into consecutive batches that `begin` can take one after the other.

        A batch has no user twice, and its entries fit in the cache together. A request whose own
        history does not fit is not admitted, so only what its user has stored counts.

        Returns
        -------
        Indices into `users`, ascending.
        """
        ids, lengths = _whole("users", users), _whole("history_lengths", history_lengths)
        require(ids.shape == lengths.shape, "history_lengths", lengths.shape, str(ids.shape))
        self._check_lengths(lengths)
        slots = self._entries.find(EntryKind.USER, ids.tolist())
        held = np.where(slots >= 0, self._entries.records["pages"][slots], 0)
        wanted = self._pages_for(lengths)
        wanted = np.where(wanted <= self.capacity_pages, np.maximum(wanted, held), held)
        batches, first, pages = [], 0, 0
        seen: set[int] = set()
        for i, (user, more) in enumerate(zip(ids.tolist(), wanted.tolist(), strict=True)):
            if i > first and (user in seen or pages + more > self.capacity_pages):
                batches.append(np.arange(first, i))
                first, pages = i, 0
                seen.clear()
            seen.add(user)
            pages += more
        if first < ids.size:
            batches.append(np.arange(first, ids.size))
        return batches

    def begin(
        self,
        users: ArrayLike,
        history_lengths: ArrayLike,
        new_items: ArrayLike,
        prefix_hashes: ArrayLike,
        now: Times,
    ) -> KvBatch:
        """Start a batch of requests: find what they reuse, decide who is stored, pin their entries.

        Args:
            users: [B] ids, each once and none in a running batch (`split` sees to the former).
            history_lengths: [B] tokens, the new items included, 0 to `max_history_tokens`.
            new_items: [B] of those, appended since the user's last request.
            prefix_hashes: [B] 64-bit integers; see the module.
            now: seconds, of the batch or of each request [B], such as its arrival.

        Raises:
            ArgumentError: naming the argument and what is allowed; nothing has changed.
            BackendError: a user is in a running batch; nothing has changed.
        """
        ids, lengths = _whole("users", users), _whole("history_lengths", history_lengths)
        new = _whole("new_items", new_items)
        prefixes = _whole("prefix_hashes", prefix_hashes, np.uint64)
        times = np.array(now, np.float64)
        self._check(ids, lengths, new, prefixes, times)
        if times.ndim == 0:
            times = np.full(ids.shape, times)
        known = ids.tolist()
        slots = self._idle_slots(known)

        self._now = max([self._now, *times.tolist()])
        self._entries.add(EntryKind.USER, known, slots, self._policy)
        records = self._entries.records
        seen_before = records["seen"][slots]
        self._validate(slots, lengths, new, prefixes, times)
        cached, pages_before = records["length"][slots], records["pages"][slots]
        self._set_in_flight(slots, pages_before)
        admitted, more = self._admit(slots, lengths, pages_before, times)
        if (stored := np.count_nonzero(admitted)) == slots.size:
            self._extend(slots, more, prefixes, times)
        elif stored:
            self._extend(slots[admitted], more[admitted], prefixes[admitted], times[admitted])
        pages = self._entries.pages_from(slots, np.zeros(slots.size, np.int32))
        if pages.size:
            self.pool.pin(pages)
        stop = cached.copy()
        stop[admitted] = lengths[admitted]
        return KvBatch(
            users=ids,
            cached=cached,
            admitted=admitted,
            start=cached.copy(),
            stop=stop,
            page_table=self._entries.page_table(slots),
            slots=slots,
            pinned=pages,
            pages_before=pages_before,
            seen_before=seen_before,
        )

    def commit(self, batch: KvBatch) -> None:
        """The batch's new K and V are in the blocks, or queued to be: the entries hold them.

        Raises:
            BackendError: the batch is not running.
        """
        self._finish(batch)
        self._tokens += sum((batch.stop - batch.start).tolist())
        self._entries.records["length"][batch.slots] = batch.stop  # of the others as it was

    def abort(self, batch: KvBatch) -> None:
        """The batch did not run: entries are as long as before, and pages taken for it are free.

        What was evicted for it is gone, and the requests count as visits.

        Raises:
            BackendError: the batch is not running.
        """
        self._finish(batch)
        records = self._entries.records
        records["seen"][batch.slots] = batch.seen_before
        stored = batch.admitted
        slots, before = batch.slots[stored], batch.pages_before[stored]
        pages = self._entries.pages_from(slots, before)
        self.pool.free_pages(pages)
        self.used_pages -= pages.size
        records["pages"][slots] = before
        self._forget_entries(slots[before == 0])

    def resize(self, capacity_pages: int) -> int:
        """Let entries hold so many pages from now on; evicts by policy what is too much.

        Returns
        -------
        Pages freed. Entries in flight stay: while `used_pages` exceeds the capacity, call again
        when they are done.
        """
        require(
            0 <= capacity_pages <= self.pool.pages,
            "capacity_pages",
            capacity_pages,
            f"0 to {self.pool.pages}",
        )
        self.capacity_pages = capacity_pages
        self._policy.on_resize(capacity_pages)
        return self.release(self.used_pages - capacity_pages)

    def release(self, pages: int) -> int:
        """Free `pages` pages or somewhat more, by evicting whole entries, least worthy first.

        Returns
        -------
        Pages freed: fewer only when all other entries are in flight.

        Raises:
            BackendError: the policy offers no way on.
        """
        if pages <= 0 or self.evictable_pages == 0:
            return 0
        victims = self._victims(min(pages, self.evictable_pages), _NOBODY, self._now)
        if victims is None:
            raise BackendError(
                f"{pages} pages are to be freed and {self.evictable_pages} are evictable, but the "
                f"policy {type(self._policy).__name__} offers too few victims"
            )
        return self._evict(victims)

    def close(self) -> None:
        """Stop what its policy runs in the background."""
        self._policy.close()

    def _pages_for(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.layout.pages(tokens, self.blocks_per_page)

    def _room(self) -> int:
        """Pages that may be taken without an eviction."""
        return min(self.capacity_pages - self.used_pages, self.pool.free_count)

    def _check(
        self,
        users: NDArray[np.int64],
        lengths: NDArray[np.int64],
        new: NDArray[np.int64],
        prefixes: NDArray[np.uint64],
        times: NDArray[np.float64],
    ) -> None:
        """Refuse arguments of `begin` that are not what it allows."""
        shape = users.shape
        if not lengths.shape == new.shape == prefixes.shape == shape:
            for name, given in (
                ("history_lengths", lengths),
                ("new_items", new),
                ("prefix_hashes", prefixes),
            ):
                require(given.shape == shape, name, given.shape, f"the shape of users, {shape}")
        if times.shape != shape and times.shape != ():
            raise ArgumentError("now", times.shape, f"one time or {shape}")
        if _allowed(lengths, new, times.reshape(-1), self.max_history_tokens):
            return
        require(bool(np.isfinite(times).all()), "now", times, "finite seconds")
        self._check_lengths(lengths)
        wrong = (new < 0) | (new > lengths)
        require(not wrong.any(), "new_items", new[wrong].tolist(), "0 to the history's length")

    def _check_lengths(self, lengths: NDArray[np.int64]) -> None:
        wrong = (lengths < 0) | (lengths > self.max_history_tokens)
        require(
            not wrong.any(),
            "history_lengths",
            lengths[wrong].tolist(),
            f"0 to max_history_tokens={self.max_history_tokens}; truncate longer ones and change "
            "their hash",
        )

    def _idle_slots(self, users: list[int]) -> Slots:
        """Slots [n], -1 where unknown, of users of whom none stands twice or is in a running batch."""
        if len(set(users)) < len(users):
            twice = sorted({user for user in users if users.count(user) > 1})
            raise ArgumentError("users", twice, "each once in a batch: split() it")
        slots = self._entries.find(EntryKind.USER, users)
        busy = self._entries.busy(slots)
        if busy >= 0:
            raise BackendError(
                f"user {users[busy]} has a request in a running batch: commit or abort that first"
            )
        return slots

    def _validate(
        self,
        slots: Slots,
        lengths: NDArray[np.int64],
        new: NDArray[np.int64],
        prefixes: NDArray[np.uint64],
        times: NDArray[np.float64],
    ) -> None:
        """Drop entries that the requests cannot reuse, and tell the policy of hits and misses."""
        found = self._entries.visit(slots, lengths, new, prefixes, self.model_version)
        self._policy.describe(slots, lengths)
        if (kinds := set(found.tolist())) == {HIT}:
            self._policy.on_hit(slots, times)
        elif HIT not in kinds:
            self._policy.on_miss(slots, times)
        else:
            hit = found == HIT
            self._policy.on_hit(slots[hit], times[hit])
            self._policy.on_miss(slots[~hit], times[~hit])
        if STALE in kinds:
            stale = slots[found == STALE]
            self.invalidated += stale.size
            self._drop(stale)

    def _set_in_flight(self, slots: Slots, pages: NDArray[np.int32]) -> None:
        self._policy.pin(slots)
        self._entries.records["in_flight"][slots] = True
        self._pinned_pages += sum(pages.tolist())

    def _admit(
        self,
        slots: Slots,
        lengths: NDArray[np.int64],
        pages_before: NDArray[np.int32],
        times: NDArray[np.float64],
    ) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Decide in order who is stored, and evict for it: (admitted [B], pages to add [B])."""
        more = self._pages_for(lengths) - pages_before
        admitted = lengths > 0
        wanted = more.tolist()
        if sum(wanted) <= self._room():
            return admitted, more
        promised = 0
        for i in np.flatnonzero(admitted).tolist():
            pages = wanted[i]
            if pages and not self._make_room(promised, pages, slots[i : i + 1], times[i : i + 1]):
                admitted[i] = False
                self.not_admitted += 1
            else:
                promised += pages
        return admitted, more

    def _make_room(self, promised: int, pages: int, slot: Slots, time: NDArray[np.float64]) -> bool:
        """Evict less worthy entries until `pages` fit beside those promised; all or nothing."""
        lacking = promised + pages - self._room()
        if lacking <= 0:
            return True
        if lacking > self.evictable_pages or not self._policy.admit(slot, time)[0]:
            return False
        victims = self._victims(lacking, slot, float(time[0]))
        if victims is None:
            return False
        self._evict(victims)
        return True

    def _victims(self, pages: int, incoming: Slots, now: float) -> Slots | None:
        """First entries to go that free `pages` together; None when those on offer do not.

        At most log2(entries) rounds, since every round's victims are different entries.
        """
        n = _MORE_VICTIMS + pages * self._count // self.used_pages
        while True:
            slots = self._policy.pick_victims(n, incoming, now)
            count, good = self._entries.first_to_free(slots, pages)
            if not good:
                raise BackendError(
                    f"the policy {type(self._policy).__name__} offers victims that are not cached, "
                    f"are in flight or stand there twice: slots {slots.tolist()[:16]}"
                )
            if count <= slots.size:
                return slots[:count]
            if slots.size < n:
                return None
            n *= 2

    def _evict(self, slots: Slots) -> int:
        self.evictions += slots.size
        return self._drop(slots)

    def _drop(self, slots: Slots) -> int:
        """Free the entries' pages; returns how many."""
        if slots.size == 0:
            return 0
        pages = self._entries.pages_from(slots, np.zeros(slots.size, np.int32))
        self.pool.free_pages(pages)
        self.used_pages -= pages.size
        self._tokens -= self._forget_entries(slots)
        return int(pages.size)

    def _forget_entries(self, slots: Slots) -> int:
        """Returns the tokens that they held."""
        self._count -= slots.size
        self._policy.on_remove(slots)
        return self._entries.drop_rows(slots)

    def _extend(
        self,
        slots: Slots,
        more: NDArray[np.int64],
        prefixes: NDArray[np.uint64],
        times: NDArray[np.float64],
    ) -> None:
        """Give entries [n] so many more pages; users without one get one."""
        fresh = self._entries.records["row"][slots] < 0
        if np.count_nonzero(fresh):
            self._entries.add_rows(slots[fresh])
            self._policy.on_insert(slots[fresh], times[fresh])
            self._count += int(np.count_nonzero(fresh))
        total = sum(more.tolist())
        pages = self.pool.alloc_pages(total, Owner.KV)
        self._entries.grow(slots, more, pages, prefixes, self.model_version)
        self.used_pages += total
        self._pinned_pages += total

    def _finish(self, batch: KvBatch) -> None:
        """Unpin what `begin` pinned."""
        if not batch.running:
            raise BackendError(f"the batch of users {batch.users.tolist()[:8]} ended already")
        batch.running = False
        if batch.pinned.size:
            self.pool.unpin(batch.pinned)
        self._policy.unpin(batch.slots)
        self._pinned_pages -= batch.pinned.size
        self._entries.records["in_flight"][batch.slots] = False


def _whole(name: str, values: ArrayLike, dtype: type = np.int64) -> NDArray[Any]:
    """The values as integers [n], a copy; unsigned ones do not wrap where they are compared."""
    if type(values) is np.ndarray and values.dtype == _INT64 and values.ndim == 1:
        return values.astype(dtype)
    given = np.atleast_1d(np.asarray(values))
    whole = np.issubdtype(given.dtype, np.integer) or given.size == 0
    require(whole and given.ndim == 1, name, values, "whole numbers [n]")
    if given.dtype == np.uint64 and dtype is np.int64:
        require(bool((given < 2**63).all()), name, values, "below 2^63")
    return given.astype(dtype)


_COUNTS = types.Array(types.int64, 1, "C", readonly=True)
_TIMES = types.Array(types.float64, 1, "C", readonly=True)


@numba.njit([types.b1(_COUNTS, _COUNTS, _TIMES, types.int64)], cache=True)
def _allowed(lengths: Any, new: Any, times: Any, most: int) -> bool:
    """Whether 0 <= new <= lengths <= most, and all times are finite."""
    good = True
    for i in range(lengths.size):
        good &= 0 <= new[i] <= lengths[i] <= most
    for time in times:
        good &= np.isfinite(time)
    return good


@numba.njit([types.int64[::1](_COUNTS, types.int64, types.int64, types.int64)], cache=True)
def _pages_of(tokens: Any, block_tokens: int, layers: int, blocks_per_page: int) -> Any:
    pages = np.empty(tokens.size, np.int64)
    for i in range(tokens.size):
        blocks = -(-tokens[i] // block_tokens) * layers
        pages[i] = -(-blocks // blocks_per_page)
    return pages
