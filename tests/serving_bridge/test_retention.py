"""Old histories go, late ones stay, and the file does not grow for ever."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from serving_bridge.committer import Removal
from serving_bridge.history_store import (
    REMOVED_AT_ONCE,
    USES_AT_ONCE,
    Change,
    HistoryStore,
)
from serving_bridge.retention import RETRY_S, Retention
from serving_bridge.user_table import UserTable
from tests.serving_bridge.small_engine import items
from tests.serving_bridge.store_check import users_by_use
from tests.serving_bridge.test_history_store import appended, replaced, store_in, stored

ROOM = 2**26
LIMIT = 2**21
LONG = 15_000
"""Items; 120 KB."""


def write(store: HistoryStore, user: str, n: int = 1, seed: int = 0) -> None:
    """Some more items of a user."""
    assert store.commit([appended(store, user, store.find(user), items(n, seed))]) == [None]


def use(store: HistoryStore, *users: str) -> None:
    """Requests that bring nothing new."""
    histories = map(store.find, users)
    changes = [Change(u, h, h, items(0)) for u, h in zip(users, histories, strict=True)]  # type: ignore[arg-type]
    assert store.commit(changes) == [None] * len(users)


def retention_of(
    store: HistoryStore, put: Callable[[Removal], None], limit_bytes: int = LIMIT
) -> tuple[Retention, UserTable]:
    users = UserTable(store, 1000)
    return Retention(store, users, limit_bytes, put), users


def test_the_file_stops_growing_and_holds_who_was_here_last(tmp_path: Path) -> None:
    file, used, sizes = tmp_path / "data.mdb", [], []
    with store_in(tmp_path, ROOM) as store:

        def remove(removal: Removal) -> None:
            store.remove(removal.users)
            removal.done = True

        retention, _ = retention_of(store, remove)
        for first in range(0, 350, 7):  # 42 MB
            regular = appended(store, "regular", store.find("regular"), items(70, first))
            group = [
                replaced(store, f"u{number}", None, items(LONG, number))
                for number in range(first, first + 7)
            ]
            assert store.commit([*group, regular]) == [None] * 8
            while retention.step(0.0, ()):
                pass
            assert store.size().n_bytes <= LIMIT
            used.append(store._used_bytes())
            sizes.append(file.stat().st_size)
        late = range(338, 350)
        for number in late:
            assert stored(store, f"u{number}") == items(LONG, number).tolist()
        assert store.find("regular").length == 3500  # type: ignore[union-attr]
        told = retention.take()
        assert (told.users, told.n_bytes) == store.size()
        assert told.users + told.removed == 351 and retention.take().removed == 0
    assert max(used) < 2 * LIMIT
    assert set(sizes) == {sizes[0]} and sizes[0] < 350 * 8 * LONG / 2
    order = users_by_use(tmp_path)
    assert order[-1] == "regular" and set(order) >= {f"u{number}" for number in late}
    assert "u0" not in order


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["write", "use"]), st.sampled_from("abc")),
        st.tuples(st.sampled_from(["remove", "open"]), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
@example([("write", "a"), ("write", "b"), ("use", "a"), ("use", "b"), ("use", "a")])
def test_users_go_in_the_order_of_their_last_use(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str | int]]
) -> None:
    folder = tmp_path_factory.mktemp("store")
    order: list[str] = []
    lately: list[str] = []  # uses that need not be written yet
    store = HistoryStore(folder, ROOM)
    for step, what in steps:
        if step == "open":
            store.close()
            assert users_by_use(folder) == order
            store, lately = HistoryStore(folder, ROOM), []
        elif isinstance(what, int):
            going = [user for user in order if user not in lately][:what]
            assert store.least_recent(what * store._page_bytes, ()) == going
            assert store.least_recent(2**20, going) == [
                user for user in order if user not in [*going, *lately]
            ]
            store.remove(going)
            order = [user for user in order if user not in going]
        elif step == "write" or what in order:
            write(store, what) if step == "write" else use(store, what)
            order = [*(user for user in order if user != what), what]
            lately = [] if step == "write" else [*lately, what]
        assert store.size().users == len(order)
    store.close()
    assert users_by_use(folder) == order


def test_uses_alone_are_written_now_and_then(tmp_path: Path) -> None:
    with store_in(tmp_path, ROOM) as store:
        names = [f"u{number}" for number in range(USES_AT_ONCE + 2)]
        store.commit([replaced(store, name, None, items(5)) for name in names])

        def transaction() -> int:
            return int(store._env.info()["last_txnid"])

        before = transaction()
        for _ in range(3):
            use(store, *names[1:USES_AT_ONCE])
            assert sorted(store.least_recent(2**20, ())) == [names[0], *names[USES_AT_ONCE:]]
            assert transaction() == before
            use(store, names[0])
            assert transaction() > before
            assert store.least_recent(1, ()) == names[-2:-1]
            before = transaction()


def test_a_removal_is_bounded(tmp_path: Path) -> None:
    with store_in(tmp_path, ROOM) as store:
        names = [f"u{number}" for number in range(REMOVED_AT_ONCE + 3)]
        store.commit([replaced(store, name, None, items(5)) for name in names])
        assert store.least_recent(2**30, ()) == names[:REMOVED_AT_ONCE]
        assert store.least_recent(1, ()) == names[:1]


def test_until_it_is_removed_a_user_is_unknown_and_may_come_anew(tmp_path: Path) -> None:
    put: list[Removal] = []
    with store_in(tmp_path, ROOM) as store:
        retention, users = retention_of(store, put.append, 16 * 4096)
        for number in range(12):
            write(store, f"u{number}", 600, number)
            users.find(f"u{number}")
        assert retention.step(0.0, {"u0"})
        assert put[0].users[0] == "u1" and retention.step(0.0, ()) and len(put) == 1
        assert users.find("u0") and not users.find("u1") and store.find("u1")
        anew = users.add("u1")  # sent the whole history
        assert anew.history is None and users.find("u1") is anew
        gone = put[0].users[1]
        put[0].error, put[0].done = "no room", True
        assert not retention.step(0.0, ()) and not retention.step(0.9 * RETRY_S, ())
        assert users.find("u1") is anew
        again = users.find(gone)
        assert again is not None and again.history == store.find(gone)
        assert retention.take().removed == 0
        assert retention.step(1.1 * RETRY_S, ())
        store.remove(put[1].users)
        put[1].done = True
        while retention.step(2.0, ()):
            store.remove(put[-1].users)
            put[-1].done = True
        assert users.find("u0") is None is store.find("u0")
        assert store.size().n_bytes <= 16 * 4096
        assert retention.take().removed == sum(len(one.users) for one in put[1:])
        assert users.find("u11") is not None
