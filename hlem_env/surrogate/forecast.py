"""Predicted gaps of the requests that a surrogate node serves, for KV policies that rank by them.

What a predictor says depends on the requests alone, not on alpha or the caches. So a stream that was
predicted once, for one alpha, is not predicted again for the next.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from hlem_env.eviction.online import OnlinePredictor
from hlem_env.workload.requests import Requests

WINDOW_HALF_LIVES = 2.0
"""Label window over the half-life of the scan-resistant counts."""
CHUNK = 250
"""Requests between two looks at a new model."""
CELLS = 2**17
"""Users that are known at a time."""
REMEMBERED = 4096
"""Pieces of streams whose gaps are kept."""

_known: OrderedDict[bytes, NDArray[np.float64]] = OrderedDict()
_lock = threading.Lock()


class Forecast:
    """The gaps of one stream, piece by piece.

    Args:
        half_life_s: of the scan-resistant counts.
    """

    def __init__(self, half_life_s: float) -> None:
        self._window_s = WINDOW_HALF_LIVES * half_life_s
        self._digest = repr(self._window_s).encode()
        self._behind: list[Requests] = []
        self._predictor: OnlinePredictor | None = None

    def gaps(self, requests: Requests) -> NDArray[np.float64]:
        """Seconds [n] to each user's next request, of the stream's next piece."""
        content = hashlib.sha256(self._digest)
        for array in (requests.arrival_s, requests.user, requests.history_length):
            content.update(np.ascontiguousarray(array).data)
        self._digest = content.digest()
        self._behind.append(requests)
        with _lock:
            found = _known.get(self._digest)
            if found is None:
                found = self._predict()
                _known[self._digest] = found
                while len(_known) > REMEMBERED:
                    _known.popitem(last=False)
        return found

    def copy(self) -> Forecast:
        """One that goes on from here on its own."""
        return copy.deepcopy(self)

    def _predict(self) -> NDArray[np.float64]:
        """Of the latest piece, after those that were known."""
        if self._predictor is None:
            self._predictor = OnlinePredictor(
                self._window_s, background=False, hashed=True, cells=CELLS
            )
        gaps = np.empty(0)
        for piece in self._behind:
            gaps = np.empty(len(piece))
            for first in range(0, len(piece), CHUNK):
                part = slice(first, first + CHUNK)
                gaps[part] = self._predictor.access(
                    piece.user[part], piece.arrival_s[part], piece.history_length[part]
                )
        self._behind = []
        return gaps
