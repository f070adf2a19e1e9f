"""The engine on a real small node: scores, order, refusals, ends."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hlem_env.live.node import LiveNode
from serving_bridge.scoring import UnknownUser
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

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def node() -> Iterator[LiveNode]:
    yield LiveNode(CONFIG)


def test_scores_are_those_of_the_model_however_the_history_came(
    node: LiveNode, tmp_path: Path
) -> None:
    right = Reference(node)
    candidates, first, other = items(20, 1), items(300, 2), items(250, 3)
    with engine_in(tmp_path, node=node) as engine:
        scored = result(engine.submit(whole("ann", first, candidates)))
        assert agree(scored, right.scores(first, candidates))
        assert (scored.history_tokens, scored.reused_tokens) == (300, 0)
        # New items over a cached prefix.
        grown = np.concatenate([first, items(7, 4)])
        scored = result(engine.submit(more("ann", grown[300:], candidates)))
        assert agree(scored, right.scores(grown, candidates))
        assert (scored.history_tokens, scored.reused_tokens) == (307, 300)
        # The whole history, grown: the prefix is recognised.
        longer = np.concatenate([grown, items(3, 5)])
        scored = result(engine.submit(whole("ann", longer, candidates)))
        assert agree(scored, right.scores(longer, candidates))
        assert scored.reused_tokens == 307
        # One candidate, and a thousand, nothing new.
        scored = result(engine.submit(more("ann", items(0), candidates[:1])))
        assert agree(scored, right.scores(longer, candidates[:1])) and scored.reused_tokens == 310
        many = items(1000, 6)
        scored = result(engine.submit(more("ann", items(0), many)))
        assert agree(scored, right.scores(longer, many)) and scored.scores.shape == (1000,)
        # Edited in one place, shrunk, replaced: nothing is reused.
        edited = longer.copy()
        edited[5] += 1
        for history in (edited, edited[:200], other):
            scored = result(engine.submit(whole("ann", history, candidates)))
            assert agree(scored, right.scores(history, candidates))
            assert (scored.history_tokens, scored.reused_tokens) == (history.size, 0)
        scored = result(engine.submit(more("ann", items(2, 7), candidates)))
        replaced = np.concatenate([other, items(2, 7)])
        assert agree(scored, right.scores(replaced, candidates)) and scored.reused_tokens == 250


def test_a_request_without_its_cache_reads_the_history_from_the_store(
    node: LiveNode, tmp_path: Path
) -> None:
    right = Reference(node)
    candidates, history = items(10, 1), items(600, 2)
    with engine_in(tmp_path, Told(100, None, 100), node=node) as engine:  # no page for K and V
        result(engine.submit(whole("ann", history, candidates)))
        for _ in range(3):
            new = items(11, history.size)
            history = np.concatenate([history, new])
            scored = result(engine.submit(more("ann", new, candidates)))
            assert agree(scored, right.scores(history, candidates)) and scored.reused_tokens == 0
    with engine_in(tmp_path) as again:
        scored = result(again.submit(more("ann", items(0), candidates)))
        assert agree(scored, right.scores(history, candidates))


def test_a_user_may_wait_twice_and_each_request_sees_the_ones_before(
    node: LiveNode, tmp_path: Path
) -> None:
    right = Reference(node)
    candidates = items(5, 1)
    for alpha_centi in (100, 30):
        name, history = f"user {alpha_centi}", items(100, 2)
        with engine_in(tmp_path, Told(alpha_centi, None, alpha_centi)) as engine:
            futures, histories = [engine.submit(whole(name, history, candidates))], [history]
            for i in range(6):
                new = items(i, i)
                histories.append(np.concatenate([histories[-1], new]))
                futures.append(engine.submit(more(name, new, candidates)))
            for length in (50, 60):  # replaced while all that may still be on its way to the disk
                histories.append(items(length, length))
                futures.append(engine.submit(whole(name, histories[-1], candidates)))
                histories.append(np.concatenate([histories[-1], items(4, 9)]))
                futures.append(engine.submit(more(name, items(4, 9), candidates)))
            for future, so_far in zip(futures, histories, strict=True):
                assert agree(result(future), right.scores(so_far, candidates))


def test_many_users_at_once(node: LiveNode, tmp_path: Path) -> None:
    right, rng = Reference(node), np.random.default_rng(0)
    with engine_in(tmp_path, node=node) as engine:
        asked = []
        for i in range(60):
            history, candidates = items(int(rng.integers(1, 200)), i), items(i % 9 + 1, -i % 77)
            asked.append((engine.submit(whole(f"u{i}", history, candidates)), history, candidates))
        for future, history, candidates in asked:
            assert agree(result(future), right.scores(history, candidates))


def test_new_items_of_an_unknown_user_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with engine_in(tmp_path) as engine:
        for _ in range(2):
            with pytest.raises(UnknownUser, match="no history"):
                result(engine.submit(more("nobody", items(3), items(2))))
        assert engine._store.find("nobody") is None
