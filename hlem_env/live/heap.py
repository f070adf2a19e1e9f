"""Memory that the C library keeps after torch has freed it, given back to the system.

Batches are of many sizes, and glibc's heap fills with holes between them: after hours a node on a CPU holds a
fifth more than it uses. Holes are given back between epochs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[int], int] | None:
    """The C library's `malloc_trim`, or None where the C library is another."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    return trim


_trim = _find_trim()


def give_back_free_memory() -> None:
    """Return whole free pages of the heap to the system; a few milliseconds."""
    if _trim is not None:
        _trim(0)
