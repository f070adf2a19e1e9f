"""Times the served node's own share of a request: with a scorer that answers at once.

    python -m eval.bench_server --json runs/bench/server.json

Server and client are two processes on one core. The client's request is built beforehand and sent over a
socket that is open, so that what is timed is the server's: `wall` from the first byte sent to the last one
read, `cpu` what the server's threads ran for it (Linux alone says that), which other work on the machine
does not change.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from eval.server_process import Server, server_process
from eval.server_requests import (
    GRPC_INFER,
    binary_request,
    grpc_request,
    http_request,
    json_request,
)
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, machine, write_result
from serving_bridge.scoring import Limits

WARMUP = 50
Send = Callable[[], object]


@dataclass
class Args:
    """Times the server's own share of a request, as JSON, as binary tensors and over gRPC."""

    json: Path | None = None
    """file for the figures"""
    requests: int = 500
    """timed requests of each kind"""
    tokens: int = 15_000
    """history of the long requests"""
    candidates: int = 100
    """of each request"""
    largest_item: int = 10_000_000
    """items are drawn below it"""
    seed: int = 0
    """of the items"""

    def __post_init__(self) -> None:
        require(1 <= self.tokens <= 100_000, "tokens", self.tokens, "1 to 100,000")
        require(1 <= self.candidates <= 1000, "candidates", self.candidates, "1 to 1,000")
        require(self.requests >= 1, "requests", self.requests, "1 or more")
        require(self.largest_item >= 2, "largest_item", self.largest_item, "2 or more")


def main(args: Args) -> None:
    """Run the benchmark, print and write its figures."""
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    limits = Limits(args.tokens, args.candidates)
    with server_process(limits, core) as server:
        figures = _measure(args, server)
    about = machine()
    print(f"{about['cpu']}, one core, server's share of a request, ms")
    print(f"{'':<22}{'cpu p50':>9}{'cpu p99':>9}{'wall p50':>10}{'wall p99':>10}")
    for name, figure in figures.items():
        print(
            f"{name:<22}{figure['cpu_p50_ms']:>9.3f}{figure['cpu_p99_ms']:>9.3f}"
            f"{figure['wall_p50_ms']:>10.3f}{figure['wall_p99_ms']:>10.3f}"
        )
    if args.json is not None:
        settings = {
            "requests": args.requests, "tokens": args.tokens, "candidates": args.candidates,
            "largest_item": args.largest_item, "load_average": os.getloadavg()[0],
        }  # fmt: skip
        write_result(args.json, command("eval.bench_server"), {**settings, "figures": figures})


def _measure(args: Args, server: Server) -> dict[str, Any]:
    rng = np.random.default_rng(args.seed)
    history = rng.integers(0, args.largest_item, args.tokens)
    few = rng.integers(0, args.largest_item, 10)
    candidates = rng.integers(0, args.largest_item, args.candidates)
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
    call = channel.unary_unary(GRPC_INFER)

    def rest(body: bytes, headers: dict[str, str]) -> Send:
        request = http_request(body, headers)
        return lambda: _exchange(connection, request)

    long_raw, long_headers = binary_request(history, candidates)
    message, short_message = grpc_request(history, candidates), grpc_request(few, candidates[:10])
    kinds: dict[str, Send] = {
        f"JSON, {args.tokens}": rest(json_request(history, candidates), {}),
        f"binary, {args.tokens}": rest(long_raw, long_headers),
        f"gRPC, {args.tokens}": lambda: call(message),
        "JSON, 10": rest(json_request(few, candidates[:10]), {}),
        "gRPC, 10": lambda: call(short_message),
    }
    figures = {name: _timed(send, server.pid, args.requests) for name, send in kinds.items()}
    channel.close()
    connection.close()
    return figures


def _timed(send: Send, pid: int, requests: int) -> dict[str, float]:
    """Wall and CPU time of so many requests one after the other."""
    for _ in range(WARMUP):
        send()
    wall_ms, cpu_ms = np.empty(requests), np.empty(requests)
    for i in range(requests):
        cpu = _cpu_ns(pid)
        start = time.perf_counter()
        send()
        wall_ms[i] = 1e3 * (time.perf_counter() - start)
        cpu_ms[i] = (_cpu_ns(pid) - cpu) / 1e6
    return {
        f"{kind}_p{share}_ms": round(float(np.percentile(values, share)), 4)
        for kind, values in (("cpu", cpu_ms), ("wall", wall_ms))
        for share in (50, 99)
    }


def _cpu_ns(pid: int) -> int:
    """Nanoseconds that the threads of a process have run."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text("ascii").split()[0])
        except OSError:
            continue  # the thread has ended
    return total


def _exchange(connection: socket.socket, request: bytes) -> None:
    """Send a request and read its answer."""
    connection.sendall(request)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65_536)
    head, _, body = answer.partition(b"\r\n\r\n")
    require(head.startswith(b"HTTP/1.1 200"), "status line", head[:40], "200")
    length = re.search(rb"content-length: (\d+)", head.lower())
    left = int(length[1]) - len(body) if length else 0
    while left > 0:
        left -= len(connection.recv(65_536))


if __name__ == "__main__":
    run_command("eval.bench_server", main, Args)
