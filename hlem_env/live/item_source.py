"""Where the items of requests come from: drawn for benchmarks, brought along for serving."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hlem_env.live.histories import Window
from hlem_env.workload.requests import Requests

Ints = NDArray[np.int64]


class ItemSource(Protocol):
    """What a node asks about the items of requests."""

    @property
    def fewest_candidates(self) -> int:
        """No request has fewer."""

    def candidates(self, requests: Requests) -> Ints:
        """How many candidates each request has, [n]."""

    def window(self, requests: Requests) -> Window:
        """What the requests' histories are, as they will be when the requests are served."""

    def keys(self, requests: Requests, window: Window, cached: Ints, ahead: int = 0) -> Tensor:
        """Table rows int64 [N * tables], on the device, of all tokens that are to be computed.

        Each request's new history comes before its candidates.

        Args:
            requests: no user twice.
            window: of these requests.
            cached: [n] history tokens that are not asked for, the first ones.
            ahead: requests that will be served before these and have not been yet.
        """

    def served(self, requests: Requests) -> None:
        """The requests have been served: what comes next builds on them."""
