"""The project's typed errors. Each message carries the value that was refused and what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from pathlib import Path


class HlemError(Exception):
    """Base of every error that this project raises on purpose."""


class ArgumentError(HlemError, ValueError):
    """An argument is outside what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        # The whole sentence is the one argument: some libraries print no more than the first.
        super().__init__(f"{name}={value!r} is not allowed; allowed: {allowed}")

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, object, str]]:
        return type(self), (self.name, self.value, self.allowed)


class TraceFormatError(HlemError, ValueError):
    """A line of a trace file cannot be read."""

    def __init__(self, path: str | Path, line: int, reason: str) -> None:
        self.path, self.line, self.reason = str(path), line, reason
        super().__init__(self.path, line, reason)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


class ArtefactError(HlemError):
    """A saved policy, profile or record is missing, damaged or does not fit."""


class BackendError(HlemError):
    """A backend cannot do what was asked of it in its present state."""


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise ArgumentError unless `condition` holds."""
    if not condition:
        raise ArgumentError(name, value, allowed)


def require_number(name: str, value: object, whole: bool = False) -> None:
    """Raise ArgumentError unless `value` is a finite number, with `whole` an integer; bool is neither."""
    kinds = numbers.Integral if whole else numbers.Real
    good = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    require(good, name, value, "a whole number" if whole else "a finite number")


def require_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise ArgumentError unless `value` is one of `choices`."""
    options = sorted(choices)
    require(
        isinstance(value, str) and value in options, name, value, "one of " + ", ".join(options)
    )
