"""Where a request's time goes, held against the node that the surrogate simulates."""

import json
from pathlib import Path

import numpy as np
import pytest

from eval import paper_breakdown
from eval.paper_breakdown import Args, Model, bars, draw
from hlem_env.errors import ArgumentError
from hlem_env.surrogate.hardware import HardwareProfile
from hlem_env.surrogate.node import NodeConfig, SurrogateBackend
from hlem_env.workload.requests import Catalogue, Requests
from tests.surrogate.cases import Replay
from tests.surrogate.streams import Source


def served_ms(catalogue: Catalogue, length: int, new_items: int) -> list[float]:
    """Service times of a node for a user's first request and, much later, the second one."""
    requests = Requests(
        np.array([0.0, 2.0]),
        np.zeros(2, np.int64),
        np.array([length - new_items, length], np.int32),
        np.array([length - new_items, new_items], np.int32),
    )
    node = NodeConfig(kv_policy="lru", refill=False, warmup_epochs=0)
    source = Source(1, length, float(length), catalogue)
    backend = SurrogateBackend(Replay(requests, source), node, HardwareProfile.load("h100"))
    backend.reset(0)
    return [float(ms) for ms in backend.run(50, 5.0).service_ms]


@pytest.mark.parametrize("tables", [5, 25])
@pytest.mark.parametrize("length", [7_000, 13_000])
@pytest.mark.parametrize("new_items", [100, 900])
@pytest.mark.parametrize(
    ("rows_per_table", "hits"), [(50_000_000, (0.0, 0.0)), (100, (None, 1.0))], ids=["cold", "warm"]
)
def test_totals_are_the_nodes_service_times(
    tables: int, length: int, new_items: int, rows_per_table: int, hits: tuple[float | None, float]
) -> None:
    # Rows are all alike: of many none comes twice, few are all there after the first request.
    catalogue = Catalogue(tables=tables, rows_per_table=rows_per_table, zipf=0.0)
    first, second = served_ms(catalogue, length, new_items)
    profile = HardwareProfile.load("h100")
    for embedding_hit, kv_is_hit, expected in ((hits[0], False, first), (hits[1], True, second)):
        if embedding_hit is not None:
            model = Model(profile, NodeConfig().layers, new_items, embedding_hit, catalogue)
            found = model.parts(length if kv_is_hit else length - new_items, kv_is_hit)
            assert found.total == pytest.approx(expected, rel=1e-3)


def test_gather_grows_with_tables_and_nothing_but_rows_does() -> None:
    kinds = bars(Args(tables=(10, 20)))["tables"]
    for kind in ("KV miss", "KV hit", "mean"):
        one, two = kinds[10][kind], kinds[20][kind]
        assert two.gather == pytest.approx(2 * one.gather)
        assert two.lookup == pytest.approx(2 * one.lookup)
        assert (two.prefill, two.dense, two.delta, two.overhead) == (
            one.prefill, one.dense, one.delta, one.overhead,
        )  # fmt: skip


def test_attention_and_linears_are_those_measured_on_the_profile() -> None:
    # Six layers with no candidates: 0.301 ms of attention and 0.066 ms of linears each.
    model = Model(HardwareProfile.load("h100"), 6, 200, 0.5, Catalogue(candidates=0))
    found = model.parts(10_000, False)
    assert found.prefill + found.dense == pytest.approx(6 * 0.367, rel=2e-3)
    assert found.dense == pytest.approx(6 * 0.066, rel=2e-3)


def test_the_mean_lies_between_hit_and_miss_by_the_hit_rate() -> None:
    for kv_hit in (0.0, 0.25, 1.0):
        kinds = bars(Args(kv_hit=kv_hit))["length"][8_000]
        hit, miss = kinds["KV hit"].total, kinds["KV miss"].total
        assert kinds["mean"].total == pytest.approx(miss + kv_hit * (hit - miss))


@pytest.mark.parametrize(
    "args", [Args(kv_hit=1.1), Args(embedding_hit=-0.1), Args(new_items=5_000), Args(lengths=(10,))]
)
def test_what_is_not_allowed_is_named(args: Args) -> None:
    with pytest.raises(ArgumentError, match="--"):
        bars(args)


def test_bars_are_stacked_to_the_total() -> None:
    found = bars(Args())
    figure = draw(found, Args())
    for axes, kind in zip(figure.axes[:3], ("KV miss", "KV hit", "mean"), strict=True):
        tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
        totals = [kinds[kind].total for kinds in found["length"].values()]
        assert max(tops) == pytest.approx(max(totals))


def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "parts.json", tmp_path / "plots" / "parts.png"
    paper_breakdown.main(Args(hardware="a100", json=file, plot=plot))
    written = json.loads(file.read_text())
    assert plot.read_bytes().startswith(b"\x89PNG") and written["profile"]["name"] == "a100"
    total = written["by_tables_ms"]["25"]["KV miss"]["total"]
    assert f"| 25 | KV miss | {total:.2f} |" in capsys.readouterr().out
