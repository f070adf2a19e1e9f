import numpy as np

from eval.foresight import cross_play
from hlem_env.scenario import Scenario


def test_no_plan_beats_the_one_made_for_the_requests_and_the_others_are_other_plans() -> None:
    scenario = Scenario.parse("default/burst", episode_epochs=8, warmup_epochs=3)
    p99_ms = cross_play(scenario, [20_000, 20_001], jobs=2)
    own = p99_ms.pop("own plan")
    assert (own <= p99_ms.pop("best static")).all()
    for values in p99_ms.values():
        assert (own <= values * (1 + 1e-9)).all()
        assert np.abs(values - own).max() > 0
