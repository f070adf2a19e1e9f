"""Controllers that act between decisions meet the same requests as those that do not."""

import numpy as np

from agents.static import Static
from hlem_env.backend import Runner, run_controller
from hlem_env.controller import Decision
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.telemetry import EpochStats


class Ticking(Static):
    def on_tick(self, stats: EpochStats) -> Decision | None:
        return None


def test_the_same_requests_with_ticks_and_without() -> None:
    scenario = Scenario.parse("burst", episode_epochs=40)
    runs = []
    for controller in (Static(50), Ticking(50)):
        runner = Runner(scenario.build(), MdpConfig())
        runs.append([stats for stats, _ in run_controller(runner, controller, 40, 40_003)])
    for whole, ticked in zip(*runs, strict=True):
        assert np.array_equal(whole.arrival_s, ticked.arrival_s)
        assert np.array_equal(whole.is_hot, ticked.is_hot)
        # Refill starts its budget anew in each run, which is all that ticks change.
        assert np.allclose(whole.latency_ms, ticked.latency_ms, rtol=0.02)
