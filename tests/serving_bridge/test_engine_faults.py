"""What an engine does when something is in its way: load, disks, devices, controllers, kill -9."""

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from hlem_env.errors import ArgumentError
from hlem_env.live.node import LiveNode
from serving_bridge.checking import checked
from serving_bridge.engine import Engine
from serving_bridge.history_store import Change, StoreError, StoreFull
from serving_bridge.scoring import (
    InvalidRequest,
    Limits,
    NotServed,
    Overloaded,
    ScoreRequest,
    UnknownUser,
)
from tests.serving_bridge.crash_load import history
from tests.serving_bridge.small_engine import (
    CONFIG,
    Reference,
    Told,
    agree,
    engine_in,
    items,
    more,
    result,
    whole,
)
from tests.serving_bridge.store_check import users_by_use

ROOT = Path(__file__).resolve().parents[2]
FEW = Limits(history_tokens=700, queue=4)
pytestmark = pytest.mark.usefixtures("one_thread")


class Held:
    """Keeps a node's batches waiting until it is opened, or has them raise."""

    def __init__(self, node: LiveNode) -> None:
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.error: Exception | None = None
        self._execute = node.execute
        node.execute = self.execute  # type: ignore[method-assign, assignment]

    def execute(self, *arguments: object) -> object:
        self.entered.release()
        assert self.open.wait(20)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self._execute(*arguments)  # type: ignore[arg-type]


@contextmanager
def held_engine(folder: Path) -> Iterator[tuple[Engine, Held]]:
    """An engine of a short queue, whose first request runs until `open` is set."""
    with engine_in(folder, limits=FEW) as engine:
        held = Held(engine._node)
        try:
            yield engine, held
        finally:
            held.open.set()


def request(user: str, n: int = 10) -> ScoreRequest:
    return whole(user, items(n), items(3))


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(tmp_path: Path) -> None:
    with held_engine(tmp_path) as (engine, held):
        futures = [engine.submit(request(f"u{i}")) for i in range(FEW.queue)]
        with pytest.raises(Overloaded, match="queue is full") as refused:
            engine.submit(request("late"))
        assert 0 < refused.value.retry_after_s < 60
        assert engine.ready
        held.open.set()
        for future in futures:
            result(future)
        result(engine.submit(request("late")))


def test_a_cancelled_request_leaves_the_queue_and_changes_nothing(tmp_path: Path) -> None:
    with held_engine(tmp_path) as (engine, held):
        first = engine.submit(request("first"))
        assert held.entered.acquire(timeout=20)
        waiting = [engine.submit(request(f"u{i}")) for i in range(FEW.queue - 1)]
        assert not first.cancel()  # it runs
        assert waiting[0].cancel() and waiting[2].cancel()
        following = [engine.submit(request("u0", 20)), engine.submit(request("v"))]  # room again
        with pytest.raises(Overloaded):
            engine.submit(request("w"))
        assert following.pop().cancel()
        for _ in range(50):
            assert engine.submit(request("w")).cancel()
        assert len(engine._queue) < FEW.queue  # nothing is kept of them
        held.open.set()
        for future in (first, waiting[1], *following):
            result(future)
        assert result(engine.submit(more("u0", items(0), items(1)))).history_tokens == 20
        assert engine._store.find("u2") is None
        assert engine.drain(20)


def test_draining_finishes_what_was_taken_and_takes_no_more(tmp_path: Path) -> None:
    with held_engine(tmp_path) as (engine, held):
        futures = [engine.submit(request(f"u{i}")) for i in range(3)]
        assert not engine.drain(0.01)  # still running
        assert not engine.ready
        with pytest.raises(Overloaded, match="draining"):
            engine.submit(request("late"))
        held.open.set()
        assert engine.drain(20) and all(future.done() for future in futures)
        for future in futures:
            result(future)


def test_closing_refuses_what_waits_and_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    with engine_in(tmp_path) as engine:
        held = Held(engine._node)
        running = engine.submit(request("a"))
        assert held.entered.acquire(timeout=20)
        waiting = engine.submit(request("a"))  # not in the batch of the first
        held.open.set()
        engine.close()
        assert result(running).history_tokens == 10
        if not waiting.exception():  # it may have come to run
            result(waiting)
        engine.close()
    assert threading.active_count() == before
    with engine_in(tmp_path) as again:
        assert result(again.submit(more("a", items(0), items(1)))).history_tokens == 10


def test_a_device_that_fails_ends_the_node_and_every_request_gets_an_answer(tmp_path: Path) -> None:
    with held_engine(tmp_path) as (engine, held):
        held.error = RuntimeError("the device is gone: item 12345")
        futures = [engine.submit(request("a")), engine.submit(request("a"))]
        held.open.set()
        for future in futures:
            with pytest.raises(NotServed, match="failed") as failed:
                result(future)
            assert "12345" not in str(failed.value)
        with pytest.raises(NotServed):
            result(engine.submit(request("b")))
        assert not engine.ready and engine.failure
        assert engine.drain(20)


def test_a_batch_that_the_node_refuses_is_not_served_and_the_next_is(tmp_path: Path) -> None:
    with held_engine(tmp_path) as (engine, held):
        held.error = ArgumentError("items", 12345, "others")
        future = engine.submit(request("a"))
        held.open.set()
        with pytest.raises(NotServed) as failed:
            result(future)
        assert "12345" not in str(failed.value)
        assert result(engine.submit(request("a"))).history_tokens == 10


def test_a_full_store_serves_whoever_fits_and_loses_nothing(tmp_path: Path) -> None:
    with engine_in(tmp_path, max_bytes=2**18, retain_bytes=2**18) as engine:
        acknowledged: dict[str, int] = {}
        for i in range(200):
            future = engine.submit(request(f"u{i}", 690))
            if future.exception(timeout=20) is not None:
                break
            acknowledged[f"u{i}"] = result(future).history_tokens
        with pytest.raises(NotServed, match="not stored: the history store is at its limit"):
            result(future)
        assert engine.ready and 3 < len(acknowledged) < 200
        assert result(engine.submit(more("u0", items(0), items(3)))).history_tokens == 690
        with pytest.raises(UnknownUser):
            result(engine.submit(more(f"u{len(acknowledged)}", items(2), items(3))))
    with engine_in(tmp_path, max_bytes=2**22) as again:
        for user, length in acknowledged.items():
            assert result(again.submit(more(user, items(0), items(1)))).history_tokens == length
        assert again._store.find(f"u{len(acknowledged)}") is None


def test_users_who_went_for_want_of_room_are_unknown_and_may_come_again(tmp_path: Path) -> None:
    control, node, rng = Told(), LiveNode(CONFIG), np.random.default_rng(0)
    right, candidates, room = Reference(node), items(3), 12 * 4096
    histories: dict[str, np.ndarray] = {}
    unknown = 0
    with engine_in(tmp_path, control, node=node, retain_bytes=room) as engine:
        for step in range(25):
            histories[f"u{step}"] = items(300, step)
            result(engine.submit(whole(f"u{step}", histories[f"u{step}"], candidates)))
            users = {
                f"u{user}" for user in [*range(max(step - 3, 0), step), rng.integers(step + 1)]
            }
            asked = [(user, engine.submit(more(user, items(2), candidates))) for user in users]
            for user, future in asked:
                histories[user] = np.concatenate([histories[user], items(2)])
                try:
                    scored = result(future)
                except UnknownUser:
                    unknown += 1
                    histories[user] = items(310, -step % 77)
                    scored = result(engine.submit(whole(user, histories[user], candidates)))
                    assert scored.reused_tokens == 0
                assert agree(scored, right.scores(histories[user], candidates))
        seen = len(control.epochs)
        wait_for(lambda: len(control.epochs) > seen + 1)
        told = [served.histories for _, served in control.epochs]
    held = users_by_use(tmp_path)
    assert {f"u{user}" for user in range(21, 25)} <= set(held) and unknown > 0
    assert told[-1].users == len(held) < 12 and 0 < told[-1].n_bytes <= room
    assert sum(one.removed for one in told) == 25 + unknown - len(held)


def test_what_was_not_written_has_not_happened_nor_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_engine(tmp_path) as (engine, held):
        right = Reference(engine._node)
        held.open.set()
        result(engine.submit(request("u", 300)))
        store, blocked = engine._store, threading.Event()
        commit, failures = store.commit, [1]

        def commit_later(changes: list[Change]) -> list[StoreError | None]:
            assert blocked.wait(20)
            if failures and failures.pop():
                return [StoreFull("no room")] * len(changes)
            return commit(changes)

        monkeypatch.setattr(store, "commit", commit_later)
        futures = [engine.submit(more("u", items(n, n), items(3))) for n in (9, 0, 4)]
        wait_for(lambda: not engine._queue)  # all three are executed or about to be
        blocked.set()
        for future in futures:
            with pytest.raises(NotServed, match="not stored"):
                result(future)
        assert engine.ready
        new = items(5, 5)
        scored = result(engine.submit(more("u", new, items(3))))
        assert (scored.history_tokens, scored.reused_tokens) == (305, 0)
        assert agree(scored, right.scores(np.concatenate([items(300), new]), items(3)))


def test_a_forgotten_user_is_known_from_the_store_and_finds_nobodys_cache(tmp_path: Path) -> None:
    node = LiveNode(CONFIG)
    right = Reference(node)
    rng = np.random.default_rng(0)
    few = Limits(history_tokens=700, queue=2)
    histories: dict[str, np.ndarray] = {}
    with engine_in(tmp_path, limits=few, node=node, known_users=3) as engine:
        for step in range(30):
            user = f"u{rng.integers(5)}"
            if user not in histories:
                histories[user] = items(100, step)
                future = engine.submit(whole(user, histories[user], items(3)))
            else:
                new = items(4, step)
                histories[user] = np.concatenate([histories[user], new])
                future = engine.submit(more(user, new, items(3)))
            assert agree(result(future), right.scores(histories[user], items(3)))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda: whole("", items(1), items(1)), "user has 0 bytes"),
        (lambda: whole("é" * 129, items(1), items(1)), "user has 258 bytes"),
        (lambda: whole("\ud800", items(1), items(1)), "UTF-8"),
        (lambda: ScoreRequest("u", items(1)), "either history or new_items"),
        (lambda: ScoreRequest("u", items(1), items(1), items(1)), "either history or new_items"),
        (lambda: whole("u", items(0), items(1)), "history has 0 items, allowed are 1 to 700"),
        (lambda: whole("u", items(701), items(1)), "history has 701"),
        (lambda: more("u", items(701), items(1)), "new_items has 701"),
        (lambda: whole("u", items(1), items(0)), "candidates has 0"),
        (lambda: whole("u", items(1), items(1001)), "candidates has 1001"),
        (lambda: whole("u", items(1), np.array([3, -1])), "candidates has an item below 0"),
        (lambda: whole("u", items(4).reshape(2, 2), items(1)), "history must be one row"),
        (lambda: whole("u", np.zeros(4), items(1)), "history must be one row"),
    ],
)
def test_a_request_outside_the_limits_is_refused(
    wrong: Callable[[], ScoreRequest], told: str
) -> None:
    with pytest.raises(InvalidRequest, match=told):
        checked(wrong(), Limits(history_tokens=700))


def test_a_refused_request_holds_no_place(tmp_path: Path) -> None:
    with engine_in(tmp_path, limits=FEW) as engine:
        for _ in range(2 * FEW.queue):
            with pytest.raises(InvalidRequest):
                engine.submit(request("u", 701))
        result(engine.submit(request("u", 700)))


def test_a_history_that_grows_too_long_loses_its_oldest_quarter_and_says_so(tmp_path: Path) -> None:
    node = LiveNode(CONFIG)
    right, candidates, history = Reference(node), items(5, 1), items(698, 2)
    with engine_in(tmp_path, node=node) as engine:
        result(engine.submit(whole("u", history, candidates)))
        scored = result(engine.submit(more("u", items(2, 3), candidates)))
        assert (scored.history_tokens, scored.reused_tokens) == (700, 698)
        for last in (items(1, 4), items(600, 5)):  # the second is more than what stays
            history = np.concatenate([history, items(2, 3), last])[-525:]
            scored = result(engine.submit(more("u", last, candidates)))
            assert (scored.history_tokens, scored.reused_tokens) == (525, 0)
            assert agree(scored, right.scores(history, candidates))
            again = result(engine.submit(more("u", items(2, 3), candidates)))
            assert (again.history_tokens, again.reused_tokens) == (527, 525)
    with engine_in(tmp_path) as reopened:
        assert result(reopened.submit(more("u", items(0), candidates))).history_tokens == 527


def wait_for(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(2000):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not happen")


def test_ticks_and_epochs_go_by_without_requests_and_alpha_follows(tmp_path: Path) -> None:
    control = Told(40, None, 55)
    with engine_in(tmp_path, control) as engine:
        wait_for(lambda: len(control.epochs) >= 2)
        assert len(control.ticks) >= 20
        first, second = control.epochs[0], control.epochs[1]
        for stats, served in (first, second):
            assert stats.duration_s == pytest.approx(CONFIG.epoch_seconds)
            assert stats.requests == stats.backlog == len(served.requests) == served.refused == 0
        assert (first[0].alpha_target, second[0].alpha_target) == (0.40, 0.55)
        assert second[0].embedding_pages == engine._node.pool.pages * 55 // 100


def test_an_epoch_tells_of_all_its_requests_and_of_those_refused(tmp_path: Path) -> None:
    control = Told()
    limits = Limits(history_tokens=700, queue=3)
    refused, lengths = 0, []
    with engine_in(tmp_path, control, limits) as engine:
        for i in range(40):
            futures = []
            for user in ("a", "b", "a", "c", "d"):
                try:
                    futures.append(engine.submit(request(user, 10 + i)))
                except Overloaded:
                    refused += 1
            lengths += [result(future).history_tokens for future in futures]
        wait_for(lambda: sum(stats.requests for stats, _ in control.epochs) >= len(lengths))
        told = list(control.epochs)
    assert refused > 0 and sum(served.refused for _, served in told) == refused
    assert sum(served.requests.history_length.sum() for _, served in told) == sum(lengths)
    users = set()
    for stats, served in told:
        assert stats.requests == len(served.requests)
        assert stats.history_tokens == served.requests.history_length.sum()
        assert (np.diff(served.requests.arrival_s) >= 0).all()
        assert stats.latency_ms.size == 0 or stats.latency_ms.min() > 0
        users |= set(served.requests.user.tolist())
    assert {0, 1} <= users <= {0, 1, 2, 3}
    assert max(stats.hot_share for stats, _ in told) > 0.5


@pytest.mark.parametrize("wrong", [RuntimeError("control"), 101, -1, "40", 0.5])
def test_a_controller_that_fails_holds_alpha_and_serving_goes_on(
    tmp_path: Path, wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    control = Told(40, None, wrong)
    with caplog.at_level(logging.ERROR), engine_in(tmp_path, control) as engine:
        control.ticks_answer = wrong
        wait_for(lambda: len(control.epochs) >= 1)
        assert result(engine.submit(request("a"))).history_tokens == 10
        assert engine.ready
        assert control.ticks[-1].alpha_target == 0.40
    assert caplog.text.count("alpha is held at 40") == 1


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.serving_bridge.crash_load", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = [process.stdout.readline() for _ in range(200)]
    os.kill(process.pid, signal.SIGKILL)
    told += process.stdout.readlines()  # what it said before it died
    process.stdout.close()
    process.wait()
    acknowledged: dict[int, int] = {}
    for line in told:
        if line.endswith("\n"):
            user, length = map(int, line.split())
            acknowledged[user] = length
    assert len(told) >= 200 and len(acknowledged) == 12
    held = users_by_use(tmp_path)  # it is sound
    assert {f"u{user}" for user in acknowledged} <= set(held) and "v0" not in held
    with engine_in(tmp_path) as engine:
        right = Reference(engine._node)
        for user, length in acknowledged.items():
            stored = engine._store.find(f"u{user}")
            assert stored is not None
            # Under way was one request: of more items, or of a history that begins anew.
            assert stored.length >= length or stored.length in (1, 5, 120, 30)
            held = engine._store.read(stored, 0, stored.length)
            assert held.tolist() == history(user, 0, stored.length).tolist()
        scored = result(engine.submit(more(f"u{user}", items(2), items(3))))
        assert agree(scored, right.scores(np.concatenate([held, items(2)]), items(3)))
