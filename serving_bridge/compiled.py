"""Compiled functions as a decision calls them: without numba's look at the types of all arguments.

That look takes 0.3 us, most of it for tuples: a fifth of the policy's call, a third of the adapter's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def entry(function: Any, *arguments: object) -> Callable[..., Any]:
    """What numba calls for arguments of the types of these: compiled, or loaded, now.

    It takes them by position, and only of these types: who calls it knows that they are.
    """
    function(*arguments)
    found: Callable[..., Any] = function.overloads[tuple(map(numba.typeof, arguments))].entry_point
    return found
