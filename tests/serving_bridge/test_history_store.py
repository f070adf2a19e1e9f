"""Histories on disk: what was written is read, what does not fit is refused, nothing in between."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hlem_env.errors import ArtefactError
from hlem_env.live.prefix_hash import prefix_hash
from serving_bridge.history_store import (
    USES_AT_ONCE,
    Change,
    HistoryStore,
    StaleHistory,
    StoredHistory,
    StoreError,
    StoreFull,
)
from tests.serving_bridge.small_engine import Items, items

MAX_BYTES = 2**22


@contextmanager
def store_in(folder: Path, max_bytes: int = MAX_BYTES) -> Iterator[HistoryStore]:
    store = HistoryStore(folder, max_bytes)
    try:
        yield store
    finally:
        store.close()


def appended(store: HistoryStore, user: str, base: StoredHistory | None, new: Items) -> Change:
    if base is None:
        return replaced(store, user, None, new)
    after = StoredHistory(base.id, base.length + new.size, prefix_hash(new, base.hash))
    return Change(user, base, after, new)


def replaced(store: HistoryStore, user: str, base: StoredHistory | None, new: Items) -> Change:
    after = StoredHistory(store.new_id(), new.size, prefix_hash(new, store.hash_key))
    return Change(user, base, after, new)


def stored(store: HistoryStore, user: str) -> list[int] | None:
    history = store.find(user)
    return None if history is None else store.read(history, 0, history.length).tolist()


STEPS = st.lists(
    st.lists(  # of one group
        st.tuples(st.sampled_from("ab"), st.booleans(), st.sampled_from([0, 1, 7, 509, 510, 1400])),
        min_size=1,
        max_size=4,
    ),
    max_size=6,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_it_holds_what_a_dictionary_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[list[tuple[str, bool, int]]]
) -> None:
    folder, right = tmp_path_factory.mktemp("store"), {}
    for number, group in enumerate(steps):
        with store_in(folder) as store:  # anew for each group
            histories = {user: store.find(user) for user in "ab"}
            changes = []
            for user, anew, n in group:
                new, base = items(n, number), histories[user]
                if base is None or anew:
                    new = items(max(n, 1), number)
                    changes.append(replaced(store, user, base, new))
                    right[user] = new.tolist()
                else:
                    changes.append(appended(store, user, base, new))
                    right[user] += new.tolist()
                histories[user] = changes[-1].after
            assert store.commit(changes) == [None] * len(changes)
            for user in "ab":
                assert stored(store, user) == right.get(user)


def test_a_part_of_a_history_can_be_read(tmp_path: Path) -> None:
    whole = items(1700)
    with store_in(tmp_path) as store:
        change = replaced(store, "u", None, whole)
        store.commit([change])
        for first, last in ((0, 0), (0, 1), (509, 511), (510, 1020), (3, 1699), (1699, 1700)):
            assert store.read(change.after, first, last).tolist() == whole[first:last].tolist()


def test_a_change_of_what_is_not_stored_is_refused_alone(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        first = replaced(store, "u", None, items(5))
        assert store.commit([first]) == [None]
        lost = appended(store, "u", first.after, items(3, 1))
        follows = appended(store, "u", lost.after, items(3, 2))
        unchanged = Change("u", lost.after, lost.after, items(0))
        good = appended(store, "u", first.after, items(4, 3))
        errors = store.commit([follows, unchanged, good, first])
        assert [type(error) for error in errors] == [
            StaleHistory, StaleHistory, type(None), StaleHistory,
        ]  # fmt: skip
        assert stored(store, "u") == [*items(5).tolist(), *items(4, 3).tolist()]


def test_a_replaced_history_gives_its_room_back(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        base = None
        for number in range(60):  # 6 MB in a store of 4
            change = replaced(store, "u", base, items(12_000, number))
            assert store.commit([change]) == [None]
            base = change.after
        assert stored(store, "u") == items(12_000, 59).tolist()


def fill(store: HistoryStore) -> list[str]:
    """Write users until one is refused."""
    for number in range(1000):
        [error] = store.commit([replaced(store, f"u{number}", None, items(15_000, number))])
        if error is not None:
            assert isinstance(error, StoreFull)
            return [f"u{n}" for n in range(number)]
    raise AssertionError("never full")


def test_a_full_store_refuses_what_does_not_fit_and_keeps_the_rest(tmp_path: Path) -> None:
    with store_in(tmp_path) as store:
        users = fill(store)
        first = store.find("u0")
        big = replaced(store, "big", None, items(15_000))
        unchanged = Change("u0", first, first, items(0))
        errors = store.commit([big, unchanged])
        assert [type(error) for error in errors] == [StoreFull, type(None)]
        assert "limit of 0.00391 GiB" in str(errors[0])
    with store_in(tmp_path) as store:
        for number, user in enumerate(users):
            assert stored(store, user) == items(15_000, number).tolist()
        assert stored(store, "big") is None
    with store_in(tmp_path, 4 * MAX_BYTES) as store:  # a higher limit is all it takes
        assert store.commit([replaced(store, "big", None, items(15_000))]) == [None]


@contextmanager
def full_disk(n_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_refuses_and_damages_nothing(tmp_path: Path) -> None:
    with store_in(tmp_path, 2**26) as store:
        store.commit([replaced(store, "first", None, items(100))])
        with full_disk(store.folder.joinpath("data.mdb").stat().st_size):
            users = fill(store)
            assert len(users) > 2 * USES_AT_ONCE
            kept = [
                Change(user, base, base, items(0)) for user in users if (base := store.find(user))
            ]
            assert {store.commit([change])[0] for change in kept} == {None}  # it needs no room
        assert store.commit([replaced(store, "last", None, items(15_000, 7))]) == [None]
    with store_in(tmp_path, 2**26) as store:
        assert stored(store, "first") == items(100).tolist()
        for number, user in enumerate(users):
            assert stored(store, user) == items(15_000, number).tolist()
        assert stored(store, f"u{len(users)}") is None
        assert stored(store, "last") == items(15_000, 7).tolist()


def a_store(folder: Path) -> Path:
    """A store with some histories; its file."""
    with store_in(folder) as store:
        store.commit([replaced(store, f"u{i}", None, items(3000, i)) for i in range(20)])
    return folder / "data.mdb"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.6])
def test_a_torn_store_is_refused(tmp_path: Path, share: float) -> None:
    file = a_store(tmp_path)
    with lmdb.open(str(tmp_path)) as env:
        used = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    os.truncate(file, int(share * used))
    with pytest.raises(ArtefactError, match=r"torn|damaged"):
        HistoryStore(tmp_path, MAX_BYTES)


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    file = a_store(tmp_path)
    file.write_bytes(b"a file of something else" * 10_000)
    with pytest.raises(ArtefactError, match="no store of histories"):
        HistoryStore(tmp_path, MAX_BYTES)


def test_a_database_of_something_else_and_another_version_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    with lmdb.open(str(other)) as env, env.begin(write=True) as txn:
        txn.put(b"somebody", b"else's")
    with pytest.raises(ArtefactError, match="no store of histories"):
        HistoryStore(other, MAX_BYTES)
    a_store(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=2) as env, env.begin(write=True) as txn:
        document = json.loads(txn.get(b"format"))
        txn.put(b"format", json.dumps({**document, "format_version": 1}).encode())
    with pytest.raises(ArtefactError, match="'format_version': 1"):
        HistoryStore(tmp_path, MAX_BYTES)


def test_a_store_has_one_owner(tmp_path: Path) -> None:
    with store_in(tmp_path), pytest.raises(ArtefactError, match="in use"):
        HistoryStore(tmp_path, MAX_BYTES)
    with store_in(tmp_path):
        pass


def test_items_that_were_changed_on_the_disk_are_noticed(tmp_path: Path) -> None:
    file = a_store(tmp_path)
    data = file.read_bytes()
    place = data.index(items(3000, 4)[:100].tobytes())
    file.write_bytes(data[:place] + np.int64(7).tobytes() + data[place + 8 :])
    with store_in(tmp_path) as store:
        with pytest.raises(StoreError, match="damaged"):
            stored(store, "u4")
        assert stored(store, "u3") == items(3000, 3).tolist()
