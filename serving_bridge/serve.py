"""Serves a live node: Open Inference Protocol v2 over REST and gRPC, alpha decided by a policy.

    python -m serving_bridge.serve --policy agents/pretrained/working_set --data runs/node

Histories, the epoch log and the adapter's state are kept in the folder of --data, and are there again after
a restart, however the process ended. docs/serving_api.md describes the API.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError, require, require_choice
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.machine import allow_open_files
from hlem_env.mdp import MdpConfig
from serving_bridge.control_loop import ControlLoop, ControlSettings
from serving_bridge.engine import Engine
from serving_bridge.epoch_log import EpochLog
from serving_bridge.history_store import DEFAULT_MAX_BYTES, HistoryStore
from serving_bridge.policy import FrozenPolicy
from serving_bridge.scoring import Limits
from serving_bridge.server.admin import TOKEN_VARIABLE, read_token
from serving_bridge.server.lifecycle import Listen, NodeServer, serve_until_signal
from serving_bridge.status import MODES

NO_TOKEN = f"off: set {TOKEN_VARIABLE} or --admin-token-file"


@dataclass
class Args:
    """Serves a live node over REST and gRPC, its memory split by a policy."""

    policy: Path
    """folder of the policy that decides"""
    preset: str = "cpu-small"
    """shipped preset (cpu-small, h100), or the path of one"""
    data: Path = Path("runs/node")
    """folder of histories, epoch log and adapter's state; made if missing"""
    host: str = "127.0.0.1"
    """address to listen at; this machine alone by default"""
    port: int = 8080
    """of REST; 0 for any that is free"""
    grpc_port: Annotated[int | None, tyro.conf.arg(metavar="INT")] = 8081
    """of gRPC; 0 for any that is free, None for none"""
    mode: Annotated[str | None, tyro.conf.arg(metavar="STR")] = None
    """active, shadow (decide, do not apply) or frozen (hold alpha); by default as the run before on the same
    data ended, active at first"""
    release: bool = False
    """let go of the alpha at which an operator held the run before"""
    admin_token_file: Path | None = None
    """file with the token of the admin API, which is off without one; $HLEM_ADMIN_TOKEN is the other way"""
    queue: int = 256
    """requests that wait or run; more are turned away"""
    candidates: int = 1000
    """of one request, at most"""
    histories_mib: int = 14 * 1024
    """of histories on the disk; beyond it those of users go who were not here for longest"""
    body_mib: int = 4
    """of one request, at most"""
    drain_s: float = 30.0
    """for requests in flight, once the node is told to stop"""

    def __post_init__(self) -> None:
        if self.mode is not None:
            require_choice("mode", self.mode, MODES)
        for name, most in (
            ("queue", 65_536), ("candidates", 100_000), ("histories_mib", 2**25), ("body_mib", 1024)
        ):  # fmt: skip
            value = getattr(self, name)
            require(1 <= value <= most, name, value, f"1 to {most}")

    @property
    def listen(self) -> Listen:
        """Where it listens."""
        return Listen(self.host, self.port, self.grpc_port, self.drain_s)


def main(args: Args) -> int:
    """Serve until told to stop."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # It warns of every request that is no HTTP, which anybody can send.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    allow_open_files()
    listen, token = args.listen, read_token(args.admin_token_file)
    with ExitStack() as stack:
        engine, control = build_node(args, stack)
        server = NodeServer(engine, listen, control, control, token)

        def started(server: NodeServer) -> None:
            grpc = "" if server.grpc_port is None else f", gRPC {args.host}:{server.grpc_port}"
            admin = NO_TOKEN if token is None else "on"
            print(f"REST http://{args.host}:{server.port}{grpc}; admin API {admin}", flush=True)

        return asyncio.run(serve_until_signal(server, started, lambda: engine.failure))


def build_node(args: Args, stack: ExitStack) -> tuple[Engine, ControlLoop]:
    """The engine and what controls it; `stack` closes both.

    Raises:
        HlemError: the policy, the preset or what is in the folder of data cannot be used.
    """
    policy = FrozenPolicy.load(args.policy)
    config = LiveConfig.load(args.preset)
    mdp_config = node_mdp_config(policy, config)
    try:
        log = EpochLog(args.data / "log", mdp_config, about=config.to_json())
    except OSError as error:
        raise ArtefactError(f"no epoch log can be kept in {args.data}: {error.strerror}") from error
    stack.callback(log.close)
    retain_bytes = args.histories_mib * 2**20
    # The map has room for what comes while old histories are being removed.
    max_bytes = max(DEFAULT_MAX_BYTES, retain_bytes + retain_bytes // 7)
    store = HistoryStore(args.data / "histories", max_bytes)
    stack.callback(store.close)
    # As the run before left them: a restart is no jump, and does not undo what an operator ordered.
    last = log.last_record or {"mode": "active", "next_alpha_centi": None}
    hold = None if args.release else last.get("hold_centi")
    settings = ControlSettings(mode=args.mode or last["mode"])
    control = ControlLoop(
        policy, mdp_config, settings, state=args.data / "adapter", log=log,
        initial_alpha_centi=last["next_alpha_centi"],
    )  # fmt: skip
    stack.callback(control.close)
    if hold is not None:
        control.hold(control.config.clip(hold))
    limits = Limits(
        config.max_history_tokens,
        args.candidates,
        queue=args.queue,
        body_bytes=args.body_mib * 2**20,
    )
    engine = Engine(LiveNode(config), store, control, limits, retain_bytes=retain_bytes)
    stack.callback(engine.close)
    return engine, control


def node_mdp_config(policy: FrozenPolicy, config: LiveConfig) -> MdpConfig:
    """The policy's view of this node: the node's SLO, lengths and epochs in place of the training's."""
    return replace(
        policy.mdp_config,
        slo_ms=config.slo_ms,
        max_history_tokens=config.max_history_tokens,
        epoch_seconds=config.epoch_seconds,
    )


if __name__ == "__main__":
    run_command("serving_bridge.serve", main, Args)
