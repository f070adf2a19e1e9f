"""Whether a request is one that a node takes. Messages name limits and counts, never what was sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from serving_bridge.scoring import InvalidRequest, Items, Limits, ScoreRequest


def checked(request: ScoreRequest, limits: Limits) -> ScoreRequest:
    """The request, its arrays contiguous int64.

    Raises:
        InvalidRequest: it is outside the limits.
    """
    try:
        user_bytes = len(request.user.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("user must be text that UTF-8 can hold") from None
    if not 1 <= user_bytes <= limits.user_bytes:
        raise InvalidRequest(f"user has {user_bytes} bytes, allowed are 1 to {limits.user_bytes}")
    if (request.history is None) == (request.new_items is None):
        raise InvalidRequest("a request has either history or new_items")
    candidates = _items("candidates", request.candidates, 1, limits.candidates)
    if request.history is not None:
        history = _items("history", request.history, 1, limits.history_tokens)
        return replace(request, candidates=candidates, history=history)
    assert request.new_items is not None
    new = _items("new_items", request.new_items, 0, limits.history_tokens)
    return replace(request, candidates=candidates, new_items=new)


def _items(name: str, items: Items, least: int, most: int) -> Items:
    if items.ndim != 1 or items.dtype != np.int64:
        raise InvalidRequest(f"{name} must be one row of 64-bit integers")
    if not least <= items.size <= most:
        raise InvalidRequest(f"{name} has {items.size} items, allowed are {least} to {most}")
    if items.size and items.min() < 0:
        raise InvalidRequest(f"{name} has an item below 0")
    return np.ascontiguousarray(items)
