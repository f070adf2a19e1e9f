import numpy as np

from eval.foresight import Course, cross_play, plan_for
from hlem_env.scenario import Scenario


def test_no_plan_beats_the_one_made_for_the_requests_and_the_others_are_other_plans() -> None:
    scenario = Scenario.parse("default/burst", episode_epochs=8, warmup_epochs=3)
    p99_ms = cross_play(scenario, [20_000, 20_001], jobs=2)
    own = p99_ms.pop("own plan")
    assert (own <= p99_ms.pop("best static")).all()
    for values in p99_ms.values():
        assert (own <= values * (1 + 1e-9)).all()
        assert np.abs(values - own).max() > 0


def test_drawings_share_the_course_and_not_the_arrivals() -> None:
    scenario = Scenario.parse("default/burst", episode_epochs=40, warmup_epochs=1)
    (one, first), (two, second) = (Course(scenario, 20_003, draw).record() for draw in (0, 3))
    assert one.workload.digest() == two.workload.digest()  # type: ignore[attr-defined]
    assert first.whole.arrival_s[0] != second.whole.arrival_s[0]


def test_larger_steps_and_more_ways_find_no_worse_a_plan() -> None:
    course = Course(Scenario.parse("default/burst", episode_epochs=16, warmup_epochs=3), 20_003)
    narrow, wide = plan_for(course, 2, 41), plan_for(course, 20, 41)
    assert max(np.abs(np.diff(narrow.plan))) <= 2 < max(np.abs(np.diff(wide.plan))) <= 20
    assert wide.planned_ms <= narrow.planned_ms
