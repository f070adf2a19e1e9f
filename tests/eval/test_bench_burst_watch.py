import numpy as np
import pytest

from eval.bench_burst_watch import judge, summarise


def test_alarms_against_labels_by_hand() -> None:
    burst = np.array([0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 2, 2, 0, 0, 0])
    found = judge([1.0, 3.2, 3.9, 9.5], burst)
    assert found.bursts == 2
    assert found.delays == (pytest.approx(0.2),)
    assert (found.false_alarms, found.quiet_epochs) == (2, 10)  # at 1.0 and 9.5
    assert judge([7.0], burst).delays == (4.0,)  # an epoch after the burst still counts
    assert judge([7.1], burst).false_alarms == 1
    row = summarise([found, found], 15)
    assert (row["seen"], row["bursts"], row["share_seen"]) == (2, 4, 0.5)
    assert row["false_alarms_per_240_quiet_epochs"] == 240 * 4 / 20
