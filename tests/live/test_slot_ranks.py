"""Ranks of slots and the order of HF, beside what they mean said slowly."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hlem_env.live import slot_ranks
from hlem_env.live.cache_state import FOREIGN, FREE

BATCH = 1800
PACE_S = 0.0625
"""So that products are exact, whether a processor rounds them before it adds or not."""


def slots(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stamps and times that many share; a tenth each is free and another owner's."""
    rng = np.random.default_rng(seed)
    stamp = rng.choice([3, 4, 900, 1700, 1701, BATCH], n)
    owner = rng.random(n)
    stamp = np.where(owner < 0.1, FREE, np.where(owner > 0.9, FOREIGN, stamp))
    times = rng.choice([0.0, 50.0, 90.0, 130.0, 4000.0, math.inf, math.nan], n)
    return torch.from_numpy(stamp).int(), torch.from_numpy(times).float()


@pytest.mark.parametrize("last", [None, 900])
def test_free_ones_then_the_farthest_candidates_then_the_least_recent(last: int | None) -> None:
    stamp, times = slots(300, 1)
    limit = None if last is None else torch.tensor(last, dtype=torch.int32)
    rank = slot_ranks.ranks(stamp, times, 90.0, PACE_S, BATCH, limit)

    def order(i: int) -> tuple[float, ...]:
        used, time = int(stamp[i]), float(times[i])
        far = abs(max(time, 90.0 - PACE_S * (BATCH - used)) - 90.0)
        if used == FREE:
            return 0, 0, 0, i
        if last is not None and used > last:
            return 2, used, 0, i
        return 1, -(math.inf if math.isnan(far) else far), used, i

    owned = [i for i in range(300) if stamp[i] != FOREIGN]
    in_order = [i for i in rank.sort(stable=True).indices.tolist() if stamp[i] != FOREIGN]
    assert in_order == sorted(owned, key=order)
    assert (rank[stamp == FREE] == FREE).all() and (rank[stamp == FOREIGN] == FOREIGN).all()
    entries = slot_ranks.entries(torch.arange(300, dtype=torch.int32), rank)
    for i in owned:
        assert (int(entries[i]) == ~i) == (order(i)[0] == 1)


def test_recency_is_exact_for_2048_batches_and_never_turned_round() -> None:
    ages = torch.cat((torch.arange(2049), torch.logspace(11.001, 30.9, 400, base=2.0).long()))
    numbers = slot_ranks.recencies((2**31 - 2 - ages).int(), 2**31 - 2)
    assert (numbers[:2049].diff() < 0).all()
    assert (numbers.diff() <= 0).all() and numbers.min() >= 0 and numbers.max() < 2**15


@pytest.mark.parametrize("seed", range(3))
def test_the_farthest_of_four_goes_one_after_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    farness = rng.choice([0.0, 1.0, 2.0, 5.0, math.inf], 60)
    left, expected = list(range(60)), []
    while left:
        expected.append(max(left[:4], key=lambda i: (farness[i], -i)))
        left.remove(expected[-1])
    assert slot_ranks.hold_back(torch.from_numpy(farness).float(), 3).tolist() == expected
    for n in (0, 1, 3):
        assert sorted(slot_ranks.hold_back(torch.zeros(n), 3).tolist()) == list(range(n))


@pytest.mark.gpu
@pytest.mark.parametrize("last", [None, 900])
def test_ranks_on_a_gpu_are_the_same(last: int | None) -> None:
    from hlem_env.live.kernels.rank_triton import Ranks

    n = 100_003
    stamp, times = slots(n, 2)
    row_of = torch.randperm(n)
    next_of = torch.empty(n + 1)
    next_of[row_of] = times
    held = (stamp >= 0) & (stamp < FOREIGN)
    ranks = Ranks(torch.where(held, row_of, -1).cuda(), next_of.cuda(), torch.cuda.current_stream())
    limit = None if last is None else torch.tensor(last, dtype=torch.int32)
    expected = slot_ranks.ranks(stamp, times, 90.0, PACE_S, BATCH, limit)
    for number in (6, 7):  # the second launch does without Triton's look at the arguments
        head = torch.zeros(4, dtype=torch.int32, device="cuda")
        there = None if limit is None else limit.cuda()
        rank = ranks.ranks(stamp.cuda(), 90.0, PACE_S, BATCH, there, 1700, number, head)
        assert torch.equal(rank.cpu(), expected)
        recent = (stamp >= 1700) & (stamp < FOREIGN)
        assert head.tolist() == [0, int(recent.sum()), number, 0]
        some = torch.nonzero(held)[:, 0].int()
        entries, scores = ranks.entries(some.cuda(), rank[some.long().cuda()], stamp.cuda())
        assert torch.equal(entries.cpu(), slot_ranks.entries(some, expected[some]))
        assert torch.equal(scores.cpu(), stamp[some])
