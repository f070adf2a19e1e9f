"""Inference requests and answers of gRPC, in the protocol's public messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as messages

from serving_bridge.scoring import InvalidRequest, Items, Limits, Scored
from serving_bridge.server.codec import (
    Inference,
    checked_id,
    checked_input,
    integers_from_bytes,
    output_values,
    raw_bytes,
    refuse_unless,
    score_request,
    user_from_bytes,
    user_from_raw,
    wanted_outputs,
)
from serving_bridge.server.contract import MODEL, OUTPUTS, VERSION
from serving_bridge.server.refusals import UnknownModel


def check_model(name: str, version: str) -> None:
    """Raise UnknownModel unless this is the model here; no version means the latest."""
    if name != MODEL or version not in ("", VERSION):
        raise UnknownModel(f"the only model here is {MODEL}, version {VERSION}")


def read_message(message: Any, limits: Limits) -> Inference:
    """A request from a ModelInferRequest.

    Args:
        message: tensors in `raw_input_contents`, in the order of the inputs, or in each one's `contents`.
        limits: of the node.

    Raises:
        UnknownModel: another model or version.
        InvalidRequest: with what is wrong.
    """
    check_model(message.model_name, message.model_version)
    refuse_unless(not message.parameters, "this node takes no request parameters")
    raw = message.raw_input_contents
    refuse_unless(
        len(raw) in (0, len(message.inputs)),
        "raw_input_contents must hold one element for each input, or none",
    )
    user: str | None = None
    items: dict[str, Items] = {}
    for i, described in enumerate(message.inputs):
        taken = items if user is None else {**items, "USER": None}
        name, elements = checked_input(
            described.name, described.datatype, list(described.shape), taken, limits
        )
        refuse_unless(not described.parameters, f"{name} takes no parameters")
        if raw:
            refuse_unless(
                not described.HasField("contents"),
                f"{name} must be given raw or in contents, not both",
            )
            if name == "USER":
                user = user_from_raw(raw[i], limits)
            else:
                items[name] = integers_from_bytes(name, raw[i], elements)
        elif name == "USER":
            user = _user(described.contents, limits)
        else:
            items[name] = _integers(name, described.contents, elements)
    for output in message.outputs:
        refuse_unless(not output.parameters, "outputs take no parameters")
    outputs = wanted_outputs([(output.name, True) for output in message.outputs], True)
    return Inference(score_request(user, items), checked_id(message.id), outputs)


def write_message(inference: Inference, scored: Scored) -> Any:
    """The answer as a ModelInferResponse, its tensors in `raw_output_contents`.

    Raises:
        NotServed: a score is not finite.
    """
    answer = messages.ModelInferResponse(model_name=MODEL, model_version=VERSION, id=inference.id)
    for name, _ in inference.outputs:
        values = output_values(name, scored)
        answer.outputs.add(name=name, datatype=OUTPUTS[name].datatype, shape=[values.size])
        answer.raw_output_contents.append(raw_bytes(values))
    return answer


def _user(contents: Any, limits: Limits) -> str:
    """From the typed field that belongs to BYTES."""
    _alone("USER", contents, "bytes_contents")
    refuse_unless(len(contents.bytes_contents) == 1, "USER must hold one element in bytes_contents")
    return user_from_bytes(contents.bytes_contents[0], limits)


def _integers(name: str, contents: Any, elements: int) -> Items:
    """From the typed field that belongs to INT64, int64 [elements]."""
    _alone(name, contents, "int64_contents")
    refuse_unless(
        len(contents.int64_contents) == elements,
        f"{name} must have as many elements in int64_contents as its shape says",
    )
    return np.array(contents.int64_contents, np.int64)


def _alone(name: str, contents: Any, field: str) -> None:
    """Refuse elements in a field of another datatype."""
    if any(found.name != field for found, _ in contents.ListFields()):
        raise InvalidRequest(f"{name} must be given in {field}")
