"""Train Stable-Baselines3's PPO or DQN on HBMPartitionEnv: `python -m train.sb3 --algorithm ppo`.

A reference from outside: the environment as it is, another library's algorithms on it, our file format
for what comes out. Scenarios, steps, discount, training signal and choice of the checkpoint are those of
`train.ppo`; what that adds beside (standardised input, control variate, centred advantages) is left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm import tqdm

import hlem_env
from hlem_env.command_line import run_command
from hlem_env.errors import HlemError, require
from hlem_env.machine import command, git_revision
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import TrainingDomain
from serving_bridge.policy import export_policy
from train import ppo

NETWORK = (64, 64)
"""Units of the hidden layers, SB3's own default; tanh between them, as a frozen policy has it."""
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "n_steps": 128,
        "batch_size": 256,
        "n_epochs": 10,
        "gamma": 0.7,
        "gae_lambda": 0.9,
        "learning_rate": 1e-3,
    },
    "dqn": {
        "buffer_size": 100_000,
        "learning_starts": 4_096,
        "batch_size": 256,
        "gamma": 0.7,
        "learning_rate": 5e-4,
        "train_freq": 1,
        "gradient_steps": 4,
        "target_update_interval": 2_048,
        "exploration_fraction": 0.3,
        "exploration_final_eps": 0.05,
    },
}
"""What differs from SB3's defaults: rollouts, discount and learning rate as `train.ppo` has them, and for
DQN four gradient steps for every step of all environments. SB3's defaults are for other discounts."""


FIRST_SEED = 1_000_000
"""Environment i of training seed s is seeded with this + 1,000 s + i, as in `train.ppo`; so are, by SB3,
the global generators that it draws weights and actions from."""


@dataclass
class Args:
    """Train an algorithm of Stable-Baselines3 and export the best checkpoint as a frozen policy."""

    algorithm: Literal["ppo", "dqn"] = "ppo"
    """of Stable-Baselines3"""
    output: Path | None = None
    """folder of the policy and SB3's log; by default runs/sb3/ALGORITHM"""
    seed: int = 1
    """of networks, environments and minibatches"""
    workload: str = "training"
    """"training" (random scenarios), or a workload of HBMPartitionEnv"""
    features: Literal["paper", "working_set"] = "working_set"
    """seven features, or eight with the working set"""
    reward: Literal["queueing", "busy_time", "eq5"] = "queueing"
    """training signal; evaluation is always by P99"""
    kv_policy: Literal["scan_resistant", "lru"] = "scan_resistant"
    """eviction policy of the KV cache"""
    total_timesteps: int = 204_800
    """environment steps (epochs of the node)"""
    num_envs: int = 16
    """environments in turn"""
    eval_every: int = 16_384
    """steps between evaluations, in the second half of the training"""
    eval_seeds: int = 16
    """evaluation scenarios, the same as those of train.ppo"""


class Network(nn.Module):
    """SB3's policy network alone: states to logits (PPO) or to action values (DQN).

    Args:
        model: of SB3, an MLP with tanh between its layers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        policy = model.policy
        if hasattr(policy, "q_net"):
            parts = list(policy.q_net.q_net)
        else:
            parts = [*policy.mlp_extractor.policy_net, policy.action_net]
        kinds = [type(part) for part in parts]
        allowed = "linear layers with tanh between them"
        expected = [nn.Tanh if i % 2 else nn.Linear for i in range(len(parts))]
        require(kinds == expected, "layers", [kind.__name__ for kind in kinds], allowed)
        self.layers = nn.Sequential(*parts)

    def forward(self, states: Tensor) -> Tensor:
        """float32 [..., n_features] to [..., n_actions]."""
        values: Tensor = self.layers(states)
        return values

    def act(self, states: Tensor) -> Tensor:
        """Index of the largest: int64 [...]."""
        with torch.inference_mode():
            return self(states).argmax(-1)  # type: ignore[no-any-return]

    def weights(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the tensors, as `export_policy` takes them."""
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        return {
            f"layers.{index}.{kind}": getattr(layer, kind).detach().cpu().numpy().copy()
            for index, layer in enumerate(linear)
            for kind in ("weight", "bias")
        }


def make_model(args: Args) -> Any:
    """SB3's model with its environments.

    Raises:
        HlemError: Stable-Baselines3 is not installed.
    """
    try:
        import stable_baselines3 as sb3
        from stable_baselines3.common.env_util import make_vec_env
    except ModuleNotFoundError as error:
        reason = f"{error}: pip install -c constraints.txt -e '.[baselines]'"
        raise HlemError(reason) from error
    arguments: dict[str, Any] = {
        "workload": args.workload,
        "features": args.features,
        "reward": args.reward,
        "kv_policy": args.kv_policy,
    }
    envs = make_vec_env(partial(gym.make, hlem_env.ENV_ID, **arguments), n_envs=args.num_envs)
    kind = {"ppo": sb3.PPO, "dqn": sb3.DQN}[args.algorithm]
    return kind(
        "MlpPolicy", envs, policy_kwargs={"net_arch": list(NETWORK), "activation_fn": nn.Tanh},
        seed=FIRST_SEED + 1000 * args.seed, device="cpu", **SETTINGS[args.algorithm],
    )  # fmt: skip


def train(args: Args) -> Path:
    """Run the training; returns the policy's folder."""
    require(args.total_timesteps >= 1, "--total-timesteps", args.total_timesteps, "1 or more")
    require(args.num_envs >= 1, "--num-envs", args.num_envs, "1 or more")
    require(args.eval_every >= 1, "--eval-every", args.eval_every, "1 or more")
    require(args.eval_seeds >= 1, "--eval-seeds", args.eval_seeds, "1 or more")
    folder = args.output or Path("runs/sb3") / args.algorithm
    torch.set_num_threads(1)
    model = make_model(args)
    config: MdpConfig = model.env.get_attr("unwrapped")[0].config
    like = ppo.Args(
        workload=args.workload,
        features=args.features,
        kv_policy=args.kv_policy,
        eval_seeds=args.eval_seeds,
    )
    scenarios = ppo.evaluation_scenarios(like)
    reference_ms = ppo.rollout_p99(like, scenarios, None)
    history: list[dict[str, float]] = []

    def evaluate(steps: int) -> None:
        """Keep the checkpoint with the lowest P99 on the evaluation scenarios."""
        network = Network(model)
        ratio = float(np.mean(ppo.rollout_p99(like, scenarios, network) / reference_ms))
        best = min((entry["eval_p99_ratio"] for entry in history), default=np.inf)
        history.append({"steps": steps, "eval_p99_ratio": ratio})
        model.logger.record("slo/eval_p99_ratio", ratio)
        if ratio < best:
            export(folder, args, network, config, history)

    _learn(model, args, folder, evaluate)
    return folder


def _learn(model: Any, args: Args, folder: Path, evaluate: Callable[[int], None]) -> None:
    """SB3's training with a progress bar, evaluations in its second half and one at its end."""
    from stable_baselines3.common.logger import configure

    model.set_logger(configure(str(folder / "log"), ["csv", "tensorboard"]))
    evaluated = args.total_timesteps // 2
    bar = tqdm(total=args.total_timesteps, unit="step", disable=None)

    def after_step(scope: dict[str, Any], _: dict[str, Any]) -> bool:
        nonlocal evaluated
        bar.update(model.num_timesteps - bar.n)
        if model.num_timesteps - evaluated >= args.eval_every:
            evaluated = model.num_timesteps
            evaluate(evaluated)
        return True

    with bar:
        model.learn(args.total_timesteps, callback=after_step)
    evaluate(model.num_timesteps)
    model.logger.dump(model.num_timesteps)
    model.logger.close()
    model.env.close()


def export(
    folder: Path,
    args: Args,
    network: Network,
    config: MdpConfig,
    history: list[dict[str, float]],
) -> None:
    """Write the policy's folder."""
    inputs = np.random.default_rng(args.seed).random((64, len(config.feature_names)), np.float32)
    with torch.inference_mode():
        outputs = network(torch.from_numpy(inputs)).numpy().copy()
    export_policy(
        folder,
        network.weights(),
        mdp_config=config,
        parity_inputs=inputs,
        parity_logits=outputs,
        env_spec={
            "id": hlem_env.ENV_ID,
            "kwargs": {"workload": args.workload, "features": args.features, "reward": args.reward},
            "domain": TrainingDomain().to_json() if args.workload == "training" else None,
            "algorithm": f"SB3 {args.algorithm.upper()}",
            "library": f"stable-baselines3 {metadata.version('stable-baselines3')}",
            "settings": SETTINGS[args.algorithm],
            "training": {"total_timesteps": args.total_timesteps, "evaluations": history},
        },
        training_command=command("train.sb3"),
        seed=args.seed,
        git_revision=git_revision(),
    )


def main(args: Args) -> None:
    """Train and say where the policy is."""
    began = time.time()
    folder = train(args)
    print(f"Policy in {folder} after {time.time() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    run_command("train.sb3", main, Args)
