import numpy as np
import pytest
import torch

from hlem_env.live.histories import Histories
from hlem_env.workload.regimes import LoadCurve, RegimeConfig, SyntheticWorkload


def held(histories: Histories, user: int, first: int, length: int) -> list[int]:
    index = torch.arange(first, first + length)
    return histories.draw(torch.full_like(index, user), index).tolist()


def visit(histories: Histories, user: int, length: int, new: int) -> tuple[int, int]:
    window = histories.visit(np.array([user]), np.array([length]), np.array([new]))
    return int(window.first[0]), int(window.edits[0])


def test_a_history_grows_at_its_end_and_loses_its_oldest_items_when_cut() -> None:
    histories = Histories(10, 1000, 0.9, seed=3)
    assert visit(histories, 4, 100, 7) == (0, 0)
    before = held(histories, 4, 0, 100)
    assert visit(histories, 4, 105, 5) == (0, 0)
    assert held(histories, 4, 0, 105)[:100] == before
    # 105 + 5 new would be 110; 80 are left, so the oldest 30 went.
    first, edits = visit(histories, 4, 80, 5)
    assert (first, edits) == (30, 1)
    assert held(histories, 4, first, 80)[:70] == before[30:]
    assert visit(histories, 9, 60, 60) == (0, 0)
    assert held(histories, 9, 0, 60) != before[:60]


def test_one_off_users_leave_nothing_behind() -> None:
    histories = Histories(2, 1000, 0.9, seed=3)
    for _ in range(2):
        assert visit(histories, 7, 50, 50) == (0, 0)


@pytest.mark.parametrize("zipf", [0.0, 0.6, 1.0, 1.2])
def test_items_follow_the_popularity(zipf: float) -> None:
    items = 1000
    histories = Histories(1, items, zipf, seed=1)
    index = torch.arange(400_000)
    counts = torch.bincount(histories.draw(torch.zeros_like(index), index), minlength=items)
    rank = np.arange(1, items + 1, dtype=float)
    share = rank**-zipf / (rank**-zipf).sum()
    got = counts.numpy() / index.numel()
    assert np.abs(np.cumsum(got) - np.cumsum(share)).max() < 0.003


def test_windows_follow_a_workload_whose_histories_are_cut() -> None:
    config = RegimeConfig(
        mean_history_tokens=190, max_history_tokens=200, warm_users=5, pool_bytes=6_000_000_000
    )
    workload = SyntheticWorkload(config, LoadCurve((0.2,), (50.0,)))
    workload.reset(np.random.default_rng(0), 0.0)
    histories = Histories(workload.persistent_users, 100, 0.9, seed=0)
    requests = workload.take(60.0)
    ends: dict[int, int] = {}
    cuts = 0
    for user, length, new in zip(
        requests.user.tolist(), requests.history_length.tolist(), requests.new_items.tolist(),
        strict=True,
    ):  # fmt: skip
        first, edits = visit(histories, user, length, new)
        if user in ends:
            assert first + length == ends[user] + new  # the items appended are counted on
            cuts = max(cuts, edits)
        ends[user] = first + length
    assert cuts >= 1
