"""Items for requests that bring none: histories and candidates are drawn, by hashes."""

from __future__ import annotations

import numpy as np
import torch
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
        lengths, new = _whole(requests)
        return self._histories.window(requests.user, lengths, new)

    def keys(self, requests: Requests, window: Window, cached: Ints, ahead: int = 0) -> Tensor:
        """See `ItemSource.keys`. Candidates are drawn by how many requests came before."""
        new = requests.history_length.astype(np.int64) - cached
        ends = np.cumsum(new + self.fewest_candidates)
        start = ends - new - self.fewest_candidates
        serial = self._served + ahead + np.arange(len(requests))
        spans = torch.from_numpy(
            np.stack([requests.user, window.first + cached, new, start, serial])
        )
        spans = spans.to(self._tables.device)
        return token_rows(spans, int(ends[-1]), self._histories, self._tables)

    def served(self, requests: Requests) -> None:
        """See `ItemSource.served`."""
        lengths, new = _whole(requests)
        self._histories.visit(requests.user, lengths, new)
        self._served += len(requests)


def _whole(requests: Requests) -> tuple[Ints, Ints]:
    return requests.history_length.astype(np.int64), requests.new_items.astype(np.int64)
