"""The adapter's state on disk: weights, replay and counters, so that a restart goes on learning.

A folder of `adapter.json`, which names a tensor file and its SHA-256, and that file. The tensors are
written first under the name of their hash, then `adapter.json` is replaced in one step: at every
moment the folder holds the old state or the new one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from hlem_env.errors import ArtefactError
from serving_bridge.adapter import FEATURES, OnlineAdapter
from serving_bridge.durable import replace_file
from serving_bridge.residual_network import Weights, frozen, packed

logger = logging.getLogger(__name__)

STATE_FILE = "adapter.json"
FORMAT, FORMAT_VERSION = "hlem-adapter", 2
MAX_BYTES = 1 << 20
"""Of either file: a thousand samples take 64 kB."""
_TENSORS = re.compile(r"adapter-[0-9a-f]{16}\.safetensors")


def save_state(adapter: OnlineAdapter, folder: str | Path, policy_sha256: str) -> None:
    """Write the state, from any thread but the one that learns.

    Args:
        adapter: whose weights and replay.
        folder: made if missing.
        policy_sha256: of the policy's weights: a residual on another policy means nothing.

    Raises:
        OSError: it cannot be written; the state before is as it was.
    """
    folder, learner = Path(folder), adapter.learner
    with adapter.learning:
        tensors = {
            **learner.weights._asdict(),
            "replay": learner.replay.copy(),
            "worth": learner.worth.numbers(),
        }
        seen = learner.seen
    data = safetensors.numpy.save({k: np.ascontiguousarray(v) for k, v in tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    name = f"adapter-{digest[:16]}.safetensors"
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "features": list(FEATURES),
        "policy_sha256": policy_sha256,
        "bound": adapter.settings.bound,
        "explore": adapter.settings.explore,
        "seen": seen,
        "tensors": name,
        "tensors_sha256": digest,
    }
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / name, data)
    replace_file(folder / STATE_FILE, (json.dumps(document, indent=1) + "\n").encode())
    for file in folder.iterdir():
        if _TENSORS.fullmatch(file.name) and file.name != name:
            file.unlink(missing_ok=True)


def restore_state(adapter: OnlineAdapter, folder: str | Path, policy_sha256: str) -> bool:
    """Go on from a saved state; whether there was one that fits.

    A state that is damaged, or of another policy or version, is told of in a warning, kept aside as
    `*.bad`, and the adapter starts from zero. Without a state nothing is said.
    """
    folder = Path(folder)
    if not (folder / STATE_FILE).exists():
        return False
    try:
        document = _document(folder / STATE_FILE)
        tensors, seen = _checked(document, folder, adapter, policy_sha256)
    except ArtefactError as error:
        logger.warning("the adapter starts from zero: %s", error)
        _put_aside(folder)
        return False
    weights = Weights(*(tensors[key].copy() for key in Weights._fields))
    adapter.learner.replay[:] = tensors["replay"]
    adapter.learner.seen = seen
    adapter.learner.weights = frozen(weights)
    adapter.learner.worth.restore(tensors["worth"])
    adapter.snapshot, adapter.worth = packed(weights), adapter.learner.worth.worth
    return True


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ArtefactError(f"{path}: not an object")
    return document


def _checked(
    document: dict[str, Any], folder: Path, adapter: OnlineAdapter, policy_sha256: str
) -> tuple[dict[str, NDArray[np.float64]], int]:
    about = folder / STATE_FILE
    for key, wanted in {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "features": list(FEATURES),
        "policy_sha256": policy_sha256,
        "bound": adapter.settings.bound,
        "explore": adapter.settings.explore,
    }.items():
        if document.get(key) != wanted:
            raise ArtefactError(f"{about}: {key} is {document.get(key)!r}; needed is {wanted!r}")
    name, seen = document.get("tensors"), document.get("seen")
    if not (isinstance(name, str) and _TENSORS.fullmatch(name)):
        raise ArtefactError(f"{about}: tensors is {name!r}; needed is the name of a file")
    if type(seen) is not int or seen < 0:
        raise ArtefactError(f"{about}: seen is {seen!r}; needed is a whole number from 0")
    data = _read(folder / name)
    if hashlib.sha256(data).hexdigest() != document.get("tensors_sha256"):
        raise ArtefactError(f"{folder / name}: not the file that {STATE_FILE} names")
    try:
        tensors = safetensors.numpy.load(data)
    except (SafetensorError, ValueError) as error:
        raise ArtefactError(f"{folder / name}: {error}") from error
    learner = adapter.learner
    wanted_tensors = {
        **learner.weights._asdict(),
        "replay": learner.replay,
        "worth": learner.worth.numbers(),
    }
    for key, like in wanted_tensors.items():
        tensor = tensors.get(key)
        fits = tensor is not None and (tensor.shape, tensor.dtype) == (like.shape, like.dtype)
        if tensor is None or not fits or not np.isfinite(tensor).all():
            raise ArtefactError(
                f"{folder / name}: {key} is missing, of another shape or not finite"
            )
    return tensors, seen


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ArtefactError(f"{path}: larger than the {MAX_BYTES} bytes that are allowed")
    return data


def _put_aside(folder: Path) -> None:
    for file in [folder / STATE_FILE, *folder.glob("adapter-*.safetensors")]:
        try:
            os.replace(file, file.with_name(f"{file.name}.bad"))
        except OSError as error:
            logger.warning("%s cannot be kept aside: %s", file, error.strerror)
