"""Users' histories on disk: what a request of new items builds on, and what survives a crash.

An LMDB environment of three tables. `users` has a record a user: which history it has, how long it is,
the hash of its items, and the number of its last use. `segments` has a history's items, 510 to a segment,
which is one page of the file: an append rewrites the last segment and adds more, it does not rewrite the
history. `uses` has the users by the number of their last use. A change is all or nothing and on the disk
when `commit` returns; many users' changes share one synchronisation.

A use that changes nothing is not written by itself: it waits for the next change, or for others like it.

The file grows by space that the file system has set aside before, so that a full disk is found out
while nothing has been written yet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError, HlemError, require
from hlem_env.live.prefix_hash import prefix_hash
from serving_bridge.durable import lock_folder

Items = NDArray[np.int64]

FORMAT, FORMAT_VERSION = "hlem-histories", 2
DEFAULT_MAX_BYTES = 16 * 2**30
SEGMENT_ITEMS = 510
"""With LMDB's header of 16 bytes these fill a page of 4 KiB."""
USER_BYTES_MAX = 511
"""Of a user's id: LMDB's longest key."""
_SEGMENT_BYTES = 8 * SEGMENT_ITEMS
_FORMAT_KEY = b"format"
USES_AT_ONCE = 64
"""As many uses that changed nothing are written by themselves."""
REMOVED_AT_ONCE = 32
"""Users; a bound on the time that a removal takes."""
_RECORD = struct.Struct("<QQQQ")
_SEGMENT_KEY = struct.Struct(">QI")
_USE_KEY = struct.Struct(">Q")
_PAGES_A_CHANGE = 32
"""Of trees and free lists that a change or a removal may rewrite, beside its segments; with room to spare."""
_PAGES_A_USE = 8
"""Of trees, to write a use alone."""
_GROW_BYTES = 2**24
"""The file grows by so much at a time."""


class StoreError(HlemError):
    """Histories were not written or not read. The message repeats nothing of them."""


class StoreFull(StoreError):
    """There is no room for the change, in the store or on the disk."""


class StaleHistory(StoreError):
    """The change builds on a history that is not the stored one."""


class StoreBroken(StoreError):
    """Nothing can be written until the store has been opened anew."""


class StoredHistory(NamedTuple):
    """What names a user's history."""

    id: int
    """Another one whenever the history is replaced."""
    length: int
    """Items; one or more."""
    hash: int
    """`prefix_hash` of all items, from the store's `hash_key`."""


class Change(NamedTuple):
    """A user's history becomes another."""

    user: str
    base: StoredHistory | None
    """What it builds on, or replaces; None: the user has none."""
    after: StoredHistory
    """With the id of `base` `items` are appended, else they are the whole history. Equal to `base`:
    nothing changes, but `base` must be what is stored."""
    items: Items


class Size(NamedTuple):
    """What a store holds."""

    users: int
    n_bytes: int
    """Of pages in use; the file has free ones beside them, which the next changes take."""


class HistoryStore:
    """The store in a folder; any number of threads may read, one at a time may commit.

    Args:
        folder: made if missing. One process at a time.
        max_bytes: the file does not grow beyond.

    Raises:
        ArtefactError: what is there is damaged, of another kind or version, or in use.
    """

    def __init__(self, folder: str | Path, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        require(2**18 <= max_bytes <= 2**46, "max_bytes", max_bytes, "256 KiB to 64 TiB")
        self.folder, self.max_bytes = Path(folder), max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        # Users of uses that have not been written, latest last. It is replaced, never changed: another
        # thread reads it.
        self._used: dict[str, None] = {}
        self._file = self.folder / "data.mdb"
        self._lock = lock_folder(
            self.folder / "owner.lock", f"{folder} is in use by another process"
        )
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def find(self, user: str) -> StoredHistory | None:
        """What a user's history is, or None. Raises StoreError."""
        with self._translated(), self._env.begin(db=self._users) as txn:
            return _record(txn.get(user.encode()))

    def read(self, history: StoredHistory, first: int, last: int) -> Items:
        """Items first (inclusive) to last (exclusive), 0 <= first <= last <= its length.

        Raises:
            StoreError: it is not there any more, or damaged.
        """
        items = np.empty(last - first, "<i8")
        if first == last:
            return items
        with self._translated(), self._env.begin(db=self._segments, buffers=True) as txn:
            cursor = txn.cursor()
            found = cursor.set_key(_SEGMENT_KEY.pack(history.id, first // SEGMENT_ITEMS))
            done, skip = 0, first % SEGMENT_ITEMS
            while found and done < items.size:
                segment = np.frombuffer(cursor.value(), "<i8")[skip : skip + items.size - done]
                if segment.size == 0 or cursor.key()[:8] != history.id.to_bytes(8, "big"):
                    break
                items[done : done + segment.size] = segment
                done, skip, found = done + segment.size, 0, cursor.next()
        whole = (first, last) == (0, history.length)
        if done < items.size or (whole and prefix_hash(items, self.hash_key) != history.hash):
            raise StoreError("a stored history is damaged or has been replaced")
        return items

    def new_id(self) -> int:
        """An id that no history has or had since the store was opened."""
        return next(self._ids)

    def commit(self, changes: Sequence[Change]) -> list[StoreError | None]:
        """Write changes, in order; those without an error are on the disk.

        They share one transaction if they all fit, else each has its own.

        Returns
        -------
        [changes] StoreFull, StaleHistory or StoreBroken, of which the last ends all; None: written.
        """
        try:
            return self._write(changes)
        except StoreError as error:
            if len(changes) == 1 or isinstance(error, StoreBroken):
                return [error] * len(changes)
        return [self.commit([change])[0] for change in changes]

    def size(self) -> Size:
        """Users and bytes now. Raises StoreError."""
        tables = (self._users, self._segments, self._uses)
        with self._translated(), self._env.begin() as txn:
            stats = [txn.stat(table) for table in tables]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return Size(stats[0]["entries"], pages * self._page_bytes)

    def least_recent(self, n_bytes: int, but: Collection[str]) -> list[str]:
        """Users that were not here for longest, first.

        Args:
            n_bytes: as many users as have so much of histories, at most 32.
            but: leave these out: users whose changes may be on their way to `commit`.

        Raises:
            StoreError: the store cannot be read.
        """
        # Before the transaction: what is written from here on is of users in `but`, or of these.
        used, found, pages = self._used, list[str](), 0
        with self._translated(), self._env.begin() as txn:
            for key in txn.cursor(db=self._uses).iternext(keys=False, values=True):
                if pages * self._page_bytes >= n_bytes or len(found) == REMOVED_AT_ONCE:
                    break
                user, history = key.decode(), _record(txn.get(key, db=self._users))
                if history is not None and user not in used and user not in but:
                    found.append(user)
                    pages += -(-history.length // SEGMENT_ITEMS)
        return found

    def remove(self, users: Sequence[str]) -> None:
        """Remove the histories of users, all at once; on the disk when it returns.

        Raises:
            StoreError: nothing was removed.
        """
        with self._translated():
            self._reserve((len(users) + 2) * _PAGES_A_CHANGE)
            with self._env.begin(write=True) as txn:
                for user in users:
                    data = txn.pop(user.encode(), db=self._users)
                    if data is not None:
                        history, _, _, use = _RECORD.unpack(data)
                        self._delete(txn, history)
                        txn.delete(_USE_KEY.pack(use), db=self._uses)

    def close(self) -> None:
        """Close it. May be called twice."""
        if "_env" in self.__dict__:
            if self._used:
                self._write_uses()
            self._env.close()
            del self._env
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        present = self._file.exists()
        page = os.sysconf("SC_PAGESIZE")
        if present and self._file.stat().st_size < 2 * page:
            raise ArtefactError(f"{self._file} is shorter than any store: it is damaged")
        try:
            self._env = lmdb.open(
                str(self.folder), map_size=self.max_bytes, max_dbs=3, mode=0o600, max_spare_txns=4
            )
        except lmdb.Error as error:
            raise ArtefactError(f"{self.folder} holds no store of histories: {error}") from error
        self._env.reader_check()  # readers of a process that was killed would keep old pages
        self._page_bytes = self._env.stat()["psize"]
        if self._file.stat().st_size < self._used_bytes():  # to read on would end the process
            raise ArtefactError(f"{self._file} is torn: it is shorter than it says")
        try:
            self._read_format()
        except lmdb.Error as error:
            raise ArtefactError(f"{self.folder} is damaged: {error}") from error

    def _read_format(self) -> None:
        if self._env.stat()["entries"] == 0:
            self._reserve(64)
            document = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "segment_items": SEGMENT_ITEMS,
                "hash_key": secrets.randbits(64),
            }
            with self._env.begin(write=True) as txn:
                txn.put(_FORMAT_KEY, json.dumps(document).encode())
                for name in (b"users", b"segments", b"uses"):
                    self._env.open_db(name, txn)
        with self._env.begin() as txn:
            self.hash_key = _checked(self.folder, txn.get(_FORMAT_KEY))
        self._users = self._env.open_db(b"users", create=False)
        self._segments = self._env.open_db(b"segments", create=False)
        self._uses = self._env.open_db(b"uses", create=False)
        with self._env.begin() as txn:
            self._ids = itertools.count(_last(txn, self._segments) + 1)
            self._use_numbers = itertools.count(_last(txn, self._uses) + 1)

    def _write(self, changes: Sequence[Change]) -> list[StoreError | None]:
        writes = any(change.after != change.base for change in changes)
        with self._translated():
            if writes:
                items = sum(change.items.size for change in changes)
                pages = items // SEGMENT_ITEMS + _PAGES_A_CHANGE * (len(changes) + 2)
                self._reserve(pages + _PAGES_A_USE * len(self._used))
            with self._env.begin(write=True) as txn:
                errors: list[StoreError | None] = [self._apply(txn, one) for one in changes]
                used = self._used.copy()
                for change, error in zip(changes, errors, strict=True):
                    if error is None:
                        used.pop(change.user, None)
                        used[change.user] = None
                if writes:
                    self._number_uses(txn, used)
        self._used = {} if writes else used
        if len(self._used) >= USES_AT_ONCE:
            self._write_uses()
        return errors

    def _apply(self, txn: Any, change: Change) -> StaleHistory | None:
        # An id is known to be taken by its segments.
        require(change.after.length >= 1, "length", change.after.length, "1 or more")
        key = change.user.encode()
        data = txn.get(key, db=self._users)
        current = _record(data)
        if current != change.base:
            return StaleHistory("the history has changed, or what it builds on was not written")
        if change.after == current:
            return None
        start = 0
        if current is not None and change.after.id == current.id:
            start = current.length
        elif current is not None:
            self._delete(txn, current.id)
        self._append(txn, change.after.id, start, change.items)
        use = 0 if data is None else _RECORD.unpack(data)[3]
        txn.put(key, _RECORD.pack(*change.after, use), db=self._users)
        return None

    def _number_uses(self, txn: Any, users: Iterable[str]) -> None:
        """These users were here last, in this order."""
        for key in map(str.encode, users):
            data = txn.get(key, db=self._users)
            if data is not None:
                *history, before = _RECORD.unpack(data)
                number = next(self._use_numbers)
                txn.delete(_USE_KEY.pack(before), db=self._uses)
                txn.put(_USE_KEY.pack(number), key, append=True, db=self._uses)
                txn.put(key, _RECORD.pack(*history, number), db=self._users)

    def _write_uses(self) -> None:
        """Have on the disk who was here last; forget it if there is no room, which is no reason to refuse."""
        with contextlib.suppress(StoreError), self._translated():
            self._reserve(_PAGES_A_USE * len(self._used))
            with self._env.begin(write=True) as txn:
                self._number_uses(txn, self._used)
        self._used = {}

    def _append(self, txn: Any, history: int, start: int, items: Items) -> None:
        index, within = divmod(start, SEGMENT_ITEMS)
        data = np.ascontiguousarray(items, "<i8").tobytes()
        if within:
            last = txn.get(_SEGMENT_KEY.pack(history, index), db=self._segments)
            if last is None or len(last) != 8 * within:
                raise StoreError("a stored history is damaged")
            data = last + data
        for i, at in enumerate(range(0, len(data), _SEGMENT_BYTES), index):
            txn.put(
                _SEGMENT_KEY.pack(history, i), data[at : at + _SEGMENT_BYTES], db=self._segments
            )

    def _delete(self, txn: Any, history: int) -> None:
        cursor = txn.cursor(db=self._segments)
        more = cursor.set_range(_SEGMENT_KEY.pack(history, 0))
        while more and cursor.key()[:8] == history.to_bytes(8, "big"):
            more = cursor.delete()

    def _used_bytes(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._page_bytes)

    def _reserve(self, pages: int) -> None:
        """Have the file longer by so much than it is used, of space that the disk has set aside."""
        n_bytes = pages * self._page_bytes
        size = self._file.stat().st_size
        if size >= min(self._used_bytes() + n_bytes, self.max_bytes):
            return
        grown = min(max(self._used_bytes() + n_bytes, size + _GROW_BYTES), self.max_bytes)
        with self._file.open("r+b") as file:
            os.posix_fallocate(file.fileno(), size, grown - size)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """LMDB's and the system's errors as this module's."""
        try:
            yield
        except lmdb.MapFullError as error:
            limit = self.max_bytes / 2**30
            raise StoreFull(f"the history store is at its limit of {limit:.3g} GiB") from error
        except (lmdb.PanicError, lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
            raise StoreBroken("the history store is damaged") from error
        except (lmdb.Error, OSError) as error:
            raise StoreFull(
                "the history store cannot be written: is the disk full, or read-only?"
            ) from error


def _record(data: bytes | None) -> StoredHistory | None:
    return None if data is None else StoredHistory(*_RECORD.unpack(data)[:3])


def _last(txn: Any, table: Any) -> int:
    """The number at the head of a table's last key, 0 if it is empty."""
    cursor = txn.cursor(db=table)
    return int.from_bytes(cursor.key()[:8], "big") if cursor.last() else 0


def _checked(folder: Path, data: bytes | None) -> int:
    """The hash key, if the store is one of this version."""
    try:
        document = json.loads(data or b"")
        told = {key: document.get(key) for key in ("format", "format_version", "segment_items")}
        key = document.get("hash_key")
    except (ValueError, AttributeError) as error:
        raise ArtefactError(f"{folder} holds a database that is no store of histories") from error
    wanted = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "segment_items": SEGMENT_ITEMS,
    }
    if told != wanted or type(key) is not int or not 0 <= key < 2**64:
        raise ArtefactError(f"{folder} holds {told}; needed is {wanted}")
    return key
