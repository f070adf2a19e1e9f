# mypy: disallow-untyped-calls=False
"""Times of work on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def elapsed_ms(run: Callable[..., object], *arguments: Tensor) -> float:
    """Time of a call on the device, from an idle device to an idle device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run(*arguments)
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def percentiles(times_ms: list[float]) -> dict[str, float]:
    """P50 and P99 of times; empty without any."""
    if not times_ms:
        return {}
    return {f"p{q}": round(float(np.percentile(times_ms, q)), 3) for q in (50, 99)}
