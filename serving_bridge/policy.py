"""The frozen policy: a trained actor as it runs in production, without torch, and its folder on disk.

A policy is a folder of two files. `policy.safetensors` holds the actor's tensors, for each layer I
from 0 `layers.I.weight`, float32 [out, in], and `layers.I.bias`, float32 [out], with tanh between
the layers. `policy.json` says what they mean and where they come from, holds the SHA-256 of the
first file, and parity vectors: states with the logits that the training framework gave for them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import metadata as installed
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from hlem_env.errors import ArgumentError, ArtefactError, HlemError, require
from hlem_env.mdp import ACTIONS_CENTI, FEATURES, MdpConfig
from serving_bridge.actor_network import STRIDED, UNFIT, best, forward
from serving_bridge.compiled import entry
from serving_bridge.durable import replace_file

WEIGHTS_FILE = "policy.safetensors"
METADATA_FILE = "policy.json"
_PREVIOUS_FILE = "policy.safetensors.previous"
"""The weights that the old `policy.json` names, while an export replaces the pair."""

FORMAT = "hlem-policy"
FORMAT_VERSION = 1
ACTIVATION = "tanh"
MAX_WEIGHTS_BYTES = 16 << 20
MAX_METADATA_BYTES = 1 << 20
MAX_LAYERS = 8
MAX_MAGNITUDE = 1e6
"""Of a weight, and of an observation's sum: beyond any sensible one, and far from an overflow."""
_ARRAY, _FLOAT32 = np.ndarray, np.dtype(np.float32)
PARITY_TOLERANCE = 1e-5
"""Allowed difference to stored logits; times a state's largest logit where that is above 1."""
MIN_PARITY_VECTORS = 32

Weights = Mapping[str, NDArray[np.float32]]

_KINDS: dict[str, type] = {
    "format": str,
    "format_version": int,
    "hlem_version": str,
    "git_revision": str,
    "training_command": str,
    "seed": int,
    "env_spec": dict,
    "mdp_config": dict,
    "feature_names": list,
    "feature_scales": list,
    "actions_centi": list,
    "activation": str,
    "layers": list,
    "weights_sha256": str,
    "parity_inputs": list,
    "parity_logits": list,
}
"""The entries of `policy.json`: all of them, and no other."""


class FrozenPolicy:
    """A trained actor: states to action indices, without torch.

    Weights never change, and a decision keeps nothing: threads may share a policy.

    Args:
        weights: tensors as in `policy.safetensors`; copied.
        document: the content of `policy.json`.
        folder: where both come from, for messages.

    Raises:
        ArtefactError: naming the file and what is wrong with it.
    """

    __slots__ = (
        "_best",
        "_document",
        "_folder",
        "_layers",
        "_shape",
        "_weights",
        "actions_centi",
        "feature_names",
        "mdp_config",
    )

    mdp_config: MdpConfig
    """What turns measurements into the states that this policy was trained on."""
    feature_names: tuple[str, ...]
    """Names of the state's entries, in order."""
    actions_centi: tuple[int, ...]
    """Step of alpha of each action index, in hundredths."""

    def __init__(self, weights: Weights, document: Mapping[str, Any], folder: Path) -> None:
        self._folder, self._document = folder, dict(document)
        about, tensors = folder / METADATA_FILE, folder / WEIGHTS_FILE
        _check_kinds(document, about)
        self.mdp_config = _checked_config(document, about)
        self.feature_names = self.mdp_config.feature_names
        self.actions_centi = ACTIONS_CENTI
        layers = _checked_layers(document, about, len(self.feature_names), len(ACTIONS_CENTI))
        self._weights = _checked_weights(weights, layers, tensors)
        self._build(layers)
        self._check_parity(about)

    @classmethod
    def load(cls, folder: str | Path) -> FrozenPolicy:
        """Read a policy's folder and check all of it, parity vectors included.

        Raises:
            ArtefactError: a file is missing, too large, damaged, of an unknown version or of
                another policy; the weights do not fit what the metadata says; features, their
                scales or actions differ from this version's; or the logits are not those of the
                training framework. The message names the file and the reason.
        """
        folder = Path(folder)
        document, data = _read_pair(folder)
        return cls(_tensors(data, folder / WEIGHTS_FILE), document, folder)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The content of `policy.json` without the parity vectors, read-only."""
        return MappingProxyType(
            {
                name: value
                for name, value in self._document.items()
                if not name.startswith("parity_")
            }
        )

    @property
    def weights(self) -> Weights:
        """The tensors as in `policy.safetensors`, read-only."""
        return MappingProxyType(self._weights)

    def act(self, observation: NDArray[np.float32]) -> int:
        """Index of the action with the largest logit; the first of equals.

        Args:
            observation: float32 [n_features], a numpy array of finite numbers.

        Raises:
            ArgumentError: anything else.
        """
        action: int = UNFIT
        if type(observation) is _ARRAY and observation.dtype == _FLOAT32 and observation.ndim == 1:
            action = self._best(self._layers, observation, MAX_MAGNITUDE)
        if action >= 0:
            return action
        if action == STRIDED:
            return self.act(observation.copy())
        self._refuse(observation)

    def logits(self, observation: NDArray[np.float32]) -> NDArray[np.float32]:
        """Unnormalised log-probabilities of the actions, a new float32 [n_actions].

        Args:
            observation: float32 [n_features], a numpy array of finite numbers.

        Raises:
            ArgumentError: anything else.
        """
        self.act(observation)
        # A copy is contiguous and writable: the one kind of array that is compiled for.
        found: NDArray[np.float32] = forward(self._layers, observation.copy())
        return found

    def _refuse(self, observation: object) -> NoReturn:
        allowed = (
            f"a numpy array of finite numbers (in all below {MAX_MAGNITUDE:g}), "
            f"float32 [{self._shape[0]}]: {', '.join(self.feature_names)}"
        )
        got = observation
        if isinstance(observation, np.ndarray):
            got = f"{observation.dtype} {list(observation.shape)}"
            if observation.size <= 16:
                got += f" {observation.tolist()}"
        raise ArgumentError("observation", got, allowed)

    def _build(self, layers: Sequence[tuple[int, int]]) -> None:
        """Lay out the weights as `actor_network` takes them, the bias last in each row."""
        self._shape = (layers[0][0],)
        self._layers = tuple(
            np.column_stack(
                (self._weights[f"layers.{index}.weight"], self._weights[f"layers.{index}.bias"])
            )
            for index in range(len(layers))
        )
        self._best = entry(best, self._layers, np.zeros(self._shape, np.float32), MAX_MAGNITUDE)

    def _check_parity(self, path: Path) -> None:
        inputs = _matrix(self._document, "parity_inputs", len(self.feature_names), path)
        expected = _matrix(self._document, "parity_logits", len(self.actions_centi), path)
        _check(
            len(inputs) == len(expected) >= MIN_PARITY_VECTORS,
            path,
            f"{len(inputs)} parity inputs with {len(expected)} logits; "
            f"as many of both are needed, {MIN_PARITY_VECTORS} or more",
        )
        found = np.stack([self.logits(row) for row in inputs]).astype(np.float64)
        largest = np.abs(expected).max(axis=1, keepdims=True)
        error = np.abs(found - expected) / np.maximum(1.0, largest)
        # The negation also catches logits that are not numbers.
        for row in np.flatnonzero(~(error <= PARITY_TOLERANCE).all(axis=1)):
            raise ArtefactError(
                f"{path}: the logits of parity vector {row} are {found[row].tolist()}, stored are "
                f"{expected[row].tolist()}; allowed is a difference of {PARITY_TOLERANCE}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenPolicy, (self._weights, self._document, self._folder)

    def __repr__(self) -> str:
        features = self.mdp_config.features
        return f"FrozenPolicy({str(self._folder)!r}, features={features!r})"


def export_policy(
    folder: str | Path,
    weights: Weights,
    *,
    mdp_config: MdpConfig,
    parity_inputs: NDArray[np.float32],
    parity_logits: NDArray[np.float32],
    env_spec: Mapping[str, Any],
    training_command: str,
    seed: int,
    git_revision: str,
    hlem_version: str | None = None,
) -> None:
    """Write a policy's folder; at every moment it loads as the old policy or as the new one.

    What `FrozenPolicy.load` would refuse is not written. One export at a time to a folder.

    Args:
        folder: made if missing.
        weights: the actor's tensors, `layers.I.weight` float32 [out, in] and `layers.I.bias`
            float32 [out].
        mdp_config: what the states and rewards of the training came from.
        parity_inputs: float32 [n, n_features], n >= 32.
        parity_logits: float32 [n, n_actions], by the training framework.
        env_spec: the environment's id and arguments, plain JSON values.
        training_command: the command that trained the policy.
        seed: of the training.
        git_revision: of the code that trained it.
        hlem_version: None is the installed version.

    Raises:
        ArgumentError: `env_spec` or another value is not JSON.
        ArtefactError: the loader would refuse the result, for the reason given.
        OSError: the folder cannot be written; the policy in it, if any, is as it was.
    """
    folder = Path(folder)
    require(
        "layers.0.weight" in weights,
        "weights",
        sorted(weights),
        "layers.0.weight, layers.0.bias and so on for each layer",
    )
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in weights.items()}
    shapes = [
        tensors[name].shape
        for name in (f"layers.{index}.weight" for index in range(len(tensors)))
        if name in tensors
    ]
    data = safetensors.numpy.save(tensors)
    document = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "hlem_version": _version() if hlem_version is None else hlem_version,
        "git_revision": git_revision,
        "training_command": training_command,
        "seed": seed,
        "env_spec": dict(env_spec),
        "mdp_config": mdp_config.to_json(),
        "feature_names": list(mdp_config.feature_names),
        "feature_scales": list(mdp_config.feature_scales),
        "actions_centi": list(ACTIONS_CENTI),
        "activation": ACTIVATION,
        "layers": [list(reversed(shape)) for shape in shapes],
        "weights_sha256": hashlib.sha256(data).hexdigest(),
        "parity_inputs": np.asarray(parity_inputs).tolist(),
        "parity_logits": np.asarray(parity_logits).tolist(),
    }
    try:
        text = (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        allowed = f"plain JSON values without NaN and infinity ({error})"
        raise ArgumentError("the policy's metadata", sorted(document), allowed) from error
    for name, size, limit in (
        (WEIGHTS_FILE, len(data), MAX_WEIGHTS_BYTES),
        (METADATA_FILE, len(text), MAX_METADATA_BYTES),
    ):
        _check(size <= limit, folder / name, f"{size} bytes; allowed are {limit}")
    FrozenPolicy(
        _tensors(data, folder / WEIGHTS_FILE), _parsed(text, folder / METADATA_FILE), folder
    )

    folder.mkdir(parents=True, exist_ok=True)
    # Two files cannot be replaced in one step. Between the two steps the old metadata finds its
    # weights under the other name.
    try:
        previous = _read_pair(folder)[1]
    except ArtefactError:
        pass  # There is no policy that must stay readable.
    else:
        replace_file(folder / _PREVIOUS_FILE, previous)
    replace_file(folder / WEIGHTS_FILE, data)
    replace_file(folder / METADATA_FILE, text)
    (folder / _PREVIOUS_FILE).unlink(missing_ok=True)


def _version() -> str:
    try:
        return installed.version("hlem")
    except installed.PackageNotFoundError:
        return "unknown"


def _check(condition: bool, path: Path, reason: str) -> None:
    if not condition:
        raise ArtefactError(f"{path}: {reason}")


def _read(path: Path, limit: int) -> bytes:
    try:
        _check(path.exists(), path, "there is no such file")
        _check(path.is_file(), path, "not a file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read: {error.strerror}") from error
    _check(len(data) <= limit, path, f"larger than the {limit} bytes that are allowed")
    return data


def _read_pair(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Metadata, and the bytes of the weights that it names."""
    _check(os.path.isdir(folder), folder, "there is no such folder, or it cannot be entered")
    about, weights = folder / METADATA_FILE, folder / WEIGHTS_FILE
    text = _read(about, MAX_METADATA_BYTES)
    for _ in range(5):
        document = _parsed(text, about)
        _check_kinds(document, about)
        data = _read(weights, MAX_WEIGHTS_BYTES)
        found = hashlib.sha256(data).hexdigest()
        if found == document["weights_sha256"]:
            return document, data
        try:
            data = _read(folder / _PREVIOUS_FILE, MAX_WEIGHTS_BYTES)
        except ArtefactError:
            pass  # No export was interrupted.
        else:
            if hashlib.sha256(data).hexdigest() == document["weights_sha256"]:
                return document, data
        # An export may have put both files in place since the metadata was read.
        before, text = text, _read(about, MAX_METADATA_BYTES)
        if text == before:
            break
    raise ArtefactError(
        f"{weights}: its SHA-256 is {found}, {METADATA_FILE} was written for "
        f"{document['weights_sha256']!r}: the file is damaged or of another policy"
    )


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `text`, if its format and version are known."""

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON value")

    try:
        document = json.loads(text.decode("utf-8"), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise ArtefactError(f"{path}: not JSON: {error}") from error
    _check(isinstance(document, dict), path, "not a JSON object")
    _check(
        document.get("format") == FORMAT,
        path,
        f"format is {document.get('format')!r}; allowed is {FORMAT!r}",
    )
    version = document.get("format_version")
    _check(
        type(version) is int and version == FORMAT_VERSION,
        path,
        f"format_version is {version!r}; known is {FORMAT_VERSION}",
    )
    parsed: dict[str, Any] = document
    return parsed


def _check_kinds(document: Mapping[str, Any], path: Path) -> None:
    for name, kind in _KINDS.items():
        _check(name in document, path, f"{name} is missing")
        _check(
            type(document[name]) is kind,
            path,
            f"{name} is {_brief(document[name])}; a {kind.__name__} is needed",
        )
    unknown = sorted(set(document) - set(_KINDS))
    _check(not unknown, path, f"unknown entries {unknown}")


def _checked_config(document: Mapping[str, Any], path: Path) -> MdpConfig:
    """The MdpConfig, where features, their scales and actions are those of this version."""
    values = document["mdp_config"]
    kinds = {field.name: type(field.default) for field in fields(MdpConfig)}
    _check(
        set(values) == set(kinds),
        path,
        f"mdp_config has the fields {sorted(values)}; needed are {sorted(kinds)}",
    )
    for name, kind in kinds.items():
        allowed = (int, float) if kind is float else (kind,)
        _check(
            type(values[name]) in allowed,
            path,
            f"mdp_config.{name} is {_brief(values[name])}; a {kind.__name__} is needed",
        )
    try:
        config = MdpConfig(**values)
    except HlemError as error:
        raise ArtefactError(f"{path}: mdp_config: {error}") from error
    for name, allowed_values in (
        ("feature_names", list(FEATURES[config.features])),
        ("feature_scales", list(config.feature_scales)),
        ("actions_centi", list(ACTIONS_CENTI)),
        ("activation", ACTIVATION),
    ):
        _check(
            document[name] == allowed_values,
            path,
            f"{name} is {_brief(document[name])}; needed is {allowed_values}",
        )
    return config


def _checked_layers(
    document: Mapping[str, Any], path: Path, n_features: int, n_actions: int
) -> list[tuple[int, int]]:
    """[in, out] of each layer, where they fit each other, the state and the actions."""
    layers = document["layers"]
    sound = 1 <= len(layers) <= MAX_LAYERS and all(
        type(layer) is list and len(layer) == 2 and all(type(n) is int and n > 0 for n in layer)
        for layer in layers
    )
    sound = (
        sound
        and layers[0][0] == n_features
        and layers[-1][1] == n_actions
        and all(before[1] == after[0] for before, after in pairwise(layers))
    )
    _check(
        sound,
        path,
        f"layers are {_brief(layers)}; needed are 1 to {MAX_LAYERS} of [in, out] that fit each "
        f"other, the first from {n_features}, the last to {n_actions}",
    )
    return [(n_in, n_out) for n_in, n_out in layers]


def _tensors(data: bytes, path: Path) -> dict[str, NDArray[Any]]:
    try:
        return safetensors.numpy.load(data)
    except (SafetensorError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ArtefactError(f"{path}: not a safetensors file: {error}") from error


def _checked_weights(
    weights: Weights, layers: Sequence[tuple[int, int]], path: Path
) -> dict[str, NDArray[np.float32]]:
    """Read-only copies of the tensors, where each is there, finite, and of the layers' shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, (n_in, n_out) in enumerate(layers):
        shapes[f"layers.{index}.weight"] = (n_out, n_in)
        shapes[f"layers.{index}.bias"] = (n_out,)
    unknown = sorted(set(weights) - set(shapes))
    _check(not unknown, path, f"unknown tensors {_brief(unknown)}")
    checked = {}
    for name, shape in shapes.items():
        _check(name in weights, path, f"the tensor {name} is missing")
        tensor = weights[name]
        _check(
            tensor.dtype == np.float32 and tensor.shape == shape,
            path,
            f"{name} is {tensor.dtype} {list(tensor.shape)}; needed is float32 {list(shape)}",
        )
        _check(
            bool((np.abs(tensor) <= MAX_MAGNITUDE).all()),
            path,
            f"{name} has values that are not finite, or beyond {MAX_MAGNITUDE:g}",
        )
        checked[name] = tensor.copy()
        checked[name].flags.writeable = False
    return checked


def _matrix(
    document: Mapping[str, Any], name: str, columns: int, path: Path
) -> NDArray[np.float32]:
    rows = document[name]
    sound = all(
        type(row) is list
        and len(row) == columns
        and all(type(value) in (int, float) and abs(value) < 1e30 for value in row)
        for row in rows
    )
    _check(sound, path, f"{name} needs rows of {columns} finite numbers")
    return np.array(rows, dtype=np.float32).reshape(len(rows), columns)


def _brief(value: object) -> str:
    """A value of a damaged file, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
