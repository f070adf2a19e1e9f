import pytest
import torch

from hlem_env.live.row_index import DenseIndex, RowIndex, SetAssociativeIndex

CPU = torch.device("cpu")


@pytest.mark.parametrize("index", [DenseIndex(200, CPU), SetAssociativeIndex(64, CPU)])
def test_rows_that_are_none_take_no_place(index: RowIndex) -> None:
    """As many at once as a set of the hashed index has places: they would push rows out of it."""
    stamp = torch.zeros(64, dtype=torch.int32)
    rows = torch.arange(0, 200, 10)
    assert index.insert(rows, torch.arange(20), stamp, now=1)[0].all()
    nobody = torch.full((20,), -1)
    with_rows = torch.stack([nobody, torch.arange(1, 200, 10)]).T.reshape(-1)
    _, displaced = index.insert(with_rows, torch.arange(20, 60), stamp, now=1)
    assert displaced.numel() == 0
    assert index.find(rows).tolist() == list(range(20))
    assert index.find(with_rows[1::2]).tolist() == list(range(21, 60, 2))
    assert index.find(nobody).tolist() == [-1] * 20
    index.remove(with_rows)
    assert index.find(rows).tolist() == list(range(20))
