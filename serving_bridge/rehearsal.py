"""Before a node is ready: everything that is compiled at its first use is used once.

Else, after an installation, the first requests would wait for seconds, and the first epoch would again.
"""

from __future__ import annotations

import numpy as np

from hlem_env.live.given_items import GivenItems, GivenRequests
from hlem_env.live.node import LiveNode
from hlem_env.telemetry import percentile
from serving_bridge.scoring import Limits

USERS = 3


def rehearse(node: LiveNode, limits: Limits) -> None:
    """Have a node serve given items from then on; its caches are empty afterwards."""
    node.reset(0, GivenItems(node.tables))
    node.move(50)
    tokens = max(min(node.config.token_budget, limits.history_tokens) // USERS, 1)
    for new, candidates in ((tokens, 1), (0, 1), (0, limits.candidates)):
        requests = _requests(tokens, new, candidates)
        while len(requests):
            count = node.first_batch(requests)
            node.execute(requests[:count], requests[count:], 0.0)
            requests = requests[count:]
    node.move(100)  # gives up every entry
    node.idle(0.0)
    node.move(0)
    percentile(np.zeros(1), 0.99)
    node.take_ahead_bytes()
    node.reset(0, GivenItems(node.tables))


def _requests(tokens: int, new: int, candidates: int) -> GivenRequests:
    history, asked = np.arange(tokens), np.arange(candidates)
    return GivenRequests(
        np.zeros(USERS),
        np.arange(USERS),
        np.full(USERS, tokens, np.int32),
        np.full(USERS, new, np.int32),
        np.zeros(USERS, np.int64),
        (lambda first: history[first:],) * USERS,
        (asked,) * USERS,
    )
