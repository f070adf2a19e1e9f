import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.bench_sls import Args, main
from eval.sls_batches import Gaps, draw_batches, true_gaps
from hlem_env.errors import ArgumentError

SMALL = {"batch": (8,), "pooling": 3, "tables": 2, "rows": 4000, "warm": 4, "batches": 6}


def test_sums_are_those_of_an_embedding_bag() -> None:
    batch = draw_batches(Args(**SMALL), 8)[0]
    values = torch.randn(2 * 4000, 16)
    bags = torch.nn.functional.embedding_bag(batch.keys, values, batch.offsets[:-1], mode="sum")
    assert torch.allclose(batch.sums(values[batch.keys]), bags, atol=1e-5)
    assert len(bags) == 2 * 8
    table = torch.arange(2).repeat_interleave(
        batch.offsets[[8, 16]].diff(prepend=torch.zeros(1, dtype=torch.int64))
    )
    assert torch.equal(batch.local + 4000 * table, batch.keys)


def test_true_gaps_lead_to_the_next_batch_with_the_row() -> None:
    rows = [np.array(some) for some in ([1, 4], [4], [2, 4], [1, 2])]
    gaps = true_gaps(rows)
    at = lambda t: gaps(rows[t], np.full(rows[t].size, float(t))).tolist()  # noqa: E731
    assert [at(t) for t in range(4)] == [[3, 1], [1], [1, np.inf], [np.inf, np.inf]]


def test_a_cache_is_filled_before_anything_is_timed() -> None:
    small = SMALL | {"warm_keys": 5.0}
    few, many = (sum(len(b.keys) for b in draw_batches(Args(**small), n)[:-12]) for n in (8, 1000))
    assert 4.5 * 800 < few < 5.5 * 800 < many  # keys for 800 rows that fit; at least 4 batches


def test_gaps_are_found_by_row() -> None:
    gaps = Gaps()
    gaps.append(np.array([2, 5, 9]), np.array([20.0, 50.0, 90.0]))
    assert gaps(np.array([9, 2]), np.zeros(2)).tolist() == [90.0, 20.0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_right_sums_and_better_hits_by_true_predictions(device: str, tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    file = tmp_path / "sls.json"
    small = SMALL | {"batch": (16,), "batches": 12, "warm_keys": 5.0}
    assert main(Args(device=device, json=file, link_gbps=1000.0, **small)) == 0
    written = json.loads(file.read_text())
    assert all(line["sums_right"] for line in written["lines"])
    hits = {(line["policy"], line["predictions"]): line["hit_rate"] for line in written["lines"]}
    assert hits["fpb", "true"] > hits["lru", None]
    assert hits["laru", "true"] > hits["lru", None]


def test_arguments_are_checked() -> None:
    for wrong in ({"device": "tpu"}, {"batch": ()}, {"drift": 1.5}, {"share": 0.0}, {"batches": 1}):
        with pytest.raises(ArgumentError):
            Args(**wrong)
