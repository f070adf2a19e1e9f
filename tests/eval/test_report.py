"""The report of a small made-up comparison."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eval import cells, names, report, report_style
from eval.figures import RAMP, SERIES, alpha_star_summary, by_hot_share, smoothed
from eval.learning import read_learning, step_of_share
from eval.records import Record
from eval.report import write_picture, write_report
from eval.results import load_results
from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.scenario import Scenario

EPOCHS = 12
NASTY = '<img src=x onerror="alert(1)">&$x_1$.csv'
MOVING = ("working-set rule", "ppo-only", "ppo-only (working set) [Eq. 5]", "<b>own</b>")
NAMES = (
    "static 0.10",
    names.BEST_STATIC,
    names.DESIGN_POINT,
    *MOVING,
    names.REACHABLE,
    names.ALPHA_STAR,
)


def save_record(path: Path, name: str, scenario: Scenario, alpha_centi: list[int]) -> None:
    wave = np.sin(np.arange(EPOCHS))
    Record(
        controller=name, scenario=scenario.to_json(), seed=1, workload_digest="", load_tables="",
        mdp_config={}, alpha_centi=alpha_centi, p99_ms=(25 + wave).tolist(), qos=[1.0] * EPOCHS,
        kv_hit=[0.5] * EPOCHS, emb_hit=[0.5] * EPOCHS,
        hot_share=np.repeat([0.1, 0.5], EPOCHS // 2).tolist(), utilisation=[0.7] * EPOCHS,
        requests=[100] * EPOCHS, backlog=0,
    ).save(path)  # fmt: skip


def make_cell(output: Path, scenario: Scenario, star: bool = True) -> dict[str, Any]:
    """A cell of results.json with its records. static 0.10 is saturated."""
    controllers: dict[str, Any] = {}
    shown = [n for n in NAMES if star or n not in names.ORACLES]
    for i, name in enumerate(shown):
        files = []
        for seed in (1, 2):
            path = Path("records") / f"{scenario.digest()}-{i}" / f"{seed}.json"
            save_record(output / path, name, scenario, [30 + i] * EPOCHS)
            files.append(str(path))
        saturated = name == "static 0.10"
        controllers[name] = {
            "p99_ms": [1234.5 if saturated else 20.0 + i, 21.0 + i],
            "qos": [0.99, 0.98],
            "movement": [1.0, 2.0],
            "utilisation": [0.7, 0.7],
            "saturated": [saturated, saturated],
            "gap": [0.05, 0.06] if star else [None, None],
            "regret": [0.01, -0.02] if star else [None, None],
            "record": files,
        }
    for columns in controllers.values():
        columns["summary"] = cells.summarise(columns, controllers)
    return {
        "workload": scenario.name,
        "kv_policy": scenario.kv_policy,
        "scenario": scenario.to_json(),
        "design_point_alpha": 0.54,
        "best_static_alpha": [0.3, 0.34],
        "seeds": [1, 2],
        "controllers": controllers,
        "bound_violations": ["working-set rule"] if star else [],
    }


def make_output(folder: Path, with_trace: bool) -> Path:
    """A folder as eval.compare leaves it: Trend and, if wanted, a trace under LRU."""
    trend = make_cell(folder, Scenario(regime="trend", episode_epochs=EPOCHS))
    share = np.repeat([0.1, 0.5], EPOCHS // 2)
    grid = np.arange(10, 91, 20)
    p99 = 20 + (grid[:, None] / 100 - (1 - share)) ** 2
    trend["alpha_star"] = alpha_star_summary(grid, p99, share)
    trace = Scenario(trace=NASTY, kv_policy="lru", episode_epochs=EPOCHS)
    results = {
        "command": "python -m eval.compare --workloads '<i>'",
        "machine": {"cpu": "<u>CPU</u>", "cores": 2, "memory_gib": None},
        "title": "A <title>",
        "load_tables": "533924aceaa8c338",
        "slo_ms": 30.0,
        "cells": [trend, make_cell(folder, trace, star=False)] if with_trace else [trend],
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def make_policy(folder: Path) -> Path:
    """A policy's folder whose return rises and levels off."""
    folder.mkdir()
    about = {"git_revision": "abc<123>", "seed": 1, "mdp_config": {"reward": "busy_time"}}
    (folder / "policy.json").write_text(json.dumps(about))
    rows = [
        {"global_step": 100 * i, "charts/episodes": 4 * i, "charts/episodic_return": value}
        for i, value in enumerate([*np.linspace(-100, 0, 21), *[0.0] * 20])
    ]
    rows += [{"global_step": 100 * i, "slo/eval_p99_ratio": 1.1 - 0.002 * i} for i in (10, 40)]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + '\n{"globa')
    return folder


def page_of(output: Path, *policies: Path) -> str:
    path = output / "report.html"
    write_report(output / "results.json", path, tuple(map(str, policies)))
    assert [p.name for p in output.iterdir() if p.name.endswith(".tmp")] == []
    return path.read_text(encoding="utf-8")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return make_output(tmp_path / "out", with_trace=False)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy<1>")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    return page_of(make_output(folder / "out", with_trace=True), make_policy(folder / "policy<1>"))


class Reader(HTMLParser):
    """Tags that do not close, and the text of table rows."""

    VOID = {"meta", "br", "hr", "img", "link", "input"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[list[str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def rows_of(page: str, name: str) -> list[dict[str, str]]:
    """Rows of a controller in the cells' rankings, by heading."""
    found, headings = [], []
    for row in Reader(page).rows:
        if row[0] == "controller":
            headings = row
        elif len(row) == len(headings) and row[0].lstrip("0123456789").startswith(name):
            found.append(dict(zip(headings, row, strict=True)))
    return found


def test_shows_every_controller_of_every_cell(page: str) -> None:
    assert Reader(page).open == []
    for name in NAMES:
        assert len(rows_of(page, name)) >= (1 if name in names.ORACLES else 2), name


def test_escapes_what_comes_from_outside(page: str) -> None:
    reader = Reader(page)
    assert page.count("<script") == 1 and "<img" not in page
    assert not {"b", "i", "u"} & reader.tags
    assert "onerror=&quot;alert(1)&quot;" in page and "abc&lt;123&gt;" in page
    assert "$x_1$" in page


def test_is_one_file_without_addresses(page: str) -> None:
    assert re.findall(r"https?:|//[a-z]|@import|url\((?!#)", page) == []
    reader = Reader(page)
    assert not {"link", "img", "iframe", "object"} & reader.tags
    for name, value in reader.attributes:
        assert name != "src"
        assert name not in ("href", "xlink:href") or (value or "").startswith("#")
    assert len(page) < 3_000_000


def test_ids_are_unique_and_references_resolve(page: str) -> None:
    ids = [value for name, value in Reader(page).attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', page)) <= set(ids)


def test_figures_follow_the_readers_colours(page: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(svgs) == 4  # an episode a cell, latency of the one with alpha*, a learning curve
    text = "".join(svgs)
    assert "var(--ink)" in text and "var(--series-0)" in text and "var(--ramp-" in text
    assert not any(colour in text for colour in (*SERIES, *RAMP))
    assert {m for m in re.findall(r"var\((--[a-z0-9-]+)\)", text)} <= set(
        re.findall(r"(--[a-z0-9-]+):", report_style.CSS)
    )


def test_a_saturated_cell_has_no_figures(page: str) -> None:
    found = rows_of(page, "static 0.10")
    assert len(found) == 2
    for row in found:
        assert row.pop("P99, ms") == "saturated" and row.pop("controller") == "static 0.10"
        assert set(row.values()) == {"–"}
    assert "1234" not in page and "627" not in page


def test_nothing_is_compared_with_a_saturated_reference(output: Path) -> None:
    results = json.loads((output / "results.json").read_text())
    controllers = results["cells"][0]["controllers"]
    controllers[names.BEST_STATIC]["summary"]["saturated"] = True
    (output / "results.json").write_text(json.dumps(results))
    (row,) = rows_of(page_of(output), "ppo-only")[:1]
    assert "room recovered, %" not in row and "P99 / best static" not in row
    assert row["P99, ms"].startswith("24.50") and row["controller"].startswith("3")


def test_figures_of_the_table_are_those_of_the_results(page: str) -> None:
    row = rows_of(page, "working-set rule")[0]
    assert row["P99, ms"].startswith("23.50") and row["QoS, %"].startswith("98.50")
    assert row["gap"].startswith("0.055")
    assert row["P99 / best static"].startswith("1.0930")  # (23 + 24) / (21 + 22)
    assert row["P99 − best policy's, ms"].startswith("−1.00")


def test_the_papers_figures_stand_beside_a_regime_and_not_beside_a_trace(page: str) -> None:
    assert page.count("<h3>Beside the paper") == 1
    rows = {row[0]: row for row in Reader(page).rows if len(row) == 4}
    assert rows["gap, best staticbest static in hindsight"][2] == "0.061"
    assert rows["gap, PPO onlyppo-only"][2] == "0.051"
    assert rows["gap, full controller"][1:] == ["not run", "0.023", ""]
    assert "step limit: the reachable oracle is" in rows["P99 below best static, %ppo-only"][3]


def test_says_when_a_baseline_wins_and_when_a_bound_is_broken(page: str) -> None:
    beaten = "Beaten by design-point static and working-set rule."
    assert page.count(beaten) == 2
    assert page.count("working-set rule has a lower P99 than the reachable oracle") == 1


def test_tells_command_commit_and_hardware(output: Path) -> None:
    results = json.loads((output / "results.json").read_text()) | {"revision": "0123abcd"}
    (output / "results.json").write_text(json.dumps(results))
    page = page_of(output)
    assert "<code>0123abcd</code>" in page and "&lt;u&gt;CPU&lt;/u&gt;, 2 cores" in page
    assert "<code>python -m eval.compare --workloads &#x27;&lt;i&gt;&#x27;</code>" in page


def test_missing_records_are_named(output: Path) -> None:
    cell = json.loads((output / "results.json").read_text())["cells"][0]
    gone = output / cell["controllers"]["ppo-only"]["record"][0]
    gone.unlink()
    damaged = output / cell["controllers"]["working-set rule"]["record"][0]
    damaged.write_text("{")
    uneven = output / cell["controllers"][names.BEST_STATIC]["record"][0]
    uneven.write_text(json.dumps(json.loads(uneven.read_text()) | {"p99_ms": [1.0]}))
    page = page_of(output)
    assert "course of ppo-only: cannot read" in page
    assert "course of working-set rule" in page
    assert "lists of different or no length" in page
    assert str(output) not in page


def test_without_any_record_the_tables_remain(output: Path) -> None:
    for path in (output / "records").rglob("*.json"):
        path.unlink()
    page = page_of(output)
    assert "Not shown" in page
    assert rows_of(page, "ppo-only")


def test_results_apart_from_their_records_give_a_page(output: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "compare.json"
    moved.parent.mkdir()
    (output / "results.json").rename(moved)
    with pytest.raises(ArgumentError, match="--page"):
        report.main(report.Args(moved))
    report.main(report.Args(moved, page=tmp_path / "deep" / "page.html"))
    page = (tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert page.count("records are not here") == 1 and rows_of(page, "ppo-only")


def test_a_record_outside_the_folder_is_not_read(output: Path, tmp_path: Path) -> None:
    results = json.loads((output / "results.json").read_text())
    save_record(tmp_path / "other.json", "ppo-only", Scenario(), [50] * EPOCHS)
    results["cells"][0]["controllers"]["ppo-only"]["record"][0] = "../other.json"
    (output / "results.json").write_text(json.dumps(results))
    assert "../other.json lies outside" in page_of(output)


def test_without_a_curve_the_oracles_record_gives_alpha_star(output: Path) -> None:
    results = json.loads((output / "results.json").read_text())
    del results["cells"][0]["alpha_star"]
    (output / "results.json").write_text(json.dumps(results))
    page = page_of(output)
    assert ">alpha*</text>" in page
    assert page.count("no alpha* curve") == 1


@pytest.mark.parametrize("value", [[1], {"alpha_centi": ["x"]}], ids=str)
def test_a_damaged_curve_is_named(output: Path, value: object) -> None:
    results = json.loads((output / "results.json").read_text())
    results["cells"][0]["alpha_star"] = value
    (output / "results.json").write_text(json.dumps(results))
    assert "latency against alpha: " in page_of(output)


def test_missing_parts_of_policies_are_named(output: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    (empty / "nothing").mkdir(parents=True)
    (empty / "nothing" / "metrics.jsonl").write_text("\n[]\n")
    page = page_of(output, empty, empty / "nothing", tmp_path / "absent")
    assert page.count("metrics.jsonl: No such file or directory") == 2
    assert page.count("policy.json: No such file or directory") == 3
    assert "holds no episodic return" in page


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot read"),
        ("{", "damaged: not JSON"),
        ("[" * 100_000, "damaged: not JSON"),
        ("[]", "not a result of eval.compare"),
        ('{"slo_ms": 30}', "no list of cells"),
        ('{"slo_ms": "x", "cells": []}', "slo_ms='x'"),
        ('{"slo_ms": 30, "cells": [{"workload": "w"}]}', "cell 0 has no kv_policy"),
    ],
    ids=["missing", "cut", "deep", "list", "no cells", "slo", "cell"],
)
def test_damaged_results_are_refused_with_the_reason(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ArtefactError, match=re.escape(reason)) as caught:
        load_results(path)
    assert str(path) in str(caught.value)


def test_a_failed_page_leaves_the_old_one(output: Path) -> None:
    old = page_of(output)
    results = json.loads((output / "results.json").read_text())
    results["cells"][0]["best_static_alpha"] = ["x"]
    (output / "results.json").write_text(json.dumps(results))
    with pytest.raises(ArtefactError, match="damaged"):
        page_of(output)
    assert (output / "report.html").read_text(encoding="utf-8") == old


def test_the_command_draws_page_and_picture(
    output: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = json.loads((output / "results.json").read_text()) | {"policies": [str(policy)]}
    (output / "results.json").write_text(json.dumps(results))
    picture = output / "images" / "trend.png"
    report.main(report.Args(output, picture=picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "abc&lt;123&gt;" in (output / "report.html").read_text()
    assert str(picture) in capsys.readouterr().out


def test_a_picture_of_something_else_is_refused(output: Path) -> None:
    results = output / "results.json"
    with pytest.raises(ArgumentError, match="default/trend"):
        write_picture(results, output / "x.png", "default/steady")
    with pytest.raises(ArgumentError, match="png"):
        write_picture(results, output / "x.exe", "default/trend")


def test_learning_says_when_the_return_was_there(policy: Path) -> None:
    learning, _, skipped = read_learning(policy / "metrics.jsonl")
    assert skipped == 1
    # From a level of -90 (first five points) to 0: -4.5 is passed between rows 19 and 20.
    assert learning.episodes_to_95 in (4 * 19, 4 * 20)
    assert learning.best_ratio == pytest.approx(1.02)
    assert (learning.best_ratio_step, learning.best_ratio_episodes) == (4000, 160)
    assert learning.episodes == 160


def test_a_return_lost_in_noise_has_no_answer() -> None:
    noise = np.random.default_rng(1).normal(-30, 2, 60)
    assert step_of_share(np.arange(60.0), noise) is None
    assert step_of_share(np.arange(4.0), np.arange(4.0)) is None
    falling = np.linspace(0, -10, 60)
    assert step_of_share(np.arange(60.0), falling) is None


def test_curves_by_hot_share_are_means_of_their_epochs() -> None:
    share = [0.1, 0.11, 0.09, 0.5, 0.5, 0.52, 0.9]
    p99 = np.array([[1, 2, 3, 10, 10, 40, 7], [4, 4, 4, 1, 2, 3, 7]])
    low, high = by_hot_share([10, 90], p99, share)  # 0.9 has one epoch only
    assert low["p99_ms"] == [2, 4] and high["p99_ms"] == [20, 2]
    assert low["hot_share"] == pytest.approx(0.1) and high["epochs"] == 3
    with pytest.raises(ValueError, match="alphas, epochs"):
        by_hot_share([10], p99, share)


def test_a_steady_share_is_one_curve_wherever_it_lies() -> None:
    for steady in (0.15, 0.2, 0.25):
        share = steady + 0.02 * np.sin(np.arange(40))
        (curve,) = by_hot_share([10, 90], np.ones((2, 40)), share)
        assert curve["epochs"] == 40 and curve["hot_share"] == pytest.approx(steady, abs=0.01)


def test_at_most_as_many_curves_as_colours() -> None:
    share = np.linspace(0, 1, 110)
    curves = by_hot_share([10], np.ones((1, 110)), share)
    assert 2 <= len(curves) <= len(RAMP)


def test_summary_of_alpha_star_takes_the_lowest() -> None:
    found = alpha_star_summary([10, 50], [[3.0, 1.0], [2.0, 5.0]], [0.2, 0.2])
    assert found["alpha_centi"] == [50, 10] and found["best_p99_ms"] == [2.0, 1.0]
    assert json.loads(json.dumps(found)) == found


def test_smoothing_keeps_a_constant_and_a_short_series() -> None:
    np.testing.assert_allclose(smoothed(np.full(9, 3.0)), 3.0)
    np.testing.assert_allclose(smoothed([1.0, 2.0, 3.0, 4.0, 10.0])[2], 4.0)
    assert smoothed([7.0]).tolist() == [7.0]


def test_report_needs_no_picture_window() -> None:
    assert "matplotlib.pyplot" not in Path(report.__file__).read_text()
    assert "tkinter" not in sys.modules
