"""A node whose requests bring their items: the right rows, the right scores, nothing reused wrongly."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig
from hlem_env.live.given_items import GivenItems, GivenRequests, Ints
from hlem_env.live.host_tables import HostTables
from hlem_env.live.hstu import Hstu, HstuBatch
from hlem_env.live.node import LiveNode, model_config
from hlem_env.workload.requests import Requests

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = replace(
    LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, mean_history_tokens=100, layers=2,
    max_history_tokens=300, rows_per_table=5000, emulated_link_gbps=None, token_budget=900,
)  # fmt: skip
CUDA = replace(
    LiveConfig.load("h100"), pool_bytes=2**30, mean_history_tokens=1000, layers=2, tables=4,
    max_history_tokens=2500, rows_per_table=100_000, token_budget=4096,
)  # fmt: skip
NODES = [
    (CPU, 1e-4),
    pytest.param((CUDA, 2e-2), marks=[pytest.mark.gpu, NEEDS_GPU]),
]
"""With the relative tolerance of its type; a wrong item moves scores by far more."""


@pytest.fixture(params=NODES, ids=["cpu", "cuda"])
def setting(request: pytest.FixtureRequest) -> Iterator["Setting"]:
    setting = Setting(*request.param)
    yield setting
    setting.node.close()


class Setting:
    """A node, and what it must answer."""

    def __init__(self, config: LiveConfig, tolerance: float) -> None:
        self.node, self.tolerance = LiveNode(config), tolerance
        self.node.reset(0, GivenItems(self.node.tables))
        self.node.move(30)
        self.right = Hstu(model_config(config), dtype=torch.float64)
        weights = self.node.model.state_dict()
        self.right.load_state_dict({name: value.cpu() for name, value in weights.items()})
        self.asked: list[int] = []

    def request(
        self, user: int, history: Ints, new: int, candidates: Ints, edits: int = 0
    ) -> GivenRequests:
        def read(first: int) -> Ints:
            self.asked.append(first)
            return history[first:]

        return GivenRequests(
            np.zeros(1), np.array([user]), np.array([history.size], np.int32),
            np.array([new], np.int32), np.array([edits]), (read,), (candidates,),
        )  # fmt: skip

    def expected(self, history: Ints, candidates: Ints) -> torch.Tensor:
        tables = self.node.tables
        items = torch.from_numpy(np.concatenate([history, candidates]))
        rows = tables.rows[tables.keys(items)].double().sum(1)
        batch = HstuBatch.build([history.size], [candidates.size], None, self.right.config)
        return self.right(rows, batch)

    def serve(self, requests: GivenRequests) -> tuple[torch.Tensor, list[int]]:
        done = self.node.execute(requests, requests[:0], 0.0)
        return done.scores.double().cpu(), done.reused.tolist()

    def agree(self, scores: torch.Tensor, expected: torch.Tensor) -> bool:
        # The tolerance is for the norm of many scores; one or a few stray by three times their deviation.
        distance = (scores - expected).norm() / expected.norm()
        allowed = self.tolerance * (3.0 if len(expected) < 10 else 1.0)
        return scores.shape == expected.shape and distance.item() < allowed


def items(n: int, seed: int) -> Ints:
    return np.random.default_rng(seed).integers(0, 2**63 - 1, n)


def together(*requests: GivenRequests) -> GivenRequests:
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(one, name) for one in requests])

    return GivenRequests(
        joined("arrival_s"), joined("user"), joined("history_length"), joined("new_items"),
        joined("edits"), sum((one.history for one in requests), ()),
        sum((one.candidates for one in requests), ()),
    )  # fmt: skip


def test_scores_are_those_of_the_items_given_and_only_new_ones_are_asked_for(
    setting: Setting,
) -> None:
    history, candidates = items(250, 0), items(20, 1)
    for length, new, cached in ((200, 200, 0), (205, 5, 200), (250, 45, 205), (250, 0, 250)):
        scores, reused = setting.serve(setting.request(1, history[:length], new, candidates))
        assert setting.agree(scores, setting.expected(history[:length], candidates))
        assert reused == [cached] and setting.asked[-1] == cached


def test_every_request_may_have_another_number_of_candidates(setting: Setting) -> None:
    # One, some beyond what recorded launches hold, a thousand; alone, cached and together.
    counts, length = (1, 2, 100, 257, 1000), 100
    asked = [(items(length, user), items(n, -user % 97)) for user, n in enumerate(counts)]
    right = [setting.expected(history, candidates) for history, candidates in asked]
    for cached in (0, length):
        for user, (history, candidates) in enumerate(asked):
            request = setting.request(user, history, length - cached, candidates)
            scores, reused = setting.serve(request)
            assert reused == [cached] and setting.agree(scores, right[user])
    for some in ((1, 2, 100, 257, 1000), (1, 1, 3), (1, 2, 100, 200, 1), (1, 0, 0, 0, 999)):
        # Candidates do not see one another: of fewer, the scores are the same.
        parts = [(user, n) for user, n in enumerate(some) if n]
        requests = [setting.request(u, asked[u][0], 0, asked[u][1][:n]) for u, n in parts]
        scores, _ = setting.serve(together(*requests))
        assert setting.agree(scores, torch.cat([right[u][:n] for u, n in parts]))


def test_a_history_of_another_edit_is_computed_anew(setting: Setting) -> None:
    candidates, first, second = items(20, 1), items(150, 2), items(180, 3)
    setting.serve(setting.request(1, first, 150, candidates))
    changed = setting.request(1, second, 180, candidates, edits=1)
    assert setting.node.first_batch(changed) == 1
    scores, reused = setting.serve(changed)
    assert reused == [0] and setting.agree(scores, setting.expected(second, candidates))
    scores, reused = setting.serve(setting.request(1, second, 0, candidates, edits=1))
    assert reused == [180] and setting.agree(scores, setting.expected(second, candidates))


def test_batches_keep_to_the_token_budget_whatever_the_candidates() -> None:
    setting = Setting(*NODES[0])
    histories = [items(100, user) for user in range(8)]
    few = [setting.request(u, h, 100, items(1, u)) for u, h in enumerate(histories)]
    many = [setting.request(u, h, 100, items(300, u)) for u, h in enumerate(histories)]
    assert setting.node.first_batch(together(*few)) == 8  # 808 tokens of 900
    assert setting.node.first_batch(together(*many)) == 2
    assert setting.node.first_batch(together(*few[:3], *many[3:])) == 4
    assert setting.node.first_batch(setting.request(1, items(300, 1), 300, items(1000, 2))) == 1
    setting.serve(together(*few))
    assert setting.node.first_batch(together(*many)) == 3  # cached tokens are free
    other = [setting.request(u, h, 100, items(300, u), edits=1) for u, h in enumerate(histories)]
    assert setting.node.first_batch(together(*other)) == 2  # those of another history are not


def test_requests_without_items_and_wrong_items_are_refused_and_nothing_has_changed() -> None:
    setting = Setting(*NODES[0])
    one = np.array([5])
    with pytest.raises(ArgumentError, match="GivenRequests"):
        setting.node.execute(Requests(np.zeros(1), one, one, one), Requests.empty(), 0.0)
    wrong = setting.request(1, items(10, 0), 10, items(2, 0))
    short = replace(wrong, history=(lambda first: items(9, 0),))
    with pytest.raises(ArgumentError, match="items of a history=9"):
        setting.node.execute(short, short[:0], 0.0)
    scores, reused = setting.serve(wrong)
    assert reused == [0] and setting.agree(scores, setting.expected(items(10, 0), items(2, 0)))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("n", [1, 127, 16_000])
def test_the_kernel_finds_the_rows_that_the_tables_name(n: int) -> None:
    from hlem_env.live.kernels.item_rows_triton import item_rows

    tables = HostTables(10, 100_003, 8, torch.float32, 5, "cuda")
    given = torch.from_numpy(items(n, n)).cuda()
    assert torch.equal(item_rows(given, tables), tables.keys(given).reshape(-1))
