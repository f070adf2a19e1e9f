import builtins
from typing import Any

import pytest
import torch

from hlem_env.errors import ArgumentError, BackendError
from hlem_env.live import fbgemm_ops
from hlem_env.live.host_tables import HostTables


@pytest.fixture
def fbgemm() -> None:
    try:
        fbgemm_ops.load()
    except BackendError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets(dtype: torch.dtype) -> None:
    offsets = fbgemm_ops.asynchronous_complete_cumsum(torch.tensor([2, 0, 3], dtype=dtype))
    assert offsets.tolist() == [0, 2, 2, 5] and offsets.dtype == torch.int64


@pytest.mark.usefixtures("fbgemm")
def test_int32_lengths_do_not_wrap() -> None:
    lengths = torch.full((3,), 2**30, dtype=torch.int32)
    offsets = fbgemm_ops.asynchronous_complete_cumsum(lengths)
    assert offsets.tolist() == [0, 2**30, 2**31, 3 * 2**30]


@pytest.mark.usefixtures("fbgemm")
def test_jagged_to_padded_and_back() -> None:
    values = torch.arange(10.0).reshape(5, 2)
    offsets = torch.tensor([0, 2, 2, 5])
    dense = fbgemm_ops.jagged_to_padded_dense(values, offsets, 3, padding=-1.0)
    assert dense.tolist() == [
        [[0, 1], [2, 3], [-1, -1]],
        [[-1, -1]] * 3,
        [[4, 5], [6, 7], [8, 9]],
    ]
    for total in (5, None):
        assert torch.equal(fbgemm_ops.dense_to_jagged(dense, offsets, total), values)
    cut = fbgemm_ops.jagged_to_padded_dense(values, offsets, 1)
    assert cut[:, 0].tolist() == [[0, 1], [0, 0], [4, 5]]


@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_host_resident_tables(dtype: torch.dtype) -> None:
    tables = HostTables(3, 50, 32, dtype, seed=2)
    tbe = fbgemm_ops.Tbe(tables)
    items = torch.arange(20)
    keys = tables.keys(items)
    local = (keys - torch.arange(3) * 50).T.reshape(-1)
    out = tbe.lookup(local, torch.arange(61))
    assert torch.equal(out.reshape(3, 20, 32), tables.rows[keys.T])


@pytest.mark.gpu
@pytest.mark.usefixtures("fbgemm")
@pytest.mark.parametrize("placement", ["device", "cached", "mapped"])
def test_the_tables_on_a_gpu(placement: str) -> None:
    tables = HostTables(3, 500, 32, seed=2, device="cuda")
    tbe = fbgemm_ops.Tbe(tables, placement)
    keys = tables.keys(torch.arange(200))
    local = (keys - torch.arange(3) * 500).T.reshape(-1).cuda()
    for _ in range(2):
        out = tbe.lookup(local, torch.arange(601, device="cuda"))
        assert torch.equal(out.reshape(3, 200, 32).cpu(), tables.rows[keys.T])


def test_a_pair_that_does_not_match_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def failing(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("fbgemm_gpu"):
            raise OSError("undefined symbol: _ZN3c10")
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", failing)
    monkeypatch.setattr(fbgemm_ops, "_version", lambda name: "1.7.2")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    fbgemm_ops.load.cache_clear()
    with pytest.raises(BackendError) as told:
        fbgemm_ops.load()
    fbgemm_ops.load.cache_clear()
    for part in (
        "1.7.2",
        "belongs to torch 2.12",
        "torch 2.13.0",
        "1.8 with torch 2.13",
        "_ZN3c10",
    ):
        assert part in str(told.value)
    monkeypatch.setattr(fbgemm_ops, "_version", lambda name: None)
    with pytest.raises(BackendError, match="not installed"):
        fbgemm_ops.load()
    fbgemm_ops.load.cache_clear()


def test_shapes_and_types_are_checked() -> None:
    with pytest.raises(ArgumentError, match="lengths"):
        fbgemm_ops.asynchronous_complete_cumsum(torch.zeros(3))
    with pytest.raises(ArgumentError, match="offsets"):
        fbgemm_ops.jagged_to_padded_dense(torch.zeros(3, 2), torch.zeros(2), 3)
    with pytest.raises(ArgumentError, match="dense"):
        fbgemm_ops.dense_to_jagged(torch.zeros(3, 2, 2), torch.tensor([0, 1, 2]))
    with pytest.raises(ArgumentError, match="placement"):
        fbgemm_ops.Tbe(HostTables(1, 4, 8), "hbm")


def test_operators_that_lie_on_cpu_builds_are_not_called() -> None:
    assert fbgemm_ops.__file__ is not None
    with open(fbgemm_ops.__file__, encoding="utf-8") as file:
        code = file.read().split('"""', 2)[2]
    for name in ("lxu_cache_lookup", "linearize_cache_indices", "populate_byte"):
        assert name not in code
