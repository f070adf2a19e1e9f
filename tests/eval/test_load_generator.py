"""The load generator against a node whose scorer keeps histories in memory."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval import load_generator
from eval.load_burst import FIRST_USER, Burst, BurstMix
from eval.load_client import Client
from eval.load_generator import Generator
from eval.load_totals import Totals
from eval.load_users import Catalogue, User, Users, Visit
from hlem_env.errors import ArgumentError
from hlem_env.workload.requests import Requests
from serving_bridge.scoring import InvalidRequest, Limits, Overloaded
from tests.serving_bridge.server.fake_node import LIMITS, FakeNode, FakeScorer, running

CATALOGUE = Catalogue(1000, 0.9, 1)


@pytest.fixture(scope="module")
def shared_node() -> Iterator[FakeNode]:
    with running(FakeNode(replace(LIMITS, queue=4096))) as node:
        yield node


@pytest.fixture
def node(shared_node: FakeNode) -> FakeNode:
    shared_node.reset()
    return shared_node


# Users and their items.


@given(st.integers(0, 2**41), st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_part_of_a_history_is_that_part_of_the_whole(
    user: int, first: int, part: int, rest: int
) -> None:
    whole = CATALOGUE.history(user, first, first + part + rest)
    np.testing.assert_array_equal(
        CATALOGUE.history(user, first + part, first + part + rest), whole[part:]
    )
    assert ((whole >= 0) & (whole < 1000)).all()


@pytest.mark.parametrize("zipf", [0.0, 0.9, 1.0, 1.5])
def test_items_are_as_popular_as_they_should_be(zipf: float) -> None:
    items = np.concatenate([Catalogue(1000, zipf, 3).history(u, 0, 500) for u in range(400)])
    # The integral of x^-zipf over the rank's interval, by its own antiderivative.
    grid = np.arange(1, 1002, dtype=float)
    integral = np.log(grid) if zipf == 1.0 else (grid ** (1 - zipf) - 1) / (1 - zipf)
    right = np.diff(integral) / integral[-1]
    seen = np.bincount(items, minlength=1000) / items.size
    sigma = np.sqrt(right * (1 - right) / items.size)
    assert (np.abs(seen - right) < 5 * sigma).all()


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), max_size=30))
def test_visits_follow_one_life(steps: list[tuple[int, bool, bool]]) -> None:
    """Each history is as long as the workload says, and ends no earlier than the one before."""
    users, length = Users(10), 20
    user, visit = users.visit(3, length, 4)
    assert user.unsent(visit) == 16
    for new, cut, skipped in steps:
        length += new
        if cut and length > 8:
            length -= length // 4
        if skipped:  # a burst's user came instead
            continue
        before = visit
        same, visit = users.visit(3, length, new)
        assert same is user and visit.end - visit.first == length
        assert visit.end >= before.end and visit.first >= before.first >= 0


def test_users_that_never_come_back_are_not_kept() -> None:
    users = Users(10)
    for number in range(10, 1000):
        _, visit = users.visit(number, 50, 50)
        assert visit == Visit(0, 50)
    assert users._met == {}


def test_a_burst_takes_places_and_adds_none() -> None:
    n = 4000
    requests = Requests(
        np.arange(n, dtype=float), np.arange(n), np.full(n, 100, np.int32), np.full(n, 3, np.int32)
    )
    burst = Burst(0, 10, 0.5, 16, 1.0, 100, 200, 5)
    mixed = BurstMix(burst, np.random.default_rng(1)).mixed(requests)
    theirs = mixed.user >= FIRST_USER
    assert theirs.mean() == pytest.approx(0.5, abs=0.04)
    assert set(mixed.user[theirs]) == set(range(FIRST_USER, FIRST_USER + 16))
    np.testing.assert_array_equal(mixed.user[~theirs], requests.user[~theirs])
    assert mixed.history_length.max() <= 200 and mixed.new_items[theirs].max() <= 5


# The client.


class Spoilt(FakeScorer):
    """Refuses, fails and forgets at random; what failed may have been stored."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.random = random.Random(1)

    def submit(self, request: Any) -> Any:
        fate = self.random.random()
        if fate < 0.2:
            raise Overloaded("the queue is full", 1.0)
        if fate < 0.25:
            self.histories.pop(request.user, None)
        future = super().submit(request)
        if 0.25 <= fate < 0.35:
            raise InvalidRequest("stored, and not said to be")
        return future


def test_histories_are_whole_however_requests_end() -> None:
    node = FakeNode(replace(LIMITS, queue=512))
    spoilt = Spoilt(node.scorer.limits)
    node.server.dispatch.scorer = node.server.scorer = node.scorer = spoilt
    users, rng = Users(8), random.Random(2)
    seen: dict[int, tuple[User, Visit]] = {}
    lengths = dict.fromkeys(range(8), 30)

    async def load() -> list[Any]:
        async with Client(f"http://{node.url}", CATALOGUE, 3, "u") as client:
            waiting = []
            for _ in range(300):
                number = rng.randrange(8)
                lengths[number] += (new := rng.randint(0, 4))
                if lengths[number] > 60:
                    lengths[number] -= 15
                seen[number] = users.visit(number, lengths[number], new)
                waiting.append(asyncio.create_task(client.ask(number, *seen[number])))
                if rng.random() < 0.5:
                    await asyncio.sleep(0.001)
            answers = await asyncio.gather(*waiting)
            spoilt.random.random = lambda: 1.0  # type: ignore[method-assign]
            last = [await client.ask(number, *seen[number]) for number in seen]
        return [answers, last]

    with running(node):
        answers, last = asyncio.run(load())
    kinds = {answer.outcome for answer in answers}
    assert kinds == {"served", "refused", "failed"} and any(a.asked_again for a in answers)
    assert not any(answer.wrong_length for answer in answers + last)
    assert all(answer.outcome == "served" for answer in last)
    for number, (_, visit) in seen.items():
        assert spoilt.histories[f"u{number}"] == CATALOGUE.history(number, *visit).tolist()


def test_of_two_visits_the_later_may_be_sent_first(node: FakeNode) -> None:
    users = Users(8)
    first = users.visit(1, 30, 30)
    visits = [users.visit(1, 34, 4), users.visit(1, 37, 3)]

    async def load() -> list[Any]:
        async with Client(f"http://{node.url}", CATALOGUE, 3, "u") as client:
            return [await client.ask(1, *visit) for visit in [first, *reversed(visits)]]

    assert not any(answer.wrong_length for answer in asyncio.run(load()))
    assert node.scorer.histories["u1"] == CATALOGUE.history(1, 0, 37).tolist()


def test_a_node_that_is_gone_is_a_loss_and_no_error() -> None:
    async def ask() -> Any:
        async with Client("http://127.0.0.1:9", CATALOGUE, 3, "u") as client:
            return await client.ask(1, *Users(8).visit(1, 10, 2))

    assert asyncio.run(ask()).outcome == "lost"


# The generator.


def generator(node: FakeNode, lines: list[str], **changed: Any) -> Generator:
    values: dict[str, Any] = {
        "url": f"http://{node.url}", "seconds": 1.5, "rate": 150.0, "burst_seconds": 0.5,
        "report_seconds": 0.5, "users": "",
    }  # fmt: skip
    return Generator(load_generator.Args(**(values | changed)), lines.append)


def run(generator: Generator, stop_after_s: float | None = None) -> Any:
    async def live() -> Any:
        stop = asyncio.Event()
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        return await generator.run(stop)

    return asyncio.run(live())


def test_a_load_with_a_burst_in_its_middle(node: FakeNode) -> None:
    lines: list[str] = []
    made = generator(node, lines)
    due: list[tuple[float, bool]] = []
    send = made._send

    async def noted(client: Client, at_s: float, number: int, *rest: Any) -> None:
        due.append((at_s, number >= FIRST_USER))
        await send(client, at_s, number, *rest)

    made._send = noted  # type: ignore[method-assign]
    total = run(made)
    # A second at the rate and half a second at 1.25 times it.
    expected = 150 * (1.0 + 0.5 * 1.25)
    assert abs(total.sent - expected) < 5 * np.sqrt(expected)
    assert total.outcomes["served"] == total.sent
    # One was asked before the load, and some twice.
    assert len(node.scorer.asked) == 1 + total.sent + total.asked_again
    assert total.asked_again > 0 and total.wrong_length == 0
    # However late a busy machine sends them, it is then that they are due.
    burst = np.array([at_s for at_s, theirs in due if theirs]) - min(due)[0]
    assert burst.size > 40
    assert burst.min() > 0.45 and burst.max() < 1.05
    assert lines[-1].startswith("All: sent")
    told = [made._line(passed_s, Totals()) for passed_s in (0.5, 1.0, 1.5)]
    assert ["BURST" in line for line in told] == [False, True, False]


def test_requests_leave_whatever_the_node_does(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_generator, "LAST_ANSWERS_S", 0.1)
    lines: list[str] = []
    made = generator(node, lines, burst_seconds=0.0, seconds=1.0)
    made._wake = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign]
    node.scorer.hold = True
    total = run(made)
    assert total.sent > 100
    assert total.outcomes == {"lost": total.sent}


def test_it_ends_when_it_is_told_to(node: FakeNode) -> None:
    lines: list[str] = []
    total = run(generator(node, lines, seconds=600.0), stop_after_s=0.6)
    assert 0 < total.sent < 300 and lines[-1].startswith("All: sent")


def test_errors_are_told_as_they_come(node: FakeNode) -> None:
    lines: list[str] = []
    made = generator(node, lines, seconds=1.0, users="x" * 300)
    made._wake = lambda *_: asyncio.sleep(0)  # type: ignore[method-assign]
    total = run(made)
    assert total.outcomes["failed"] == total.sent > 0
    assert any(" x 400 " in line for line in lines)


def test_the_rate_follows_from_how_busy_the_node_says_it_is(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.serving_bridge.server.fake_node import record

    lines: list[str] = []
    made = generator(node, lines, rate=None, seconds=0.2, utilisation=0.6)
    made.config = replace(made.config, epoch_seconds=0.02)
    node.status.records += [record(0, utilisation=0.3), record(1, utilisation=0.3)]
    run(made)
    # Twice the first speed; then there is no newer epoch to go by.
    assert made._speed == pytest.approx(2 * load_generator.FIRST_SPEED)


def test_no_node_at_the_address() -> None:
    made = Generator(load_generator.Args(url="http://127.0.0.1:9", rate=1.0), lambda _: None)
    with pytest.raises(ArgumentError, match="url"):
        run(made)


def test_a_pool_holds_as_many_histories_as_the_node_says() -> None:
    from hlem_env.live.config import LiveConfig
    from hlem_env.live.node import LiveNode

    config = LiveConfig.load("cpu-small")
    node = LiveNode(config)
    try:
        assert load_generator.entries_in_pool(config) == node.entries_in_pool
    finally:
        node.close()


@pytest.mark.parametrize(
    "bad", [{"seconds": 0}, {"utilisation": 0}, {"rate": -1.0}, {"report_seconds": 0}]
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        load_generator.Args(**bad)
