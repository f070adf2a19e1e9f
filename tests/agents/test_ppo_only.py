from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from agents.actor_critic import ActorCritic
from agents.ppo_only import PpoOnly
from hlem_env.controller import Controller
from hlem_env.errors import ArgumentError
from hlem_env.mdp import ACTIONS_CENTI, FEATURES, MdpConfig, observe
from hlem_env.telemetry import EpochStats
from serving_bridge.policy import FrozenPolicy, export_policy


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small only lose by more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stats_at(alpha: float) -> EpochStats:
    empty = np.zeros(0)
    return EpochStats(
        duration_s=5.0,
        latency_ms=empty,
        service_ms=empty,
        arrival_s=empty,
        is_hot=empty.astype(bool),
        history_tokens=0,
        reused_tokens=0,
        rows_looked_up=0,
        rows_hit=0.0,
        computed_tokens=0,
        refill_bytes=0.0,
        prefetch_bytes=0.0,
        evictions=0,
        alpha_target=alpha,
        alpha_resident=alpha,
        embedding_pages=0,
        kv_pages=0,
        free_pages=0,
        pending_pages=0,
        pool_bytes=1,
        working_set_bytes=0.5,
        backlog=0,
        backlog_age_s=0.0,
        utilisation=0.0,
    )


def controller(folder: Path, features: str = "paper", likes: int | None = None) -> PpoOnly:
    """A policy with weights of some size, or one that always takes the action `likes`."""
    network = ActorCritic(len(FEATURES[features]))
    with torch.no_grad():
        network.actor[-1].weight.mul_(100.0)
        if likes is not None:
            network.actor[-1].bias[likes] = 50.0
    inputs, logits = network.parity_vectors(np.random.default_rng(0))
    export_policy(
        folder,
        network.actor_weights(),
        mdp_config=MdpConfig(features=features),
        parity_inputs=inputs,
        parity_logits=logits,
        env_spec={},
        training_command="",
        seed=0,
        git_revision="",
    )
    return PpoOnly(FrozenPolicy.load(folder))


@pytest.mark.parametrize(
    ("features", "name"), [("paper", "ppo-only"), ("working_set", "ppo-only (working set)")]
)
def test_follows_the_protocol(tmp_path: Path, features: str, name: str) -> None:
    made: Controller = controller(tmp_path, features)
    assert (made.name, made.period, made.initial_alpha_centi) == (name, 1, 50)
    made.reset(0)
    assert not hasattr(made, "on_tick")


@pytest.mark.parametrize("index", range(7))
def test_every_action_from_every_alpha_of_the_grid(tmp_path: Path, index: int) -> None:
    made = controller(tmp_path, likes=index)
    for alpha_centi in range(101):
        stats = stats_at(alpha_centi / 100)
        decision = made.decide(observe(stats, MdpConfig()), stats)
        # Out of bounds too: the runner clips, and says so.
        assert decision.alpha_centi == alpha_centi + (-6, -4, -2, 0, 2, 4, 6)[index]
        assert type(decision.alpha_centi) is int
        assert sum(decision.parts.values()) == ACTIONS_CENTI[index]
        assert f"{ACTIONS_CENTI[index] / 100:+.2f}" in decision.reason


def test_steps_from_an_alpha_with_rounding_error(tmp_path: Path) -> None:
    made = controller(tmp_path, likes=4)
    for alpha in (0.5 + 4 * 0.05, np.float32(0.7), 0.7000000000000001, 0.6999999):
        stats = stats_at(float(alpha))
        assert made.decide(np.zeros(7, np.float32), stats).alpha_centi == 72


def test_takes_the_first_seven_of_eight(tmp_path: Path) -> None:
    made = controller(tmp_path)
    stats = stats_at(0.5)
    rows = np.random.default_rng(1).random((200, 8), dtype=np.float32)
    alphas = [made.decide(row, stats).alpha_centi for row in rows]
    assert alphas == [made.decide(row[:7].copy(), stats).alpha_centi for row in rows]
    assert len(set(alphas)) > 1


def test_eighth_feature_reaches_the_policy(tmp_path: Path) -> None:
    made = controller(tmp_path, "working_set")
    stats = stats_at(0.5)
    rows = np.random.default_rng(1).random((200, 8), dtype=np.float32)
    other = rows.copy()
    other[:, 7] = 1 - rows[:, 7]
    decisions = [[made.decide(row, stats).alpha_centi for row in part] for part in (rows, other)]
    assert decisions[0] != decisions[1]


def test_fewer_features_are_refused(tmp_path: Path) -> None:
    made = controller(tmp_path, "working_set")
    with pytest.raises(ArgumentError, match=r"number of observed features=7 .* 8 features"):
        made.decide(np.zeros(7, np.float32), stats_at(0.5))


@pytest.mark.parametrize(
    "observation",
    [np.zeros(7), np.zeros((7, 7), np.float32), np.full(7, np.nan, np.float32), [0.0] * 7, None],
    ids=["float64", "matrix", "NaN", "list", "None"],
)
def test_other_observations_are_refused(tmp_path: Path, observation: np.ndarray) -> None:
    with pytest.raises(ArgumentError, match=r"float32 \[7\]"):
        controller(tmp_path).decide(observation, stats_at(0.5))
