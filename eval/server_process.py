"""The served node's protocol servers in a process of their own, with a scorer that answers at once."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from serving_bridge.scoring import Limits, Scored, ScoreRequest
from serving_bridge.server.lifecycle import Listen, NodeServer


class AtOnce:
    """A scorer whose answer is there when it is asked."""

    ready = True

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def submit(self, request: ScoreRequest) -> Future[Scored]:
        """Zeros."""
        future: Future[Scored] = Future()
        future.set_result(Scored(np.zeros(request.candidates.size, np.float32), 1, 0))
        return future

    def drain(self, timeout_s: float) -> bool:
        """Nothing is ever in flight."""
        return True


class Server(NamedTuple):
    """A running server."""

    pid: int
    port: int
    grpc_port: int


@contextmanager
def server_process(limits: Limits, core: int | None = None) -> Iterator[Server]:
    """A server of its own process, ended when the context is left.

    Args:
        limits: of the node.
        core: the one that it runs on; None for any.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, limits, core), daemon=True)
    process.start()
    theirs.close()
    try:
        port, grpc_port = ours.recv()
        yield Server(process.pid or 0, port, grpc_port)
    finally:
        ours.close()
        process.join(20)
        process.kill()
        process.join()


def _serve(pipe: Connection, limits: Limits, core: int | None) -> None:
    """The server's process: it ends when the other end of the pipe is closed."""
    if core is not None:
        os.sched_setaffinity(0, {core})

    async def live() -> None:
        server = NodeServer(AtOnce(limits), Listen(port=0, grpc_port=0, drain_s=1.0))
        await server.start()
        pipe.send((server.port, server.grpc_port))
        closed = asyncio.Event()
        asyncio.get_running_loop().add_reader(pipe.fileno(), closed.set)
        await closed.wait()
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        await server.stop()

    asyncio.run(live())
