"""What the adapter makes of the policy's step, in one compiled call.

    surprise   (P99 - EMA) / SLO
    x          KV hits, embedding hits, hot share, surprise within +-1, base step / 0.06
    applied    a(x), of the network, with noise             (Eq. 6, residual_network.py)
    pull       share (target - alpha - base step)           within the bound; cache_worth.py has the target
    residual   held back + (pull + applied)                 the sum within the bound
    step       round(base step + residual + carry)          on the grid of 0.01; the rest is the next carry

Compiled as a whole, since a decision waits for it: right after the rest of an epoch's work the interpreter is
slow, and takes twice as long for these lines as when they are repeated. What is `register_jitable` is plain
Python to everyone else.
"""

from __future__ import annotations

import math

import numba
from numba.extending import register_jitable

from hlem_env.mdp import ACTIONS_CENTI, EMA_WEIGHT, HOT_WINDOW_EPOCHS
from serving_bridge.cache_worth import target
from serving_bridge.residual_network import propose

MOST = 1e6
"""Sum of a sample's magnitudes: far beyond any sensible one, far from an overflow."""
Memory = tuple[float, float, float]
"""Of an episode: EMA of P99 in ms, mean working set, carry in hundredths."""
UNKNOWN: Memory = (-1.0, -1.0, 0.0)
"""Before the first epoch: negative means are replaced by its values."""
Proposed = tuple[tuple[float, ...], float, float]
"""x, the applied residual and its mean: what is learnt from, once the epoch's reward is known."""
_LARGEST_STEP = max(ACTIONS_CENTI)
_FALL = 0.5
"""Of what the working set lies below its mean: half of those who have left still hold KV."""
_SUDDEN = 0.15
"""Pools by which the working set is off its mean of a hot window in a burst, and in few trends."""


@numba.njit(cache=True)
def adapted_step(  # type: ignore[no-untyped-def]
    rows, worth, bound, share, noise, memory,
    slo_ms, alpha_centi, base_centi, kv_hit, emb_hit, hot_share, p99_ms, working_set,
):  # fmt: skip
    """The step to take, the residual in it (hundredths both), what was proposed, and the new memory.

    Args:
        rows, bound, noise: of the network, see `propose`.
        worth: of the caches.
        share: of the gap to its target, that the pull closes.
        memory: see `Memory`.
        slo_ms: of the service.
        alpha_centi: in force.
        base_centi: step of the policy from there.
        kv_hit, emb_hit, hot_share, p99_ms, working_set: of the epoch.
    """
    ema_ms, mean_working_set, carry = memory
    surprise, ema_ms = surprised(p99_ms, ema_ms, slo_ms)
    clipped = min(max(surprise, -1.0), 1.0)
    x = (kv_hit, emb_hit, hot_share, clipped, base_centi / _LARGEST_STEP)
    applied, mean = propose(rows, x, bound, noise, MOST)
    settled, mean_working_set = settle(working_set, mean_working_set)
    wanted, above_knee = target(worth, settled, hot_share, kv_hit)
    held, pull = pulled(wanted, above_knee, alpha_centi / 100, base_centi / 100, share, bound)
    residual_centi = 100 * (held + bounded(pull + applied, bound))
    step, carry = on_grid(base_centi, residual_centi, carry)
    return step, residual_centi, (x, applied, mean), (ema_ms, mean_working_set, carry)


@register_jitable
def surprised(p99_ms: float, ema_ms: float, slo_ms: float) -> tuple[float, float]:
    """(P99 - EMA) / SLO before the epoch is taken into the EMA, 0 for the first, and the EMA after it."""
    if ema_ms < 0.0:
        ema_ms = p99_ms
    difference = p99_ms - ema_ms
    return difference / slo_ms, ema_ms + EMA_WEIGHT * difference


@register_jitable
def settle(working_set: float, mean: float) -> tuple[float, float]:
    """The working set to pull by, and its mean with this epoch.

    NaN while it is off its mean: a burst's is gone before alpha is there. Half of what it has fallen is left
    out: a user who has left counts as hot for a window more.
    """
    if mean < 0.0:
        mean = working_set
    off = working_set - mean
    mean += off / HOT_WINDOW_EPOCHS
    if not -_SUDDEN <= off <= _SUDDEN:
        return math.nan, mean
    return working_set + _FALL * off if off < 0.0 else working_set, mean


@register_jitable
def pulled(
    wanted: float, above_knee: bool, alpha: float, base: float, share: float, bound: float
) -> tuple[float, float]:
    """The part of the residual that is not learnt by reward, in alpha.

    Args:
        wanted, above_knee: from `target`; NaN pulls nowhere.
        alpha: in force.
        base: step of the policy from there.
        share: of the gap, that is closed.
        bound: of the pull.

    Returns:
        What is held back of the base step, and the pull. A base step is held back that leads away from a
        balance above the knee: towards the knee is the policy's habit, and there it is wrong.
    """
    if share == 0.0:
        return 0.0, 0.0
    gap = wanted - alpha
    if above_knee and base * gap < 0.0:
        return -base, bounded(share * gap, bound)
    return 0.0, bounded(share * (gap - base), bound)


@register_jitable
def bounded(value: float, bound: float) -> float:
    """Within +-bound; 0 for what is no number."""
    if -bound <= value <= bound:
        return value
    if value > bound:
        return bound
    return -bound if value < -bound else 0.0


@register_jitable
def on_grid(base_centi: int, residual_centi: float, carry: float) -> tuple[int, float]:
    """The whole hundredths to move by, and what is left over for the next epoch."""
    wanted = base_centi + residual_centi + carry
    step = round(wanted)
    return step, wanted - step
