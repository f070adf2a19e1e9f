"""The machine behind a figure, and the files that results are written to."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from hlem_env.errors import ArgumentError

_FLAT_LIST = re.compile(r"\[([^\[\]{}]*)\]")


def machine() -> dict[str, Any]:
    """CPU model, cores, memory and versions; nothing that names the host or its users.

    `cores` are those that this process may use, `memory_gib` is the whole machine's (None where it
    cannot be told), a package that is not installed has the version None.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
    }


def command(module: str) -> str:
    """The command line of this process, which ran `python -m MODULE`."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def git_revision() -> str:
    """Revision of the code, or "unknown" outside a checkout."""
    root = Path(__file__).resolve().parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def json_text(values: Mapping[str, Any]) -> str:
    """JSON with indents, lists of plain values on a line.

    Raises:
        TypeError: something is no plain value.
        ValueError: NaN or infinity.
    """
    text = json.dumps(values, indent=2, allow_nan=False)
    return _FLAT_LIST.sub(lambda found: _on_a_line(found[1]), text) + "\n"


def write_result(path: str | Path, command: str, payload: Mapping[str, Any]) -> None:
    """Write a result as JSON beside its command and `machine()`, in one step.

    Args:
        path: file to write; its folder is made if missing.
        command: what produced the result.
        payload: plain JSON values under the keys that follow `command` and `machine`.

    Raises:
        ArgumentError: `payload` holds something else, NaN or infinity, or one of those two keys.
        OSError: the file cannot be written.
    """
    path = Path(path)
    taken = sorted({"command", "machine"} & set(payload))
    if taken:
        raise ArgumentError("payload", taken, "keys other than command and machine")
    result = {"command": command, "machine": machine(), **payload}
    try:
        text = json_text(result)
    except (TypeError, ValueError) as error:
        allowed = f"plain JSON values without NaN and infinity ({error})"
        raise ArgumentError("payload", sorted(payload), allowed) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    return round(total / 2**30, 1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def allow_open_files(wanted: int = 16_384) -> None:
    """Let this process open so many files, or as many as the system allows it; 1,024 are usual."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _on_a_line(items: str) -> str:
    """A list without its line breaks, which no string in JSON has."""
    inside = re.sub(r"^\n\s*|\n\s*$", "", items)
    return "[" + re.sub(r"\n\s*", " ", inside) + "]"
