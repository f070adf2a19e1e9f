"""Items in order of their last access, with the farthest predicted one of the oldest n in O(log k).

Every access writes its item to the next place of a tape and empties the place where it stood, so
places are in order of recency. A tree over the tape, 32 children a node, keeps of every span how many
items may be evicted, and bounds of their values: the predicted times of their next requests. The tape
is twice as long as the items that it holds; at its end it is written anew, close together.

Why the end of the tape is not in the tree. Nobody asks the tree before a victim is wanted, and where
most requests hit that is seldom. What was appended since enters the tree then, a node's worth in one
pass up instead of one pass an item; what moved on meanwhile never enters it.

Why both bounds. A prediction p that lies before the time t is overdue by t - p and is read as
t + (t - p). So the item that is requested last is the one with the largest |p - t|, of which both
bounds of a span make a bound, and no time of day enters the tree.

Why bounds. A good prediction says of most items that leave a place that they leave it now: they have
the smallest value. Looking for the next one each time would take longer than all else, so that
bounds stay as they are until a search for a victim comes upon one that is out of date.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

FAN_BITS = 5
FAN = 1 << FAN_BITS

PLACE = np.dtype([("value", "f8"), ("key", "i8")])
"""A place of the tape: NaN where nothing may be evicted, and the key, -1 for an empty place."""
NODE = np.dtype([("high", "f8"), ("low", "f8"), ("count", "i8")])

Tape = Any
Nodes = Any
Levels = NDArray[np.int64]
Ends = Any
"""A record with `head`, the next place to write, and `indexed`, the first that the tree does not know."""

_compiled = numba.njit(cache=True, nogil=True, error_model="numpy")
_inlined = numba.njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
"""What every access runs: a call would hand over the seven words of each array on the stack."""


def new_tape(places: int) -> tuple[Tape, Nodes, Levels]:
    """An empty tape of at least `places` places: the places, the nodes, and each level's first node."""
    places = max(-(-places // FAN) * FAN, FAN)
    tape = np.empty(places, PLACE)
    starts: list[int] = []
    size, total = places, 0
    while not starts or size > 1:
        size = -(-size // FAN)
        starts.append(total)
        total += size
    nodes, levels = np.empty(total, NODE), np.array(starts, np.int64)
    rebuild(tape, nodes, levels, 0)
    return tape, nodes, levels


@_compiled
def rebuild(tape: Tape, nodes: Nodes, levels: Levels, used: int) -> None:
    """Bring all nodes up to date with the first `used` places; the others are emptied."""
    for i in range(used, tape.size):
        tape[i].value, tape[i].key = np.nan, -1
    for i in range(levels[1] if levels.size > 1 else 1):
        high, low, count = -np.inf, np.inf, 0
        if i << FAN_BITS < used:
            for j in range(i << FAN_BITS, (i + 1) << FAN_BITS):
                value = tape[j].value
                count += value == value
                if value > high:
                    high = value
                if value < low:
                    low = value
        nodes[i].high, nodes[i].low, nodes[i].count = high, low, count
    for level in range(1, levels.size):
        end = levels[level + 1] if level + 1 < levels.size else nodes.size
        for i in range(end - levels[level]):
            high, low, count = -np.inf, np.inf, 0
            begin = levels[level - 1] + (i << FAN_BITS)
            for j in range(begin, min(begin + FAN, levels[level])):
                count += nodes[j].count
                if nodes[j].high > high:
                    high = nodes[j].high
                if nodes[j].low < low:
                    low = nodes[j].low
            node = nodes[levels[level] + i]
            node.high, node.low, node.count = high, low, count


@_inlined
def append(tape: Tape, ends: Ends, key: int, value: float) -> int:
    """Write an item to the next place, which must exist, and return that; NaN: it must not be evicted."""
    place = ends.head
    tape[place].key, tape[place].value = key, value
    ends.head = place + 1
    return int(place)


@_compiled
def index(tape: Tape, nodes: Nodes, levels: Levels, ends: Ends) -> None:
    """Bring the tree up to date with what was appended since the last time."""
    while ends.indexed < ends.head:
        last = min((ends.indexed | (FAN - 1)) + 1, ends.head)
        high, low, count = -np.inf, np.inf, 0
        for j in range(ends.indexed, last):
            value = tape[j].value
            count += value == value
            if value > high:
                high = value
            if value < low:
                low = value
        if count > 0:
            _count_in(nodes, levels, ends.indexed, high, low, count)
        ends.indexed = last


@_compiled
def _count_in(
    nodes: Nodes, levels: Levels, place: int, high: float, low: float, count: int
) -> None:
    """So many more items between these values are below all nodes above a place."""
    i = place
    for level in range(levels.size):
        i >>= FAN_BITS
        node = nodes[levels[level] + i]
        if node.count == 0:
            node.high, node.low = high, low
        if high > node.high:
            node.high = high
        if low < node.low:
            node.low = low
        node.count += count


@_compiled
def add(tape: Tape, nodes: Nodes, levels: Levels, ends: Ends, place: int, value: float) -> None:
    """Let the item at a place be evicted, with this value (infinity: never requested again)."""
    tape[place].value = value
    if place < ends.indexed:
        _count_in(nodes, levels, place, value, value, 1)


@_inlined
def withdraw(tape: Tape, nodes: Nodes, levels: Levels, ends: Ends, place: int) -> None:
    """Let the item at a place not be evicted; it keeps its place."""
    value = tape[place].value
    if value != value:  # NaN: it could not
        return
    tape[place].value = np.nan
    if place < ends.indexed:
        i = place
        for level in range(levels.size):
            i >>= FAN_BITS
            nodes[levels[level] + i].count -= 1


@_compiled
def oldest(tape: Tape, nodes: Nodes, levels: Levels, ends: Ends) -> int:
    """Place of the least recent item that may be evicted, -1 when there is none."""
    index(tape, nodes, levels, ends)
    level = levels.size - 1
    if nodes[levels[level]].count == 0:
        return -1
    i = 0
    while level > 0:
        level -= 1
        i <<= FAN_BITS
        while nodes[levels[level] + i].count == 0:
            i += 1
    i <<= FAN_BITS
    while tape[i].value != tape[i].value:
        i += 1
    return i


@_compiled
def _bound(node: Any, now: float) -> float:
    """No item of the span is farther from `now` than this; -infinity for none."""
    if node.count == 0:
        return -np.inf
    return float(max(node.high - now, now - node.low))


@_compiled
def _best_span(
    tape: Tape, nodes: Nodes, levels: Levels, n: int, now: float
) -> tuple[float, int, int]:
    """Of the spans that the n least recent items make up, the first with the largest bound.

    Returns
    -------
    (the bound, level of the node, its number); level -1 is a place of the tape.
    """
    level, i = levels.size - 1, 0
    if n >= nodes[levels[level]].count:
        return _bound(nodes[levels[level]], now), level, 0
    far, far_level, far_at = -np.inf, -1, -1
    left = n
    while left > 0:
        i <<= FAN_BITS
        level -= 1
        if level < 0:
            while left > 0:
                value = tape[i].value
                if value == value:
                    left -= 1
                    if abs(value - now) > far:
                        far, far_level, far_at = abs(value - now), -1, i
                i += 1
        else:
            while left > 0 and nodes[levels[level] + i].count <= left:
                node = nodes[levels[level] + i]
                left -= node.count
                bound = _bound(node, now)
                if bound > far:
                    far, far_level, far_at = bound, level, i
                i += 1
    return far, far_level, far_at


@_compiled
def farthest(tape: Tape, nodes: Nodes, levels: Levels, ends: Ends, n: int, now: float) -> int:
    """Of the n least recent items that may be evicted, the place of the one requested last.

    Ties go to the least recent. -1 when there are none.
    """
    index(tape, nodes, levels, ends)
    if nodes[levels[levels.size - 1]].count == 0 or n < 1:
        return -1
    while True:
        far, level, i = _best_span(tape, nodes, levels, n, now)
        if level < 0:
            return i
        while level > 0:
            level -= 1
            begin = i << FAN_BITS
            best = -np.inf
            last = levels[level + 1] - levels[level]
            for j in range(begin, min(begin + FAN, last)):
                bound = _bound(nodes[levels[level] + j], now)
                if bound > best:
                    best, i = bound, j
        begin = i << FAN_BITS
        best = -np.inf
        for j in range(begin, begin + FAN):
            if abs(tape[j].value - now) > best:  # no, where it is NaN
                best, i = abs(tape[j].value - now), j
        if best == far:
            return i
        _tighten(tape, nodes, levels, i)


@_compiled
def _tighten(tape: Tape, nodes: Nodes, levels: Levels, place: int) -> None:
    """Bring the bounds of all spans that hold a place up to date with what is below them."""
    first = place & -FAN
    high, low = -np.inf, np.inf
    for j in range(first, first + FAN):
        if tape[j].value > high:
            high = tape[j].value
        if tape[j].value < low:
            low = tape[j].value
    i = place >> FAN_BITS
    nodes[i].high, nodes[i].low = high, low
    for level in range(1, levels.size):
        begin = levels[level - 1] + (i & -FAN)
        high, low = -np.inf, np.inf
        for j in range(begin, min(begin + FAN, levels[level])):
            if nodes[j].count > 0:
                if nodes[j].high > high:
                    high = nodes[j].high
                if nodes[j].low < low:
                    low = nodes[j].low
        i >>= FAN_BITS
        nodes[levels[level] + i].high, nodes[levels[level] + i].low = high, low
