"""Requests as arrays, what they look up, and the Workload protocol that produces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import require, require_number


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests in order of arrival, one entry each."""

    arrival_s: NDArray[np.float64]
    """[n] on the workload's clock, ascending."""
    user: NDArray[np.int64]
    """[n] ids. Below `Workload.persistent_users` they come back; at or above it each comes once,
    numbered in order."""
    history_length: NDArray[np.int32]
    """[n] tokens of history, the new items included."""
    new_items: NDArray[np.int32]
    """[n] of those, appended since the user's last request."""

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    def __getitem__(self, part: slice) -> Requests:
        return Requests(
            self.arrival_s[part], self.user[part], self.history_length[part], self.new_items[part]
        )

    def then(self, later: Requests) -> Requests:
        """These requests followed by `later` ones."""
        if not len(self):
            return later
        return Requests(
            np.concatenate((self.arrival_s, later.arrival_s)),
            np.concatenate((self.user, later.user)),
            np.concatenate((self.history_length, later.history_length)),
            np.concatenate((self.new_items, later.new_items)),
        )

    @classmethod
    def empty(cls) -> Requests:
        """No requests."""
        return cls(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True)
class Catalogue:
    """What a token looks up: one row in each of `tables` tables, by Zipf popularity."""

    tables: int = 10
    rows_per_table: int = 50_000_000
    row_bytes: int = 1024
    zipf: float = 0.9
    """Exponent s of the row popularity, p(rank) ~ rank^-s."""
    candidates: int = 100
    """Candidate items scored in each request."""

    def __post_init__(self) -> None:
        for name in ("tables", "rows_per_table", "row_bytes", "candidates"):
            require_number(name, getattr(self, name), whole=True)
        require_number("zipf", self.zipf)
        require(1 <= self.tables <= 1000, "tables", self.tables, "1 to 1000")
        require(
            1 <= self.rows_per_table <= 2**40, "rows_per_table", self.rows_per_table, "1 to 2^40"
        )
        require(1 <= self.row_bytes <= 2**20, "row_bytes", self.row_bytes, "1 to 2^20 bytes")
        require(0 <= self.zipf <= 3, "zipf", self.zipf, "0 to 3")
        require(0 <= self.candidates <= 100_000, "candidates", self.candidates, "0 to 100,000")


class Workload(Protocol):
    """A stream of requests on a clock of its own that starts at `-warmup_s`."""

    @property
    def persistent_users(self) -> int:
        """User ids below this may come back."""

    @property
    def max_history_tokens(self) -> int:
        """No history is longer."""

    @property
    def mean_history_tokens(self) -> float:
        """Typical history length; sizes the node's bookkeeping."""

    @property
    def catalogue(self) -> Catalogue:
        """What the tokens look up."""

    def reset(self, rng: np.random.Generator, start_s: float) -> None:
        """Start anew at `start_s` (0 or, for a warm-up, below). All randomness comes from `rng`."""

    def take(self, until_s: float) -> Requests:
        """Requests that arrive from where the last call ended to before `until_s`."""

    def to_json(self) -> dict[str, Any]:
        """Plain values that make this workload again."""
