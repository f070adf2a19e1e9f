"""What a served node is asked and what it answers: requests, scores, limits, reasons for a refusal."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import HlemError

Items = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Score candidates for a user. Either `history` or `new_items` is given.

    A history with at least one item, or a user that the store knows: a candidate needs no history to be
    scored, but `new_items` need one to follow.
    """

    user: str
    """1 to 256 bytes of UTF-8."""
    candidates: Items
    """Item ids [c], 0 to 2^63 - 1; c >= 1."""
    history: Items | None = None
    """The user's whole history, oldest first [n]; it replaces what is stored."""
    new_items: Items | None = None
    """What the user did since the last request, oldest first [n]; n may be 0. A history that gets longer
    than the node's longest loses its oldest quarter, and `Scored.history_tokens` tells."""


class Scored(NamedTuple):
    """The answer to one request. Its history is on disk when it is given."""

    scores: NDArray[np.float32]
    """[candidates], in the request's order."""
    history_tokens: int
    """Length of the user's history as it is now, the new items included."""
    reused_tokens: int
    """Of those, tokens whose K and V came from the cache."""


@dataclass(frozen=True)
class Limits:
    """What a node takes of one request; more is refused, never cut."""

    history_tokens: int
    """Of one user, new items included."""
    candidates: int = 1000
    """Of one request."""
    user_bytes: int = 256
    """Of a user's id in UTF-8."""
    queue: int = 256
    """Requests that wait or run."""
    body_bytes: int = 4 * 2**20
    """Of one request as it is sent, after decompression."""


class ScoringError(HlemError):
    """A request was not served. The message is fit for the client: it repeats nothing that was sent."""


class InvalidRequest(ScoringError):
    """The request is not one that this node takes."""


class UnknownUser(ScoringError):
    """New items of a user without a stored history."""


class Overloaded(ScoringError):
    """The queue is full, or the node is draining."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotServed(ScoringError):
    """The node failed while the request was with it."""


class Scorer(Protocol):
    """What the protocol servers speak to. Any thread may call it."""

    limits: Limits

    def submit(self, request: ScoreRequest) -> Future[Scored]:
        """Queue a request. Cancelling the future takes it out of the queue if it has not begun.

        Raises:
            InvalidRequest: outside the limits.
            Overloaded: at once, never by waiting.
        """

    @property
    def ready(self) -> bool:
        """Whether requests are taken now: warmed up, and not draining."""

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, finish those that were taken; whether all finished in time."""
