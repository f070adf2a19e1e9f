import copy
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

from agents.actor_critic import ActorCritic
from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.mdp import ACTIONS_CENTI, FEATURES, MdpConfig
from serving_bridge import policy as policy_module
from serving_bridge.policy import FrozenPolicy, export_policy

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS, ABOUT = "policy.safetensors", "policy.json"


@cache
def network(features: str = "paper", seed: int = 0, spread: float = 1.0) -> ActorCritic:
    """A network whose logits lie well apart, as after training."""
    generator = torch.Generator().manual_seed(seed)
    made = ActorCritic(len(FEATURES[features]), generator=generator)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * spread * noise)
    return made


def export(folder: Path, made: ActorCritic, features: str = "paper", **changes: Any) -> None:
    inputs, logits = made.parity_vectors(np.random.default_rng(5))
    arguments: dict[str, Any] = {
        "weights": made.actor_weights(),
        "mdp_config": MdpConfig(features=features, slo_ms=25.0),
        "parity_inputs": inputs,
        "parity_logits": logits,
        "env_spec": {"id": "HBMPartition", "kwargs": {"regime": "steady", "alpha": None}},
        "training_command": "python -m train.ppo --seed 3",
        "seed": 3,
        "git_revision": "0123abc",
    }
    export_policy(folder, **{**arguments, **changes})


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small only lose by more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    export(folder, network())
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "policy"))


def states(count: int, n_features: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random((count, n_features), dtype=np.float32)


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / ABOUT).read_text())
    change(document)
    (folder / ABOUT).write_text(json.dumps(document))


def put_weights(folder: Path, tensors: dict[str, np.ndarray] | bytes) -> None:
    """Replace the tensors and make the hash fit, so that only later checks can refuse them."""
    data = tensors if isinstance(tensors, bytes) else safetensors.numpy.save(tensors)
    (folder / WEIGHTS).write_bytes(data)
    edit(folder, lambda d: d.update(weights_sha256=hashlib.sha256(data).hexdigest()))


def refusal(folder: Path) -> str:
    with pytest.raises(ArtefactError) as caught:
        FrozenPolicy.load(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


# Round trip


@pytest.mark.parametrize("features", ["paper", "working_set"])
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_logits_and_actions_are_those_of_torch(
    tmp_path: Path, features: str, spread: float
) -> None:
    made = network(features, spread=spread)
    export(tmp_path, made, features)
    policy = FrozenPolicy.load(tmp_path)
    inputs = states(2_000, len(FEATURES[features]))
    with torch.inference_mode():
        expected = made.logits(torch.from_numpy(inputs)).numpy()
    found = np.stack([policy.logits(row) for row in inputs])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
    best = np.sort(expected, axis=1)
    clear = best[:, -1] - best[:, -2] > 1e-4
    assert clear.mean() > 0.8
    actions = np.array([policy.act(row) for row in inputs])
    np.testing.assert_array_equal(actions[clear], expected.argmax(axis=1)[clear])


@pytest.mark.parametrize("sizes", [(7, 7), (7, 16, 7), (7, 5, 9, 4, 7)])
def test_other_depths(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    layers: list[torch.nn.Module] = []
    weights = {}
    for index, (n_in, n_out) in enumerate(pairwise(sizes)):
        linear = torch.nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
        for kind, parameter in linear.named_parameters():
            torch.nn.init.normal_(parameter, generator=generator)
            weights[f"layers.{index}.{kind}"] = parameter.detach().numpy()
        layers += [torch.nn.Tanh(), linear] if index else [linear]
    inputs = states(64, 7)
    with torch.inference_mode():
        logits = torch.nn.Sequential(*layers)(torch.from_numpy(inputs)).numpy()
    export(tmp_path, network(), weights=weights, parity_inputs=inputs, parity_logits=logits)
    found = [FrozenPolicy.load(tmp_path).logits(row) for row in inputs]
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=1e-5)


def test_metadata(exported: Path) -> None:
    policy = FrozenPolicy.load(str(exported))
    assert policy.mdp_config == MdpConfig(slo_ms=25.0)
    assert policy.feature_names == FEATURES["paper"]
    assert policy.actions_centi == ACTIONS_CENTI
    about = policy.metadata
    assert about["seed"] == 3
    assert about["git_revision"] == "0123abc"
    assert about["training_command"] == "python -m train.ppo --seed 3"
    assert about["env_spec"] == {
        "id": "HBMPartition",
        "kwargs": {"regime": "steady", "alpha": None},
    }
    assert about["layers"] == [[7, 64], [64, 128], [128, 7]]
    # Length by the maximum length, P99 by four times the SLO, all others by 1.
    assert about["feature_scales"] == [1, 1, 1, 15_000, 1, 1, 100]
    assert "parity_inputs" not in about
    with pytest.raises(TypeError):
        about["seed"] = 4  # type: ignore[index]


def test_weights_cannot_be_changed(exported: Path) -> None:
    policy = FrozenPolicy.load(exported)
    with pytest.raises(ValueError, match="read-only"):
        policy.weights["layers.0.bias"][0] = 1.0


def test_loading_and_deciding_import_no_torch(exported: Path) -> None:
    script = (
        "import sys, numpy; from serving_bridge.policy import FrozenPolicy; "
        f"FrozenPolicy.load({str(exported)!r}).act(numpy.zeros(7, numpy.float32)); "
        "sys.exit(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'agents')) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


# Observations


@pytest.mark.parametrize(
    "observation",
    [
        np.zeros(7),
        np.zeros(7, np.float16),
        np.zeros(7, np.int64),
        np.zeros(7, ">f4"),
        np.zeros(7, object),
        np.zeros(8, np.float32),
        np.zeros(6, np.float32),
        np.zeros(0, np.float32),
        np.zeros((1, 7), np.float32),
        np.float32(0.5),
        [0.0] * 7,
        (0.0,) * 7,
        torch.zeros(7),
        None,
        "0.5",
        7,
    ],
    ids=repr,
)
def test_observation_of_another_kind_is_refused(exported: Path, observation: Any) -> None:
    policy = FrozenPolicy.load(exported)
    for method in (policy.act, policy.logits):
        with pytest.raises(ArgumentError, match=r"^observation=.*float32 \[7\]: hot_share"):
            method(observation)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", range(7))
def test_observation_that_is_not_finite_is_refused(
    exported: Path, value: float, position: int
) -> None:
    policy = FrozenPolicy.load(exported)
    observation = states(1, 7)[0]
    expected = policy.logits(observation)
    damaged = observation.copy()
    damaged[position] = value
    with pytest.raises(ArgumentError, match="finite"):
        policy.act(damaged)
    if position:
        damaged[0] = -value
        with pytest.raises(ArgumentError, match="finite"):
            policy.act(damaged)
    # A refusal leaves nothing behind.
    np.testing.assert_array_equal(policy.logits(observation), expected)


def test_observation_of_absurd_size_is_refused(exported: Path) -> None:
    policy = FrozenPolicy.load(exported)
    for value in (3e38, -3e38, 1e7, -1e7):
        with pytest.raises(ArgumentError, match="below 1e\\+06"):
            policy.act(np.array([value, -value, 0, 0, 0, 0, 0], np.float32))
    # Subnormal numbers, signs and raw token counts are no reason to refuse.
    for value in (0.0, -0.0, 1e-45, -1.0, 1e5):
        assert 0 <= policy.act(np.full(7, value, np.float32)) < 7


def test_observation_may_be_a_view_and_is_not_changed(exported: Path) -> None:
    policy = FrozenPolicy.load(exported)
    rows = states(7, 14)
    before = rows.copy()
    for view in (rows[0, ::2], rows[:, 3], rows[1, 7:]):
        np.testing.assert_array_equal(policy.logits(view), policy.logits(view.copy()))
    np.testing.assert_array_equal(rows, before)


def test_logits_are_the_callers_own(exported: Path) -> None:
    policy = FrozenPolicy.load(exported)
    one, two = states(2, 7)
    first = policy.logits(one)
    kept = first.copy()
    policy.logits(two)
    np.testing.assert_array_equal(first, kept)


def test_threads_share_a_policy(exported: Path) -> None:
    policy = FrozenPolicy.load(exported)
    inputs = states(400, 7)
    expected = np.stack([policy.logits(row) for row in inputs])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            runs = [
                pool.submit(lambda: [(policy.act(row), policy.logits(row)) for row in inputs])
                for _ in range(8)
            ]
            results = [run.result() for run in runs]
    finally:
        sys.setswitchinterval(interval)
    for result in results:
        np.testing.assert_array_equal([action for action, _ in result], expected.argmax(axis=1))
        np.testing.assert_array_equal([logits for _, logits in result], expected)


def test_copy_decides_alike(exported: Path) -> None:
    policy = FrozenPolicy.load(exported)
    for twin in (copy.copy(policy), copy.deepcopy(policy)):
        for row in states(20, 7):
            np.testing.assert_array_equal(twin.logits(row), policy.logits(row))


# Refused folders


def test_missing_or_unreadable(folder: Path, tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere")
    assert "no such folder" in refusal(folder / ABOUT)
    (folder / WEIGHTS).unlink()
    assert f"{WEIGHTS}: there is no such file" in refusal(folder)
    (folder / WEIGHTS).mkdir()
    assert f"{WEIGHTS}: not a file" in refusal(folder)
    (folder / ABOUT).unlink()
    assert f"{ABOUT}: there is no such file" in refusal(folder)
    os.mkfifo(folder / ABOUT)
    assert f"{ABOUT}: not a file" in refusal(folder)


def test_truncated(folder: Path) -> None:
    for name in (WEIGHTS, ABOUT):
        data = (folder / name).read_bytes()
        for size in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 2):
            (folder / name).write_bytes(data[:size])
            assert name in refusal(folder)
            if name == WEIGHTS:
                put_weights(folder, data[:size])
                assert f"{WEIGHTS}: not a safetensors file" in refusal(folder)
        (folder / name).write_bytes(data)
        if name == WEIGHTS:
            put_weights(folder, data)
    FrozenPolicy.load(folder)


def test_every_region_of_the_weights_is_guarded(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    positions = {0, 3, 7, 8, 9, header // 2, header - 1, header, header + 1, len(data) - 1}
    positions |= set(range(header, len(data), 4_001))
    for position in sorted(positions):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= flip
            (folder / WEIGHTS).write_bytes(damaged)
            assert "SHA-256" in refusal(folder)


def test_damaged_header_with_its_own_hash(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    # Spaces at the header's end are padding, and a changed one may be harmless to the reader.
    for position in (*range(8), *range(8, header - 8, 11)):
        damaged = bytearray(data)
        damaged[position] ^= 0x04
        put_weights(folder, bytes(damaged))
        assert WEIGHTS in refusal(folder)


def test_appended_bytes(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes() + b"\0\0\0\0"
    (folder / WEIGHTS).write_bytes(data)
    assert "SHA-256" in refusal(folder)
    put_weights(folder, data)
    assert f"{WEIGHTS}: not a safetensors file" in refusal(folder)


def test_mixed_pair(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    export(other, network(seed=9))
    mixed = tmp_path / "mixed"
    for weights, about in ((folder, other), (other, folder)):
        mixed.mkdir(exist_ok=True)
        shutil.copy(weights / WEIGHTS, mixed)
        shutil.copy(about / ABOUT, mixed)
        assert f"{WEIGHTS}: its SHA-256" in refusal(mixed)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"not json",
        b"\xff\xfe{}",
        b"\0" * 100,
        b"[" * 200_000,
        b'{"format": NaN}',
        b'{"seed": ' + b"9" * 5_000 + b"}",
    ],
    ids=lambda text: text[:12],
)
def test_not_json(folder: Path, text: bytes) -> None:
    (folder / ABOUT).write_bytes(text)
    assert f"{ABOUT}: not JSON" in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "null", "3", '"x"'])
def test_not_an_object(folder: Path, text: str) -> None:
    (folder / ABOUT).write_text(text)
    assert f"{ABOUT}: not a JSON object" in refusal(folder)


@pytest.mark.parametrize("value", [0, 2, 99, "1", 1.0, True, None, [1]])
def test_unknown_format_version(folder: Path, value: object) -> None:
    edit(folder, lambda d: d.update(format_version=value))
    assert "format_version is" in refusal(folder)


def test_other_format(folder: Path) -> None:
    edit(folder, lambda d: d.update(format="hlem-profile"))
    assert "format is 'hlem-profile'" in refusal(folder)


@pytest.mark.parametrize("name", sorted(policy_module._KINDS))
def test_missing_entry_or_another_kind(folder: Path, name: str) -> None:
    text = (folder / ABOUT).read_text()
    edit(folder, lambda d: d.pop(name))
    assert ABOUT in (message := refusal(folder)) and name in message
    for value in (None, 3.5, True):
        (folder / ABOUT).write_text(text)
        edit(folder, lambda d, value=value: d.update({name: value}))
        assert ABOUT in (message := refusal(folder)) and name in message


def test_unknown_entry(folder: Path) -> None:
    edit(folder, lambda d: d.update(surprise=1))
    assert "surprise" in refusal(folder)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "features renamed": (lambda d: d["feature_names"].__setitem__(0, "hot"), "feature_names is"),
    "features reordered": (lambda d: d["feature_names"].reverse(), "feature_names is"),
    "one feature less": (lambda d: d["feature_names"].pop(), "feature_names is"),
    "other scale": (lambda d: d["feature_scales"].__setitem__(6, 120.0), "feature_scales is"),
    "scale of another SLO": (lambda d: d["mdp_config"].update(slo_ms=30.0), "feature_scales is"),
    "other actions": (lambda d: d["actions_centi"].__setitem__(0, -8), "actions_centi is"),
    "fewer actions": (lambda d: d["actions_centi"].pop(), "actions_centi is"),
    "other activation": (lambda d: d.update(activation="relu"), "activation is"),
    "unknown feature set": (lambda d: d["mdp_config"].update(features="all"), "features='all'"),
    "other feature set": (
        lambda d: d["mdp_config"].update(features="working_set"),
        "feature_names is",
    ),
    "config out of bounds": (lambda d: d["mdp_config"].update(slo_ms=-1), "slo_ms=-1"),
    "config of another kind": (lambda d: d["mdp_config"].update(slo_ms="30"), "mdp_config.slo_ms"),
    "config with a flag": (
        lambda d: d["mdp_config"].update(max_history_tokens=True),
        "mdp_config.max_history_tokens",
    ),
    "config with an unknown field": (lambda d: d["mdp_config"].update(x=1), "mdp_config has"),
    "config without a field": (lambda d: d["mdp_config"].pop("reward"), "mdp_config has"),
    "no layers": (lambda d: d["layers"].clear(), "layers are"),
    "too many layers": (lambda d: d.update(layers=[[7, 7]] * 9), "layers are"),
    "layers apart": (lambda d: d["layers"][0].__setitem__(1, 63), "layers are"),
    "layers of strings": (lambda d: d.update(layers=["ab", "cd"]), "layers are"),
    "layer of three": (lambda d: d["layers"][0].append(1), "layers are"),
    "empty layer": (lambda d: d.update(layers=[[7, 0], [0, 7]]), "layers are"),
    "other width": (lambda d: d.update(layers=[[7, 64], [64, 64], [64, 7]]), "layers.1.weight"),
    "one layer less": (lambda d: d.update(layers=[[7, 64], [64, 7]]), "unknown tensors"),
    "one layer more": (lambda d: d["layers"].append([7, 7]), "layers.3.weight is missing"),
    "parity logit off": (
        lambda d: d["parity_logits"][40].__setitem__(3, d["parity_logits"][40][3] + 1e-3),
        "parity vector 40",
    ),
    "parity input off": (
        lambda d: d["parity_inputs"][0].__setitem__(2, d["parity_inputs"][0][2] + 0.01),
        "parity vector 0",
    ),
    "too few parity vectors": (
        lambda d: d.update(
            parity_inputs=d["parity_inputs"][:31], parity_logits=d["parity_logits"][:31]
        ),
        "31 parity inputs",
    ),
    "no parity vectors": (lambda d: d.update(parity_inputs=[], parity_logits=[]), "0 parity"),
    "parity of unequal length": (lambda d: d["parity_inputs"].pop(), "63 parity inputs"),
    "ragged parity": (lambda d: d["parity_inputs"][1].pop(), "parity_inputs needs"),
    "parity of strings": (lambda d: d["parity_inputs"].__setitem__(0, ["1"] * 7), "parity_inputs"),
    "parity beyond float32": (
        lambda d: d["parity_logits"][0].__setitem__(0, 10**400),
        "parity_logits needs",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited_metadata(folder: Path, name: str) -> None:
    change, reason = EDITS[name]
    edit(folder, change)
    assert f"{ABOUT}: " in (message := refusal(folder)) or f"{WEIGHTS}: " in message
    assert reason in message


def test_infinite_number_in_json(folder: Path) -> None:
    text = (folder / ABOUT).read_text()
    (folder / ABOUT).write_text(text.replace('"slo_ms": 25.0', '"slo_ms": 1e999'))
    assert "slo_ms=inf" in refusal(folder)


Tensors = dict[str, np.ndarray]
TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop("layers.1.bias"), "the tensor layers.1.bias is missing"),
    "unknown": (lambda t: t.update(more=t["layers.0.bias"]), "unknown tensors ['more']"),
    "transposed": (
        lambda t: t.update({"layers.1.weight": t["layers.1.weight"].T.copy()}),
        "layers.1.weight is float32 [64, 128]; needed is float32 [128, 64]",
    ),
    "flat": (
        lambda t: t.update({"layers.0.weight": t["layers.0.weight"].ravel()}),
        "layers.0.weight is float32 [448]",
    ),
    "half": (
        lambda t: t.update({"layers.0.bias": t["layers.0.bias"].astype(np.float16)}),
        "layers.0.bias is float16",
    ),
    "double": (
        lambda t: t.update({"layers.0.bias": t["layers.0.bias"].astype(np.float64)}),
        "layers.0.bias is float64",
    ),
    "NaN": (lambda t: t["layers.2.weight"].__setitem__((0, 0), np.nan), "not finite"),
    "infinite": (lambda t: t["layers.0.bias"].__setitem__(5, -np.inf), "not finite"),
    "other values": (lambda t: t["layers.1.bias"].__iadd__(np.float32(0.01)), "parity vector"),
    "huge": (lambda t: t["layers.2.weight"].__setitem__((0, 0), 3e38), "beyond 1e+06"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_with_their_own_hash(folder: Path, name: str) -> None:
    change, reason = TENSORS[name]
    tensors = {k: v.copy() for k, v in safetensors.numpy.load_file(folder / WEIGHTS).items()}
    change(tensors)
    put_weights(folder, tensors)
    assert reason in refusal(folder)


def test_tensor_kind_that_numpy_lacks(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    header = json.dumps({"layers.0.bias": entry}).encode()
    put_weights(folder, len(header).to_bytes(8, "little") + header + data[-4:])
    assert f"{WEIGHTS}: not a safetensors file" in refusal(folder)


def test_size_limits(folder: Path) -> None:
    about = (folder / ABOUT).read_bytes()
    (folder / ABOUT).write_bytes(about + b" " * ((1 << 20) - len(about)))
    FrozenPolicy.load(folder)
    (folder / ABOUT).write_bytes(about + b" " * ((1 << 20) - len(about) + 1))
    assert f"{ABOUT}: larger than the 1048576 bytes" in refusal(folder)
    (folder / ABOUT).write_bytes(about)
    with (folder / WEIGHTS).open("r+b") as file:
        file.truncate((16 << 20) + 1)
    assert f"{WEIGHTS}: larger than the 16777216 bytes" in refusal(folder)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_parity_tolerance(tmp_path: Path, spread: float) -> None:
    export(tmp_path, network(spread=spread))
    logits = json.loads((tmp_path / ABOUT).read_text())["parity_logits"][7]
    scale = max(1.0, *map(abs, logits))
    assert (scale == 1.0) == (spread == 0.0)
    for error, passes in ((0.0, True), (0.5e-5, True), (-0.5e-5, True), (2e-5, False)):
        new = logits[0] + error * scale
        edit(tmp_path, lambda d, new=new: d["parity_logits"][7].__setitem__(0, new))
        if passes:
            FrozenPolicy.load(tmp_path)
        else:
            assert "parity vector 7" in refusal(tmp_path)


# Export


class Interrupted(BaseException):
    pass


def test_files_and_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    export(folder, network())
    assert sorted(path.name for path in folder.iterdir()) == [ABOUT, WEIGHTS]
    umask = os.umask(0)
    os.umask(umask)
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    export(folder, network(seed=1))
    assert sorted(path.name for path in folder.iterdir()) == [ABOUT, WEIGHTS]


def test_same_export_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        export(tmp_path / name, network())
    for file in (WEIGHTS, ABOUT):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("call", ["replace", "fsync", "open"])
def test_interrupted_export(folder: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before the n-th call of each kind, for every n: the old policy or the new one loads."""
    old, new = network(), network(seed=9)
    row = states(1, 7)[0]
    expected = {
        kind: made.logits(torch.from_numpy(row)).detach().numpy()
        for kind, made in (("old", old), ("new", new))
    }
    real = getattr(os, call)
    outcomes = []
    for allowed in range(20):
        export(folder, old)
        calls = iter(range(allowed))

        def stop(*args: Any, calls: Any = calls, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                raise Interrupted
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(policy_module.os, call, stop)
            try:
                export(folder, new)
            except Interrupted:
                finished = False
            else:
                finished = True
        logits = FrozenPolicy.load(folder).logits(row)
        kind = "new" if np.allclose(logits, expected["new"], rtol=1e-4, atol=1e-4) else "old"
        np.testing.assert_allclose(logits, expected[kind], rtol=1e-4, atol=1e-4)
        outcomes.append(kind)
        assert not list(folder.glob(".*.tmp"))
        if finished:
            break
    assert finished and kind == "new"
    assert outcomes[0] == "old"
    # The next export clears what the interrupted ones left.
    assert sorted(path.name for path in folder.iterdir()) == [ABOUT, WEIGHTS]


def test_killed_between_the_two_files(folder: Path, tmp_path: Path) -> None:
    """As after a power cut: the new weights are in place, the old metadata too."""
    row = states(1, 7)[0]
    before = FrozenPolicy.load(folder).logits(row)
    export(tmp_path / "new", network(seed=9))
    shutil.copy(folder / WEIGHTS, folder / "policy.safetensors.previous")
    shutil.copy(tmp_path / "new" / WEIGHTS, folder)
    np.testing.assert_array_equal(FrozenPolicy.load(folder).logits(row), before)
    # What is left of another policy helps nobody.
    (folder / "policy.safetensors.previous").write_bytes(b"other")
    assert "SHA-256" in refusal(folder)


def test_reader_during_exports(folder: Path) -> None:
    made = [network(seed=seed) for seed in (1, 2)]
    row = states(1, 7)[0]
    expected = [m.logits(torch.from_numpy(row)).detach().numpy() for m in made]
    export(folder, made[0])
    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(lambda: [export(folder, made[turn % 2]) for turn in range(12)])
        while not writer.done():
            logits = FrozenPolicy.load(folder).logits(row)
            assert min(np.abs(logits - e).max() for e in expected) < 1e-4
        writer.result()


def test_export_between_the_two_files_of_a_reader(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = network(seed=9)
    read, exports = policy_module._read, iter([made])

    def read_then_export(path: Path, limit: int) -> bytes:
        data = read(path, limit)
        if path.name == ABOUT and (new := next(exports, None)) is not None:
            export(folder, new)
        return data

    monkeypatch.setattr(policy_module, "_read", read_then_export)
    row = states(1, 7)[0]
    expected = made.logits(torch.from_numpy(row)).detach().numpy()
    np.testing.assert_allclose(FrozenPolicy.load(folder).logits(row), expected, atol=1e-4)


def test_damaged_policy_is_replaced(folder: Path) -> None:
    (folder / ABOUT).write_text("damaged")
    export(folder, network(seed=9))
    FrozenPolicy.load(folder)


EXPORTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no weights": ({"weights": {}}, ArgumentError, "layers.0.weight"),
    "double weights": (
        {"weights": {n: w.astype(np.float64) for n, w in network().actor_weights().items()}},
        ArtefactError,
        "float64",
    ),
    "weights of other features": (
        {"weights": network("working_set").actor_weights()},
        ArtefactError,
        "layers are [[8, 64]",
    ),
    "weights without a bias": (
        {"weights": {n: w for n, w in network().actor_weights().items() if n != "layers.1.bias"}},
        ArtefactError,
        "layers.1.bias is missing",
    ),
    "parity of another network": (
        {"parity_logits": network(seed=9).parity_vectors(np.random.default_rng(5))[1]},
        ArtefactError,
        "parity vector 0",
    ),
    "too few parity vectors": (
        {"parity_inputs": states(3, 7), "parity_logits": states(3, 7)},
        ArtefactError,
        "3 parity inputs",
    ),
    "NaN in parity": (
        {"parity_logits": np.full((64, 7), np.nan)},
        ArgumentError,
        "plain JSON values",
    ),
    "env spec not JSON": ({"env_spec": {"x": object()}}, ArgumentError, "plain JSON values"),
    "env spec too large": ({"env_spec": {"x": "y" * (1 << 20)}}, ArtefactError, "bytes; allowed"),
    "seed not an integer": ({"seed": 1.5}, ArtefactError, "seed is 1.5"),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_refused_export_writes_nothing(folder: Path, name: str) -> None:
    changes, error, reason = EXPORTS[name]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error) as caught:
        export(folder, network(), **changes)
    assert reason in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_in_another_memory_order(tmp_path: Path) -> None:
    weights = {n: np.asfortranarray(w) for n, w in network().actor_weights().items()}
    export(tmp_path, network(), weights=weights)
    FrozenPolicy.load(tmp_path)


def test_every_field_of_the_config_is_kept(tmp_path: Path) -> None:
    changed = {
        "slo_ms": 12.5,
        "max_history_tokens": 9_000,
        "alpha_min_centi": 0,
        "alpha_max_centi": 100,
        "epoch_seconds": 2.0,
        "features": "working_set",
        "reward": "busy_time",
    }
    assert set(changed) == {field.name for field in fields(MdpConfig)}
    config = MdpConfig(**changed)  # type: ignore[arg-type]
    export(tmp_path, network("working_set"), mdp_config=config)
    assert FrozenPolicy.load(tmp_path).mdp_config == config
