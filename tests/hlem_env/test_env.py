"""HBMPartitionEnv-v0: what Gymnasium and Stable-Baselines3 ask of it, and its own promises."""

import copy
import json
import multiprocessing
import pickle
import re
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3

from hlem_env import ArgumentError, BackendError
from hlem_env.env import HBMPartitionEnv, HBMPartitionVectorEnv
from hlem_env.mdp import FEATURES, REWARD_FLOOR, REWARDS
from hlem_env.scenario import Scenario, TrainingDomain

ID = "hlem_env:HBMPartitionEnv-v0"

SMALL = {
    "pool_bytes": 6_000_000_000,
    "mean_history_tokens": 2000,
    "max_history_tokens": 3000,
    "utilisation": 0.05,
    "warmup_epochs": 2,
}
"""Some fifty requests an epoch."""
TINY = {
    "pool_bytes": 100 * 2**21,
    "mean_history_tokens": 100,
    "max_history_tokens": 200,
    "tables": 1,
    "rows_per_table": 1000,
    "warmup_epochs": 0,
}
"""The smallest pool: 100 pages."""


def rollout(env: Any, actions: list[int], seed: int | None) -> list[Any]:
    """Every observation, reward, flag and info of one episode."""
    seen = [env.reset(seed=seed)]
    seen += [env.step(action) for action in actions]
    return seen


def same(one: Any, other: Any) -> bool:
    """Equality to the last bit, of any nesting."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(np.array_equal(one, other))


# What Gymnasium and Stable-Baselines3 check


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("features", FEATURES)
def test_checkers_find_nothing(features: str, reward: str, capsys: Any) -> None:
    arguments: dict[str, Any] = {"workload": SMALL, "features": features, "reward": reward}
    made = gym.make(ID, **arguments, render_mode="rgb_array")
    check_env(made.unwrapped)
    check_env(HBMPartitionEnv(**arguments), skip_render_check=True)
    check_env_for_sb3(made)
    check_env_for_sb3(HBMPartitionEnv(**arguments))
    assert made.observation_space.shape == (len(FEATURES[features]),)
    assert made.action_space == gym.spaces.Discrete(7)
    made.close()


@pytest.mark.parametrize("workload", ["burst", "video-games/trend", "training"])
def test_checkers_find_nothing_with_other_workloads(workload: str) -> None:
    env = HBMPartitionEnv(workload=workload, epoch_seconds=0.5)
    check_env(env, skip_render_check=True)
    check_env_for_sb3(env, skip_render_check=True)


def test_make_wraps_without_a_word() -> None:
    env = gym.make(ID, workload=SMALL, max_episode_steps=3)
    rollout(env, [6, 0], seed=1)
    assert env.step(3)[3] is True
    env.close()


def test_spec_survives_json() -> None:
    arguments: dict[str, Any] = {
        "workload": SMALL,
        "alpha_bounds": (0.2, 0.8),
        "initial_alpha": 0.3,
        "features": "working_set",
        "slo_ms": 3.0,
    }
    env = gym.make(ID, **arguments)
    assert env.spec is not None
    text = env.spec.to_json()
    assert json.loads(text)["kwargs"]["workload"] == SMALL
    actions = [6, 1, 0, 0, 5, 2]
    expected = rollout(env, actions, seed=4)
    for spec in (EnvSpec.from_json(text), env.spec):
        assert same(rollout(gym.make(spec), actions, seed=4), expected)


def test_ppo_of_stable_baselines3_trains() -> None:
    env = gym.make(ID, workload=SMALL, episode_epochs=50)
    model = PPO(
        "MlpPolicy", env, n_steps=128, batch_size=64, n_epochs=1, device="cpu", seed=0, verbose=0
    )
    before = {name: value.clone() for name, value in model.policy.state_dict().items()}
    model.learn(256)
    after = model.policy.state_dict()
    assert any(not before[name].equal(after[name]) for name in before)
    action, _ = model.predict(env.reset(seed=0)[0])
    assert env.action_space.contains(int(action))
    assert model.ep_info_buffer is not None
    assert [episode["l"] for episode in model.ep_info_buffer] == [50] * 5
    env.close()


# One environment and many


COURSES: dict[str, tuple[dict[str, Any], int]] = {
    "steady": ({"workload": SMALL, "episode_epochs": 60}, 1000),
    "books trend": (
        {
            "workload": SMALL | {"preset": "books", "regime": "trend"},
            "episode_epochs": 45,
            "features": "working_set",
        },
        1000,
    ),
    "training": (
        {
            "workload": "training",
            "episode_epochs": 125,
            "epoch_seconds": 0.1,
            "reward": "busy_time",
        },
        1000,
    ),
    "defaults": ({}, 20),
    "burst, overloaded": ({"workload": SMALL | {"regime": "burst", "utilisation": 1.4}}, 30),
}
ENVS = 8
SEED = 20


def actions_of(number: int, steps: int) -> list[int]:
    actions: list[int] = np.random.default_rng([number, 5]).integers(7, size=steps).tolist()
    return actions


@cache
def scalar_course(name: str, number: int) -> list[tuple[Any, ...]]:
    """What a scalar environment gives, its resets at an episode's end included.

    Entries are (observation, reward, truncated, info), those of resets with a reward of None.
    """
    arguments, steps = COURSES[name]
    env = HBMPartitionEnv(**arguments)
    observation, info = env.reset(seed=SEED + number)
    course: list[tuple[Any, ...]] = [(observation, None, False, info)]
    for action in actions_of(number, steps):
        observation, reward, terminated, truncated, info = env.step(action)
        assert not terminated
        course.append((observation, reward, truncated, info))
        if truncated:
            observation, info = env.reset()
            course.append((observation, None, False, info))
    return course


def assert_infos(infos: dict[str, Any], number: int, expected: dict[str, Any]) -> None:
    for key, value in expected.items():
        assert infos[key][number] == value, key
        assert infos[f"_{key}"][number], key


@pytest.mark.parametrize("name", COURSES)
def test_vector_equals_scalars_that_reset_in_the_next_step(name: str) -> None:
    arguments, steps = COURSES[name]
    vector = HBMPartitionVectorEnv(ENVS, **arguments)
    courses = [scalar_course(name, number) for number in range(ENVS)]
    actions = [iter(actions_of(number, steps)) for number in range(ENVS)]
    observations, infos = vector.reset(seed=SEED)
    for number, course in enumerate(courses):
        assert same(observations[number], course[0][0])
        assert_infos(infos, number, course[0][3])
    for at in range(1, steps + 1):
        resets = [course[at][1] is None for course in courses]
        chosen = [6 if reset else next(given) for reset, given in zip(resets, actions, strict=True)]
        observations, rewards, terminations, truncations, infos = vector.step(np.array(chosen))
        assert not terminations.any()
        for number, course in enumerate(courses):
            observation, reward, truncated, info = course[at]
            assert same(observations[number], observation)
            assert rewards[number] == (0.0 if reward is None else reward)
            assert truncations[number] == truncated
            assert_infos(infos, number, info)
    vector.close()


@pytest.mark.parametrize("name", COURSES)
def test_vector_equals_scalars_that_reset_in_the_same_step(name: str) -> None:
    arguments, steps = COURSES[name]
    vector = gym.make_vec(ID, num_envs=ENVS, autoreset_mode=AutoresetMode.SAME_STEP, **arguments)
    assert isinstance(vector.unwrapped, HBMPartitionVectorEnv)
    courses = [iter(scalar_course(name, number)) for number in range(ENVS)]
    actions = np.array([actions_of(number, steps) for number in range(ENVS)])
    observations, _ = vector.reset(seed=SEED)
    for number, course in enumerate(courses):
        assert same(observations[number], next(course)[0])
    ends = 0
    for at in range(steps):
        observations, rewards, terminations, truncations, infos = vector.step(actions[:, at])
        assert not terminations.any()
        assert ("final_info" in infos) == ("final_obs" in infos) == bool(truncations.any())
        for number, course in enumerate(courses):
            observation, reward, truncated, info = next(course)
            assert rewards[number] == reward
            assert truncations[number] == truncated
            if truncated:
                ends += 1
                assert infos["_final_obs"][number]
                assert infos["_final_info"][number]
                assert same(infos["final_obs"][number], observation)
                assert_infos(infos["final_info"], number, info)
                observation, _, _, info = next(course)
            elif truncations.any():
                assert not infos["_final_obs"][number]
            assert same(observations[number], observation)
            assert_infos(infos, number, info)
    assert ends == ENVS * (steps // arguments.get("episode_epochs", 240))
    vector.close()


def test_make_vec_of_scalar_environments_agrees() -> None:
    made = gym.make_vec(ID, num_envs=3, vectorization_mode="sync", workload=SMALL)
    native = gym.make_vec(ID, num_envs=3, workload=SMALL)
    assert native.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    assert made.observation_space == native.observation_space
    assert made.action_space == native.action_space
    actions = list(np.random.default_rng(0).integers(7, size=(20, 3)))
    ours, theirs = rollout(native, actions, seed=7), rollout(made, actions, seed=7)
    for (*mine, _), (*other, _) in zip(ours, theirs, strict=True):
        assert same(mine, other)
    made.close()
    native.close()


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_processes_share_environments_out_and_change_nothing(mode: str) -> None:
    actions = list(np.random.default_rng(0).integers(7, size=(9, 5)))
    seen = []
    for processes in (1, 3):
        vector = HBMPartitionVectorEnv(
            5, mode, processes, workload=SMALL, episode_epochs=4, render_mode="ansi"
        )
        course = [rollout(vector, actions, seed=seed) for seed in (7, None)]
        for results in [results for part in course for results in part]:
            if "final_obs" in results[-1]:
                results[-1]["final_obs"] = list(results[-1]["final_obs"])
        seen.append([course, vector.render()])
        vector.close()
    assert same(*seen)


def test_each_may_have_a_workload_of_its_own() -> None:
    workloads = [SMALL, SMALL | {"regime": "trend"}]
    vector = HBMPartitionVectorEnv(2, workloads=workloads)
    observations, _ = vector.reset(seed=3)
    for number, workload in enumerate(workloads):
        scalar = HBMPartitionEnv(workload=workload)
        assert same(observations[number], scalar.reset(seed=3 + number)[0])


def test_an_error_of_another_process_is_raised_here_and_the_next_step_is_right() -> None:
    vector = HBMPartitionVectorEnv(2, processes=2, workload=SMALL)
    vector.reset(seed=0)
    for wrong in ([3, 9], [9, 3]):
        with pytest.raises(ArgumentError, match=r"action=.*9.*0 to 6"):
            vector.step(np.array(wrong))
    assert vector.step(np.array([6, 0]))[-1]["alpha"].tolist() == [0.56, 0.44]
    vector.close()


def test_processes_end_with_their_environment() -> None:
    vector = HBMPartitionVectorEnv(3, processes=3, workload=SMALL)
    vector.reset(seed=0)
    first, second = multiprocessing.active_children()
    first.kill()
    first.join()
    with pytest.raises(BackendError, match="a process of the vector environment has died"):
        vector.step(np.array([3, 3, 3]))
    vector.close()
    assert not second.is_alive()


def test_vector_takes_a_seed_for_each() -> None:
    vector = HBMPartitionVectorEnv(3, workload=SMALL)
    observations, _ = vector.reset(seed=[9, 2, 9])
    assert same(observations[0], observations[2])
    assert not same(observations[0], observations[1])
    assert same(observations[1], HBMPartitionEnv(workload=SMALL).reset(seed=2)[0])


def test_vector_gives_fresh_arrays() -> None:
    vector = HBMPartitionVectorEnv(2, workload=SMALL)
    kept = [vector.reset(seed=0)[0]]
    for _ in range(5):
        results = vector.step(np.array([3, 3]))
        assert not any(np.shares_memory(results[0], earlier) for earlier in kept)
        kept.append(results[0])


# Seeds


@pytest.mark.parametrize("workload", [SMALL, SMALL | {"regime": "burst"}, "training"])
def test_a_seed_makes_the_run(workload: Any) -> None:
    actions = actions_of(0, 30)
    envs = [HBMPartitionEnv(workload=workload, epoch_seconds=1.0) for _ in range(2)]
    first, second = (rollout(env, actions, seed=5) for env in envs)
    assert same(first, second)
    assert same(rollout(envs[0], actions, seed=5), first)
    assert not same(rollout(envs[1], actions, seed=6)[0][0], first[0][0])


def test_a_training_domain_draws_from_its_own_ranges() -> None:
    domain = TrainingDomain(regimes=("trend",), tables=(3, 3), crowded_share=1.0)
    env = HBMPartitionEnv(workload=domain)
    for seed in range(3):
        env.reset(seed=seed)
        assert env.scenario.tables == 3
        assert env.scenario.mean_history_tokens > 11_000


def test_training_is_the_default_training_domain() -> None:
    envs = [HBMPartitionEnv(workload=w) for w in ("training", TrainingDomain())]
    assert same(*(rollout(env, [0] * 3, seed=4) for env in envs))


def test_reset_without_a_seed_goes_on_from_the_last_one() -> None:
    one, other = (HBMPartitionEnv(workload=SMALL) for _ in range(2))
    first = rollout(one, [3] * 5, seed=1)
    second = rollout(one, [3] * 5, seed=None)
    assert not same(first, second)
    other.reset(seed=1)
    assert same(rollout(other, [3] * 5, seed=None), second)


@pytest.mark.parametrize("workload", [SMALL | {"regime": "burst"}, "training"])
def test_copies_in_the_middle_of_an_episode_go_on_alike(workload: Any) -> None:
    env = HBMPartitionEnv(workload=workload, epoch_seconds=1.0, episode_epochs=30)
    rollout(env, actions_of(1, 10), seed=3)
    copies = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    actions = actions_of(2, 20)
    expected = [env.step(action) for action in actions] + [env.reset()]
    for copied in copies:
        assert same([copied.step(action) for action in actions] + [copied.reset()], expected)


# Observations, infos, ends


def test_info_is_what_the_documentation_says() -> None:
    assert HBMPartitionEnv.__doc__ is not None
    text = HBMPartitionEnv.__doc__.split("`info` always has:")[1].split("##")[0]
    documented = set(re.findall(r"`(\w+)`", text))
    env = HBMPartitionEnv(workload=SMALL)
    infos = [env.reset(seed=0)[1], env.step(6)[4]]
    for info in infos:
        assert info.keys() == documented
        for key, value in info.items():
            kind = {"clipped": bool, "requests": int, "backlog": int}.get(key, float)
            assert isinstance(value, kind), key
            assert key == "clipped" or not isinstance(value, bool), key


def test_steps_give_plain_types_and_fresh_arrays() -> None:
    env = HBMPartitionEnv(workload=SMALL, features="working_set")
    kept = [env.reset(seed=0)[0]]
    copies = [kept[0].copy()]
    for action in actions_of(0, 20):
        observation, reward, terminated, truncated, info = env.step(np.int64(action))
        assert type(reward) is float
        assert type(terminated) is bool
        assert type(truncated) is bool
        assert type(info["clipped"]) is bool
        assert observation.dtype == np.float32
        assert env.observation_space.contains(observation)
        assert not any(np.shares_memory(observation, earlier) for earlier in kept)
        kept.append(observation)
        copies.append(observation.copy())
    assert same(kept, copies)


@pytest.mark.parametrize("episode_epochs", [1, 7])
def test_an_episode_ends_by_truncation_alone(episode_epochs: int) -> None:
    env = HBMPartitionEnv(workload=SMALL, episode_epochs=episode_epochs)
    for _ in range(2):
        env.reset(seed=0)
        flags = [env.step(0)[2:4] for _ in range(episode_epochs)]
        assert flags == [(False, False)] * (episode_epochs - 1) + [(False, True)]


def test_an_episode_takes_240_epochs_of_5_seconds() -> None:
    env = HBMPartitionEnv(workload=SMALL)
    env.reset(seed=0)
    requests = 0
    for at in range(1, 241):
        *_, truncated, info = env.step(3)
        requests += info["requests"]
        assert truncated == (at == 240)
    rate = float(Scenario.parse(SMALL).workload().load(0.20))  # type: ignore[attr-defined]
    assert requests == pytest.approx(1200 * rate, rel=0.05)


@pytest.mark.parametrize(
    ("workload", "arguments"),
    [
        (TINY | {"utilisation": 0.01}, {"epoch_seconds": 0.01}),
        (SMALL | {"utilisation": 4.9}, {}),
        (SMALL | {"utilisation": 4.9}, {"reward": "busy_time", "slo_ms": 0.1}),
        (SMALL | {"steady_hot_share": 0.0}, {}),
        (SMALL | {"steady_hot_share": 1.0}, {"alpha_bounds": (0.0, 1.0), "initial_alpha": 0.0}),
        (SMALL | {"kv_policy": "lru"}, {"alpha_bounds": (0.0, 1.0), "initial_alpha": 1.0}),
    ],
    ids=["idle", "overload", "slow", "no hot users", "only hot users", "lru"],
)
def test_extremes_stay_in_the_spaces(workload: Any, arguments: Any) -> None:
    env = HBMPartitionEnv(workload=workload, features="working_set", **arguments)
    observation, info = env.reset(seed=0)
    for action in [0] * 10 + [6] * 20:
        assert env.observation_space.contains(observation)
        assert all(np.isfinite(value) for value in info.values())
        observation, reward, _, _, info = env.step(action)
        assert REWARD_FLOOR <= reward <= 1.0


def test_idle_epochs_are_good_epochs() -> None:
    env = HBMPartitionEnv(workload=TINY | {"utilisation": 0.01}, epoch_seconds=0.01)
    env.reset(seed=0)
    results = [env.step(3) for _ in range(50)]
    idle = [(r[1], r[4]) for r in results if r[4]["requests"] == r[4]["backlog"] == 0]
    assert len(idle) > 5
    for reward, info in idle:
        assert (reward, info["qos"], info["p99_ms"]) == (1.0, 1.0, 0.0)


def test_overload_is_punished_and_seen() -> None:
    env = HBMPartitionEnv(workload=SMALL | {"utilisation": 3.0})
    env.reset(seed=0)
    results = [env.step(3) for _ in range(10)]
    assert [r[1] for r in results] == [REWARD_FLOOR] * 10
    backlogs = [r[4]["backlog"] for r in results]
    assert backlogs == sorted(set(backlogs))
    assert results[-1][0][4] == results[-1][0][6] == 1.0
    assert results[-1][4]["utilisation"] == pytest.approx(1.0)


# alpha


TINY_ENVS = {
    bounds: HBMPartitionEnv(
        workload=TINY | {"utilisation": 0.01},
        alpha_bounds=bounds,
        initial_alpha=initial,
        epoch_seconds=0.05,
    )
    for bounds, initial in (((0.1, 0.9), 0.5), ((0.0, 1.0), 0.03), ((0.29, 0.58), 0.57))
}


@settings(max_examples=60, deadline=None)
@given(
    bounds=st.sampled_from(sorted(TINY_ENVS)),
    actions=st.lists(st.integers(0, 6), min_size=1, max_size=40),
)
def test_alpha_is_the_whole_sum_of_its_steps(
    bounds: tuple[float, float], actions: list[int]
) -> None:
    env = TINY_ENVS[bounds]
    observation, info = env.reset(seed=0)
    low, high = (round(100 * bound) for bound in bounds)
    hundredths = round(100 * env.initial_alpha_centi / 100)
    assert not info["clipped"]
    for action in actions:
        observation, _, _, _, info = env.step(action)
        wanted = hundredths + 2 * action - 6
        hundredths = sorted((low, wanted, high))[1]
        assert info["alpha"] == float(f"{hundredths / 100:.2f}")
        assert observation[5] == np.float32(f"{hundredths / 100:.2f}")
        assert info["clipped"] == (hundredths != wanted)


def test_alpha_star_is_within_the_bounds_and_follows_the_workload() -> None:
    env = HBMPartitionEnv(workload={"regime": "trend"}, episode_epochs=20, alpha_bounds=(0.3, 0.7))
    env.reset(seed=0)
    infos = [env.step(3)[4] for _ in range(20)]
    stars = [info["alpha_star"] for info in infos]
    assert min(stars) == 0.3
    assert max(stars) == 0.7
    assert stars.index(0.3) < stars.index(0.7, 10)


@pytest.mark.parametrize(("reward", "near"), [("busy_time", 0.002), ("queueing", 0.06)])
def test_the_reference_is_the_reward_at_the_optimum_whatever_is_done(
    reward: str, near: float
) -> None:
    """Near, since the closed form knows neither warm users nor growing histories."""

    def means(initial_alpha: float, action: int) -> tuple[float, float]:
        env = HBMPartitionEnv(reward=reward, initial_alpha=initial_alpha)
        env.reset(seed=1)
        results = [env.step(action) for _ in range(30)]
        references = [float(info["reward_reference"]) for *_, info in results]
        return float(np.mean([r[1] for r in results])), float(np.mean(references))

    star = HBMPartitionEnv(reward=reward).reset(seed=1)[1]["alpha_star"]
    at_star, reference = means(star, 3)
    assert at_star == pytest.approx(reference, abs=near)
    for action in (0, 6):
        elsewhere, unmoved = means(0.5, action)
        assert unmoved == pytest.approx(reference, abs=near / 20)
        assert elsewhere < at_star


def test_eq5_has_no_reference() -> None:
    assert HBMPartitionEnv(workload=SMALL).reset(seed=0)[1]["reward_reference"] == 0.0


# Wrong arguments


WRONG: list[dict[str, Any]] = [
    {"workload": "nope"},
    {"workload": "nope/steady"},
    {"workload": "books/nope"},
    {"workload": None},
    {"workload": 3},
    {"workload": ["steady"]},
    {"backend": "nope"},
    {"backend": None},
    {"hardware": "v100"},
    {"kv_policy": "fifo"},
    {"features": "all"},
    {"features": None},
    {"reward": "eq6"},
    {"slo_ms": 0},
    {"slo_ms": -1.0},
    {"slo_ms": float("nan")},
    {"slo_ms": float("inf")},
    {"epoch_seconds": 0},
    {"epoch_seconds": 1e6},
    {"epoch_seconds": float("nan")},
    {"alpha_bounds": (0.9, 0.1)},
    {"alpha_bounds": (0.5, 0.5)},
    {"alpha_bounds": (-0.1, 0.9)},
    {"alpha_bounds": (0.1, 1.1)},
    {"alpha_bounds": (0.105, 0.9)},
    {"initial_alpha": 0.95},
    {"initial_alpha": 0.09},
    {"initial_alpha": 0.505},
    {"episode_epochs": 0},
    {"episode_epochs": 2.5},
    {"episode_epochs": "9"},
    {"render_mode": "svg"},
]
WRONG_FIELDS: list[dict[str, Any]] = [
    {"nope": 1},
    {"regime": "calm"},
    {"preset": "films"},
    {"trace_histories": "none"},
    {"mean_history_tokens": 0},
    {"mean_history_tokens": 20_000},
    {"mean_history_tokens": float("nan")},
    {"max_history_tokens": 0},
    {"steady_hot_share": 1.5},
    {"steady_hot_share": -0.1},
    {"population_factor": 0},
    {"population_factor": float("nan")},
    {"burst_users": "none"},
    {"tables": 0},
    {"rows_per_table": 0},
    {"zipf": -1},
    {"zipf": 5},
    {"zipf": float("nan")},
    {"utilisation": 0},
    {"utilisation": 9},
    {"hardware": "v100"},
    {"compute_scale": 0},
    {"gather_scale": -1},
    {"hbm_scale": float("nan")},
    {"layers": 0},
    {"pool_bytes": 10**6},
    {"kv_policy": "fifo"},
    {"warmup_epochs": -1},
]
# Values of a wrong type
WRONG_TYPES: list[dict[str, Any]] = [
    {"alpha_bounds": (float("nan"), 0.9)},
    {"alpha_bounds": (0.5,)},
    {"alpha_bounds": (0.1, 0.5, 0.9)},
    {"alpha_bounds": 0.5},
    {"initial_alpha": "half"},
    {"initial_alpha": float("nan")},
    {"slo_ms": "30"},
    {"epoch_seconds": "5"},
    {"episode_epochs": True},
    {"hardware": 5},
    {"workload": {"tables": "ten"}},
    {"workload": {"tables": 2.5}},
    {"workload": {"layers": 1.5}},
    {"workload": {"pool_bytes": 6e10}},
    {"workload": {"utilisation": "low"}},
    {"workload": {"refill": "yes"}},
    {"workload": {"warmup_epochs": 1.5}},
    {"workload": {"trace": 3}},
]


def assert_refused(arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    if name == "workload" and isinstance(value, dict):
        ((name, value),) = value.items()
        if name == "nope":
            name, value = "workload field", name
    with pytest.raises(ArgumentError) as caught:
        HBMPartitionEnv(**arguments).reset(seed=0)
    error = caught.value
    text = str(error)
    assert name.replace("_", " ") in text.split("=")[0].replace("_", " ")
    assert repr(value) in text or repr(error.value) in text
    assert error.allowed in text
    assert len(error.allowed) > 3


@pytest.mark.parametrize("arguments", WRONG, ids=str)
def test_wrong_arguments_name_themselves(arguments: dict[str, Any]) -> None:
    assert_refused(arguments)


@pytest.mark.parametrize("field", WRONG_FIELDS, ids=str)
def test_wrong_fields_of_a_workload_name_themselves(field: dict[str, Any]) -> None:
    assert_refused({"workload": field})


@pytest.mark.parametrize("arguments", WRONG_TYPES, ids=str)
def test_wrong_types_name_themselves(arguments: dict[str, Any]) -> None:
    assert_refused(arguments)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"one of .*a100.*h100"):
        HBMPartitionEnv(hardware="v100")
    with pytest.raises(ArgumentError, match=r"workload field='nope'.*one of .*tables"):
        HBMPartitionEnv(workload={"nope": 1})
    with pytest.raises(ArgumentError, match=r"steady.*trend.*burst.*books.*training"):
        HBMPartitionEnv(workload="nope")
    with pytest.raises(TypeError, match="nope"):
        HBMPartitionEnv(nope=1)  # type: ignore[call-arg]


def test_a_missing_trace_is_named() -> None:
    for workload in ("trace:/no/such/file", {"trace": "/no/such/file"}):
        with pytest.raises(ArgumentError, match="/no/such/file"):
            HBMPartitionEnv(workload=workload)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"hardware": "v100"},
        {"kv_policy": "fifo"},
        {"slo_ms": 0},
    ],
    ids=str,
)
def test_training_refuses_wrong_arguments_at_once(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(ArgumentError, match=name):
        HBMPartitionEnv(workload="training", **arguments)


@pytest.mark.parametrize(
    ("field", "value"), [("epoch_seconds", 2.0), ("episode_epochs", 3)], ids=str
)
def test_a_workload_keeps_its_own_clock(field: str, value: Any) -> None:
    """A mapping's clock is either followed or refused, never dropped in silence."""
    try:
        env = HBMPartitionEnv(workload=SMALL | {field: value})
    except ArgumentError as error:
        assert field in str(error)
        return
    assert getattr(env.scenario, field) == value


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"num_envs": 10**6}, "num_envs"),
        ({"autoreset_mode": AutoresetMode.DISABLED}, "autoreset_mode"),
        ({"autoreset_mode": "nope"}, "autoreset_mode"),
        ({"num_envs": 2.5}, "num_envs"),
        ({"num_envs": 2, "processes": 3}, "processes"),
        ({"num_envs": 2, "processes": 0}, "processes"),
        ({"num_envs": 2, "processes": 2, "backend": "live"}, "processes"),
        ({"num_envs": 2, "workloads": ["steady"]}, "workloads"),
        ({"num_envs": 2, "slo_ms": 0}, "slo_ms"),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_vector_name_themselves(arguments: Any, name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        HBMPartitionVectorEnv(**arguments)


@pytest.mark.parametrize("action", [-1, 7, 2.0, "3", None, np.array([1])], ids=str)
def test_wrong_actions_are_refused(action: Any) -> None:
    env = HBMPartitionEnv(workload=SMALL)
    env.reset(seed=0)
    with pytest.raises(ArgumentError, match=r"action=.*0 to 6"):
        env.step(action)


def test_vector_refuses_the_wrong_number_of_anything() -> None:
    vector = HBMPartitionVectorEnv(2, workload=SMALL)
    with pytest.raises(ArgumentError, match="seed"):
        vector.reset(seed=[1])
    vector.reset(seed=[1, None])
    with pytest.raises(ArgumentError, match="actions"):
        vector.step(np.array([1, 2, 3]))
    with pytest.raises(ArgumentError, match=r"action=.*9.*0 to 6"):
        vector.step(np.array([1, 9]))


# Life cycle


@pytest.mark.parametrize("workload", [SMALL, "training"])
def test_step_before_reset_and_after_close(workload: Any) -> None:
    env = HBMPartitionEnv(workload=workload)
    with pytest.raises(gym.error.ResetNeeded, match="reset"):
        env.step(3)
    expected = env.reset(seed=0)
    env.close()
    env.close()
    with pytest.raises(gym.error.ResetNeeded, match="reset"):
        env.step(3)
    assert same(env.reset(seed=0), expected)


def test_close_twice_through_wrappers() -> None:
    env = gym.make(ID, workload=SMALL)
    env.reset(seed=0)
    env.close()
    env.close()
    vector = gym.make_vec(ID, num_envs=2, workload=SMALL)
    vector.close()
    vector.close()


# Rendering


def test_text() -> None:
    env = HBMPartitionEnv(workload=SMALL, render_mode="ansi")
    assert "reset" in env.render()
    env.reset(seed=0)
    for _ in range(100):
        env.step(6)
    lines = env.render().splitlines()
    assert lines[0] == "epoch 100   SLO 30 ms"
    assert [line.split()[0] for line in lines[1:]] == [
        "alpha", "alpha*", "P99", "KV", "embedding", "hot",
    ]  # fmt: skip
    assert lines[1].endswith(" 0.90")
    assert max(map(len, lines)) < 120


def test_text_says_when_the_slo_is_missed() -> None:
    env = HBMPartitionEnv(workload=SMALL | {"utilisation": 3.0}, render_mode="ansi")
    env.reset(seed=0)
    assert "over the SLO" in env.render()


def test_pictures() -> None:
    env = HBMPartitionEnv(workload=SMALL, render_mode="rgb_array")
    env.reset(seed=0)
    first = env.render()
    assert first.dtype == np.uint8
    assert first.ndim == 3
    assert first.shape[2] == 3
    for _ in range(5):
        env.step(0)
    second = env.render()
    assert second.shape == first.shape
    assert not np.array_equal(first, second)


def test_human_prints_every_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    env = HBMPartitionEnv(workload=SMALL, render_mode="human")
    env.reset(seed=0)
    env.step(3)
    assert env.render() is None
    shown = capsys.readouterr().out.split("\x1b[H\x1b[J")
    assert ["epoch 0" in text for text in shown[1:]] == [True, False, False]
    assert "epoch 1" in shown[2]


def test_no_render_mode(capsys: pytest.CaptureFixture[str]) -> None:
    env = HBMPartitionEnv(workload=SMALL)
    env.reset(seed=0)
    env.step(3)
    with pytest.warns(UserWarning, match="render_mode"):
        assert env.render() is None
    assert capsys.readouterr().out == ""


def test_vector_renders_each() -> None:
    vector = HBMPartitionVectorEnv(2, workload=SMALL, render_mode="ansi")
    vector.reset(seed=0)
    vector.step(np.array([0, 6]))
    one, other = vector.render()
    assert "0.44" in one
    assert "0.56" in other
