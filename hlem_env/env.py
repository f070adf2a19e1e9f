"""HBMPartitionEnv-v0: the environment, its vector form, and its documentation page."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_all_start_methods
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from hlem_env import mdp
from hlem_env.backend import Backend, Runner
from hlem_env.env_group import EnvGroup, ForkedGroup, Info, Observation, Step
from hlem_env.errors import ArgumentError, require, require_choice, require_number
from hlem_env.live.config import LiveConfig
from hlem_env.live_scenario import live_backend, live_scenario, twin_backend
from hlem_env.mdp import MdpConfig
from hlem_env.rendering import History, draw_frame, draw_text
from hlem_env.scenario import Scenario, TrainingDomain
from hlem_env.surrogate.load import Optimum
from hlem_env.telemetry import EpochStats

BACKENDS = ("surrogate", "twin", "live")
DEFAULT_SLO_MS = 30.0
DEFAULT_LIVE_PRESET = "cpu-small"
RENDER_MODES = ("human", "rgb_array", "ansi")
TRAINING = "training"
"""Name of the workload that draws a random scenario at every reset."""


class HBMPartitionEnv(gym.Env[Observation, np.int64]):
    """
    ## Description

    A GPU serves a generative recommender (HSTU). One pool of its memory holds two caches: embedding
    rows and the K and V of users' histories. alpha is the embedding cache's share. Every epoch (5 s)
    the agent moves alpha; too little of either cache costs milliseconds in every request that
    misses it. The best split moves with the workload: when many requests come from returning (hot)
    users, KV is worth more. After the HLEM paper, "One Pool, Two Caches" (arXiv 2605.04450).

    ## Action Space

    `Discrete(7)`: alpha moves by -0.06, -0.04, -0.02, 0, +0.02, +0.04, +0.06, then is clipped to its
    bounds. alpha is an integer on a grid of 0.01.

    ## Observation Space

    `Box(0, 1, (7,), float32)`, of the epoch that has just ended:

    | # | Feature | Meaning |
    |---|---|---|
    | 0 | hot_share | share of requests from hot users (at least 3 requests in the trailing 12 epochs) |
    | 1 | kv_hit | share of history tokens whose K and V were reused |
    | 2 | emb_hit | share of looked-up embedding rows found in HBM |
    | 3 | length | mean history length / maximum |
    | 4 | violation | share of requests over the SLO |
    | 5 | alpha | commanded embedding share |
    | 6 | p99 | P99 latency / (4 x SLO), clipped at 1 |

    With `features="working_set"` an eighth follows: KV bytes of the hot users / pool bytes.

    ## Rewards

    `reward="eq5"` (the paper's Eq. 5): share of requests within the SLO - max(0, P99 - SLO) / SLO.
    `reward="busy_time"`: minus the mean service time / SLO, a less noisy signal for training.
    `reward="queueing"`: minus ln(P99 / SLO), with the P99 that a queue of these service times and
    this request rate has in the long run. All are clipped to [-4, 1].

    An epoch without requests has QoS 1 and P99 0; one in which requests wait and none completes has
    QoS 0 and the age of the oldest as P99.

    ## Starting State

    Caches are warmed for 12 epochs at `initial_alpha` with the workload held at its start, then one
    epoch is observed.

    ## Episode End

    Truncation after `episode_epochs` epochs (240). There is no termination.

    ## Arguments

    | Argument | Default | Meaning |
    |---|---|---|
    | `workload` | `"steady"` | `"steady"`, `"trend"`, `"burst"`; `"PRESET/REGIME"` with a preset of `default`, `taobao`, `video-games`, `books`; `"trace:PATH"`; `"training"` (a random scenario at every reset); a `hlem_env.scenario.TrainingDomain` (the same, drawn from it); or a mapping of the fields of `hlem_env.scenario.Scenario` |
    | `backend` | `"surrogate"` | `"surrogate"`; `"live"`, a node that executes HSTU for real; `"twin"`, the surrogate of that node on the machine that `train.calibrate` found; or a callable `(scenario) -> Backend` |
    | `hardware` | None | profile name or path, instead of the scenario's; with `backend="live"` or `"twin"` a live preset, `"cpu-small"` by default |
    | `kv_policy` | None | `"scan_resistant"`, `"lru"`, `"laru"`, `"hf"` or `"fpb"`, instead of the scenario's |
    | `features` | `"paper"` | `"paper"` or `"working_set"` |
    | `reward` | `"eq5"` | `"eq5"`, `"busy_time"` or `"queueing"` |
    | `slo_ms` | None | service level objective on latency, milliseconds; None: 30, or the live preset's |
    | `epoch_seconds` | 5 | seconds between decisions, instead of the scenario's |
    | `alpha_bounds` | (0.1, 0.9) | multiples of 0.01 in [0, 1] |
    | `initial_alpha` | 0.5 | alpha at the start of an episode |
    | `episode_epochs` | 240 | epochs to truncation, instead of the scenario's |
    | `render_mode` | None | `"human"` (text, redrawn in the terminal), `"rgb_array"`, `"ansi"` |

    ```python
    import gymnasium as gym
    import hlem_env

    env = gym.make("HBMPartitionEnv-v0", workload="books/trend", features="working_set")
    observation, info = env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step(6)
    ```

    `info` always has: `alpha`, `alpha_star` (closed-form optimum of the surrogate, -1 where there is
    none), `reward_reference` (what a smooth reward would be there, 0 where there is none), `p99_ms`, `qos`, `kv_hit`, `emb_hit`, `hot_share`, `working_set`, `utilisation`,
    `mean_service_ms`, `requests`, `backlog`, `clipped` (the step went out of bounds).

    ## Vectorized environment

    `gym.make_vec("HBMPartitionEnv-v0", num_envs=16)` gives `HBMPartitionVectorEnv`, which equals that
    many scalar environments seeded `seed`, `seed + 1`, ... step for step. `autoreset_mode` may be
    `"NextStep"` (default) or `"SameStep"`.

    ## Version History

    * v0: first version.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 5}

    def __init__(
        self,
        workload: str | dict[str, Any] | Scenario | TrainingDomain = "steady",
        backend: str | Callable[[Scenario], Backend] = "surrogate",
        hardware: str | None = None,
        kv_policy: str | None = None,
        features: str = "paper",
        reward: str = "eq5",
        slo_ms: float | None = None,
        epoch_seconds: float | None = None,
        alpha_bounds: tuple[float, float] = (0.1, 0.9),
        initial_alpha: float = 0.5,
        episode_epochs: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        if render_mode is not None:
            require_choice("render_mode", render_mode, RENDER_MODES)
        self.render_mode = render_mode
        given = {
            "epoch_seconds": epoch_seconds,
            "episode_epochs": episode_epochs,
            "hardware": hardware,
            "kv_policy": kv_policy,
        }
        overrides = {name: value for name, value in given.items() if value is not None}
        domain = TrainingDomain() if workload == TRAINING else workload
        self.domain = domain if isinstance(domain, TrainingDomain) else None
        start = "steady" if isinstance(domain, TrainingDomain) else domain
        make_node = NODES.get(backend) if isinstance(backend, str) else None
        if make_node is not None:
            random = self.domain is not None and backend == "live"
            require(not random, "workload", workload, "one workload, with backend='live'")
            self.scenario, self._make_backend, live_slo_ms = _live(start, overrides, make_node)
            slo_ms = live_slo_ms if slo_ms is None else slo_ms
        else:
            self.scenario = Scenario.parse(start, **overrides)
            self.scenario.profile()  # an unknown one is refused here, not at the first reset
            self._make_backend = _backend_factory(backend)
        self.episode_epochs = self.scenario.episode_epochs
        require(
            isinstance(alpha_bounds, tuple | list) and len(alpha_bounds) == 2,
            "alpha_bounds",
            alpha_bounds,
            "two numbers",
        )
        self.config = MdpConfig(
            slo_ms=DEFAULT_SLO_MS if slo_ms is None else slo_ms,
            max_history_tokens=self.scenario.max_history_tokens,
            alpha_min_centi=_centi("alpha_bounds", alpha_bounds[0]),
            alpha_max_centi=_centi("alpha_bounds", alpha_bounds[1]),
            epoch_seconds=self.scenario.epoch_seconds,
            features=features,
            reward=reward,
        )
        self.initial_alpha_centi = _centi("initial_alpha", initial_alpha)
        require(
            self.config.clip(self.initial_alpha_centi) == self.initial_alpha_centi,
            "initial_alpha",
            initial_alpha,
            f"within alpha_bounds={tuple(alpha_bounds)}",
        )
        self._runner: Runner | None = None
        self._optimum: tuple[NDArray[np.float64], Optimum] | None = None
        self._has_closed_form = make_node is None
        if self.domain is None and backend != "live":
            self._build()
        self._epoch = 0
        self._history = History()
        self.action_space = spaces.Discrete(len(mdp.ACTIONS_CENTI))
        width = len(self.config.feature_names)
        self.observation_space = spaces.Box(0.0, 1.0, (width,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode; returns the state after its first epoch. `options` has no keys."""
        super().reset(seed=seed)
        if self.domain is not None:
            self.scenario = self.domain.sample(self.scenario, self.np_random)
        if self._runner is None or self.domain is not None:
            self._build()
        assert self._runner is not None
        episode_seed = int(self.np_random.integers(2**31))
        stats = self._runner.reset(episode_seed, self.initial_alpha_centi)
        self._epoch = 0
        self._history = History()
        return mdp.observe(stats, self.config), self._after(stats)

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, Info]:
        """Move alpha by `ACTIONS_CENTI[action]` hundredths and run one epoch."""
        if self._runner is None or self._runner.alpha_centi < 0:
            raise gym.error.ResetNeeded("call reset() before step()")
        stats = self._runner.step(self._runner.alpha_centi + _step_centi(action))
        self._epoch += 1
        info = self._after(stats)
        reward = mdp.reward(stats, self.config)
        truncated = self._epoch >= self.episode_epochs
        return mdp.observe(stats, self.config), reward, False, truncated, info

    def render(self) -> Any:
        """The episode so far: text, or an RGB array [height, width, 3] of uint8."""
        if self.render_mode == "rgb_array":
            return draw_frame(self._history, self.config)
        if self.render_mode == "ansi":
            return draw_text(self._history, self.config)
        if self.render_mode == "human":
            print("\x1b[H\x1b[J" + draw_text(self._history, self.config), flush=True)
            return None
        gym.logger.warn("render() does nothing without a render_mode of " + ", ".join(RENDER_MODES))
        return None

    def close(self) -> None:
        """Close the backend. May be called twice."""
        if self._runner is not None:
            self._runner.backend.close()
            self._runner = None

    def _build(self) -> None:
        if self._runner is not None:
            self._runner.backend.close()
        self._runner = Runner(self._make_backend(self.scenario), self.config)
        self._optimum = self.scenario.optimum() if self._has_closed_form else None
        self._star = (-1.0, -1.0)  # of which hot share, and the optimum there

    @property
    def _node(self) -> Backend | None:
        return self._runner.backend if self._runner is not None else None

    def _after(self, stats: EpochStats) -> Info:
        assert self._runner is not None
        info: Info = {
            "alpha": stats.alpha_target,
            "alpha_star": self._alpha_star(),
            "reward_reference": self._reference(stats),
            "p99_ms": stats.p99_ms,
            "qos": stats.qos(self.config.slo_ms),
            "kv_hit": stats.kv_hit,
            "emb_hit": stats.emb_hit,
            "hot_share": stats.hot_share,
            "working_set": stats.working_set,
            "utilisation": stats.utilisation,
            "mean_service_ms": stats.mean_service_ms,
            "requests": stats.requests,
            "backlog": stats.backlog,
            "clipped": self._runner.was_clipped,
        }
        if self.render_mode is not None:
            self._history.append(info)
            if self.render_mode == "human":
                self.render()
        return info

    def _alpha_star(self) -> float:
        """Closed-form optimum of the epoch that has just run, within the bounds; -1: none."""
        share = getattr(getattr(self._node, "workload", None), "hot_share", None)
        if share is None or self._optimum is None:
            return -1.0
        if share != self._star[0]:
            shares, best = self._optimum
            nearest = round(float(np.interp(share, shares, best.alpha_centi)))
            self._star = share, self.config.clip(nearest) / 100
        return self._star[1]

    def _reference(self, stats: EpochStats) -> float:
        """Smooth reward at the closed form's optimum for the requests that the epoch happened to have.

        It takes their hot share, lengths and number, which do not depend on actions.
        """
        if self._optimum is None or self.config.reward == "eq5" or not stats.requests:
            return 0.0
        shares, best = self._optimum
        longer = stats.mean_history_tokens / self.scenario.mean_history_tokens
        service_ms = longer * float(np.interp(stats.hot_share, shares, best.service_ms))
        square_ms2 = longer**2 * float(np.interp(stats.hot_share, shares, best.square_ms2))
        rate = stats.requests / stats.duration_s
        return mdp.smooth_reward(service_ms, square_ms2, rate, self.config)


class HBMPartitionVectorEnv(VectorEnv[Observation, NDArray[np.int64], NDArray[Any]]):
    """`num_envs` environments of the arguments of HBMPartitionEnv, stepped together.

    Args:
        num_envs: at least 1.
        autoreset_mode: "NextStep" (the step after an episode's end resets) or "SameStep" (the last
            step resets at once and puts the last state into `final_obs` and `final_info`).
        processes: that share the environments out, this one among them. The results do not depend on
            it. More than one need an operating system that forks, and the surrogate.
        workloads: [num_envs] workloads, in place of one `workload` for all.
        **arguments: those of HBMPartitionEnv.
    """

    metadata: dict[str, Any] = {
        "render_modes": ["rgb_array", "ansi"],
        "render_fps": 5,
        "autoreset_mode": AutoresetMode.NEXT_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        processes: int = 1,
        workloads: Sequence[Any] | None = None,
        **arguments: Any,
    ) -> None:
        require_number("num_envs", num_envs, whole=True)
        require(1 <= num_envs <= 10_000, "num_envs", num_envs, "1 to 10,000")
        name = autoreset_mode.value if isinstance(autoreset_mode, AutoresetMode) else autoreset_mode
        require_choice("autoreset_mode", name, ("NextStep", "SameStep"))
        require_number("processes", processes, whole=True)
        forks = "fork" in get_all_start_methods() and arguments.get("backend") != "live"
        most = num_envs if forks else 1
        require(1 <= processes <= most, "processes", processes, f"1 to {most}")
        self.autoreset_mode = AutoresetMode(name)
        self.num_envs = num_envs
        each = [{}] * num_envs if workloads is None else [{"workload": w} for w in workloads]
        require(len(each) == num_envs, "workloads", workloads, f"{num_envs} of them")
        self.envs = [HBMPartitionEnv(**arguments, **one) for one in each]
        self.render_mode = self.envs[0].render_mode
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        edges = [num_envs * i // processes for i in range(processes + 1)]
        self._parts = [slice(*pair) for pair in pairwise(edges)]  # of each process, this one first
        groups = [EnvGroup(self.envs[part], name == "SameStep") for part in self._parts]
        self._own, self._forked = groups[0], [ForkedGroup(group) for group in groups[1:]]

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start an episode in each; environment i is seeded `seed + i`, or by entry i of a list."""
        seeds: list[int | None]
        if isinstance(seed, int | np.integer):
            seed = int(seed)
            seeds = [seed + i for i in range(self.num_envs)]
        else:
            seeds = [None] * self.num_envs if seed is None else list(seed)
        require(len(seeds) == self.num_envs, "seed", seed, f"a number or {self.num_envs} of them")
        # This process first: what numba compiles now, the forked ones need not.
        results = self._own.reset(seeds[self._parts[0]])
        self._begin("reset", seeds)
        results += self._answers()
        return np.stack([r[0] for r in results]), _stack_infos([r[1] for r in results])

    def step(
        self, actions: NDArray[np.int64]
    ) -> tuple[Observation, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], Info]:
        """One epoch in each, by actions [num_envs]."""
        require(len(actions) == self.num_envs, "actions", actions, f"{self.num_envs} of them")
        self._begin("step", actions)
        try:
            steps: list[Step] = self._own.step(actions[self._parts[0]])
        finally:
            others = self._answers()
        steps += others
        infos = _stack_infos([step.info for step in steps])
        for i, step in enumerate(steps):
            if step.last is not None:
                final = dict(zip(("final_obs", "final_info"), step.last, strict=True))
                infos = self._add_info(infos, final, i)
        return (
            np.stack([step.observation for step in steps]),
            np.array([step.reward for step in steps]),
            np.zeros(self.num_envs, np.bool_),
            np.array([step.truncated for step in steps]),
            infos,
        )

    def render(self) -> tuple[Any, ...] | None:
        """One frame an environment."""
        self._begin("render")
        return (*self._own.render(), *self._answers())

    def close_extras(self, **kwargs: Any) -> None:
        """End the other processes and close every environment's backend."""
        for group in self._forked:
            group.close()
        for env in self.envs:
            env.close()

    def _begin(self, method: str, *arguments: Sequence[Any] | NDArray[Any]) -> None:
        """Have the other processes call a method of their groups, with their parts of the arguments."""
        for group, part in zip(self._forked, self._parts[1:], strict=True):
            group.begin(method, *(argument[part] for argument in arguments))

    def _answers(self) -> list[Any]:
        """What the other processes answer, an entry for each of their environments."""
        # Of all before any error is raised: an answer that is left would be taken for the next one's.
        answers = [group.answer() for group in self._forked]
        results: list[Any] = []
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
            results += answer
        return results


def _stack_infos(infos: list[Info]) -> Info:
    """Infos of all sub-environments as Gymnasium wants them: arrays [num_envs] and their masks."""
    columns = zip(*(info.values() for info in infos), strict=True)
    stacked: Info = dict(zip(infos[0], map(np.array, columns), strict=True))
    present = {f"_{key}": np.ones(len(infos), np.bool_) for key in infos[0]}
    return stacked | present


def _step_centi(action: np.int64 | int) -> int:
    """The action's step of alpha, hundredths."""
    try:
        number = operator.index(action)
    except TypeError:
        number = -1
    if not 0 <= number < len(mdp.ACTIONS_CENTI):
        allowed = f"a whole number from 0 to {len(mdp.ACTIONS_CENTI) - 1}"
        raise ArgumentError("action", action, allowed)
    return mdp.ACTIONS_CENTI[number]


def _centi(name: str, share: float) -> int:
    require_number(name, share)
    centi = round(100 * share)
    on_grid = abs(100 * share - centi) < 1e-6
    require(on_grid and 0 <= centi <= 100, name, share, "multiples of 0.01 from 0 to 1")
    return centi


NODES: dict[str, Callable[..., Backend]] = {"live": live_backend, "twin": twin_backend}
"""Backends of a live preset, (scenario, config) -> backend."""


def _live(
    workload: str | dict[str, Any] | Scenario,
    overrides: dict[str, Any],
    make: Callable[..., Backend],
) -> tuple[Scenario, Callable[[Scenario], Backend], float]:
    """Scenario, maker of its backend, and SLO in milliseconds of a live preset."""
    preset = overrides.pop("hardware", DEFAULT_LIVE_PRESET)
    config = LiveConfig.load(preset)
    seconds = overrides.pop("epoch_seconds", None)
    if seconds is not None:
        config = replace(config, epoch_seconds=seconds)
    parsed = Scenario.parse(workload, **overrides)
    scenario = live_scenario(parsed, config)
    if make is twin_backend and parsed.zipf is not None:  # a live node has one catalogue
        scenario = replace(scenario, zipf=parsed.zipf)
    return scenario, partial(make, config=config), config.slo_ms


def _backend_factory(backend: str | Callable[[Scenario], Backend]) -> Callable[[Scenario], Backend]:
    if callable(backend):
        return backend
    require_choice("backend", backend, BACKENDS)
    return Scenario.build
