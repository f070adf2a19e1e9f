"""Signals: what is in flight is answered, the exit code is 0, a second signal ends at once."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages

from hlem_env.errors import ArgumentError
from serving_bridge.server.lifecycle import Listen, NodeServer
from tests.serving_bridge.server.fake_node import FakeNode, FakeScorer, running
from tests.serving_bridge.server.test_bad_grpc import SERVICE, message
from tests.serving_bridge.server.wire import INFER, with_input

ROOT = Path(__file__).resolve().parents[3]


class Process(NamedTuple):
    popen: subprocess.Popen[str]
    port: int
    grpc_port: int

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def ask(self, user: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("POST", INFER, json.dumps(with_input(0, data=[user])))
            return connection.getresponse().status
        finally:
            connection.close()

    def ask_grpc(self, user: str) -> Any:
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            asked = message(raw=False)
            asked.inputs[0].contents.bytes_contents[0] = user.encode()
            call = channel.unary_unary(f"{SERVICE}/ModelInfer")
            raw = call(asked.SerializeToString(), timeout=30)
            return messages.ModelInferResponse.FromString(raw)


@contextmanager
def started(drain_s: float) -> Iterator[Process]:
    popen = subprocess.Popen(
        [sys.executable, "-m", "tests.serving_bridge.server.node_program", str(drain_s)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with popen:
        try:
            assert popen.stdout is not None
            port, grpc_port = popen.stdout.readline().split()
            yield Process(popen, int(port), int(grpc_port))
        finally:
            popen.kill()


def test_what_is_in_flight_is_answered() -> None:
    with started(20.0) as process, ThreadPoolExecutor(2) as pool:
        assert process.ask("ann") == 200
        waiting = [pool.submit(process.ask, "slow"), pool.submit(process.ask_grpc, "slow")]
        assert [process.line(), process.line()] == ["held", "held"]
        process.popen.send_signal(signal.SIGTERM)
        # Who comes while it drains is told so.
        while (status := process.ask("late")) == 200:
            pass
        assert status == 503
        assert waiting[0].result(30) == 200
        assert len(waiting[1].result(30).outputs) == 3
        assert process.popen.wait(30) == 0
        # Code behind the servers still ran: uvicorn's own handler would have skipped it.
        assert process.line() == "closed"
        with pytest.raises(ConnectionError):
            process.ask("ann")


def test_a_second_signal_ends_at_once() -> None:
    with started(600.0) as process, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(process.ask, "never")
        assert process.line() == "held"
        process.popen.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.popen.wait(0.7)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == 128 + signal.SIGTERM
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            waiting.result(30)


def test_a_request_that_does_not_end_holds_nobody_up_for_ever() -> None:
    with started(1.0) as process, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(process.ask, "never")
        waiting_grpc = pool.submit(process.ask_grpc, "never")
        assert [process.line(), process.line()] == ["held", "held"]
        process.popen.send_signal(signal.SIGINT)
        assert waiting.result(30) == 503
        with pytest.raises(grpc.RpcError) as caught:
            waiting_grpc.result(30)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.popen.wait(30) == 1


def test_calls_that_come_as_it_stops_are_told_so() -> None:
    node = FakeNode()
    asked, end = message(raw=False).SerializeToString(), node.server.dispatch.end
    waiting: list[grpc.Future] = []

    def end_late() -> None:
        """gRPC has these calls, and the loop that is to answer them is busy."""
        waiting.extend(call.future(asked, timeout=30) for _ in range(20))
        time.sleep(0.3)
        end()

    node.server.dispatch.end = end_late  # type: ignore[method-assign]
    with running(node):
        channel = grpc.insecure_channel(node.grpc_url)
        call = channel.unary_unary(f"{SERVICE}/ModelInfer")
        call(asked, timeout=30)
    assert {one.code() for one in waiting} == {grpc.StatusCode.UNAVAILABLE}
    channel.close()


def test_a_port_that_is_taken_is_told() -> None:
    async def start(**where: Any) -> None:
        await NodeServer(FakeScorer(), Listen(**where)).start()

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for where in ({"port": port, "grpc_port": None}, {"port": 0, "grpc_port": port}):
            with pytest.raises(ArgumentError, match="port"):
                asyncio.run(start(**where))


@pytest.mark.parametrize(
    "bad",
    [{"port": -1}, {"port": 65_536}, {"grpc_port": 70_000}, {"drain_s": 0.0}, {"drain_s": float("nan")}],
)  # fmt: skip
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        Listen(**bad)
