"""Why a request was refused: the status that REST and gRPC give, and the name that metrics count it by.

The message of a refusal is fixed by the code that refuses. It names tensors and limits of this server
and never repeats what was sent.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from serving_bridge.scoring import (
    InvalidRequest,
    NotServed,
    Overloaded,
    ScoringError,
    UnknownUser,
)


class TooLarge(InvalidRequest):
    """The body is over the limit."""


class UnsupportedMedia(InvalidRequest):
    """The body is of a type or an encoding that this server does not read."""


class TooSlow(InvalidRequest):
    """The body did not arrive in time."""


class UnknownModel(InvalidRequest):
    """There is no such model or version here."""


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class Refusal(NamedTuple):
    """How one kind of error is told."""

    http: int
    grpc: str
    """Name of the code in `grpc.StatusCode`."""
    outcome: str
    """In the metrics."""


REFUSALS: Final[dict[type[ScoringError], Refusal]] = {
    TooLarge: Refusal(413, "RESOURCE_EXHAUSTED", "too_large"),
    UnsupportedMedia: Refusal(415, "INVALID_ARGUMENT", "invalid"),
    TooSlow: Refusal(408, "DEADLINE_EXCEEDED", "too_slow"),
    UnknownModel: Refusal(404, "NOT_FOUND", "invalid"),
    InvalidRequest: Refusal(400, "INVALID_ARGUMENT", "invalid"),
    UnknownUser: Refusal(409, "FAILED_PRECONDITION", "unknown_user"),
    Overloaded: Refusal(503, "UNAVAILABLE", "overloaded"),
    NotServed: Refusal(500, "INTERNAL", "failed"),
}
FAILED: Final = NotServed("the node failed while it handled the request")


def refusal(error: ScoringError) -> Refusal:
    """How an error is told: as the nearest of its classes that is listed."""
    for kind in type(error).__mro__:
        if kind in REFUSALS:
            return REFUSALS[kind]
    return REFUSALS[NotServed]


def retry_after(error: ScoringError) -> str | None:
    """Whole seconds to wait before the request is sent again, at least 1; None where that is no help."""
    if isinstance(error, Overloaded):
        seconds = error.retry_after_s
        return str(max(1, math.ceil(seconds))) if math.isfinite(seconds) else "1"
    return None
