"""More requests than the node takes, and clients that go away before they have their answer."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from serving_bridge.scoring import Overloaded, Scored
from serving_bridge.server import connections
from tests.serving_bridge.server.fake_node import LIMITS, FakeNode, expected
from tests.serving_bridge.server.test_bad_grpc import SERVICE, message
from tests.serving_bridge.server.wire import INFER, good, send


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def opened(node: FakeNode, body: bytes, announced: int | None = None) -> socket.socket:
    """A connection on which a request, or a part of one, was sent."""
    connection = socket.create_connection(("127.0.0.1", node.server.port), 20)
    length = len(body) if announced is None else announced
    head = f"POST {INFER} HTTP/1.1\r\nHost: node\r\nContent-Length: {length}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def answer_all(node: FakeNode) -> None:
    for future in node.scorer.held:
        if not future.done():
            future.set_result(Scored(expected([5, 6, 7], [1, 2]), 3, 0))


def test_overload_says_when_to_come_back(node: FakeNode) -> None:
    node.scorer.raises = Overloaded("the queue is full", 2.5)
    answer = send(node, good())
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")
    assert answer.json == {"error": "the queue is full"}


def test_bodies_that_are_being_read_are_bounded(node: FakeNode) -> None:
    """Clients that send slowly hold no more memory than twice the queue's requests."""
    body = json.dumps(good()).encode()
    in_flight = node.server.metrics.in_flight
    slow = [opened(node, body[:10], len(body)) for _ in range(2 * LIMITS.queue)]
    until(lambda: in_flight._value.get() == 2 * LIMITS.queue)
    answer = send(node, body)
    assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
    assert send(node, path="/v2/health/ready", method="GET").status == 200
    for connection in slow:
        connection.sendall(body[10:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.close()
    until(lambda: in_flight._value.get() == 0)
    assert send(node, body).status == 200


def test_grpc_calls_are_bounded(node: FakeNode) -> None:
    node.scorer.hold = True
    with grpc.insecure_channel(node.grpc_url) as channel:
        call = channel.unary_unary(f"{SERVICE}/ModelInfer")
        raw = message().SerializeToString()
        waiting = [call.future(raw, timeout=20) for _ in range(2 * LIMITS.queue)]
        until(lambda: len(node.scorer.held) == 2 * LIMITS.queue)
        with pytest.raises(grpc.RpcError) as caught:
            call(raw, timeout=20)
        error: Any = caught.value
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert ("retry-after", "1") in error.trailing_metadata()
        answer_all(node)
        for future in waiting:
            future.result(20)


def test_connections_are_bounded(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    open_before = len(node.server._http.server_state.connections)
    monkeypatch.setattr(connections, "CONNECTIONS", open_before + 1)
    first = opened(node, b"", 10)
    until(lambda: len(node.server._http.server_state.connections) > open_before)
    with socket.create_connection(("127.0.0.1", node.server.port), 20) as second:
        answer = b""
        while chunk := second.recv(4096):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in answer
    first.close()
    until(lambda: len(node.server._http.server_state.connections) <= open_before)
    assert send(node, good()).status == 200


def test_silent_connection_is_closed(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "FIRST_REQUEST_SECONDS", 0.05)
    with socket.create_connection(("127.0.0.1", node.server.port), 20) as connection:
        connection.sendall(b"POST / HT")
        assert connection.recv(100) == b""


def test_body_that_does_not_come(node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving_bridge.server.request_body.READ_SECONDS", 0.05)
    with opened(node, b"{", 100) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_http_client_that_goes_away_takes_its_request_back(node: FakeNode) -> None:
    node.scorer.hold = True
    connection = opened(node, json.dumps(good()).encode())
    until(lambda: len(node.scorer.held) == 1)
    assert not node.scorer.held[0].cancelled()
    connection.close()
    until(node.scorer.held[0].cancelled)


def test_grpc_client_that_goes_away_takes_its_request_back(node: FakeNode) -> None:
    node.scorer.hold = True
    with grpc.insecure_channel(node.grpc_url) as channel:
        call = channel.unary_unary(f"{SERVICE}/ModelInfer").future(message().SerializeToString())
        until(lambda: len(node.scorer.held) == 1)
        call.cancel()
        until(node.scorer.held[0].cancelled)


def test_client_that_goes_away_within_its_body(node: FakeNode) -> None:
    opened(node, b"{", 100).close()
    until(lambda: node.server.metrics.in_flight._value.get() == 0)
    assert send(node, good()).status == 200
    assert node.scorer.asked[0].user == "ann" and len(node.scorer.asked) == 1


def test_answers_of_another_thread(node: FakeNode) -> None:
    node.scorer.hold = True
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(send, node, good())
        until(lambda: len(node.scorer.held) == 1)
        answer_all(node)
        assert waiting.result(20).status == 200


def test_future_that_the_scorer_cancels(node: FakeNode) -> None:
    node.scorer.hold = True
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(send, node, good())
        until(lambda: len(node.scorer.held) == 1)
        node.scorer.held[0].cancel()
        answer = waiting.result(20)
    assert answer.status == 500 and "failed" in answer.json["error"]
