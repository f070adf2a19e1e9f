"""JSON whose long lists of integers become arrays without a Python object for each element.

A compiled scan copies the text and takes out every list of at least `SHORTEST` elements that holds
nothing but integers of 64 bits; a sign is left in its place, and orjson reads the rest. A list that holds
anything else stays in the text. So the scan never judges: what is no JSON is still refused by orjson,
and what is no integer by the codec.
"""

from __future__ import annotations

import secrets
from typing import Any, NamedTuple

import numba
import numpy as np
import orjson
from numpy.typing import NDArray

SHORTEST = 64
"""Elements from which on a list is taken out; such a list is longer than its sign."""
MOST = 8
"""Lists that are taken out of one text."""
_KEY = secrets.token_hex(16)
"""Nobody outside this process can write it, so no text can pose as a sign."""
_SIGN = np.frombuffer(b'{"' + _KEY.encode() + b'":0}', np.uint8)
_LARGEST = np.uint64(2**63 - 1)


class Loaded(NamedTuple):
    """A document, and the lists that were taken out of it."""

    document: Any
    """With an object of one key, the sign, where a list was. What expects anything but a list of numbers
    there refuses it for being an object."""
    arrays: list[NDArray[np.int64]]

    def list_or_array(self, value: Any) -> Any:
        """The array behind a sign; any other value as it is."""
        if self.arrays and isinstance(value, dict) and value.keys() == {_KEY}:
            return self.arrays[value[_KEY]]
        return value


def load_json(text: bytes) -> Loaded:
    """The document, and its long lists of integers as int64 arrays.

    Raises:
        ValueError: it is no JSON.
    """
    if len(text) < 2 * SHORTEST:
        return Loaded(orjson.loads(text), [])
    rest = np.empty(len(text), np.uint8)
    values = np.empty(len(text) // 2 + 1, np.int64)
    ends = np.zeros(MOST, np.int64)
    length, lists = take_out(np.frombuffer(text, np.uint8), rest, values, ends, _SIGN)
    starts = [0, *ends.tolist()]
    # Copies: the arrays live on with the request, the buffer is as long as the text.
    arrays = [values[starts[i] : starts[i + 1]].copy() for i in range(lists)]
    return Loaded(orjson.loads(rest[:length].data), arrays)


def compile_scan() -> None:
    """Have the scan compiled, or read from numba's cache, before the first request comes."""
    load_json(b"[" + b"1," * SHORTEST + b"1]")


@numba.njit(cache=True, nogil=True)
def _integers(
    text: NDArray[np.uint8], at: int, values: NDArray[np.int64], filled: int
) -> tuple[int, int]:
    """Read a list of integers whose bracket is before `at`.

    Returns:
        Where the text goes on and how many were read; 0 of them if it is no such list or an empty one.
    """
    count = 0
    size = text.size
    while True:
        while at < size and (text[at] == 32 or 9 <= text[at] <= 10 or text[at] == 13):
            at += 1
        negative = at < size and text[at] == 45
        if negative:
            at += 1
        first = at
        value = np.uint64(0)
        while at < size and 48 <= text[at] <= 57:
            value = np.uint64(10) * value + np.uint64(text[at] - 48)
            at += 1
        # JSON has no number without digits and none that begins with a 0. 19 digits fit in 64 bits
        # without a sign, so that more of them cannot have wrapped unseen.
        if at == first or at - first > 19 or (text[first] == 48 and at > first + 1):
            return at, 0
        if value > _LARGEST:
            return at, 0
        values[filled + count] = -np.int64(value) if negative else np.int64(value)
        count += 1
        while at < size and (text[at] == 32 or 9 <= text[at] <= 10 or text[at] == 13):
            at += 1
        if at == size:
            return at, 0
        if text[at] == 93:
            return at + 1, count
        if text[at] != 44:
            return at, 0
        at += 1


@numba.njit(cache=True, nogil=True)
def take_out(
    text: NDArray[np.uint8],
    rest: NDArray[np.uint8],
    values: NDArray[np.int64],
    ends: NDArray[np.int64],
    sign: NDArray[np.uint8],
) -> tuple[int, int]:
    """Copy `text` to `rest`, a sign in place of every long list of integers.

    Args:
        text: uint8 [n].
        rest: uint8 [n], written.
        values: int64 [n / 2 + 1], written: the lists' elements, one list behind the other.
        ends: int64 [lists at most], written: where each list ends in `values`.
        sign: uint8; the byte before its last one becomes the list's number, one digit.

    Returns:
        Length of `rest`, and how many lists were taken out.
    """
    at = length = lists = filled = 0
    in_string = False
    while at < text.size:
        byte = text[at]
        if in_string:
            if byte == 92 and at + 1 < text.size:
                rest[length] = byte
                length += 1
                at += 1
                byte = text[at]
            elif byte == 34:
                in_string = False
        elif byte == 34:
            in_string = True
        elif byte == 91 and lists < ends.size:
            end, count = _integers(text, at + 1, values, filled)
            if count >= SHORTEST:
                for k in range(sign.size):  # numba compiles an assigned slice ten times as long
                    rest[length + k] = sign[k]
                length += sign.size
                rest[length - 2] = 48 + lists
                filled += count
                ends[lists] = filled
                lists += 1
                at = end
                continue
        rest[length] = byte
        length += 1
        at += 1
    return length, lists
