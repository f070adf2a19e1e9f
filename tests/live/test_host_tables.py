import pytest
import torch

from hlem_env.errors import ArgumentError
from hlem_env.live.host_tables import HostTables


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_are_what_is_expected_of_them(dtype: torch.dtype) -> None:
    tables = HostTables(3, 700, 64, dtype, seed=5)
    assert tables.rows.shape == (2100, 64) and tables.rows.dtype == dtype
    assert torch.equal(tables.rows, tables.expected(torch.arange(2100)))


def test_values_tell_rows_apart_and_are_spread() -> None:
    rows = HostTables(1, 5000, 32, torch.float32).rows
    assert len(rows.unique(dim=0)) == 5000
    assert abs(rows.mean().item()) < 0.01
    assert rows.var().item() == pytest.approx(1 / 3, rel=0.02)  # uniform over [-1, 1)
    correlation = torch.corrcoef(rows.T) - torch.eye(32)
    assert correlation.abs().max() < 0.08
    neighbours = (rows[1:] * rows[:-1]).mean()
    assert abs(neighbours.item()) < 0.01


def test_the_seed_decides() -> None:
    first, again, other = (HostTables(1, 50, 16, seed=seed) for seed in (1, 1, 2))
    items = torch.arange(100)
    assert torch.equal(first.rows, again.rows) and not torch.equal(first.rows, other.rows)
    assert torch.equal(first.keys(items), again.keys(items))
    assert not torch.equal(first.keys(items), other.keys(items))


def test_keys_lie_in_their_tables_evenly() -> None:
    tables = HostTables(4, 10, 8)
    keys = tables.keys(torch.arange(40_000))
    assert torch.equal(keys // 10, torch.arange(4).expand(40_000, 4))
    counts = torch.stack([torch.bincount(keys[:, t] - 10 * t, minlength=10) for t in range(4)])
    assert counts.min() > 3700 and counts.max() < 4300  # 5 standard deviations of 4000
    assert not torch.equal(keys[:, 0], keys[:, 1] - 10)  # tables hash independently


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 10, 16), "tables"),
        ((1, 0, 16), "rows_per_table"),
        ((1, 10, 4), "dim"),
        ((1, 10, 16, torch.int32), "dtype"),
        ((1, 10, 16, torch.float16, 0, "meta"), "device"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[object, ...], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        HostTables(*arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_gpu_fills_with_the_same_values() -> None:
    ours = HostTables(2, 3000, 64, torch.float16, seed=7, device="cuda")
    assert torch.equal(ours.rows, HostTables(2, 3000, 64, torch.float16, seed=7).rows)
    items = torch.arange(1000)
    assert torch.equal(ours.keys(items.cuda()).cpu(), ours.keys(items))
