"""Requests that bring their own items: what a served node executes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hlem_env.errors import require
from hlem_env.live.histories import Window
from hlem_env.live.host_tables import HostTables
from hlem_env.live.item_source import Ints
from hlem_env.workload.requests import Requests


@dataclass(frozen=True, eq=False)
class GivenRequests(Requests):
    """Requests with the items of their histories and their candidates; ids int64, 0 and up."""

    edits: Ints
    """[n] a number that changes whenever a user's history is not the last one with items appended:
    edited, shrunk or replaced. K and V of another number are not reused."""
    history: tuple[Callable[[int], Ints], ...]
    """[n] a request's history from its i-th item on, for the i that it is called with. What is cached is
    not asked for."""
    candidates: tuple[Ints, ...]
    """[n] of each request, one or more."""

    def __getitem__(self, part: slice) -> GivenRequests:
        return GivenRequests(
            self.arrival_s[part], self.user[part], self.history_length[part], self.new_items[part],
            self.edits[part], self.history[part], self.candidates[part],
        )  # fmt: skip


class GivenItems:
    """An ItemSource for GivenRequests; it remembers nothing.

    Args:
        tables: whose rows. Any id is an item: its row in a table is a hash of both.
    """

    fewest_candidates = 1

    def __init__(self, tables: HostTables) -> None:
        self._tables = tables
        self._rows(
            torch.zeros(1, dtype=torch.int64)
        )  # compiles, where there is something to compile

    def candidates(self, requests: Requests) -> Ints:
        """See `ItemSource.candidates`."""
        return np.array([one.size for one in _given(requests).candidates], np.int64)

    def window(self, requests: Requests) -> Window:
        """See `ItemSource.window`."""
        return Window(np.zeros(len(requests), np.int64), _given(requests).edits)

    def keys(self, requests: Requests, window: Window, cached: Ints, ahead: int = 0) -> Tensor:
        """See `ItemSource.keys`. The items go to the device in one copy that nobody waits for."""
        given, parts = _given(requests), []
        new = requests.history_length.astype(np.int64) - cached
        for first, count, history, candidates in zip(
            cached.tolist(), new.tolist(), given.history, given.candidates, strict=True
        ):
            items = history(first)
            require(items.size == count, "items of a history", items.size, f"{count} from {first}")
            parts += [items, candidates]
        cuda = self._tables.device.type == "cuda"
        tokens = sum(part.size for part in parts)
        host = torch.empty(tokens, dtype=torch.int64, pin_memory=cuda)
        np.concatenate(parts, out=host.numpy())
        return self._rows(host)

    def served(self, requests: Requests) -> None:
        """See `ItemSource.served`."""

    def _rows(self, items: Tensor) -> Tensor:
        """Rows int64 [n * tables], on the device, of items int64 [n] on the host."""
        if self._tables.device.type == "cpu":
            return self._tables.keys(items).reshape(-1)
        from hlem_env.live.kernels import item_rows_triton

        moved = items.to(self._tables.device, non_blocking=True)
        return item_rows_triton.item_rows(moved, self._tables)


def _given(requests: Requests) -> GivenRequests:
    if not isinstance(requests, GivenRequests):
        kind = type(requests).__name__
        require(False, "requests", kind, "GivenRequests, since the node draws no items")
    assert isinstance(requests, GivenRequests)
    return requests
