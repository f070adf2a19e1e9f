"""Load on an engine, and a line for each answer; the test kills it. Run with a folder."""

import itertools
import sys
from pathlib import Path

import numpy as np

from serving_bridge.scoring import ScoreRequest
from tests.serving_bridge.small_engine import Items, engine_in

CANDIDATES = np.arange(3)
USERS = 12


def history(user: int, first: int, last: int) -> Items:
    """The items that this user does, from the first on."""
    return 1_000_000 * user + np.arange(first, last)


def main() -> None:
    lengths, sizes = [0] * USERS, itertools.cycle((1, 5, 120, 30))
    with engine_in(Path(sys.argv[1])) as engine:
        while True:
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
            for user, future in enumerate(futures):
                print(f"{user} {future.result().history_tokens}", flush=True)


if __name__ == "__main__":
    main()
