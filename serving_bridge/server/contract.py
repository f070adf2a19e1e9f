"""The model as clients see it: its name, its tensors, what it says of itself."""

from __future__ import annotations

from importlib import metadata
from typing import Any, Final, NamedTuple

MODEL: Final = "hlem"
VERSION: Final = "1"
SERVER: Final = "hlem"
EXTENSIONS: Final = ("binary_tensor_data",)
PLATFORM: Final = "hlem_hstu"


class TensorSpec(NamedTuple):
    """A tensor of one dimension."""

    datatype: str
    elements: int
    """-1: as many as the request has."""


INPUTS: Final = {
    "USER": TensorSpec("BYTES", 1),
    "HISTORY": TensorSpec("INT64", -1),
    "NEW_ITEMS": TensorSpec("INT64", -1),
    "CANDIDATES": TensorSpec("INT64", -1),
}
"""USER and CANDIDATES, and either HISTORY or NEW_ITEMS."""

OUTPUTS: Final = {
    "SCORES": TensorSpec("FP32", -1),
    "HISTORY_TOKENS": TensorSpec("INT64", 1),
    "REUSED_TOKENS": TensorSpec("INT64", 1),
}
"""A score for each candidate, the length of the user's history, and how much of it was cached."""


def server_metadata() -> dict[str, Any]:
    """What the server says of itself."""
    return {"name": SERVER, "version": _version(), "extensions": list(EXTENSIONS)}


def model_metadata() -> dict[str, Any]:
    """What the model takes and gives."""
    return {
        "name": MODEL,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": _described(INPUTS),
        "outputs": _described(OUTPUTS),
    }


def _described(tensors: dict[str, TensorSpec]) -> list[dict[str, Any]]:
    return [
        {"name": name, "datatype": spec.datatype, "shape": [spec.elements]}
        for name, spec in tensors.items()
    ]


def _version() -> str:
    try:
        return metadata.version("hlem")
    except metadata.PackageNotFoundError:
        return "unknown"
