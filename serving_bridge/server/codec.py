"""What an inference request must be, whichever way it came: checks that REST and gRPC share.

checked_input     one input's name, datatype and shape -> how many elements it has
integers          its elements, from what the wire held
score_request     the inputs together -> ScoreRequest
wanted_outputs    the outputs that were asked for
output_values     Scored -> the values of an output
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from serving_bridge.scoring import InvalidRequest, Items, Limits, NotServed, Scored, ScoreRequest
from serving_bridge.server.contract import INPUTS, OUTPUTS, TensorSpec

ID_CHARACTERS = 256
"""Of a request's id, at most."""


class Output(NamedTuple):
    """An output that was asked for."""

    name: str
    binary: bool
    """As raw bytes behind the JSON header; gRPC sends all outputs raw."""


class Inference(NamedTuple):
    """An inference request that passed every check."""

    request: ScoreRequest
    id: str
    """Empty if it has none."""
    outputs: tuple[Output, ...]


def refuse_unless(condition: bool, message: str) -> None:
    """Raise InvalidRequest unless `condition` holds."""
    if not condition:
        raise InvalidRequest(message)


def checked_id(value: object) -> str:
    """A request's id.

    Raises:
        InvalidRequest: no string, or too long.
    """
    if not isinstance(value, str) or len(value) > ID_CHARACTERS:
        raise InvalidRequest(f"id must be a string of at most {ID_CHARACTERS} characters")
    return value


def checked_input(
    name: object, datatype: object, shape: object, taken: Mapping[str, object], limits: Limits
) -> tuple[str, int]:
    """Name and number of elements of an input.

    Args:
        name: as it was sent, as are `datatype` and `shape`.
        datatype: must be the model's.
        shape: must be [n].
        taken: the inputs before it.
        limits: of the node.

    Raises:
        InvalidRequest: the model has no such input, or not like this, or it came before, or it is too long.
    """
    spec = INPUTS.get(name) if isinstance(name, str) else None
    if spec is None or not isinstance(name, str):
        raise InvalidRequest(f"unknown input; this model takes {', '.join(INPUTS)}")
    refuse_unless(name not in taken, f"{name} was given twice")
    refuse_unless(datatype == spec.datatype, f"{name} must have the datatype {spec.datatype}")
    elements = _elements(name, shape, spec)
    most = limits.candidates if name == "CANDIDATES" else limits.history_tokens
    refuse_unless(elements <= most, f"{name} may have at most {most} elements")
    return name, elements


def _elements(name: str, shape: object, spec: TensorSpec) -> int:
    """Number of elements of a shape, which must have one dimension."""
    expected = "[1]" if spec.elements == 1 else "[n], n the number of its elements"
    if not isinstance(shape, list) or len(shape) != 1:
        raise InvalidRequest(f"{name} must have the shape {expected}")
    (elements,) = shape
    # bool is an int to Python, and no dimension.
    if type(elements) is not int or not 0 <= elements < 2**63:
        raise InvalidRequest(f"{name} must have the shape {expected}")
    refuse_unless(spec.elements in (-1, elements), f"{name} must have the shape {expected}")
    return elements


def integers_from_list(name: str, values: object, elements: int) -> Items:
    """Elements of an input that came as a JSON list, as int64 [elements].

    Args:
        name: of the input.
        values: the list, or the array that was read from one.
        elements: how many its shape says.

    Raises:
        InvalidRequest: no list, nested, another length, or an element is no integer of 64 bits.
    """
    wanted = f"{name} must be a flat list of integers of 64 bits"
    if not isinstance(values, list | np.ndarray):
        raise InvalidRequest(wanted)
    refuse_unless(len(values) == elements, f"{name} must have as many elements as its shape says")
    if isinstance(values, np.ndarray):
        return values
    # `array` takes a bool, which is an integer to Python, and refuses everything else.
    refuse_unless(bool not in set(map(type, values)), wanted)
    try:
        return np.frombuffer(array("q", values), np.int64)
    except (TypeError, OverflowError):
        raise InvalidRequest(wanted) from None


def integers_from_bytes(name: str, raw: memoryview | bytes, elements: int) -> Items:
    """Elements of an input that came as raw little-endian bytes, as int64 [elements].

    Raises:
        InvalidRequest: not eight bytes for each element.
    """
    refuse_unless(len(raw) == 8 * elements, f"{name} must hold 8 bytes for each element")
    # A copy: the bytes may start anywhere, and the whole body would live as long as the view.
    return np.frombuffer(raw, "<i8").astype(np.int64, copy=True)


def user_from_bytes(raw: bytes, limits: Limits) -> str:
    """The user of a BYTES element.

    Raises:
        InvalidRequest: empty, too long, or no UTF-8.
    """
    refuse_unless(
        1 <= len(raw) <= limits.user_bytes, f"USER must have 1 to {limits.user_bytes} bytes"
    )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("USER must be UTF-8") from None


def user_from_raw(raw: memoryview | bytes, limits: Limits) -> str:
    """The user of a raw BYTES tensor of one element: its length in four bytes, then itself.

    Raises:
        InvalidRequest: the length is not that of what follows, or as `user_from_bytes`.
    """
    length = int.from_bytes(raw[:4], "little")
    refuse_unless(
        len(raw) >= 4 and len(raw) == 4 + length,
        "USER must hold its length in 4 bytes and as many bytes as that",
    )
    return user_from_bytes(bytes(raw[4:]), limits)


def score_request(user: str | None, items: Mapping[str, Items]) -> ScoreRequest:
    """The inputs together.

    Args:
        user: None if it was not given.
        items: the other inputs by name.

    Raises:
        InvalidRequest: one is missing, both or none of HISTORY and NEW_ITEMS, none where one is needed, or
            an item's id is negative.
    """
    if user is None or "CANDIDATES" not in items:
        raise InvalidRequest("USER and CANDIDATES are needed")
    refuse_unless(
        ("HISTORY" in items) != ("NEW_ITEMS" in items),
        "either HISTORY or NEW_ITEMS is needed, and not both",
    )
    for name, values in items.items():
        if values.size:
            refuse_unless(int(values.min()) >= 0, f"{name} must not hold negative items")
        else:
            refuse_unless(name == "NEW_ITEMS", f"{name} must hold at least one item")
    return ScoreRequest(user, items["CANDIDATES"], items.get("HISTORY"), items.get("NEW_ITEMS"))


def wanted_outputs(asked: Iterable[tuple[object, bool]], binary: bool) -> tuple[Output, ...]:
    """The outputs that were asked for, all if none was named.

    Args:
        asked: names and whether each is wanted raw.
        binary: whether all are wanted raw if none is named.

    Raises:
        InvalidRequest: an output that the model has not, or one twice.
    """
    found: dict[str, Output] = {}
    for name, raw in asked:
        if not isinstance(name, str) or name not in OUTPUTS:
            raise InvalidRequest(f"unknown output; this model gives {', '.join(OUTPUTS)}")
        refuse_unless(name not in found, f"{name} was asked for twice")
        found[name] = Output(name, raw)
    return tuple(found.values()) or tuple(Output(name, binary) for name in OUTPUTS)


def output_values(name: str, scored: Scored) -> NDArray[np.float32] | Items:
    """The values of an output: float32 [candidates] or int64 [1].

    Raises:
        NotServed: a score is not finite.
    """
    if name == "SCORES":
        if not np.isfinite(scored.scores).all():
            raise NotServed("the node computed a score that is no finite number")
        return np.ascontiguousarray(scored.scores, np.float32)
    count = scored.history_tokens if name == "HISTORY_TOKENS" else scored.reused_tokens
    return np.array([count], np.int64)


def raw_bytes(values: NDArray[np.float32] | Items) -> bytes:
    """Values as little-endian bytes."""
    if sys.byteorder == "big":
        values = values.byteswap()
    return values.tobytes()
