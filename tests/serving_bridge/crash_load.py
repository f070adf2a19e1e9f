"""Load on an engine, and a line for each answer; the test kills it. Run with a folder.

Beside the users who are told of come others, each once: their histories go when the store is at its limit.
"""

import itertools
import sys
from pathlib import Path

import numpy as np

from serving_bridge.scoring import ScoreRequest
from tests.serving_bridge.small_engine import Items, engine_in

CANDIDATES = np.arange(3)
USERS = 12
RETAIN_BYTES = 2**18
PASSING = 3
"""Users of a round that do not come back."""


def history(user: int, first: int, last: int) -> Items:
    """The items that this user does, from the first on."""
    return 1_000_000 * user + np.arange(first, last)


def main() -> None:
    lengths, sizes = [0] * USERS, itertools.cycle((1, 5, 120, 30))
    with engine_in(Path(sys.argv[1]), retain_bytes=RETAIN_BYTES) as engine:
        for round in itertools.count():
            futures = []
            for user, size in zip(range(USERS), sizes, strict=False):
                begin, end = lengths[user], lengths[user] + size
                if begin == 0 or end > 690:  # the first time, and when there is no more room
                    begin, end = 0, end if begin == 0 else size
                    given = {"history": history(user, begin, end)}
                else:
                    given = {"new_items": history(user, begin, end)}
                futures.append(engine.submit(ScoreRequest(f"u{user}", CANDIDATES, **given)))
                lengths[user] = end
            for i in range(PASSING):
                passing = ScoreRequest(f"v{PASSING * round + i}", CANDIDATES, history(0, 0, 690))
                futures.append(engine.submit(passing))
            for user, future in enumerate(futures[:USERS]):
                print(f"{user} {future.result().history_tokens}", flush=True)


if __name__ == "__main__":
    main()
