"""The OpenAPI document of the REST API: what it takes and gives, and nothing that it does not."""

from __future__ import annotations

from typing import Any, Final

from serving_bridge.scoring import Limits
from serving_bridge.server.codec import ID_CHARACTERS
from serving_bridge.server.contract import INPUTS, MODEL, OUTPUTS, VERSION, server_metadata
from serving_bridge.server.json_codec import HEADER_LENGTH
from serving_bridge.server.request_body import JSON, RAW
from serving_bridge.status import MODES

Json = dict[str, Any]
_STRING: Final[Json] = {"type": "string"}
_BOOL: Final[Json] = {"type": "boolean"}
_COUNT: Final[Json] = {"type": "integer", "minimum": 0}
_ITEM: Final[Json] = {"type": "integer", "minimum": 0, "maximum": 2**63 - 1}
EXAMPLE: Final[Json] = {
    "id": "42",
    "inputs": [
        {"name": "USER", "datatype": "BYTES", "shape": [1], "data": ["ann"]},
        {"name": "HISTORY", "datatype": "INT64", "shape": [3], "data": [17, 4, 2300]},
        {"name": "CANDIDATES", "datatype": "INT64", "shape": [2], "data": [5, 99]},
    ],
}
REFUSED: Final = {
    400: "The request is not one that this node takes.",
    408: "The body did not arrive in time.",
    409: "New items of a user without a stored history, or whose history was removed for want of room.",
    413: "The body is over the limit.",
    415: "The body is of a type or an encoding that this node does not read.",
    500: "The node failed while it handled the request.",
    503: "The queue is full, or the node is draining.",
}
_RETRY: Final[Json] = {
    "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}
}


def openapi_document(limits: Limits, admin: bool) -> Json:
    """The document, OpenAPI 3.1.

    Args:
        limits: of the node; they are in the schemas.
        admin: whether the admin API is on.
    """
    model = f"/v2/models/{MODEL}"
    version = f"{model}/versions/{VERSION}"
    paths: Json = {
        "/v2": _read("What the server is", _ref("Server")),
        "/v2/health/live": _read("Whether the process answers", _object(live=_BOOL)),
        "/v2/health/ready": _ready("Whether requests are taken", _object(ready=_BOOL)),
        "/metrics": _read("Metrics for Prometheus", _STRING, "text/plain"),
        "/status": _status(),
        "/openapi.json": _read("This document", {"type": "object"}),
    }
    for path in (model, version):
        paths[path] = _read("What the model takes and gives", _ref("Model"))
        paths[f"{path}/ready"] = _ready(
            "Whether the model takes requests", _object(name={"const": MODEL}, ready=_BOOL)
        )
        paths[f"{path}/infer"] = _infer()
    components: Json = {"schemas": _schemas(limits)}
    if admin:
        paths |= _admin()
        components["securitySchemes"] = {"admin": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "HLEM node", "version": str(server_metadata()["version"])},
        "paths": paths,
        "components": components,
    }


def _infer() -> Json:
    answers = {JSON: {"schema": _ref("Answer")}, RAW: {"schema": _STRING}}
    header = {
        "name": HEADER_LENGTH,
        "in": "header",
        "description": "How many bytes of the body are JSON, where raw tensors follow them.",
        "schema": {"type": "integer", "minimum": 0},
    }
    responses: Json = {
        "200": {
            "description": "The scores. Raw tensors follow the JSON where they were asked for.",
            "headers": {HEADER_LENGTH: {"schema": _COUNT}},
            "content": answers,
        }
    }
    responses |= _refusals(400, 408, 409, 413, 415, 500, 503)
    body = {
        "required": True,
        "description": "May be encoded as gzip or deflate.",
        "content": {JSON: {"schema": _ref("Request"), "example": EXAMPLE}},
    }
    return {
        "post": {
            "summary": "Score candidates for a user",
            "parameters": [header],
            "requestBody": body,
            "responses": responses,
        }
    }


def _status() -> Json:
    after = {
        "name": "after",
        "in": "query",
        "description": "Only epochs after this one.",
        "schema": {"type": "integer", "minimum": -1, "maximum": 10**18 - 1, "default": -1},
    }
    epochs = {"type": "array", "items": {"type": "object", "required": ["epoch"]}}
    # Another `run` is another process of the node: its epochs count from 0.
    told = _object(run=_STRING, ready=_BOOL, draining=_BOOL, epochs=epochs)
    path = _read("The node's last epochs", told)
    path["get"]["parameters"] = [after]
    path["get"]["responses"] |= _refusals(400)
    return path


def _admin() -> Json:
    mode = {"enum": list(MODES)}
    alpha = {"type": ["integer", "null"], "minimum": 0, "maximum": 100}
    folder = {"type": "string", "minLength": 1}
    refused = _refusals(400, 401, 408, 409, 413, 415, 500)

    def put(summary: str, takes: Json, gives: Json) -> Json:
        return {
            "summary": summary,
            "security": [{"admin": []}],
            "requestBody": {"required": True, "content": {JSON: {"schema": takes}}},
            "responses": {"200": _ok(gives), **refused},
        }

    read = _read("The mode in force", _object(mode=mode))["get"]
    read["security"] = [{"admin": []}]
    read["responses"] |= _refusals(401)
    return {
        "/admin/mode": {
            "get": read,
            "put": put("Set the mode", _object(mode=mode), _object(mode=mode)),
        },
        "/admin/hold": {
            "put": put(
                "Hold alpha, or let go", _object(alpha_centi=alpha), _object(alpha_centi=alpha)
            )
        },
        "/admin/policy": {
            "put": put(
                "Decide by the policy of a folder on the node",
                _object(folder=folder),
                _object(swapped={"const": True}),
            )
        },
    }


def _schemas(limits: Limits) -> Json:
    described = _object(
        name=_STRING, datatype=_STRING, shape={"type": "array", "items": {"type": "integer"}}
    )
    return {
        "Error": _object(error=_STRING),
        "Server": _object(
            name=_STRING, version=_STRING, extensions={"type": "array", "items": _STRING}
        ),
        "Model": _object(
            name={"const": MODEL},
            versions={"type": "array", "items": {"const": VERSION}},
            platform=_STRING,
            inputs={"type": "array", "items": described},
            outputs={"type": "array", "items": described},
        ),
        "Request": _request(limits),
        "Answer": _answer(),
    }


def _request(limits: Limits) -> Json:
    inputs = [_input(name, limits) for name in INPUTS]
    output = _object(name={"enum": list(OUTPUTS)})
    output["properties"]["parameters"] = _optional(binary_data=_BOOL)
    schema = _object(
        inputs={
            "type": "array",
            "minItems": 3,
            "maxItems": 3,
            "items": {"oneOf": inputs},
            "description": "USER, CANDIDATES, and either HISTORY or NEW_ITEMS.",
        }
    )
    schema["properties"] |= {
        "id": {"type": "string", "maxLength": ID_CHARACTERS},
        "parameters": _optional(binary_data_output=_BOOL),
        "outputs": {"type": "array", "items": output, "maxItems": len(OUTPUTS)},
    }
    return schema


def _input(name: str, limits: Limits) -> Json:
    """One input with its elements in the JSON, or as raw bytes behind it."""
    most = limits.candidates if name == "CANDIDATES" else limits.history_tokens
    least = 0 if name == "NEW_ITEMS" else 1
    if name == "USER":
        most = 1
    element = (
        {"type": "string", "minLength": 1, "maxLength": limits.user_bytes}
        if name == "USER"
        else _ITEM
    )
    size = {"type": "integer", "minimum": least}
    schema = _object(
        name={"const": name},
        datatype={"const": INPUTS[name].datatype},
        shape={
            "type": "array",
            "minItems": 1,
            "maxItems": 1,
            "items": {"type": "integer", "minimum": least, "maximum": most},
        },
    )
    schema["properties"]["data"] = {
        "type": "array", "minItems": least, "maxItems": most, "items": element,
    }  # fmt: skip
    schema["properties"]["parameters"] = _optional(binary_data_size=size)
    return schema


def _answer() -> Json:
    output = _object(
        name={"enum": list(OUTPUTS)},
        datatype={"enum": sorted({spec.datatype for spec in OUTPUTS.values()})},
        shape={"type": "array", "minItems": 1, "maxItems": 1, "items": _COUNT},
    )
    output["properties"] |= {
        "data": {"type": "array", "items": {"type": "number"}},
        "parameters": _object(binary_data_size=_COUNT),
    }
    schema = _object(
        model_name={"const": MODEL},
        model_version={"const": VERSION},
        outputs={"type": "array", "items": output},
    )
    schema["properties"]["id"] = _STRING
    return schema


def _object(**properties: Json) -> Json:
    """An object with these properties, all required, and no other."""
    return {**_optional(**properties), "required": list(properties)}


def _optional(**properties: Json) -> Json:
    return {"type": "object", "properties": dict(properties), "additionalProperties": False}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _ok(schema: Json, media: str = JSON) -> Json:
    return {"description": "OK", "content": {media: {"schema": schema}}}


def _read(summary: str, schema: Json, media: str = JSON) -> Json:
    return {"get": {"summary": summary, "responses": {"200": _ok(schema, media)}}}


def _ready(summary: str, schema: Json) -> Json:
    path = _read(summary, schema)
    not_ready = _ok(schema) | {"description": "Not yet, or no longer.", "headers": _RETRY}
    path["get"]["responses"]["503"] = not_ready
    return path


def _refusals(*statuses: int) -> Json:
    found: Json = {}
    for status in statuses:
        words = REFUSED.get(status, "The admin token is needed.")
        found[str(status)] = {"description": words, "content": {JSON: {"schema": _ref("Error")}}}
        if status == 503:
            found["503"]["headers"] = _RETRY
    return found
