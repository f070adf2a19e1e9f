"""Tables and figures beside the paper's."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import paper, paper_control, paper_latency, paper_slo
from eval.summary import load
from hlem_env.errors import ArgumentError, ArtefactError

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.001, "high": value + 0.001}


def made_up(gaps: dict[str, float], regime: str = "trend", kv: str = "scan_resistant") -> Any:
    controllers = {
        name: {
            "summary": {
                "saturated": False, "gap": estimate(gap), "qos": estimate(1 - gap),
                "p99_ms": estimate(20.0), "decision_us_p50": estimate(5.0),
                "decision_us_p99": estimate(9.0),
            }
        }
        for name, gap in gaps.items()
    }  # fmt: skip
    return {
        "workload": f"default/{regime}",
        "kv_policy": kv,
        "scenario": {"regime": regime, "trace": None},
        "controllers": controllers,
    }


GAPS = {
    "best static in hindsight": 0.010, "alpha* oracle": 0.0, "reachable oracle": 0.005,
    "ppo-only": 0.040, "ppo-only (working set)": 0.030, "PID": 0.050,
}  # fmt: skip


def row(table: str, name: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_smallest_gap_of_those_that_do_not_know_the_future_is_bold() -> None:
    table = paper_control.gap_table({"trend": made_up(GAPS)})
    bold = [line for line in table.splitlines()[1:] if "**" in line]
    assert len(bold) == 1 and bold[0].startswith("| ppo-only (working set) | **0.030 ")


def test_a_saturated_controller_is_told_as_that_and_cannot_be_the_best() -> None:
    cell = made_up(GAPS)
    cell["controllers"]["ppo-only (working set)"]["summary"]["saturated"] = True
    assert paper_control.closest(cell) == "ppo-only"
    table = paper_control.gap_table({"trend": cell})
    assert row(table, "ppo-only (working set)")[1] == "saturated"
    assert "ppo-only (working set)" not in paper_slo.bars({"trend": cell})["trend"]


def test_the_papers_gap_stands_beside_the_controller_that_is_like_its_own() -> None:
    table = paper_control.gap_table({"trend": made_up(GAPS)})
    assert row(table, "ppo-only")[2] == "0.051"
    assert row(table, "best static in hindsight")[2] == "0.061"
    assert row(table, "ppo-only (working set)")[2] == paper.NONE
    assert row(table, "PID")[2] == paper.NONE
    assert row(table, "the paper's full controller")[1:] == [paper.NONE, "0.023"]
    with_full = paper_control.gap_table({"trend": made_up(GAPS | {"SmartAllocator": 0.02})})
    assert row(with_full, "SmartAllocator")[2] == "0.023"
    assert "the paper's full controller" not in with_full


def test_only_scan_resistant_cells_count_in_the_papers_order() -> None:
    cells = [
        made_up(GAPS, "burst"),
        made_up({"PID": 0.9}, "steady", "lru"),
        made_up(GAPS, "steady"),
    ]
    found = paper.regimes_of({"cells": cells})
    assert list(found) == ["steady", "burst"] and found["steady"] is cells[2]
    with pytest.raises(ArtefactError, match="scan-resistant"):
        paper.regimes_of({"cells": [cells[1]]})
    with pytest.raises(ArtefactError, match="default/burst, default/burst"):
        paper.regimes_of({"cells": [cells[0], cells[0]]})
    with pytest.raises(ArtefactError, match=r"eval\.compare"):
        paper.regimes_of({"cells": [{"kv_policy": "scan_resistant"}]})


def test_a_result_without_oracles_has_no_gaps_to_show() -> None:
    cell = made_up(GAPS)
    for columns in cell["controllers"].values():
        del columns["summary"]["gap"]
    with pytest.raises(ArtefactError, match="oracles"):
        paper_control.gap_table({"trend": cell})


def test_bars_are_as_long_as_the_committed_shares() -> None:
    result = load(RESULTS / paper_control.RESULT.name)
    cells = paper.regimes_of(result)
    figure = paper_slo.draw(paper_slo.bars(cells), result["slo_ms"])
    assert len(figure.axes) == 3
    for axes, cell in zip(figure.axes, cells.values(), strict=True):
        drawn = [bar.get_width() for bar in axes.patches]
        wanted = [100 * c["summary"]["qos"]["value"] for c in cell["controllers"].values()]
        assert np.allclose(drawn, wanted, rtol=0, atol=1e-12)
        assert axes.get_xlim()[0] < min(drawn)


def test_latency_curves_pass_through_their_best_alpha(tmp_path: Path) -> None:
    cells = paper_latency.load(RESULTS / "shape.json")
    lengths, shares = paper_latency.by_length(cells, 0.20), paper_latency.by_share(cells)
    assert [c["mean_history_tokens"] for c in lengths] == [5_000, 8_000, 10_000, 12_000, 14_000]
    assert [c["hot_share"] for c in shares] == [0.05, 0.10, 0.20, 0.32, 0.50, 0.60]
    for cell in (*lengths, *shares):
        alpha, p99_ms = paper_latency.curve(cell)
        assert (np.diff(alpha) > 0).all()
        assert alpha[np.nanargmin(p99_ms)] == cell["best_alpha"]
    panels = paper_latency.draw(cells, 0.20).axes
    dots = [line for axes in panels for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == len(lengths) + len(shares)


def test_latency_names_the_hot_shares_there_are(tmp_path: Path) -> None:
    cells = paper_latency.load(RESULTS / "shape.json")
    with pytest.raises(ArgumentError, match=r"0\.05, 0\.1, 0\.2"):
        paper_latency.by_length(cells, 0.3)
    with pytest.raises(ArtefactError, match=r"eval\.shape"):
        paper_latency.load(RESULTS / "compare-controllers-default.json")


def test_a_saturated_best_alpha_has_no_dot_and_no_figure() -> None:
    cells = copy.deepcopy(paper_latency.load(RESULTS / "shape.json"))
    cell = paper_latency.by_share(cells)[0]
    cell["saturated"], cell["best_p99_ms"] = True, None
    assert row(paper_latency.table(cells), "10,000 tokens")[1] == "saturated"
    right = paper_latency.draw(cells, 0.20).axes[1]
    assert sum(line.get_marker() == "o" for line in right.lines) == 5


def test_the_commands_write_what_they_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"cells": [made_up(GAPS)], "slo_ms": 30.0}))
    paper_control.main(paper_control.Args(file, json=tmp_path / "control.json"))
    printed = capsys.readouterr().out
    tables = json.loads((tmp_path / "control.json").read_text())["tables"]
    assert len(tables) == 4 and all(table in printed for table in tables)
    plot, bars = tmp_path / "deep" / "slo.png", tmp_path / "slo.json"
    paper_slo.main(paper_slo.Args(file, plot=plot, json=bars))
    assert plot.read_bytes().startswith(b"\x89PNG")
    written = json.loads(bars.read_text())["qos_percent"]["trend"]
    assert written["PID"]["value"] == pytest.approx(95.0)
