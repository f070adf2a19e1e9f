"""Inference requests as they go over the wire, built without a client's library."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages

INFER = "/v2/models/hlem/infer"
GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"


def http_request(body: bytes, headers: dict[str, str]) -> bytes:
    """A request as it goes over the socket.

    In one piece: sent in two, the second waits 40 ms for an acknowledgement of the first.
    """
    lines = [f"POST {INFER} HTTP/1.1", "Host: node", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def json_request(
    history: NDArray[np.int64], candidates: NDArray[np.int64], user: str = "user"
) -> bytes:
    """A body of JSON alone."""
    inputs = [
        {"name": "USER", "datatype": "BYTES", "shape": [1], "data": [user]},
        _described("HISTORY", history) | {"data": history},
        _described("CANDIDATES", candidates) | {"data": candidates},
    ]
    return orjson.dumps({"inputs": inputs}, option=orjson.OPT_SERIALIZE_NUMPY)


def binary_request(
    history: NDArray[np.int64], candidates: NDArray[np.int64], user: str = "user"
) -> tuple[bytes, dict[str, str]]:
    """A body whose tensors are raw, answer included, and its headers."""
    name = _bytes_element(user)
    inputs = [
        {"name": "USER", "datatype": "BYTES", "shape": [1]}
        | {"parameters": {"binary_data_size": len(name)}},
        _described("HISTORY", history) | {"parameters": {"binary_data_size": history.nbytes}},
        _described("CANDIDATES", candidates)
        | {"parameters": {"binary_data_size": candidates.nbytes}},
    ]
    head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    raw = name + history.tobytes() + candidates.tobytes()
    return head + raw, {"Inference-Header-Content-Length": str(len(head))}


def grpc_request(
    history: NDArray[np.int64], candidates: NDArray[np.int64], user: str = "user"
) -> bytes:
    """A ModelInferRequest whose tensors are raw."""
    message = messages.ModelInferRequest(model_name="hlem")
    message.inputs.add(name="USER", datatype="BYTES", shape=[1])
    message.raw_input_contents.append(_bytes_element(user))
    for name, values in (("HISTORY", history), ("CANDIDATES", candidates)):
        message.inputs.add(name=name, datatype="INT64", shape=[values.size])
        message.raw_input_contents.append(values.tobytes())
    return bytes(message.SerializeToString())


def _described(name: str, values: NDArray[np.int64]) -> dict[str, Any]:
    return {"name": name, "datatype": "INT64", "shape": [values.size]}


def _bytes_element(text: str) -> bytes:
    """An element of a raw BYTES tensor."""
    encoded = text.encode("utf-8")
    return len(encoded).to_bytes(4, "little") + encoded
