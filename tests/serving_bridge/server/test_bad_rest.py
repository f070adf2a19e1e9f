"""Requests that REST refuses: with the right status, in words that repeat nothing of the request."""

import gzip
import json
import zlib
from typing import Any

import numpy as np
import pytest

from tests.serving_bridge.server.fake_node import LIMITS, FakeNode, expected
from tests.serving_bridge.server.wire import INFER, LENGTH, good, send, tensor, with_input

SECRET = "zq9"
USER, HISTORY, CANDIDATES = 0, 1, 2
MANY = 100  # elements that are read beside orjson


def history(data: list[Any], **changed: Any) -> dict[str, Any]:
    return with_input(HISTORY, data=data, shape=[len(data)], **changed)


def inputs(*tensors: Any) -> dict[str, Any]:
    return {"inputs": list(tensors)}


ann, some = tensor("USER", ["ann"], "BYTES"), tensor("CANDIDATES", [1])
BAD_DOCUMENTS: dict[str, Any] = {
    "wrong shape": with_input(HISTORY, shape=[4]),
    "wrong shape, long": history([1] * MANY) | with_input(HISTORY, data=[1] * MANY, shape=[99]),
    "negative shape": with_input(HISTORY, shape=[-3]),
    "overflowing shape": with_input(HISTORY, shape=[2**63]),
    "shape past 64 bits": with_input(HISTORY, shape=[2**70]),
    "shape whose product wraps": with_input(HISTORY, shape=[2**62, 4]),
    "two dimensions": with_input(HISTORY, shape=[3, 1]),
    "no dimension": with_input(HISTORY, shape=[]),
    "shape is no list": with_input(HISTORY, shape=3),
    "shape of floats": with_input(HISTORY, shape=[3.0]),
    "shape of booleans": with_input(HISTORY, data=[1], shape=[True]),
    "shape of strings": with_input(HISTORY, shape=["3"]),
    "shape is missing": with_input(HISTORY, shape=None),
    "long shape": with_input(HISTORY, shape=[3] * MANY),
    "ragged": history([[1, 2], [3]]),
    "nested": history([[1], [2], [3]]),
    "strings for integers": history(["1", "2"]),
    "strings for integers, long": history([SECRET] * MANY),
    "floats for integers": history([1.0, 2.0]),
    "one float among many": history([1] * MANY + [2.5]),
    "booleans for integers": history([True, False]),
    "one boolean among many": history([1] * MANY + [True]),
    "null for an integer": history([None]),
    "past 63 bits": history([2**63]),
    "past 64 bits": history([2**64]),
    "one past 63 bits among many": history([1] * MANY + [2**63]),
    "far past 64 bits": history([10**30]),
    "negative item": history([-1]),
    "one negative item among many": history([1] * MANY + [-1]),
    "data is a string": with_input(HISTORY, data=SECRET),
    "data is an object": with_input(HISTORY, data={"0": 1}),
    "data is missing": with_input(HISTORY, data=None),
    "empty history": history([]),
    "no candidates": with_input(CANDIDATES, data=[], shape=[0]),
    "history over the limit": history([1] * (LIMITS.history_tokens + 1)),
    "candidates over the limit": with_input(CANDIDATES, data=[1] * 201, shape=[201]),
    "wrong datatype": with_input(HISTORY, datatype="INT32"),
    "unknown datatype": with_input(HISTORY, datatype=SECRET),
    "datatype is missing": with_input(HISTORY, datatype=None),
    "unknown tensor": with_input(HISTORY, name=SECRET),
    "name is missing": with_input(HISTORY, name=None),
    "name is no string": with_input(HISTORY, name=["HISTORY"]),
    "duplicate tensor": inputs(ann, tensor("HISTORY", [1]), tensor("HISTORY", [2]), some),
    "duplicate user": inputs(ann, ann, tensor("HISTORY", [1]), some),
    "history and new items": inputs(ann, tensor("HISTORY", [1]), tensor("NEW_ITEMS", [1]), some),
    "neither history nor new items": inputs(ann, some),
    "no user": inputs(tensor("HISTORY", [1]), some),
    "candidates are missing": inputs(ann, tensor("HISTORY", [1])),
    "user is a number": with_input(USER, data=[17]),
    "user is a list of integers": with_input(USER, data=[1] * MANY, shape=[MANY]),
    "user is empty": with_input(USER, data=[""]),
    "user is too long": with_input(USER, data=["é" * 200]),
    "two users": with_input(USER, data=["a", "b"], shape=[2]),
    "no user in the list": with_input(USER, data=[], shape=[0]),
    "unknown output": good(outputs=[{"name": SECRET}]),
    "duplicate output": good(outputs=[{"name": "SCORES"}, {"name": "SCORES"}]),
    "output without a name": good(outputs=[{}]),
    "output is a string": good(outputs=["SCORES"]),
    "outputs is an object": good(outputs={"name": "SCORES"}),
    "outputs is a list of integers": good(outputs=[1] * MANY),
    "classification": good(outputs=[{"name": "SCORES", "parameters": {"classification": 2}}]),
    "binary_data is a number": good(outputs=[{"name": "SCORES", "parameters": {"binary_data": 1}}]),
    "binary_data_output is a string": good(parameters={"binary_data_output": "true"}),
    "unknown parameter": good(parameters={SECRET: 1}),
    "parameters is a list": good(parameters=[1] * MANY),
    "shared memory": with_input(
        HISTORY, data=None, parameters={"shared_memory_region": SECRET, "binary_data_size": 24}
    ),
    "unknown key": good(**{SECRET: 1}),
    "unknown key of an input": with_input(HISTORY, **{SECRET: 1}),
    "id is a number": good(id=7),
    "id is a list of integers": good(id=[1] * MANY),
    "id is too long": good(id=SECRET * 100),
    "inputs is an object": {"inputs": {"USER": "ann"}},
    "inputs is a list of integers": {"inputs": [1] * MANY},
    "inputs is missing": {"id": "a"},
    "an input is null": {"inputs": [None]},
    "a list": [1, 2, 3],
    "a long list": [1] * MANY,
    "a string": SECRET,
    "null": None,
}


def refused(answer: Any, status: int) -> str:
    """The error's words: one short sentence, nothing of the request, nothing of the inside."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
    assert list(answer.json) == ["error"]
    words: str = answer.json["error"]
    assert 0 < len(words) < 200
    for leak in (SECRET, "Error", "Exception", "Traceback", "serving_bridge", "orjson", "numpy"):
        assert leak not in words
    return words


@pytest.mark.parametrize("name", BAD_DOCUMENTS)
def test_document(node: FakeNode, name: str) -> None:
    refused(send(node, json.dumps(BAD_DOCUMENTS[name]).encode()), 400)
    assert node.scorer.asked == []


BAD_TEXTS = {
    "empty": b"",
    "no JSON": b"zq9 " * 100,
    "cut off": json.dumps(good()).encode()[:-5],
    "something behind it": json.dumps(good()).encode() + b"zq9",
    "not UTF-8": b'{"inputs": "\xff\xfe"}',
    "lone surrogate": json.dumps(good(id="\ud800")).encode(),
    "deeply nested": b"[" * 100_000,
    "NaN": json.dumps(history([float("nan")])).encode(),
    "leading zero": json.dumps(good()).encode().replace(b"[5, 6, 7]", b"[05, 6, 7]"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_text(node: FakeNode, name: str) -> None:
    refused(send(node, BAD_TEXTS[name]), 400)


def binary(size: Any = 24, **changed: Any) -> dict[str, Any]:
    return with_input(HISTORY, data=None, parameters={"binary_data_size": size}, **changed)


def send_binary(
    node: FakeNode, document: Any, raw: bytes = np.arange(3).tobytes(), length: str | None = None
) -> Any:
    text = json.dumps(document).encode()
    return send(node, text + raw, {LENGTH: str(len(text)) if length is None else length})


def test_binary_tensors_are_read(node: FakeNode) -> None:
    document = binary()
    document["inputs"][USER] = tensor("USER", [0], "BYTES", parameters={"binary_data_size": 7})
    del document["inputs"][USER]["data"]
    raw = b"\x03\0\0\0ann" + np.array([5, 6, 7]).tobytes()
    scores = send_binary(node, document, raw).json["outputs"][0]["data"]
    np.testing.assert_array_equal(np.float32(scores), expected([5, 6, 7], [1, 2]))
    assert node.scorer.asked[0].user == "ann"


BAD_BINARY = {
    "size is too small": (binary(16), b"1" * 16),
    "size is too large": (binary(32), b"1" * 24),
    "size is negative": (binary(-8), b"1" * 24),
    "size is a float": (binary(24.0), b"1" * 24),
    "size is a string": (binary("24"), b"1" * 24),
    "size is a boolean": (binary(True), b"1"),
    "size past 64 bits": (binary(2**70), b"1" * 24),
    "size differs from the shape": (binary(shape=[4]), b"1" * 24),
    "bytes behind the last tensor": (binary(), b"1" * 25),
    "both data and raw": (with_input(HISTORY, parameters={"binary_data_size": 24}), b"1" * 24),
    "negative item": (binary(), np.array([1, -2, 3]).tobytes()),
    "no bytes at all": (binary(), b""),
}


@pytest.mark.parametrize("name", BAD_BINARY)
def test_binary(node: FakeNode, name: str) -> None:
    refused(send_binary(node, *BAD_BINARY[name]), 400)


@pytest.mark.parametrize(
    "raw", [b"", b"\x03\0\0", b"\x04\0\0\0ann", b"\x02\0\0\0ann", b"\0\0\0\0", b"\x01\0\0\0\xff",
            b"\xff\xff\xff\xffann"]
)  # fmt: skip
def test_binary_user(node: FakeNode, raw: bytes) -> None:
    document = good()
    document["inputs"][USER] = {
        "name": "USER", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)},
    }  # fmt: skip
    refused(send_binary(node, document, raw), 400)


@pytest.mark.parametrize(
    "length", ["1.5", "-1", "+5", " ", "", "0x10", "1e2", "zq9", "1_0", "\u00b2", "9" * 30, "100000"]
)  # fmt: skip
def test_binary_header_length_that_is_no_length(node: FakeNode, length: str) -> None:
    refused(send_binary(node, binary(), length=length), 400)


def test_request_without_id_is_served(node: FakeNode) -> None:
    answer = send(node, good())
    assert answer.status == 200 and "id" not in answer.json


def test_missing_content_type_is_served(node: FakeNode) -> None:
    assert send(node, good()).status == 200
    for media in (
        "application/json",
        "application/json; charset=utf-8",
        "application/octet-stream",
    ):
        assert send(node, good(), {"Content-Type": media}).status == 200


@pytest.mark.parametrize("media", ["text/plain", "multipart/form-data; boundary=zq9", "", "zq9"])
def test_other_content_types_are_refused(node: FakeNode, media: str) -> None:
    refused(send(node, good(), {"Content-Type": media}), 415)


COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("encoding", COMPRESS)
def test_compressed_body_is_served(node: FakeNode, encoding: str) -> None:
    body = COMPRESS[encoding](json.dumps(good()).encode())
    assert send(node, body, {"Content-Encoding": encoding}).status == 200


@pytest.mark.parametrize("encoding", COMPRESS)
def test_damaged_compressed_body(node: FakeNode, encoding: str) -> None:
    body = COMPRESS[encoding](json.dumps(good()).encode())
    for bad in (body[:-3], body + body, body[:20] + b"zq9" + body[23:], b"", b"zq9"):
        refused(send(node, bad, {"Content-Encoding": encoding}), 400)


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "zq9", ""])
def test_unknown_encoding(node: FakeNode, encoding: str) -> None:
    refused(send(node, good(), {"Content-Encoding": encoding}), 415)


@pytest.mark.parametrize("encoding", COMPRESS)
def test_compressed_body_that_would_be_too_large(node: FakeNode, encoding: str) -> None:
    body = COMPRESS[encoding](b" " * (100 * LIMITS.body_bytes))
    assert len(body) < LIMITS.body_bytes
    refused(send(node, body, {"Content-Encoding": encoding}), 413)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("times", [1, 7, 20])
def test_body_over_the_limit(node: FakeNode, chunked: bool, times: int) -> None:
    body = b" " * (times * LIMITS.body_bytes + 1)
    if times > 8:
        # So much is not read to its end, and a client that is still sending may see no answer.
        try:
            answer = send(node, body, chunked=chunked)
        except ConnectionError:
            return
    else:
        answer = send(node, body, chunked=chunked)
    refused(answer, 413)
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("chunked", [False, True])
def test_body_at_the_limit(node: FakeNode, chunked: bool) -> None:
    body = json.dumps(good()).encode()
    body += b" " * (LIMITS.body_bytes - len(body))
    assert send(node, body, chunked=chunked).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/v2/",
        "/docs",
        "/v2/models/zq9",
        "/v2/models/zq9/infer",
        "/admin",
        "/v2/repository/models/hlem/unload",
        "/v2/models/hlem/versions/2/infer",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_is_at_other_paths(node: FakeNode, path: str, method: str) -> None:
    refused(send(node, good(), path=path, method=method), 404)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "ZQ9"])
def test_other_methods(node: FakeNode, method: str) -> None:
    refused(send(node, b"", path=INFER, method=method), 405)
