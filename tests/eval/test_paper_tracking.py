"""Alpha over hours, on an episode of minutes."""

import json
from pathlib import Path

import numpy as np
import pytest

from eval import paper_tracking
from eval.paper_tracking import Args, load
from eval.records import Record
from eval.tracking import MINUTE, by_minute, course_of, star_by_minute, track
from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.surrogate.optimum import AlphaStar

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def values() -> dict[str, object]:
    return track("books/trend", 2, seed=20_000, step_centi=20, repeats=1, jobs=1)


def record(alpha_centi: list[int]) -> Record:
    ones = [1.0] * len(alpha_centi)
    return Record(
        "made up", {}, 1, "", "", {}, alpha_centi, ones, ones, ones, ones, ones, ones,
        [1] * len(alpha_centi), 0,
    )  # fmt: skip


def test_minutes_are_means_of_twelve_epochs() -> None:
    assert by_minute(np.arange(24.0)).tolist() == [5.5, 17.5]
    assert by_minute(np.ones((3, 36))).shape == (3, 3)


def test_alpha_star_of_a_minute_is_the_best_of_its_mean_not_of_most_epochs() -> None:
    low, high = np.ones(MINUTE), np.full(MINUTE, 1.1)
    low[0] = 9.0  # one bad epoch outweighs eleven slightly better ones
    star = AlphaStar(np.array([20, 60]), np.stack([low, high]))
    alpha, p99_ms = star_by_minute(star)
    assert alpha.tolist() == [0.6] and p99_ms == pytest.approx([1.1])
    course = course_of(record([60] * MINUTE), star)
    assert course["gap"] == 0.0
    assert course["gap_to_epoch_star"] == pytest.approx(0.4 * 11 / 12)


def test_all_run_on_one_course_and_the_rule_moves(values: dict[str, object]) -> None:
    controllers = values["controllers"]
    assert isinstance(controllers, dict)
    assert {"best static in hindsight", "working-set rule", "ppo-only"} <= set(controllers)
    static = controllers["best static in hindsight"]
    assert static["alpha"] == [values["best_static_alpha"]] * 2 and static["movement"] == 0
    assert controllers["working-set rule"]["movement"] > 0
    star = np.array(values["alpha_star"])
    assert np.isin((100 * star).round(), np.arange(10, 91, 20)).all()
    for course in controllers.values():
        assert course["gap"] >= abs(np.mean(course["alpha"]) - star.mean()) - 1e-4


def test_a_written_course_is_drawn_again_the_same(
    values: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plot = tmp_path / "tracking.json", tmp_path / "tracking.png"
    file.write_text(json.dumps(values))
    paper_tracking.main(Args(from_=file, plot=plot))
    assert capsys.readouterr().out.strip() == paper_tracking.table(values).strip()
    assert plot.read_bytes().startswith(b"\x89PNG")
    top = paper_tracking.draw(load(file)).axes[0]
    drawn = {line.get_label(): np.asarray(line.get_ydata()) for line in top.lines}
    assert np.array_equal(drawn["alpha*"], np.array(values["alpha_star"]))


def test_the_committed_course_has_four_hours() -> None:
    committed = load(RESULTS / "paper_tracking.json")
    assert len(committed["alpha_star"]) == len(committed["history_tokens"]) == 240
    assert not any(course["saturated"] for course in committed["controllers"].values())


def test_other_files_and_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"eval\.paper_tracking"):
        load(RESULTS / "shape.json")
    with pytest.raises(ArtefactError, match="cannot read"):
        load(tmp_path / "none.json")
    with pytest.raises(ArgumentError, match="minutes"):
        Args(minutes=1)
