"""A mixed-integer linear plan of alpha over the next decisions, from the hardware's latency model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.settings import tuned
from agents.steps import LARGEST_STEP_CENTI, towards
from hlem_env.controller import Decision
from hlem_env.errors import require
from hlem_env.mdp import queueing_p99_ms
from hlem_env.scenario import Scenario
from hlem_env.surrogate.hit_rates import distinct_curve
from hlem_env.surrogate.load import service_moments
from hlem_env.telemetry import EpochStats

Floats = NDArray[np.float64]
WINDOW_EPOCHS = 12
"""Epochs from one decision to the next."""
MOST_MOVE_CENTI = WINDOW_EPOCHS * LARGEST_STEP_CENTI
_LEVEL_EPOCHS = 4
"""Epochs whose mean says where the workload is."""


@dataclass(frozen=True)
class MilpSettings:
    """Of the plan."""

    horizon: int = 3
    """Decisions that are planned together."""
    spacing_centi: int = 5
    """Between the points of the piecewise-linear latency."""
    move_ms: float = 0.01
    """What a move of alpha by a hundredth costs in P99: rows and entries come with delay."""
    trend: float = 0.5
    """Share of the last window's change of the workload that is expected again."""
    time_limit_s: float = 0.5
    low_centi: int = 10
    high_centi: int = 90


def plan(
    latency_ms: Floats,
    points_centi: NDArray[np.int64],
    start_centi: int,
    most_move_centi: int,
    move_ms: float,
    time_limit_s: float,
) -> list[int] | None:
    """The integer alphas (hundredths), one a decision, with the least latency and movement.

    Minimises the sum over decisions of the piecewise-linear latency at alpha_t, and of `move_ms` times
    |alpha_t - alpha_(t-1)|, which is at most `most_move_centi`. A latency need not be convex, so
    every decision picks the one segment that its alpha lies on by binaries.

    Args:
        latency_ms: [decisions, points].
        points_centi: [points] ascending; the first and the last are the bounds.

    Returns:
        None when the solver found nothing in its time.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import block_array, csr_array, eye_array, kron

    decisions, points = latency_ms.shape
    segments = points - 1
    # Variables, decisions in the outer order: weights of the points, segments, alphas, moves.
    one = np.ones((1, 1))
    per = [points, segments, 1, 1]

    def rows(*blocks: Floats | None) -> csr_array:
        """The same rows for every decision, from what they say of each kind of variable."""
        height = next(b.shape[0] for b in blocks if b is not None)
        filled = [
            np.zeros((height, n)) if b is None else b for b, n in zip(blocks, per, strict=True)
        ]
        return block_array([[kron(eye_array(decisions), b) for b in filled]]).tocsr()

    # A point has weight only beside the chosen segment: w_k <= z_(k-1) + z_k.
    beside = np.zeros((points, segments))
    beside[np.arange(segments), np.arange(segments)] = 1
    beside[np.arange(1, points), np.arange(segments)] = 1
    before = eye_array(decisions, k=-1)
    moved = eye_array(decisions) - before
    first = np.zeros(decisions)
    first[0] = start_centi
    empty = csr_array((decisions, decisions * (points + segments)))
    moves = eye_array(decisions)
    constraints = [
        LinearConstraint(rows(np.ones((1, points)), None, None, None), 1, 1),
        LinearConstraint(rows(None, np.ones((1, segments)), None, None), 1, 1),
        LinearConstraint(rows(np.eye(points), -beside, None, None), -np.inf, 0),
        LinearConstraint(rows(points_centi[None].astype(float), None, -one, None), 0, 0),
        LinearConstraint(block_array([[empty, moved, -moves]]), -np.inf, first),
        LinearConstraint(block_array([[empty, -moved, -moves]]), -np.inf, -first),
    ]
    low, high = float(points_centi[0]), float(points_centi[-1])
    count = decisions * np.array(per)
    result = milp(
        np.concatenate(
            [latency_ms.ravel(), np.zeros(count[1] + count[2]), np.full(count[3], move_ms)]
        ),
        integrality=np.repeat([0, 1, 1, 0], count),
        bounds=Bounds(
            np.repeat([0.0, 0.0, low, 0.0], count),
            np.repeat([1.0, 1.0, high, float(most_move_centi)], count),
        ),
        constraints=constraints,
        options={"time_limit": time_limit_s},
    )
    if result.x is None:
        return None
    alphas = result.x[count[0] + count[1] : count[0] + count[1] + count[2]]
    return [round(float(alpha)) for alpha in alphas]


class MilpPlanner:
    """Every 12 epochs plans the next decisions, goes by the first, and walks there.

    It knows the node: hardware profile, tables and their skew, layout of KV. Of the workload it knows
    what was measured: hot share, working set, lengths and rate, and how they changed in a window.

    Args:
        settings: None is the tuned ones.
        scenario: the node; None is the default one. Its workload is not looked at.
    """

    name = "MILP"
    period = 1
    initial_alpha_centi = 50

    def __init__(
        self, settings: MilpSettings | None = None, scenario: Scenario | None = None
    ) -> None:
        self.settings = s = settings or tuned("milp", MilpSettings)
        require(s.horizon >= 1, "horizon", s.horizon, "at least 1 decision")
        self._node = scenario or Scenario()
        inner = range(s.low_centi, s.high_centi, s.spacing_centi)
        self._points = np.array([*inner, s.high_centi])
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Forget what was measured."""
        self._window: list[Floats] = []
        self._level: Floats | None = None
        self._wanted_centi = self.initial_alpha_centi

    def latency_ms(
        self, hot_share: float, working_set: float, tokens: float, rate: float
    ) -> Floats:
        """P99 [points] of a queue in the long run, in milliseconds, by the closed form.

        Args:
            hot_share: of requests.
            working_set: KV bytes of hot users over the pool.
            tokens: mean history length.
            rate: requests a second.
        """
        node, hardware = self._node.node(), self._node.profile()
        config = self._node.regime_config()
        catalogue = config.catalogue
        moments = service_moments(
            distinct_curve(catalogue.rows_per_table, catalogue.zipf),
            hardware.compute_table(node.layers, config.max_history_tokens + catalogue.candidates),
            np.array([hot_share]), np.array([working_set * node.pool_pages]),
            float(node.pool_pages),
            node.page_bytes / catalogue.row_bytes / catalogue.tables, tokens,
            float(config.new_items), float(catalogue.candidates), float(catalogue.tables),
            hardware.overhead_ms, hardware.append_tokens,
            catalogue.row_bytes / hardware.gather_gbps * 1e-6,
            2 * catalogue.row_bytes / hardware.hbm_gbps * 1e-6,
        )[0][:, self._points]  # fmt: skip
        return np.array([queueing_p99_ms(mean, square, rate) for mean, square in moments.T])

    def decide(self, observation: NDArray[np.float32], stats: EpochStats) -> Decision:
        """A step towards the planned alpha; at a window's end, a new plan."""
        rate = stats.requests / stats.duration_s if stats.duration_s > 0 else 0.0
        self._window.append(
            np.array([stats.hot_share, stats.working_set, stats.mean_history_tokens, rate])
        )
        reason = f"walks to {self._wanted_centi / 100:.2f}"
        if len(self._window) == WINDOW_EPOCHS:
            reason = self._plan(round(100 * stats.alpha_target))
            self._window = []
        return Decision(towards(stats, self._wanted_centi), reason)

    def _plan(self, alpha_centi: int) -> str:
        s = self.settings
        level = np.mean(self._window[-_LEVEL_EPOCHS:], axis=0)
        change = np.zeros(4) if self._level is None else s.trend * (level - self._level)
        self._level = level
        # A decision holds for a window: what counts is the workload in its middle.
        ahead = [np.maximum(level + change * (i + 0.5), 0.0) for i in range(s.horizon)]
        latency = np.stack([self.latency_ms(min(h, 1.0), *rest) for h, *rest in ahead])
        alphas = plan(
            latency, self._points, alpha_centi, MOST_MOVE_CENTI, s.move_ms, s.time_limit_s
        )
        if alphas is None:
            return f"no plan within {s.time_limit_s} s, goes on to {self._wanted_centi / 100:.2f}"
        self._wanted_centi = alphas[0]
        return "plans " + ", ".join(f"{alpha / 100:.2f}" for alpha in alphas)
