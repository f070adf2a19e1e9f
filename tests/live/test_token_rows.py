import numpy as np
import pytest
import torch

from hlem_env.live.histories import Histories
from hlem_env.live.host_tables import HostTables
from hlem_env.live.token_rows import reference, token_rows

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def some_spans(requests: int, seed: int) -> tuple[torch.Tensor, int]:
    rng = np.random.default_rng(seed)
    new = rng.integers(0, 300, requests)
    sizes = new + 20
    start = np.cumsum(sizes) - sizes
    users, first = rng.integers(0, 100, requests), rng.integers(0, 1000, requests)
    spans = np.stack([users, first, new, start, 7 + np.arange(requests)])
    return torch.from_numpy(spans), int(sizes.sum())


def test_a_request_has_the_rows_of_its_items_whatever_comes_before_it_in_the_batch() -> None:
    histories, tables = Histories(100, 1000, 0.9, 3), HostTables(4, 1000, 8, torch.float32, 5)
    spans, total = some_spans(5, 0)
    rows = token_rows(spans, total, histories, tables).view(total, 4)
    for request in range(5):
        one = spans[:, request : request + 1].clone()
        start, new = int(one[3, 0]), int(one[2, 0])
        one[3] = 0
        alone = token_rows(one, new + 20, histories, tables).view(-1, 4)
        assert torch.equal(rows[start : start + new + 20], alone)
        user, first = int(one[0, 0]), int(one[1, 0])
        index = torch.arange(first, first + new)
        assert torch.equal(
            alone[:new], tables.keys(histories.draw(torch.full_like(index, user), index))
        )


def test_candidates_differ_between_requests() -> None:
    histories, tables = Histories(100, 10**6, 0.5, 3), HostTables(1, 10**6, 8, torch.float32, 5)
    spans = torch.tensor([[1, 1], [0, 0], [0, 0], [0, 50], [7, 8]])
    rows = token_rows(spans, 100, histories, tables)
    assert not torch.equal(rows[:50], rows[50:])


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    ("items", "zipf", "requests"),
    [(1000, 0.9, 1), (1000, 1.0, 5), (200, 0.7, 3), (6_750_000, 0.9, 40), (2_000_000, 1.0, 64)],
)
def test_the_kernel_draws_what_the_reference_draws(items: int, zipf: float, requests: int) -> None:
    histories = Histories(100, items, zipf, 3)
    tables = HostTables(10, 1000, 8, torch.float32, 5, "cuda")
    spans, total = some_spans(requests, 1)
    spans = spans.cuda()
    expected = reference(spans, total, histories, tables)
    got = token_rows(spans, total, histories, tables)
    # A draw on the border of two ranks may fall to the other side.
    assert got.shape == expected.shape
    assert (got != expected).float().mean().item() <= 1e-3
