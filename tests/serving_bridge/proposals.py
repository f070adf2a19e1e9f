"""What an adapter's network proposes, for tests of its learning."""

from __future__ import annotations

from collections.abc import Iterable

from serving_bridge.adapted_step import Proposed
from serving_bridge.adapter import OnlineAdapter


def propose(adapter: OnlineAdapter, four: Iterable[float], base_centi: int = 0) -> Proposed:
    """Its features, the residual applied and its mean.

    Args:
        four: KV hits, embedding hits, hot share, surprise.
        base_centi: step of the policy.
    """
    kv_hit, emb_hit, hot_share, surprise = map(float, four)
    memory = 0.0, 0.0, 0.0  # with an EMA of 0 and an SLO of 1 the surprise is P99
    _, _, proposed, _ = adapter.step(
        memory, 1.0, 50, base_centi, kv_hit, emb_hit, hot_share, surprise, 0.4
    )
    return proposed
