from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hlem_env.live.cache_state import EVICTED, FOREIGN, FREE, SHRUNK, CacheState
from hlem_env.live.kernels import lookup_reference as reference
from hlem_env.live.row_index import DenseIndex

PAGE_ROWS = 8
PAGES = 300


@given(st.lists(st.integers(-1, 5), min_size=1, max_size=40), st.data())
def test_the_lowest_scores_are_the_first_of_a_stable_sort(
    scores: list[int], data: st.DataObject
) -> None:
    k = data.draw(st.integers(0, len(scores)))
    first = np.argsort(np.array(scores), kind="stable")[:k]
    assert reference.lowest(torch.tensor(scores), k).tolist() == sorted(first.tolist())


def test_rows_move_in_order_and_free_slots_do_not() -> None:
    """Of slots 0 to 7 the last four go; rows 10 to 14 are there, and slot 6 is free."""
    state = CacheState(torch.zeros(8, 4), DenseIndex(20, torch.device("cpu")), counted=False)
    state.stamp[:] = torch.tensor([5, 1, FREE, 4, 2, 9, FREE, 3])
    slots = torch.tensor([0, 1, 3, 4, 5, 7])
    rows = torch.tensor([10, 11, 12, 13, 14, 15])
    state.row_of[slots] = rows
    state.index.insert(rows, slots, state.stamp, 0)
    moves, source, target = reference.shrink(state, torch.tensor([4, 5, 6, 7]))
    # Slots 2 and 6 are free, and 1 and 4 are the two least recent.
    assert source[: int(moves)].tolist() == [5, 7]
    assert target[: int(moves)].tolist() == [1, 2]
    assert (state.index.find(torch.tensor([11, 13])) == -1).all()
    assert state.counters[SHRUNK] == state.counters[EVICTED] == 2


def scores(n: int, counted: bool, generator: torch.Generator) -> torch.Tensor:
    """Of n slots a fifth each is free and another owner's; many of the others are equal."""
    owner = torch.rand(n, device="cuda", generator=generator)
    values = torch.randint(0, 3000, (n,), device="cuda", generator=generator)
    if counted:
        score = values.float() ** 3 / 7
        score = torch.where(owner < 0.2, -torch.inf, score)
        return torch.where(owner > 0.8, torch.inf, score)
    score = torch.where(owner < 0.2, FREE, values)
    return torch.where(owner > 0.8, FOREIGN, score).int()


@pytest.mark.gpu
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("n", [1, 77, 30_000, 3_000_001])
def test_selection_and_order_on_a_gpu(n: int, counted: bool) -> None:
    from hlem_env.live.kernels.slots_triton import Slots

    score = scores(n, counted, torch.Generator("cuda").manual_seed(n))
    slab = torch.empty(n, 4, device="cuda")
    row_of, count = torch.empty(n, dtype=torch.int64, device="cuda"), torch.empty_like(score)
    state: Any = SimpleNamespace(
        stamp=torch.empty_like(score, dtype=torch.int32), row_of=row_of, count=count,
        score=score, counted=counted, slab=slab,
    )  # fmt: skip
    slots = Slots(state, state.stamp, 1, torch.cuda.current_stream())
    mine = torch.nonzero(score < (torch.inf if counted else FOREIGN))[:, 0].int()
    slots.grow(mine, mine)
    owned = len(mine)
    stable = score.sort(stable=True)
    for k in {0, min(1, owned), owned // 3, owned}:
        assert torch.equal(slots.lowest(k).long(), stable.indices[:k].sort().values)
        assert torch.equal(slots.lowest(k).long(), reference.lowest(score, k))
        for beside in (False, True):
            in_order, values, head = slots.lowest_in_order(k, beside)
            assert torch.equal(in_order.long(), stable.indices[:k])
            assert torch.equal(values, stable.values[:k]) and head.tolist() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("leaving", [1, 90, 299])
def test_giving_up_pages_on_a_gpu_is_the_reference(leaving: int, counted: bool) -> None:
    from hlem_env.live.kernels.slots_triton import Slots

    device = torch.device("cuda")
    generator = torch.Generator("cuda").manual_seed(leaving)
    states = []
    slots = PAGES * PAGE_ROWS
    owned = torch.rand(slots, device="cuda", generator=generator) < 0.9
    stamp = torch.randint(1, 60, (slots,), device="cuda", generator=generator).int()
    pages = torch.randperm(PAGES, device="cuda", generator=generator)[:leaving].sort().values
    slab = torch.randn(slots, 12, device="cuda", generator=generator)
    all_pages = torch.arange(PAGES, dtype=torch.int32, device="cuda")
    for _ in range(2):
        index = DenseIndex(2 * slots, device)
        state = CacheState(slab.clone(), index, counted)
        by_kernels = Slots(state, index.slot_of, PAGE_ROWS, torch.cuda.current_stream())
        by_kernels.grow(all_pages, all_pages)
        held = torch.nonzero(owned)[:, 0]
        state.row_of[held] = 2 * held
        state.stamp[held] = stamp[held]
        if counted:
            state.count[held] = stamp[held].float() / 3
        state.index.insert(2 * held, held, state.stamp, 0)
        states.append(state)
    want, got = states
    emptied = (pages[:, None] * PAGE_ROWS + torch.arange(PAGE_ROWS, device="cuda")).reshape(-1)
    reference.give_up(want, emptied)
    leaves = torch.zeros(PAGES, dtype=torch.int32, device="cuda")
    leaves[pages] = 1
    by_kernels.shrink(pages.int(), all_pages[leaves == 0], leaves)
    for name in ("row_of", "stamp", "count", "sketch", "counters"):
        assert torch.equal(getattr(want, name), getattr(got, name)), name
    rows = torch.arange(2 * slots, device="cuda")
    assert torch.equal(want.index.find(rows), index.find(rows))
    held = got.row_of >= 0
    assert torch.equal(want.slab[held], got.slab[held])
