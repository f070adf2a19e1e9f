"""A node's servers from start to end: both listen, a signal drains them, and the process ends with 0.

    SIGTERM or SIGINT   not ready; what is new is refused; what is in flight is answered; then 0
    the same again      the process ends at once

uvicorn's own handler would raise the signal again after it has stopped, and with it skip everything
that is to follow; so the signals are handled here, in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn

from hlem_env.errors import ArgumentError, require
from serving_bridge.scoring import Scorer
from serving_bridge.server.admin import Control
from serving_bridge.server.connections import LimitedConnection
from serving_bridge.server.dispatch import Dispatch
from serving_bridge.server.grpc_server import build_server
from serving_bridge.server.integer_lists import compile_scan
from serving_bridge.server.metrics import Metrics
from serving_bridge.server.rest import build_app
from serving_bridge.status import StatusSource

logger = logging.getLogger("hlem.server")

KEEP_ALIVE_SECONDS = 75
"""After which an idle HTTP connection is closed."""
GRACE_SECONDS = 2
"""After draining, for answers that are on their way."""
QUIET_SECONDS = 0.05
"""Without a new gRPC call, before gRPC is shut."""
FAILURE_SECONDS = 0.5
"""Between two looks at whether the node has failed."""
METRICS_SECONDS = 10.0
"""Between two looks at the epochs that closed, whether somebody scrapes or not."""


@dataclass(frozen=True)
class Listen:
    """Where a node listens, and how long it takes to stop.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    """REST; 0 for any that is free."""
    grpc_port: int | None = 8081
    """gRPC; 0 for any that is free, None for none."""
    drain_s: float = 30.0
    """For requests in flight, once the node is told to stop."""

    def __post_init__(self) -> None:
        require(0 <= self.port < 65_536, "port", self.port, "0 to 65535")
        if self.grpc_port is not None:
            require(0 <= self.grpc_port < 65_536, "grpc_port", self.grpc_port, "0 to 65535")
        require(0 < self.drain_s <= 3600, "drain_s", self.drain_s, "above 0, at most 3600")


class _Http(uvicorn.Server):
    """uvicorn without a hand in the process's signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class NodeServer:
    """Both servers of one node, in the running loop.

    Args:
        scorer: does the work.
        listen: where.
        status: the node's epochs.
        control: what the admin API acts on.
        admin_token: None leaves the admin API out.

    `port` and `grpc_port` are the actual ones once it has started.
    """

    def __init__(
        self,
        scorer: Scorer,
        listen: Listen,
        status: StatusSource | None = None,
        control: Control | None = None,
        admin_token: str | None = None,
    ) -> None:
        self.listen, self.scorer = listen, scorer
        self.metrics = Metrics(status)
        self.dispatch = Dispatch(scorer, self.metrics)
        self.app = build_app(self.dispatch, status, control, admin_token)
        self.port, self.grpc_port = listen.port, listen.grpc_port

    async def start(self) -> None:
        """Listen.

        Raises:
            ArgumentError: a port is taken or the host is none of this machine's.
        """
        await asyncio.to_thread(compile_scan)
        self._socket = _bound(self.listen.host, self.listen.port)
        self.port = self._socket.getsockname()[1]
        try:
            await self._start_grpc()
        except BaseException:
            self._socket.close()
            raise
        config = uvicorn.Config(
            self.app, http=LimitedConnection, ws="none", lifespan="off", log_config=None,
            access_log=False, proxy_headers=False, server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )  # fmt: skip
        self._http = _Http(config)
        self._serving = asyncio.create_task(self._http.serve([self._socket]))
        while not self._http.started and not self._serving.done():
            await asyncio.sleep(0.01)
        self._watching = asyncio.create_task(self._watch_epochs())

    async def stop(self) -> bool:
        """Answer what is in flight and close; whether all of it was answered in time."""
        self.dispatch.draining = True
        # Both go on listening meanwhile, so that who comes late is told when to come back, and not cut off.
        done = await asyncio.to_thread(self.scorer.drain, self.listen.drain_s)
        self.dispatch.end()
        self._http.should_exit = True
        await asyncio.gather(self._serving, self._stop_grpc())
        self._watching.cancel()
        return done

    async def _start_grpc(self) -> None:
        self._grpc = None
        if self.listen.grpc_port is None:
            return
        self._grpc = build_server(self.dispatch)
        host = f"[{self.listen.host}]" if ":" in self.listen.host else self.listen.host
        try:
            self.grpc_port = self._grpc.add_insecure_port(f"{host}:{self.listen.grpc_port}")
        except RuntimeError as error:
            raise ArgumentError(
                "grpc_port", self.listen.grpc_port, "a port that is free"
            ) from error
        await self._grpc.start()

    async def _stop_grpc(self) -> None:
        if self._grpc is None:
            return
        # gRPC hands calls over one by one, and cancels those that it still has when it is shut.
        loop = asyncio.get_running_loop()
        end_s, before = loop.time() + GRACE_SECONDS, -1
        while self.dispatch.grpc_calls != before and loop.time() < end_s:
            before = self.dispatch.grpc_calls
            await asyncio.sleep(QUIET_SECONDS)
        await self._grpc.stop(GRACE_SECONDS)

    async def _watch_epochs(self) -> None:
        while True:
            await asyncio.sleep(METRICS_SECONDS)
            self.metrics.update()


async def serve_until_signal(
    server: NodeServer,
    started: Callable[[NodeServer], None],
    failure: Callable[[], str] = lambda: "",
) -> int:
    """Serve until the process is told to stop, or the node has failed.

    Args:
        server: not started.
        started: called once it listens.
        failure: why the node can serve no more; empty while it can.

    Returns
    -------
    Exit code: 0, or 1 if a request in flight was not answered in time or the node has failed.
    """
    stop = asyncio.Event()

    def on_signal(number: int) -> None:
        if stop.is_set():
            logger.warning("ended at once: requests in flight are lost")
            os._exit(128 + number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    await server.start()
    started(server)
    while not stop.is_set() and not failure():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), FAILURE_SECONDS)
    logger.info("draining")
    return 0 if await server.stop() and not failure() else 1


def _bound(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that a port that is taken is told before anything starts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off where the protocol is named: an answer in two writes would
    # otherwise wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ArgumentError("port", f"{host}:{port}", "an address that is free here") from error
    return listener
