"""Shows that the comparison with the exact simulation notices a broken surrogate. Run by hand:

    python -m tests.surrogate.mutations

Each mutation edits a copy of the surrogate's source and goes through every case and stream of
test_against_exact.py. The table says how many of them fail, and what differs in them. A mutation
that nothing notices, or whose place in the source is gone, makes the exit status 1.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hlem_env.surrogate import node as surrogate
from hlem_env.surrogate.node import SurrogateBackend
from tests.surrogate.cases import difference, draw_case, draw_requests, run_exact, run_surrogate
from tests.surrogate.streams import draw_stream, run_stream, unequal_fields
from tests.surrogate.test_against_exact import CASES, STREAMS, misses


@dataclass(frozen=True)
class Mutation:
    """One fault: `old` source, found exactly once, becomes `new`."""

    fault: str
    old: str
    new: str


EVICT_THE_HIGHEST = """
    while clock.kv_used + pages > capacity:
        highest = -1
        for slot in range(users.size):
            if users[slot].pages > 0 and users[slot].score != score:
                if highest < 0 or users[slot].score > users[highest].score:
                    highest = slot
        if highest < 0:
            return False
        _drop(users[highest], clock)
        clock.evictions += 1
    return True
    freed"""

MUTATIONS = (
    Mutation("none", "", ""),
    Mutation("evicts the highest score", "\n    freed", EVICT_THE_HIGHEST),
    Mutation(
        "requests do not wait",
        "start_s = max(arrivals[i], clock.server_free_s)",
        "start_s = arrivals[i]",
    ),
    Mutation("admits everyone", "users[slot].score < score", "users[slot].score != score"),
    Mutation(
        "evicts though it is not enough",
        "if fits:\n            _drop(users[slot], clock)",
        "if True:\n            _drop(users[slot], clock)",
    ),
    Mutation(
        "entries do not grow", "user.cached = length", "user.cached = reused if reused else length"
    ),
    Mutation("reuses a shrunk history", "if user.length > length - new_items", "if False"),
    Mutation(
        "KV keeps its pages when alpha grows",
        "while clock.kv_used > run.kv",
        "while clock.kv_used > 9 * run.kv",
    ),
    Mutation(
        "two requests make a user hot",
        "hot = arrival_s - user.arrival_2 <=",
        "hot = arrival_s - user.arrival_1 <=",
    ),
    Mutation(
        "counts requests when they start",
        "if done_s <= run.end_s:\n            _close",
        "if True:\n            _close",
    ),
    Mutation(
        "fetches a row once for each lookup",
        "if fresh < near:",
        "if True:\n            missed_rows = fresh * missing\n        elif fresh < near:",
    ),
    Mutation("forgets who read a row before", "if age < reach:", "if age < -1.0:"),
    Mutation(
        "rows are there as soon as they fit",
        "clock.reach = min(clock.reach, full)",
        "clock.reach = full",
    ),
    Mutation(
        "rows stay a quarter longer",
        "full = draws_to_fill(curve, run.rows_capacity)",
        "full = 1.25 * draws_to_fill(curve, run.rows_capacity)",
    ),
)


def mutated(mutation: Mutation, folder: Path) -> type[SurrogateBackend]:
    """The backend's class from the edited source."""
    source = Path(surrogate.__file__).read_text()
    if mutation.old:
        found = source.count(mutation.old)
        if found != 1:
            raise SystemExit(f"{mutation.fault!r}: its place was found {found} times, not once")
        source = source.replace(mutation.old, mutation.new)
    name = "mutated_" + "_".join(mutation.fault.split())
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    backend: type[SurrogateBackend] = module.SurrogateBackend
    return backend


def main() -> int:
    """Print the table; 1 if a fault went unnoticed."""
    runs = []
    for number in range(CASES):
        case = draw_case(number)
        requests = draw_requests(case)
        runs.append((case, requests, run_exact(case, requests)))
    unnoticed = []
    print(f"{'fault':38s} cases of {CASES}  streams of {STREAMS}  what differs, in how many")
    with tempfile.TemporaryDirectory() as folder:
        for mutation in MUTATIONS:
            backend = mutated(mutation, Path(folder))
            cases, streams, names = 0, 0, Counter[str]()
            for case, requests, exact in runs:
                missed = misses(difference(run_surrogate(case, requests, backend), exact))
                cases += bool(missed)
                names.update(m.split()[0] for m in missed)
            for number in range(STREAMS):
                differ = {
                    field
                    for mine, truth in run_stream(draw_stream(number), backend)
                    for field in unequal_fields(mine, truth)
                }
                streams += bool(differ)
                names.update(differ)
            what = ", ".join(f"{name} {count}" for name, count in names.most_common(5))
            print(f"{mutation.fault:38s} {cases:11d}  {streams:13d}  {what}", flush=True)
            if bool(cases or streams) != bool(mutation.old):
                unnoticed.append(mutation.fault)
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
