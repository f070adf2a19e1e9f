"""Messages that gRPC refuses: with the right code, in words that repeat nothing of the message."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from serving_bridge.scoring import Overloaded
from tests.serving_bridge.server.fake_node import LIMITS, FakeNode, expected

SECRET = "zq9"
USER, HISTORY, CANDIDATES = 0, 1, 2
SERVICE = "/inference.GRPCInferenceService"


@pytest.fixture
def channel(node: FakeNode) -> Iterator[Any]:
    with grpc.insecure_channel(node.grpc_url) as channel:
        yield channel


def message(raw: bool = True) -> Any:
    made = messages.ModelInferRequest(model_name="hlem")
    made.inputs.add(name="USER", datatype="BYTES", shape=[1])
    for name, items in (("HISTORY", [5, 6, 7]), ("CANDIDATES", [1, 2])):
        made.inputs.add(name=name, datatype="INT64", shape=[len(items)])
        if raw:
            made.raw_input_contents.append(np.array(items).tobytes())
        else:
            made.inputs[-1].contents.int64_contents.extend(items)
    if raw:
        made.raw_input_contents.insert(0, b"\x03\0\0\0ann")
    else:
        made.inputs[USER].contents.bytes_contents.append(b"ann")
    return made


def infer(channel: Any, asked: Any) -> Any:
    call = channel.unary_unary(f"{SERVICE}/ModelInfer")
    raw = asked if isinstance(asked, bytes) else asked.SerializeToString()
    return messages.ModelInferResponse.FromString(call(raw, timeout=20))


def refused(channel: Any, asked: Any, code: str) -> Any:
    with pytest.raises(grpc.RpcError) as caught:
        infer(channel, asked)
    error: Any = caught.value
    assert error.code().name == code, error
    assert 0 < len(error.details()) < 200
    for leak in (SECRET, "Error", "Exception", "serving_bridge", "protobuf"):
        assert leak not in error.details()
    return error


@pytest.mark.parametrize("raw", [True, False])
def test_a_good_message_is_served(channel: Any, raw: bool) -> None:
    answer = infer(channel, message(raw))
    scores = np.frombuffer(answer.raw_output_contents[0], np.float32)
    np.testing.assert_array_equal(scores, expected([5, 6, 7], [1, 2]))
    assert [output.name for output in answer.outputs] == [
        "SCORES", "HISTORY_TOKENS", "REUSED_TOKENS",
    ]  # fmt: skip


def shape(*dims: int) -> Callable[[Any], None]:
    def spoil(made: Any) -> None:
        del made.inputs[HISTORY].shape[:]
        made.inputs[HISTORY].shape.extend(dims)

    return spoil


def raw_history(raw: bytes) -> Callable[[Any], None]:
    def spoil(made: Any) -> None:
        made.raw_input_contents[HISTORY] = raw

    return spoil


def set_input(at: int, **values: str) -> Callable[[Any], None]:
    def spoil(made: Any) -> None:
        for key, value in values.items():
            setattr(made.inputs[at], key, value)

    return spoil


def long_history(made: Any) -> None:
    shape(LIMITS.history_tokens + 1)(made)
    made.raw_input_contents[HISTORY] = bytes(8 * (LIMITS.history_tokens + 1))


def twice(made: Any) -> None:
    made.inputs.append(made.inputs[CANDIDATES])
    made.raw_input_contents.append(made.raw_input_contents[CANDIDATES])


BAD: dict[str, Callable[[Any], Any]] = {
    "wrong shape": shape(4),
    "negative shape": shape(-3),
    "overflowing shape": shape(2**63 - 1),
    "shape whose product wraps": shape(2**62, 4),
    "no dimension": shape(),
    "bytes that are no whole elements": raw_history(b"1" * 23),
    "negative item": raw_history(np.array([1, -1, 2]).tobytes()),
    "wrong datatype": set_input(HISTORY, datatype="FP64"),
    "unknown tensor": set_input(HISTORY, name=SECRET),
    "duplicate tensor": twice,
    "user's length is wrong": lambda m: m.raw_input_contents.__setitem__(USER, b"\x09\0\0\0ann"),
    "user is no UTF-8": lambda m: m.raw_input_contents.__setitem__(USER, b"\x01\0\0\0\xff"),
    "user is too long": lambda m: m.raw_input_contents.__setitem__(USER, b"\x2c\x01\0\0" + b"a" * 300),
    "too few raw tensors": lambda m: m.raw_input_contents.pop(),
    "too many raw tensors": lambda m: m.raw_input_contents.append(b""),
    "raw and typed": lambda m: m.inputs[HISTORY].contents.int64_contents.append(1),
    "no inputs": lambda m: m.ClearField("inputs"),
    "history over the limit": long_history,
    "unknown output": lambda m: m.outputs.add(name=SECRET),
    "duplicate output": lambda m: [m.outputs.add(name="SCORES") for _ in range(2)],
    "classification": lambda m: m.outputs.add(name="SCORES").parameters["classification"].__setattr__(
        "int64_param", 2
    ),
    "request parameter": lambda m: m.parameters[SECRET].__setattr__("bool_param", True),
    "input parameter": lambda m: m.inputs[0].parameters[SECRET].__setattr__("bool_param", True),
    "id is too long": lambda m: m.__setattr__("id", SECRET * 100),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_message(node: FakeNode, channel: Any, name: str) -> None:
    made = message()
    BAD[name](made)
    refused(channel, made, "INVALID_ARGUMENT")
    assert node.scorer.asked == []


BAD_TYPED: dict[str, Callable[[Any], Any]] = {
    "elements of another type": lambda m: m.inputs[HISTORY].contents.fp32_contents.append(1.5),
    "integers of 32 bits": lambda m: (
        m.inputs[HISTORY].contents.ClearField("int64_contents"),
        m.inputs[HISTORY].contents.int_contents.extend([1, 2, 3]),
    ),
    "too few elements": lambda m: m.inputs[HISTORY].contents.int64_contents.pop(),
    "no user": lambda m: m.inputs[USER].ClearField("contents"),
    "two users": lambda m: m.inputs[USER].contents.bytes_contents.append(b"bob"),
}


@pytest.mark.parametrize("name", BAD_TYPED)
def test_typed_message(channel: Any, name: str) -> None:
    made = message(raw=False)
    BAD_TYPED[name](made)
    refused(channel, made, "INVALID_ARGUMENT")


def test_bytes_that_are_no_message(channel: Any) -> None:
    for raw in (b"\xff\xff\xff", message().SerializeToString()[:-4], b"\x0a\x05zq9"):
        refused(channel, raw, "INVALID_ARGUMENT")


def test_message_over_the_limit(channel: Any) -> None:
    made = message()
    made.raw_input_contents[HISTORY] = bytes(LIMITS.body_bytes)
    refused(channel, made, "RESOURCE_EXHAUSTED")


def test_overload_says_when_to_come_back(node: FakeNode, channel: Any) -> None:
    node.scorer.raises = Overloaded("the queue is full", 2.5)
    error = refused(channel, message(), "UNAVAILABLE")
    assert ("retry-after", "3") in error.trailing_metadata()


@pytest.mark.parametrize(
    "call",
    ["RepositoryModelUnload", "RepositoryModelLoad", "ModelConfig", "ModelStatistics", "Zq9"],
)
def test_other_calls_are_not_there(channel: Any, call: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"{SERVICE}/{call}")(b"", timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
