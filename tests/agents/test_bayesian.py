import numpy as np
import pytest

pytest.importorskip("bayes_opt", reason="needs the extra baselines")

from agents.bayesian import (
    WINDOW_EPOCHS,
    BayesianOptimisation,
    BayesianSettings,
    ExpectedImprovementSearch,
)
from tests.hlem_env.epochs import make_stats


@pytest.mark.parametrize("minimum", [17, 83])
@pytest.mark.parametrize("settings", [BayesianSettings(), None], ids=["defaults", "tuned"])
def test_finds_the_minimum_of_a_known_curve_within_20_windows(
    minimum: int, settings: BayesianSettings | None
) -> None:
    settings = settings or BayesianOptimisation().settings
    distances = []
    for seed in range(2):
        search, noise = ExpectedImprovementSearch(settings, seed), np.random.default_rng(seed)
        alpha, tried = 50, []
        for _ in range(20):
            cost = 25 + 15 * ((alpha - minimum) / 80) ** 2 + noise.normal(0, 0.05)
            search.add(alpha, cost)
            tried.append((cost, alpha))
            alpha = search.suggest()
        distances.append(abs(min(tried)[1] - minimum))
    assert np.mean(distances) <= 5  # a random search of 20 is 2 away on average, one try 25


def test_walks_to_its_suggestion_at_the_step_limit() -> None:
    agent = BayesianOptimisation(BayesianSettings())
    agent.reset(3)
    alpha, alphas, suggestions = 50, [50], []
    for epoch in range(1, 6 * WINDOW_EPOCHS + 1):
        stats = make_stats([20 + abs(alpha - 70) / 10], alpha_target=alpha / 100)
        decision = agent.decide(np.zeros(8, np.float32), stats)
        if "suggests" in decision.reason:
            suggestions.append(epoch)
        alpha = decision.alpha_centi
        alphas.append(alpha)
    assert suggestions == [12, 24, 36, 48, 60, 72]
    assert 0 < np.abs(np.diff(alphas)).max() <= 6
    assert min(alphas) >= 10 and max(alphas) <= 90


def test_one_seed_gives_one_run() -> None:
    def run(seed: int) -> list[int]:
        agent = BayesianOptimisation(BayesianSettings())
        agent.reset(seed)
        alpha, alphas = 50, []
        for _ in range(4 * WINDOW_EPOCHS):
            stats = make_stats([20 + abs(alpha - 70) / 10], alpha_target=alpha / 100)
            alpha = agent.decide(np.zeros(8, np.float32), stats).alpha_centi
            alphas.append(alpha)
        return alphas

    assert run(1) == run(1) != run(2)
