"""Items for requests that bring none: histories and candidates are drawn, by hashes."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import types
from torch import Tensor

from hlem_env.live.histories import Histories, Window
from hlem_env.live.host_tables import HostTables
from hlem_env.live.item_source import Ints
from hlem_env.live.token_rows import token_rows
from hlem_env.workload.requests import Requests


class DrawnItems:
    """An ItemSource for any Requests, the same for the same seed.

    Args:
        persistent_users: ids below it come back.
        tables: whose rows; a table's rows are the catalogue.
        zipf: exponent of the items' popularity.
        seed: of the items.
        candidates: of each request.
    """

    def __init__(
        self, persistent_users: int, tables: HostTables, zipf: float, seed: int, candidates: int
    ) -> None:
        self._histories = Histories(persistent_users, tables.rows_per_table, zipf, seed)
        self._tables, self.fewest_candidates = tables, candidates
        self._served = 0

    def candidates(self, requests: Requests) -> Ints:
        """See `ItemSource.candidates`."""
        return np.full(len(requests), self.fewest_candidates)

    def window(self, requests: Requests) -> Window:
        """See `ItemSource.window`."""
        return self._histories.window(*_whole(requests))

    def keys(self, requests: Requests, window: Window, cached: Ints, ahead: int = 0) -> Tensor:
        """See `ItemSource.keys`. Candidates are drawn by how many requests came before."""
        users, lengths, _ = _whole(requests)
        cuda = self._tables.device.type == "cuda"
        spans = torch.empty(5, len(requests), dtype=torch.int64, pin_memory=cuda)
        tokens = _describe(
            spans.numpy(), users, window.first, cached, lengths, self.fewest_candidates,
            self._served + ahead,
        )  # fmt: skip
        spans = spans.to(self._tables.device, non_blocking=True)
        return token_rows(spans, tokens, self._histories, self._tables)

    def served(self, requests: Requests) -> None:
        """See `ItemSource.served`."""
        self._histories.visit(*_whole(requests))
        self._served += len(requests)


def _whole(requests: Requests) -> tuple[Ints, Ints, Ints]:
    """Users, lengths and new items, [n] each."""
    given = requests.user, requests.history_length, requests.new_items
    users, lengths, new = (np.ascontiguousarray(one, np.int64) for one in given)
    return users, lengths, new


_GIVEN = types.Array(types.int64, 1, "C", readonly=True)


@numba.njit(
    [types.int64(types.int64[:, ::1], *[_GIVEN] * 4, types.int64, types.int64)], cache=True
)  # fmt: skip
def _describe(
    spans: Any, users: Any, first: Any, cached: Any, lengths: Any, candidates: int, serial: int
) -> int:
    """Write what `token_rows` asks of each request; returns the tokens of all."""
    tokens = 0
    for i in range(users.size):
        new = lengths[i] - cached[i]
        spans[0, i], spans[1, i], spans[2, i] = users[i], first[i] + cached[i], new
        spans[3, i], spans[4, i] = tokens, serial + i
        tokens += new + candidates
    return tokens
