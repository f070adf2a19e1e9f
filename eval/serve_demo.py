"""A served node under load, with its page in the browser: `python -m eval.serve_demo`, or `make serve-demo`.

Starts a node on the CPU with the shipped policy, prints the address of its page, opens it where there is
a browser and a display, and loads the node with a burst in the middle. Ctrl-C ends all of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from eval import load_generator, photograph
from eval.load_generator import stop_on_signal
from eval.load_totals import Totals
from eval.node_process import node_process
from hlem_env.command_line import run_command
from hlem_env.machine import command, write_result

ROOT: Final = Path(__file__).resolve().parents[1]
TRACE: Final = "taobao-userbehavior-2h.csv"
PICTURE_S: Final = 12.0
"""Before the load's end; a browser takes a while to start beside a node."""
SHIPPED: Final = "agents/pretrained/working_set"


@dataclass
class Args:
    """A node, its page, a load with a burst."""

    policy: Path = ROOT / SHIPPED
    """folder of the policy that decides"""
    preset: str = "cpu-small"
    """of the node"""
    workload: str | None = None
    """a regime, PRESET/REGIME, or trace:FILE; None: the Taobao trace of $HLEM_TRACES, or of shared/traces
    beside the checkout, if it is there, else steady"""
    seconds: float = 180.0
    """of load"""
    burst_seconds: float = 20.0
    """in the middle of it"""
    utilisation: float = 0.6
    """of the node outside the burst"""
    rate: float | None = None
    """requests a second instead"""
    port: int = 8080
    """of the page and of REST; 0 for any that is free"""
    grpc_port: int = 8081
    """of gRPC; 0 for any that is free"""
    output: Path = Path("runs/serve-demo")
    """folder of the node's data, its log and load.json"""
    photograph: Path | None = None
    """PNG file for a picture of the page, taken in the last seconds of the load"""
    no_browser: bool = False
    """do not open the page"""


def main(args: Args) -> int:
    """Run until the load has ended, or Ctrl-C."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _interrupt)
    try:
        _run(args)
    except KeyboardInterrupt:
        print("\nEnded.", flush=True)
    return 0


def _run(args: Args) -> None:
    workload = args.workload or default_workload()
    print(f"Starting a {args.preset} node; its log is {args.output / 'node.log'}", flush=True)
    arguments = [
        "--policy", str(args.policy), "--preset", args.preset, "--data", str(args.output / "node"),
        "--port", str(args.port), "--grpc-port", str(args.grpc_port),
    ]  # fmt: skip
    with node_process(arguments, args.output / "node.log") as node:
        print(f"\n    The node's page: {node.url}/\n", flush=True)
        if not args.no_browser and has_display():
            _open(f"{node.url}/")
        load = load_generator.Args(
            url=node.url, workload=workload, preset=args.preset, seconds=args.seconds,
            burst_seconds=args.burst_seconds, utilisation=args.utilisation, rate=args.rate,
        )  # fmt: skip
        total = asyncio.run(_load(load, args.photograph))
        print("Ending the node", flush=True)
    figures: dict[str, Any] = load_generator.result(load, total)
    write_result(args.output / "load.json", command("eval.serve_demo"), figures)


async def _load(args: load_generator.Args, picture: Path | None) -> Totals:
    """Load the node; towards the end the page is photographed."""
    stop = stop_on_signal()
    generator = load_generator.Generator(args)
    if picture is None:
        return await generator.run(stop)

    async def photographed() -> None:
        while generator.passed_s < args.seconds - PICTURE_S:
            await asyncio.sleep(0.2)
        await asyncio.to_thread(
            photograph.photograph, photograph.Args(url=f"{args.url}/", output=picture)
        )

    taking = asyncio.create_task(photographed())
    total = await generator.run(stop)
    if generator.passed_s >= args.seconds - PICTURE_S:
        await taking
    taking.cancel()
    return total


def default_workload() -> str:
    """The public trace if it is there, else Steady."""
    folder = Path(os.environ.get("HLEM_TRACES") or ROOT.parent / "shared" / "traces")
    trace = folder / TRACE
    return f"trace:{trace}" if trace.is_file() else "steady"


def has_display() -> bool:
    """Whether a browser would have a screen to open on."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True


def _open(url: str) -> None:
    try:
        webbrowser.open(url)
    except (webbrowser.Error, OSError, subprocess.SubprocessError):
        print("No browser could be opened: open the address above.", flush=True)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_command("eval.serve_demo", main, Args)
