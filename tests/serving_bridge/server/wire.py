"""Requests as a test spoils them, and answers as they came, over sockets of http.client."""

import http.client
import json
from typing import Any, NamedTuple

from tests.serving_bridge.server.fake_node import FakeNode

INFER = "/v2/models/hlem/infer"
LENGTH = "Inference-Header-Content-Length"


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def tensor(name: str, data: list[Any], datatype: str = "INT64", **changed: Any) -> dict[str, Any]:
    return {"name": name, "shape": [len(data)], "datatype": datatype, "data": data} | changed


def good(**changed: Any) -> dict[str, Any]:
    """A request that is served."""
    inputs = [
        tensor("USER", ["ann"], "BYTES"),
        tensor("HISTORY", [5, 6, 7]),
        tensor("CANDIDATES", [1, 2]),
    ]
    return {"inputs": inputs} | changed


def with_input(at: int, **changed: Any) -> dict[str, Any]:
    """The good request with one input changed; None takes a key away."""
    document = good()
    document["inputs"][at] = {
        key: value for key, value in (document["inputs"][at] | changed).items() if value is not None
    }
    return document


def send(
    node: FakeNode,
    body: bytes | Any = None,
    headers: dict[str, str] | None = None,
    path: str = INFER,
    method: str = "POST",
    chunked: bool = False,
) -> Answer:
    """Send a body, or a document as JSON, without a Content-Type unless the headers have one."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection(node.url, timeout=20)
    try:
        if chunked:
            pieces = (body[i : i + 8192] for i in range(0, len(body), 8192))
            connection.request(method, path, pieces, headers or {}, encode_chunked=True)
        else:
            connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()
