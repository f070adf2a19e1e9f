"""Inference requests and answers of REST: JSON, with the tensors inside or as raw bytes behind it."""

from __future__ import annotations

from typing import Any

import orjson

from serving_bridge.scoring import InvalidRequest, Items, Limits, Scored
from serving_bridge.server.codec import (
    Inference,
    Output,
    checked_id,
    checked_input,
    integers_from_bytes,
    integers_from_list,
    output_values,
    raw_bytes,
    refuse_unless,
    score_request,
    user_from_bytes,
    user_from_raw,
    wanted_outputs,
)
from serving_bridge.server.contract import MODEL, OUTPUTS, VERSION
from serving_bridge.server.integer_lists import Loaded, load_json

HEADER_LENGTH = "Inference-Header-Content-Length"
"""The HTTP header that says how many bytes are JSON; raw tensors follow them."""


def header_length(value: str | None, body_bytes: int) -> int | None:
    """How many bytes of the body are JSON; None: all, and no raw tensor.

    Raises:
        InvalidRequest: no plain number, or more than the body has.
    """
    if value is None:
        return None
    # int() takes signs, spaces, underscores and the digits of other scripts.
    good = value.isascii() and value.isdigit() and len(value) <= 20
    if not good or int(value) > body_bytes:
        raise InvalidRequest(f"{HEADER_LENGTH} must be a whole number, at most the body's length")
    return int(value)


def read_inference(body: bytes, json_bytes: int | None, limits: Limits) -> Inference:
    """A request from its body, decompressed.

    Args:
        body: JSON, and raw tensors in the order of the inputs.
        json_bytes: how much of it is JSON; None for all.
        limits: of the node.

    Raises:
        InvalidRequest: with what is wrong.
    """
    text = body if json_bytes is None else body[:json_bytes]
    raw = memoryview(body)[len(text) :]
    try:
        loaded = load_json(text)
    except ValueError:
        raise InvalidRequest("the body must be JSON") from None
    document = loaded.document
    _only(document, "the body", {"id", "parameters", "inputs", "outputs"})
    parameters = _parameters(document, "the body", {"binary_data_output"})
    binary = _flag(parameters, "binary_data_output", False)
    user, items = _inputs(document.get("inputs"), loaded, raw, limits)
    return Inference(
        score_request(user, items),
        checked_id(document.get("id", "")),
        _outputs(document.get("outputs", []), binary),
    )


def write_inference(inference: Inference, scored: Scored) -> tuple[bytes, int | None]:
    """The answer's body, and how many bytes of it are JSON if raw tensors follow.

    Raises:
        NotServed: a score is not finite.
    """
    described: list[dict[str, Any]] = []
    raw: list[bytes] = []
    for name, binary in inference.outputs:
        values = output_values(name, scored)
        output: dict[str, Any] = {
            "name": name,
            "datatype": OUTPUTS[name].datatype,
            "shape": [values.size],
        }
        if binary:
            raw.append(raw_bytes(values))
            output["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            output["data"] = values
        described.append(output)
    answer: dict[str, Any] = {"model_name": MODEL, "model_version": VERSION}
    if inference.id:
        answer["id"] = inference.id
    answer["outputs"] = described
    text = orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
    return (b"".join([text, *raw]), len(text)) if raw else (text, None)


def _inputs(
    inputs: object, loaded: Loaded, raw: memoryview, limits: Limits
) -> tuple[str | None, dict[str, Items]]:
    """The user, and the other inputs by name."""
    if not isinstance(inputs, list):
        raise InvalidRequest("inputs must be a list")
    user: str | None = None
    items: dict[str, Items] = {}
    for described in inputs:
        _only(described, "an input", {"name", "datatype", "shape", "parameters", "data"})
        # The user is no item, and yet may come only once.
        taken = items if user is None else {**items, "USER": None}
        name, elements = checked_input(
            described.get("name"),
            described.get("datatype"),
            described.get("shape"),
            taken,
            limits,
        )
        size = _raw_size(described, name, len(raw))
        if size is None:
            values = loaded.list_or_array(described["data"])
            if name == "USER":
                user = _user_from_list(values, limits)
            else:
                items[name] = integers_from_list(name, values, elements)
        else:
            own, raw = raw[:size], raw[size:]
            if name == "USER":
                user = user_from_raw(own, limits)
            else:
                items[name] = integers_from_bytes(name, own, elements)
    refuse_unless(not raw, "the body has bytes behind the JSON that belong to no input")
    return user, items


def _raw_size(described: dict[str, Any], name: str, left: int) -> int | None:
    """Bytes of an input's raw tensor; None if its elements are in the JSON."""
    parameters = _parameters(described, name, {"binary_data_size"})
    refuse_unless(
        ("data" in described) != ("binary_data_size" in parameters),
        f"{name} needs either data or the parameter binary_data_size",
    )
    if "data" in described:
        return None
    size = parameters["binary_data_size"]
    if type(size) is not int or not 0 <= size <= left:
        raise InvalidRequest(
            f"binary_data_size of {name} must be a whole number, at most the bytes that follow"
        )
    return size


def _user_from_list(values: object, limits: Limits) -> str:
    if not isinstance(values, list) or len(values) != 1 or not isinstance(values[0], str):
        raise InvalidRequest("USER must be a list of one string")
    return user_from_bytes(values[0].encode("utf-8"), limits)


def _outputs(outputs: object, binary: bool) -> tuple[Output, ...]:
    if not isinstance(outputs, list):
        raise InvalidRequest("outputs must be a list")
    asked = []
    for output in outputs:
        _only(output, "an output", {"name", "parameters"})
        parameters = _parameters(output, "an output", {"binary_data"})
        asked.append((output.get("name"), _flag(parameters, "binary_data", binary)))
    return wanted_outputs(asked, binary)


def _only(value: object, what: str, known: set[str]) -> None:
    """Refuse what is no object, or has a key that means nothing here."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be an object")
    if not value.keys() <= known:
        raise InvalidRequest(f"{what} may have no keys but {', '.join(sorted(known))}")


def _parameters(owner: dict[str, Any], what: str, known: set[str]) -> dict[str, Any]:
    parameters = owner.get("parameters", {})
    _only(parameters, f"the parameters of {what}", known)
    return parameters  # type: ignore[no-any-return]


def _flag(parameters: dict[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false")
    return value
