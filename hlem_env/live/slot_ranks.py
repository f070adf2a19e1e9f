"""The order in which predictions give slots up, as numbers that sort; PyTorch on any device.

Nothing here depends on a value that is on the device, so nothing waits for it.

A slot's rank is an int32, the lowest goes first, FREE and FOREIGN as among stamps:

    to make up      slots that make room for mispredicted rows, the least recent first
    candidates      those expected last first, and of equals the least recent
    the others      the least recent first

How late a row is expected is kept to 1 part in 128, how long ago a batch was to 1 part in 1,024 and
exactly up to 2,048 batches; what is equal then goes in order of the slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hlem_env.live.cache_state import FOREIGN, FREE

RECENCIES_BITS = 15
RECENCIES = 2**RECENCIES_BITS
PREDICTED = RECENCIES
"""The lowest rank of a candidate. The ranks below are recencies, of slots that make up."""
OTHERS = PREDICTED + 2**30
"""The lowest rank of the others."""
INFINITY = 0x7F80
"""The first 16 bits of float32's infinity."""
YOUNGEST = 0x3F80 << 3
"""The first 19 bits of the float32 1.0."""


def ranks(
    stamp: Tensor, expected: Tensor, now_s: float, pace_s: float, batch: int, last: Tensor | None
) -> Tensor:
    """Ranks of slots, int32 [slots], none of which makes up.

    Args:
        stamp: int32 [slots], each slot's last batch, FREE or FOREIGN.
        expected: float32 [slots], when its row is expected next, in seconds. What lies before its last
            use says nothing any more: then it was due there. What lies in the past is mirrored: a row
            that is overdue by so much is expected after as much again.
        now_s: seconds.
        pace_s: from one batch to the next.
        batch: the last one.
        last: candidates are the slots with a stamp up to this one, an int32 scalar; None: all.
    """
    recency = recencies(stamp, batch)
    farness = far(stamp, expected, now_s, pace_s, batch)
    nearness = INFINITY - (farness.view(torch.int32) >> 16)
    rank = (nearness << RECENCIES_BITS) + recency + PREDICTED
    if last is not None:
        rank = torch.where(stamp <= last, rank, OTHERS + recency)
    return torch.where((stamp == FREE) | (stamp == FOREIGN), stamp, rank)


def far(stamp: Tensor, expected: Tensor, now_s: float, pace_s: float, batch: int) -> Tensor:
    """In how many seconds rows are expected, float32 [n]; as `ranks`, infinity where nothing is known."""
    used_s = now_s - (batch - stamp).clamp(min=0).float() * pace_s
    seconds = (torch.maximum(expected, used_s) - now_s).abs()
    return torch.nan_to_num(seconds, nan=torch.inf, posinf=torch.inf)


def recencies(stamp: Tensor, batch: int) -> Tensor:
    """Numbers from 0, the least recent, below RECENCIES: int32 [n] for stamps, int32 [n]."""
    age = (batch - stamp).clamp(min=0).float()
    recency: Tensor = RECENCIES + YOUNGEST - 2 - (age.view(torch.int32) >> 13)
    return recency.clamp(max=RECENCIES - 1)


def entries(slots: Tensor, rank: Tensor) -> Tensor:
    """Queue entries of slots, int32 [n], with these ranks: complements of those a prediction put there."""
    predicted = (rank >= PREDICTED) & (rank < OTHERS)
    return torch.where(predicted, ~slots, slots)


def hold_back(farness: Tensor, held: int) -> Tensor:
    """An order of n slots in which, one after the other, the farthest of the first few goes.

    Args:
        farness: float32 [n], not negative, in order of recency; infinity goes at once.
        held: how many stay behind: candidates but one.

    Returns:
        Places, int64 [n]: of equals the least recent goes first.
    """
    n = len(farness)
    place = torch.arange(n, device=farness.device)
    # The nearer, and of equals the more recent, is the lower number: all differ.
    waiting = (farness.view(torch.int32).long() << 32) + (n - place)
    kept = []
    for _ in range(min(held, n)):
        nearest = waiting.cummin(0).values
        kept.append(nearest[-1:])
        # A newcomer goes on, or it stays and who was the nearest so far goes on.
        waiting = torch.maximum(waiting[1:], nearest[:-1])
    return n - torch.cat((waiting, *reversed(kept))) % 2**32
