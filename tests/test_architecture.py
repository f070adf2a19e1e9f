"""The arrows and the folders of the project.

The contracts between packages are in pyproject.toml under ``tool.importlinter``; this file runs
them and holds what import-linter cannot see.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("hlem_env", "agents", "train", "eval", "serving_bridge")
TOP_LEVEL = {*PACKAGES, "tests", "docs", ".ci"}

# Modules that load objects by running code from the file.
PICKLING = {"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "pickle", "shelve"}


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=240
    )


def _sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def test_import_contracts_hold() -> None:
    # The program reads its settings from the folder it runs in and finds the packages there.
    result = _run(
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
        "--no-cache",
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_top_level_folders_are_fixed() -> None:
    listing = _run("git", "ls-files", "--cached", "--others", "--exclude-standard")
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so ignored folders cannot be told from others")
    folders = {line.split("/", 1)[0] for line in listing.stdout.splitlines() if "/" in line}
    assert folders <= TOP_LEVEL, f"unknown top-level folders: {sorted(folders - TOP_LEVEL)}"
    missing = {*PACKAGES, "tests"} - folders
    assert not missing, f"missing top-level folders: {sorted(missing)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_and_complete(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    folders = {path.parent for path in (ROOT / package).rglob("*.py")}
    # Without __init__.py a folder is neither installed nor seen by the import contracts.
    bare = sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file())
    assert not bare, f"folders with modules but no __init__.py: {bare}"


def test_tests_do_not_hide_the_packages() -> None:
    found = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("__init__.py"))
    assert not found, f"tests are found by path and need no __init__.py: {found}"


def _pickle_uses(tree: ast.AST) -> list[str]:
    """List what loads code from files: imports of pickling modules and flags that allow it."""
    uses: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses += [
                f"line {node.lineno}: import {alias.name}"
                for alias in node.names
                if alias.name.split(".")[0] in PICKLING
            ]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").split(".")[0] in PICKLING:
                uses.append(f"line {node.lineno}: from {node.module} import ...")
        elif (
            isinstance(node, ast.keyword)
            and isinstance(node.value, ast.Constant)
            and (node.arg, node.value.value) in {("allow_pickle", True), ("weights_only", False)}
        ):
            uses.append(f"line {node.value.lineno}: {node.arg}={node.value.value}")
    return uses


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def load():\n    from pickle import loads",
        "import numpy, cloudpickle as cp",
        "numpy.load(path, allow_pickle=True)",
        "torch.load(path, weights_only=False)",
    ],
)
def test_pickle_check_sees(source: str) -> None:
    assert _pickle_uses(ast.parse(source))


def test_no_pickle() -> None:
    uses = {
        str(path.relative_to(ROOT)): found
        for path in _sources()
        if (found := _pickle_uses(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert not uses, f"artefacts are loaded without pickle: {uses}"


def test_decision_path_does_not_load_torch() -> None:
    policy = ROOT / "serving_bridge" / "policy.py"
    if not policy.exists() and not policy.with_suffix("").is_dir():
        pytest.skip("serving_bridge.policy does not exist yet")
    script = (
        "import sys; import serving_bridge.policy; "
        "loaded = sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'agents')); "
        "sys.exit(f'loaded: {loaded[:5]}' if loaded else 0)"
    )
    result = _run(sys.executable, "-c", script)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ci_script_is_executable() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
