"""tritonclient, which shares no code with the servers, gets what the scorer gave."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from serving_bridge.scoring import NotServed, Overloaded
from tests.serving_bridge.server.fake_node import FakeNode, expected

HISTORY = list(range(1, 3001))
CANDIDATES = [3, 2**62, 5]


@pytest.fixture
def http_client(node: FakeNode) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(node.url) as client:
        yield client


@pytest.fixture
def grpc_client(node: FakeNode) -> Iterator[Any]:
    with tritonclient.grpc.InferenceServerClient(node.grpc_url) as client:
        yield client


def inputs(client: Any, items: dict[str, list[int]], user: str = "ann", **how: bool) -> list[Any]:
    kind = tritonclient.http if isinstance(client, tritonclient.http.InferenceServerClient) else (
        tritonclient.grpc
    )  # fmt: skip
    arrays = {"USER": np.array([user], object)} | {
        name: np.array(values, np.int64) for name, values in items.items()
    }
    made = []
    for name, values in arrays.items():
        made.append(
            kind.InferInput(name, list(values.shape), "BYTES" if name == "USER" else "INT64")
        )
        made[-1].set_data_from_numpy(values, **how)
    return made


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("answer_binary", [True, False])
@pytest.mark.parametrize("binary", [True, False])
def test_http(http_client: Any, binary: bool, answer_binary: bool, compression: str | None) -> None:
    asked = inputs(http_client, {"HISTORY": HISTORY, "CANDIDATES": CANDIDATES}, binary_data=binary)
    outputs = [
        tritonclient.http.InferRequestedOutput(name, binary_data=answer_binary)
        for name in ("SCORES", "HISTORY_TOKENS", "REUSED_TOKENS")
    ]
    got = http_client.infer(
        "hlem", asked, "1", outputs, request_id="r1", request_compression_algorithm=compression,
        response_compression_algorithm=compression,
    )  # fmt: skip
    np.testing.assert_array_equal(got.as_numpy("SCORES"), expected(HISTORY, CANDIDATES))
    assert got.as_numpy("SCORES").dtype == np.float32
    assert got.as_numpy("HISTORY_TOKENS").tolist() == [len(HISTORY)]
    assert got.as_numpy("REUSED_TOKENS").tolist() == [0]
    assert got.get_response()["id"] == "r1"


def test_grpc(grpc_client: Any) -> None:
    asked = inputs(grpc_client, {"HISTORY": HISTORY, "CANDIDATES": CANDIDATES})
    got = grpc_client.infer("hlem", asked, request_id="r1")
    np.testing.assert_array_equal(got.as_numpy("SCORES"), expected(HISTORY, CANDIDATES))
    assert got.as_numpy("HISTORY_TOKENS").tolist() == [len(HISTORY)]
    assert got.get_response().id == "r1"


@pytest.mark.parametrize("which", ["http_client", "grpc_client"])
def test_new_items_follow_what_is_stored(which: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(which)
    client.infer("hlem", inputs(client, {"HISTORY": [4, 5], "CANDIDATES": [1]}))
    for new, whole in (([6], [4, 5, 6]), ([], [4, 5, 6])):
        got = client.infer("hlem", inputs(client, {"NEW_ITEMS": new, "CANDIDATES": [1, 9]}))
        np.testing.assert_array_equal(got.as_numpy("SCORES"), expected(whole, [1, 9]))
        assert got.as_numpy("HISTORY_TOKENS").tolist() == [3]


@pytest.mark.parametrize("which", ["http_client", "grpc_client"])
def test_only_the_outputs_that_were_asked_for(which: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(which)
    kind = tritonclient.http if which == "http_client" else tritonclient.grpc
    asked = inputs(client, {"HISTORY": [4, 5], "CANDIDATES": [1]})
    got = client.infer("hlem", asked, outputs=[kind.InferRequestedOutput("HISTORY_TOKENS")])
    assert got.as_numpy("HISTORY_TOKENS").tolist() == [2]
    assert got.as_numpy("SCORES") is None


@pytest.mark.parametrize("which", ["http_client", "grpc_client"])
def test_health_and_metadata(which: str, node: FakeNode, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(which)
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("hlem") and client.is_model_ready("hlem", "1")
    about = client.get_model_metadata("hlem", "1")
    tensors = about["inputs"] if which == "http_client" else about.inputs
    names = [tensor["name"] if which == "http_client" else tensor.name for tensor in tensors]
    assert names == ["USER", "HISTORY", "NEW_ITEMS", "CANDIDATES"]
    node.scorer.ready = False
    assert client.is_server_live()
    assert not client.is_server_ready() and not client.is_model_ready("hlem")


@pytest.mark.parametrize("which", ["http_client", "grpc_client"])
def test_another_model_is_unknown(which: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue(which)
    asked = inputs(client, {"HISTORY": [4, 5], "CANDIDATES": [1]})
    for name, version in (("other", ""), ("hlem", "2")):
        with pytest.raises(InferenceServerException) as caught:
            client.infer(name, asked, version)
        assert caught.value.status() in ("404", "StatusCode.NOT_FOUND")


REFUSALS = [
    (None, "409", "FAILED_PRECONDITION", "no history is stored"),
    (Overloaded("the queue is full", 2.5), "503", "UNAVAILABLE", "the queue is full"),
    (NotServed("the node failed"), "500", "INTERNAL", "the node failed"),
    (ZeroDivisionError("secret of the inside"), "500", "INTERNAL", "the node failed while"),
]


@pytest.mark.parametrize("which", ["http_client", "grpc_client"])
@pytest.mark.parametrize("at_once", [True, False], ids=["raised", "set"])
@pytest.mark.parametrize(("error", "http", "grpc", "words"), REFUSALS)
def test_what_the_scorer_refuses(
    node: FakeNode, request: pytest.FixtureRequest, which: str, at_once: bool,
    error: Exception | None, http: str, grpc: str, words: str,
) -> None:  # fmt: skip
    client = request.getfixturevalue(which)
    if at_once:
        node.scorer.raises = error
    else:
        node.scorer.fails = error
    with pytest.raises(InferenceServerException) as caught:
        client.infer("hlem", inputs(client, {"NEW_ITEMS": [4], "CANDIDATES": [1]}, "stranger"))
    assert caught.value.status() in (http, f"StatusCode.{grpc}")
    assert words in caught.value.message()
    assert "secret" not in caught.value.message() and "Error" not in caught.value.message()
