"""Train PPO on HBMPartitionEnv and export a frozen policy: `python -m train.ppo --output DIR`.

After CleanRL's ppo.py (single file, top to bottom, the same names in TensorBoard), for Gymnasium's
SAME_STEP autoreset: an episode's end is a truncation, so the value of its last state is added to its
last reward, and no step is spent on a reset. docs/training.md explains every logged metric.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
import safetensors.torch
import torch
import tyro
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

import hlem_env
from agents.actor_critic import ActorCritic
from hlem_env.env import HBMPartitionVectorEnv
from hlem_env.errors import ArgumentError, ArtefactError, require
from hlem_env.machine import git_revision
from hlem_env.mdp import ACTIONS_CENTI, MdpConfig
from hlem_env.scenario import Scenario, TrainingDomain
from serving_bridge.policy import export_policy
from train.log_fit import Fit, fit_log, table


@dataclass
class Args:
    """Train PPO and export the best checkpoint as a frozen policy."""

    output: Path = Path("runs/ppo")
    """folder of the policy, its checkpoint, TensorBoard events and metrics.jsonl"""
    seed: int = 1
    """of networks, environments and minibatches"""
    resume: bool = False
    """go on from the checkpoint in the output folder"""
    track: bool = False
    """log to Weights & Biases as well (pip install wandb)"""

    workload: str = "training"
    """"training" (random scenarios), or a workload of HBMPartitionEnv"""
    population_factor: float = 1.0
    """on the number of hot users of a named workload"""
    crowded_share: float = 0.0
    """share of the random scenarios in which hot users' KV outgrows the pool and items are skewed"""
    from_log: Path | None = None
    """folder of an epoch log: train on the scenario that is fitted to it, in place of --workload"""
    features: Literal["paper", "working_set"] = "paper"
    """seven features, or eight with the working set"""
    reward: Literal["queueing", "busy_time", "eq5"] = "queueing"
    """training signal; evaluation is always by P99"""
    control_variate: bool = True
    """subtract what the closed form gives for the epoch's requests from a smooth reward: it does not
    depend on actions, so the best policy stays, with less variance"""
    kv_policy: Literal["scan_resistant", "lru"] = "scan_resistant"
    """eviction policy of the KV cache"""
    hardware: str | None = None
    """profile, or the path of one: h200-live, say, which train.calibrate fitted to a live node; by default
    the workload's, h100"""
    live_preset: str | None = None
    """train on the surrogate of this live preset's node, as `train.calibrate` found it: a policy for that
    node alone"""
    epoch_seconds: float | None = None
    """between decisions; by default 5"""

    total_timesteps: int = 204_800
    """environment steps (epochs of the node)"""
    num_envs: int = 16
    """parallel environments"""
    processes: int = 2 if sys.platform == "linux" else 1
    """forked processes that share them out, at most one for each; the result does not depend on it"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    warmup_steps: int = 256
    """steps of each environment under random actions, before the training and on top of its steps,
    whose states standardise the network's input"""
    learning_rate: float = 1e-3
    """of Adam, annealed to 0"""
    gamma: float = 0.7
    """discount; most of what a move of alpha does shows within three epochs"""
    gae_lambda: float = 0.9
    """of generalised advantage estimation"""
    center_advantages: bool = True
    """subtract each environment's mean advantage over the rollout: how good a scenario is shifts all
    rewards of its episode alike, and the critic cannot see it"""
    num_minibatches: int = 8
    """minibatches of a rollout"""
    update_epochs: int = 10
    """passes over a rollout"""
    clip_coef: float = 0.2
    """of the surrogate objective"""
    ent_coef: float = 0.0
    """of the entropy bonus, annealed to 0"""
    vf_coef: float = 0.5
    """of the value loss"""
    max_grad_norm: float = 0.5
    """gradients are clipped to this norm"""
    reward_scale: float = 10.0
    """rewards are multiplied by it, for the critic's sake"""

    eval_every: int = 8
    """rollouts between evaluations, in the second half of the training"""
    eval_seeds: int = 16
    """evaluation scenarios, seeded 10,000 and up: never trained on"""


OF_A_NODE: dict[str, Any] = {"zipf": (0.55, 1.0), "utilisation": (0.45, 0.62)}
"""Of random scenarios for one live node, whose load does not follow them: less skewed items, or more load,
and it has more than it bears."""


def workload_of(args: Args) -> Scenario | TrainingDomain:
    """What to train on: what the arguments name, or what is fitted to a log.

    Raises:
        ArgumentError: a crowded share without random scenarios, or not from 0 to 1; a population factor
            without a named workload.
    """
    domain = TrainingDomain(crowded_share=args.crowded_share)
    if args.live_preset is not None:
        domain = replace(domain, **OF_A_NODE)
    named = args.from_log is None and args.workload != "training"
    require(named or args.population_factor == 1, "--population-factor", args.population_factor,
            "1, but with --workload NAME")  # fmt: skip
    if args.from_log is None and not named:
        return domain
    require(args.crowded_share == 0, "--crowded-share", args.crowded_share,
            "0, but with --workload training")  # fmt: skip
    if args.from_log is not None:
        return fitted(args.from_log).scenario
    return Scenario.parse(args.workload, population_factor=args.population_factor)


@lru_cache(maxsize=1)
def fitted(folder: Path) -> Fit:
    """The fit to a log, once: it may be written to while the training runs."""
    return fit_log(folder)


def print_fit(folder: Path) -> None:
    """What was fitted, beside what the log shows."""
    fit = fitted(folder)
    shown = Table("", f"log {folder.name}", "scenario")
    for row in table(fit):
        shown.add_row(*row)
    Console(width=110).print(shown)
    for note in fit.notes:
        print(note)


def node_arguments(args: Args) -> dict[str, Any]:
    """Arguments of HBMPartitionEnv that say which node it is.

    Raises:
        ArgumentError: a hardware profile beside a live preset.
    """
    seconds = {} if args.epoch_seconds is None else {"epoch_seconds": args.epoch_seconds}
    if args.live_preset is None:
        return seconds | {"hardware": args.hardware}
    require(args.hardware is None, "--hardware", args.hardware, "none beside --live-preset")
    require(args.from_log is None, "--from-log", args.from_log, "none beside --live-preset")
    return seconds | {"backend": "twin", "hardware": args.live_preset}


def evaluation_scenarios(args: Args) -> list[Scenario]:
    """Scenarios that choose the checkpoint: random ones like the training's, from other seeds."""
    workload = workload_of(args)
    node: dict[str, Any] = {"kv_policy": args.kv_policy}
    if args.hardware is not None:
        node["hardware"] = args.hardware
    if not isinstance(workload, TrainingDomain):
        return [Scenario.parse(workload, **node)] * args.eval_seeds
    base = Scenario(**node)
    return [
        workload.sample(base, np.random.default_rng(10_000 + i)) for i in range(args.eval_seeds)
    ]


def random_states(envs: Any, seed: int, steps: int) -> NDArray[np.float32]:
    """States [steps x environments, n_features] under random actions."""
    rng = np.random.default_rng(seed)
    envs.reset(seed=seed)
    states = [
        envs.step(rng.integers(len(ACTIONS_CENTI), size=envs.num_envs))[0] for _ in range(steps)
    ]
    return np.concatenate(states)


class Acts(Protocol):
    """What an evaluation needs of a network."""

    def act(self, obs: torch.Tensor, /) -> torch.Tensor:
        """Action indices [n] of states [n, n_features]."""


def rollout_p99(args: Args, scenarios: list[Scenario], agent: Acts | None) -> NDArray[Any]:
    """Mean P99 [scenarios] of one episode each; without an agent alpha follows the closed form.

    Where there is none, on the surrogate of a live node, it follows the working-set rule.
    """
    count = len(scenarios)
    envs = HBMPartitionVectorEnv(
        count,
        workloads=scenarios,
        features=args.features,
        processes=min(args.processes, count),
        **node_arguments(args),
    )
    observations, infos = envs.reset(seed=10_000)
    total, steps, truncated = np.zeros(count), 0, np.zeros(count, np.bool_)
    while not truncated.all():  # all at once: their episodes are equally long
        if agent is not None:
            with torch.inference_mode():
                actions = agent.act(torch.from_numpy(observations)).numpy()
        else:
            star, rule = infos["alpha_star"], 1.0 - infos["working_set"]
            wanted = np.rint(100 * (np.where(star < 0, rule, star) - infos["alpha"]))
            actions = np.abs(wanted[:, None] - ACTIONS_CENTI).argmin(axis=1)
        observations, _, _, truncated, infos = envs.step(actions)
        total, steps = total + infos["p99_ms"], steps + 1
    envs.close()
    return total / steps


def save_checkpoint(
    folder: Path, agent: ActorCritic, optimizer: Any, progress: dict[str, Any]
) -> None:
    """Network and optimiser as safetensors, the rest as JSON; an interruption leaves the old pair."""
    tensors = {f"agent.{k}": v.contiguous() for k, v in agent.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"adam.{index}.{k}": torch.as_tensor(v).contiguous() for k, v in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    name = f"checkpoint-{progress['iteration']:05d}.safetensors"
    safetensors.torch.save_file(tensors, folder / name)
    partial = folder / "checkpoint.json.part"
    partial.write_text(json.dumps(progress | {"tensors": name}))
    partial.replace(folder / "checkpoint.json")
    for old in folder.glob("checkpoint-*.safetensors"):
        if old.name != name:
            old.unlink()


def load_checkpoint(args: Args, agent: ActorCritic, optimizer: Any) -> dict[str, Any]:
    """Restore what `save_checkpoint` wrote; returns its progress.

    Raises:
        ArtefactError: there is no checkpoint, or it is damaged.
        ArgumentError: it is of a training with other arguments.
    """
    folder = args.output
    try:
        progress: dict[str, Any] = json.loads((folder / "checkpoint.json").read_text())
        for name in ("features", "reward", "workload", "population_factor", "crowded_share", "from_log",
                     "hardware", "live_preset", "epoch_seconds", "total_timesteps", "num_envs",
                     "num_steps"):  # fmt: skip
            # A checkpoint from before an argument was there was trained with its default.
            then, now = progress["args"].get(name, plain(Args())[name]), plain(args)[name]
            require(
                then == now, f"--{name.replace('_', '-')}", now, f"{then}, as in the checkpoint"
            )
        tensors = safetensors.torch.load_file(folder / progress["tensors"])
    except FileNotFoundError as error:
        raise ArtefactError(f"--resume: no checkpoint in {folder} ({error})") from error
    except ArgumentError:
        raise
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise ArtefactError(f"--resume: damaged checkpoint in {folder}: {error}") from error
    agent.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("agent.")})
    adam: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        if key.startswith("adam."):
            _, index, name = key.split(".")
            adam.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict(optimizer.state_dict() | {"state": adam})
    return progress


def mean_entropy(logp: torch.Tensor) -> torch.Tensor:
    """Mean entropy of distributions, given as log-probabilities [n, actions]."""
    return -(logp.exp() * logp).sum(-1).mean()


def train(args: Args) -> Path:
    """Run the training; returns the policy's folder."""
    require(args.total_timesteps >= args.num_envs * args.num_steps, "total_timesteps",
            args.total_timesteps, f"at least one rollout of {args.num_envs * args.num_steps}")  # fmt: skip
    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_iterations = args.total_timesteps // batch_size
    torch.set_num_threads(1)
    if args.from_log is not None:
        print_fit(args.from_log)
    workload = workload_of(args)
    generator = torch.Generator().manual_seed(args.seed)
    shuffle = np.random.default_rng(args.seed)

    envs = RecordEpisodeStatistics(
        gym.make_vec(
            hlem_env.ENV_ID, args.num_envs, workload=workload, features=args.features,
            reward=args.reward, kv_policy=args.kv_policy, **node_arguments(args),
            autoreset_mode="SameStep", processes=min(args.processes, args.num_envs),
        )
    )  # fmt: skip
    config: MdpConfig = envs.unwrapped.envs[0].config  # type: ignore[attr-defined]
    agent = ActorCritic(len(config.feature_names), generator=generator)
    parameters = list(agent.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5, fused=True)
    progress: dict[str, Any] = {"iteration": 0, "best": None, "episodes": 0, "args": plain(args)}
    if args.resume:
        progress = load_checkpoint(args, agent, optimizer)
    else:
        agent.standardise(random_states(envs.unwrapped, 900_000 + args.seed, args.warmup_steps))
    first = progress["iteration"]
    scenarios = evaluation_scenarios(args)
    reference_ms = rollout_p99(args, scenarios, None)

    args.output.mkdir(parents=True, exist_ok=True)
    if args.track:
        import wandb

        wandb.init(project="hlem", config=plain(args), sync_tensorboard=True)
    writer = SummaryWriter(str(args.output / "tensorboard"))
    log = (args.output / "metrics.jsonl").open("a" if args.resume else "w")

    def record(step: int, **metrics: float) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name.replace("__", "/"), value, step)
        log.write(
            json.dumps(
                {"global_step": step} | {k.replace("__", "/"): v for k, v in metrics.items()}
            )
            + "\n"
        )
        log.flush()

    def evaluate(step: int) -> None:
        """Keep the checkpoint with the lowest P99 on the evaluation scenarios."""
        ratio = float(np.mean(rollout_p99(args, scenarios, agent) / reference_ms))
        record(step, slo__eval_p99_ratio=ratio)
        if progress["best"] is None or ratio < progress["best"]:
            progress["best"] = ratio
            export(args, agent, config, progress)

    # Arrays, not tensors: a rollout is many small steps, and torch takes longer for each.
    shape = (args.num_steps, args.num_envs)
    obs = np.zeros((*shape, len(config.feature_names)), np.float32)
    actions = np.zeros(shape, np.int64)
    rewards, dones = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    next_obs = envs.reset(seed=1_000_000 + 1000 * args.seed + first)[0]
    start, bar = (
        time.time(),
        tqdm(total=num_iterations, initial=first, unit="rollout", disable=None),
    )

    try:
        for iteration in range(first + 1, num_iterations + 1):
            left = 1.0 - (iteration - 1.0) / num_iterations
            optimizer.param_groups[0]["lr"] = left * args.learning_rate

            # Rollout.
            slo: dict[str, list[float]] = {"p99_ms": [], "qos": [], "alpha_gap": []}
            returns: list[float] = []
            for step in range(args.num_steps):
                obs[step] = next_obs
                with torch.inference_mode():
                    actions[step] = agent.act(torch.from_numpy(next_obs), generator).numpy()
                next_obs, reward, terminated, truncated, infos = envs.step(actions[step])
                done = terminated | truncated
                if done.any():
                    returns += infos["episode"]["r"][done].tolist()
                if args.control_variate:
                    reference = np.array(infos["reward_reference"])
                    if done.any():
                        reference[done] = infos["final_info"]["reward_reference"][done]
                    reward = reward - reference
                rewards[step] = args.reward_scale * reward
                if truncated.any():
                    final = torch.from_numpy(np.stack(infos["final_obs"][truncated]))
                    with torch.inference_mode():
                        rewards[step, truncated] += args.gamma * agent.value(final).numpy()
                dones[step] = done
                slo["p99_ms"].append(float(infos["p99_ms"].mean()))
                slo["qos"].append(float(infos["qos"].mean()))
                slo["alpha_gap"].append(float(np.abs(infos["alpha"] - infos["alpha_star"]).mean()))

            # The agent is still the one that acted: one pass over all steps is faster than many.
            with torch.inference_mode():
                states = torch.from_numpy(obs)
                values = agent.value(states).numpy()
                next_value = agent.value(torch.from_numpy(next_obs)).numpy()
                every_logprob = agent.logits(states).log_softmax(-1).numpy()
            logprobs = np.take_along_axis(every_logprob, actions[..., None], axis=-1)[..., 0]

            # Generalised advantage estimation.
            advantages = np.zeros(shape, np.float32)
            last_gae = np.zeros(args.num_envs, np.float32)
            for t in reversed(range(args.num_steps)):
                following = next_value if t == args.num_steps - 1 else values[t + 1]
                live = 1.0 - dones[t]
                delta = rewards[t] + args.gamma * following * live - values[t]
                last_gae = delta + args.gamma * args.gae_lambda * live * last_gae
                advantages[t] = last_gae
            targets = advantages + values
            if args.center_advantages:
                advantages -= advantages.mean(axis=0)

            # Update.
            flat = [
                torch.from_numpy(x.reshape(batch_size, *x.shape[2:]))
                for x in (obs, actions, logprobs, advantages, targets)
            ]
            clipfracs: list[torch.Tensor] = []
            for _ in range(args.update_epochs):
                order = torch.from_numpy(shuffle.permutation(batch_size))
                shuffled = (torch.split(x[order], minibatch_size) for x in flat)
                for o, a, old, adv, target in zip(*shuffled, strict=True):
                    logp = agent.logits(o).log_softmax(-1)
                    logratio = logp.gather(1, a[:, None]).squeeze(1) - old
                    ratio = logratio.exp()
                    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                    clipped = torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
                    pg_loss = -torch.min(adv * ratio, adv * clipped).mean()
                    v_loss = 0.5 * nn.functional.mse_loss(agent.value(o), target)
                    loss = pg_loss + args.vf_coef * v_loss
                    if args.ent_coef > 0:  # no gradient of a bonus that counts for nothing
                        loss = loss - left * args.ent_coef * mean_entropy(logp)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                    optimizer.step()
                    clipfracs.append(((ratio.detach() - 1).abs() > args.clip_coef).float().mean())

            global_step = iteration * batch_size
            progress |= {"iteration": iteration, "episodes": progress["episodes"] + len(returns)}
            explained = 1.0 - float((targets - values).var() / targets.var())
            record(
                global_step,
                charts__learning_rate=left * args.learning_rate,
                charts__SPS=(iteration - first) * batch_size / (time.time() - start),
                charts__episodes=progress["episodes"],
                losses__value_loss=v_loss.item(),
                losses__policy_loss=pg_loss.item(),
                losses__entropy=mean_entropy(logp).item(),
                losses__approx_kl=((ratio - 1) - logratio).mean().item(),
                losses__clipfrac=torch.stack(clipfracs).mean().item(),
                losses__explained_variance=explained,
                **({"charts__episodic_return": float(np.mean(returns))} if returns else {}),
                **{f"slo__{name}": float(np.mean(series)) for name, series in slo.items()},
            )
            late = iteration > num_iterations // 2 and iteration % args.eval_every == 0
            if late or iteration == num_iterations:
                evaluate(global_step)
                save_checkpoint(args.output, agent, optimizer, progress)
            bar.set_postfix(
                p99_ms=f"{np.mean(slo['p99_ms']):.1f}", best=progress["best"], refresh=False
            )
            bar.update()
    except KeyboardInterrupt:
        bar.close()
        save_checkpoint(args.output, agent, optimizer, progress)
        if progress["best"] is None:
            export(args, agent, config, progress)
        print(
            f"\nInterrupted. {args.output} holds a usable policy; go on with --resume.",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    finally:
        bar.close()
        writer.close()
        log.close()
        envs.close()
    return args.output


def export(args: Args, agent: ActorCritic, config: MdpConfig, progress: dict[str, Any]) -> None:
    """Write the policy's folder."""
    inputs, logits = agent.parity_vectors(np.random.default_rng(args.seed))
    workload = workload_of(args)
    plain_workload = workload.to_json() if isinstance(workload, Scenario) else args.workload
    export_policy(
        args.output,
        agent.actor_weights(),
        mdp_config=config,
        parity_inputs=inputs,
        parity_logits=logits,
        env_spec={
            "id": hlem_env.ENV_ID,
            "kwargs": {
                "workload": plain_workload,
                "features": args.features,
                "reward": args.reward,
                **node_arguments(args),
            },
            "domain": workload.to_json() if isinstance(workload, TrainingDomain) else None,
            "training": progress,
        },
        training_command="python -m train.ppo " + " ".join(sys.argv[1:]),
        seed=args.seed,
        git_revision=git_revision(),
    )


def plain(args: Args) -> dict[str, Any]:
    """The arguments as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(args).items()}


if __name__ == "__main__":
    arguments = tyro.cli(Args)
    began = time.time()
    try:
        folder = train(arguments)
    except hlem_env.HlemError as error:
        raise SystemExit(f"train.ppo: {error}") from error
    print(f"Policy in {folder} after {time.time() - began:.0f} s")
