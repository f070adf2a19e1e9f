"""P99 in the second after a move of alpha: `python -m eval.non_disruption --preset h100`.

Under open-loop load, alpha moves up and back down by 2, 6 and 10 hundredths, with refill held by the token
bucket and without, and after each such pair pass seconds without a move. Requests count in the second in
which they arrived. Pieces are rounds of all of these in random order, a file each; `--seconds` is the time of
this run, and another one goes on where it ended. Percentiles are of all rounds together, and beside
them stands the mean of the seconds' own; intervals draw whole seconds anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eval.pieces import Piece, Slice, time_left
from eval.refill_under_load import (
    NO_REFILL,
    THROTTLED,
    UNTHROTTLED,
    Floats,
    Plan,
    Served,
    start,
    watch,
)
from eval.sim_to_real import START_S
from eval.statistics import (
    pooled_percentile,
    ratio_of_pooled_percentiles,
    ratio_of_separate_means,
)
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.live.time_source import CLOCKS, clock_name, make_clock
from hlem_env.machine import command, write_result

ARMS = (THROTTLED, UNTHROTTLED)
MOST_STEP = 10
"""Hundredths of the pool."""
NO_MOVE = "no move"
HEADINGS = (
    "refill", "alpha by", "way", "seconds", "requests", "P99 ms", "over no move",
    "mean of seconds", "over later ones",
)  # fmt: skip
"""Of the report. Later: seconds without a move that follow one without a move."""


@dataclass
class Args:
    """What a move of alpha does to the requests of the second after it."""

    preset: str = "cpu-small"
    """live preset, or the path of one"""
    records: Path = Path("runs/non-disruption")
    """folder of the pieces"""
    seconds: float = 480.0
    """of this run"""
    moves: int = 200
    """of each size with each kind of refill, half of them up"""
    steps: tuple[int, ...] = (2, 6, 10)
    """by which alpha moves, in hundredths"""
    refill: tuple[str, ...] = ARMS
    """throttled, unthrottled or both"""
    rounds: int = 3
    """in a piece, of all sizes and kinds, up and down"""
    still: int = 1
    """seconds without a move after each pair of moves"""
    alpha: float = 0.3
    """from which alpha moves up"""
    utilisation: float = 0.6
    """share of time that the load keeps the node busy at it"""
    hot_share: float = 0.3
    """of the requests, Steady"""
    requests_per_s: float | None = None
    """instead of what gives the utilisation"""
    window_s: float = 1.0
    """after a move"""
    warm_s: float = 12.0
    """of load before a piece"""
    clock: str = "auto"
    """wall; cpu: CPU time of the node's thread, so that others' work does not count; auto: cpu on a CPU"""
    report: bool = False
    """show what there is, measure nothing"""
    share: tuple[int, int] = (1, 1)
    """K N: one of N processes with the same records, a device each: every Nth piece from the Kth on"""
    commit: str = ""
    """of the code, where it is no checkout"""
    json: Path | None = None
    """file for the figures"""

    def __post_init__(self) -> None:
        for name in ("seconds", "moves", "rounds", "still", "window_s", "warm_s"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("utilisation", "hot_share"):
            require(0 < getattr(self, name) < 1, name, getattr(self, name), "above 0, below 1")
        require(0 <= self.alpha <= 0.9, "alpha", self.alpha, "0 to 0.9")
        for step in self.steps or (0,):
            require(1 <= step <= MOST_STEP, "steps", step, f"1 to {MOST_STEP}")
        for arm in self.refill or ("none",):
            require(arm in ARMS, "refill", arm, " or ".join(ARMS))
        require(self.clock in (*CLOCKS, "auto"), "clock", self.clock, "wall, cpu or auto")

    @property
    def piece_s(self) -> float:
        """What a piece takes."""
        seconds = 1 + len(self.refill) * len(self.steps) * self.rounds * (2 + self.still)
        return self.warm_s + self.window_s * seconds + 1.0

    @property
    def low_centi(self) -> int:
        """Alpha before a move up."""
        return round(100 * self.alpha)

    def plan(self, seed: int) -> Plan:
        """The load."""
        return Plan(
            self.utilisation, self.hot_share, self.low_centi, self.low_centi + MOST_STEP, 1, self.warm_s,
            self.window_s, self.window_s, False, seed,
        )  # fmt: skip


SHARED = ("steps", "refill", "rounds", "still", "alpha", "utilisation", "hot_share",
          "requests_per_s", "window_s", "warm_s")  # fmt: skip
"""Options that all pieces of a folder have in common."""


def hold_to_options(args: Args, config: LiveConfig, clock: str, part: Slice) -> None:
    """Refuse a folder whose pieces were measured with other options or on another node.

    Raises:
        ArgumentError: naming what differs.
    """
    given = {"clock": clock, **{name: getattr(args, name) for name in SHARED}}
    given |= {f"preset's {name}": value for name, value in config.to_json().items()}
    ours = json.loads(json.dumps(given))  # as it is read
    if not part.has("options"):
        if args.report:  # of records that are older than this file
            return
        known = "a new folder, or one with an options.json"
        require(not part.has("rate"), "--records", str(args.records), known)
    theirs = part.once("options", lambda: {"options": ours})["options"]
    for name, value in ours.items():
        require(theirs.get(name) == value, name, value, f"{theirs.get(name)}, as in --records")


@dataclass(frozen=True)
class Second:
    """One window, on the workload's clock."""

    arm: str
    step_centi: int
    """By which alpha moved at its start; 0: it did not."""
    begin_s: float


def measure_piece(node: LiveNode, args: Args, rate: float, number: int) -> dict[str, Any]:
    """Rounds of all moves from empty caches: latencies by kind and window."""
    served = start(node, args.plan(number), rate)
    served.run(args.low_centi, args.warm_s)
    refill = watch(node)
    bucket = refill.bucket
    rng = np.random.default_rng(number)
    seconds: list[Second] = []

    def window(arm: str, step_centi: int, alpha_centi: int) -> None:
        refill.bucket = None if arm == UNTHROTTLED else bucket
        refill.enabled = arm != NO_REFILL
        seconds.append(Second(arm, step_centi, served.now_s))
        served.run(alpha_centi, args.window_s)

    kinds = [(arm, step) for arm in args.refill for step in args.steps]
    for _ in range(args.rounds):
        for place in rng.permutation(len(kinds)):
            arm, step = kinds[int(place)]
            window(arm, step, args.low_centi + step)
            window(arm, -step, args.low_centi)
            refill.refill(0)  # what is left of it would fall into the second without a move
            for _ in range(args.still):
                window(NO_MOVE, 0, args.low_centi)
    served.run(args.low_centi, args.window_s)  # what still waits
    return {
        "requests_per_s": rate,
        "utilisation": served.busy_s / served.now_s,
        "windows": _latencies(served, seconds, args.window_s),
    }


def _latencies(served: Served, seconds: list[Second], window_s: float) -> list[dict[str, Any]]:
    arrival_s, latency_ms = np.concatenate(served.arrival_s), np.concatenate(served.latency_ms)
    order = np.argsort(arrival_s)
    arrival_s, latency_ms = arrival_s[order], latency_ms[order]
    found = []
    for second in seconds:
        first, last = np.searchsorted(arrival_s, [second.begin_s, second.begin_s + window_s])
        found.append(
            {
                "arm": second.arm,
                "step_centi": second.step_centi,
                "latency_ms": [round(float(v), 3) for v in latency_ms[first:last]],
            }
        )
    return found


def find_rate(node: LiveNode, args: Args) -> Mapping[str, Any]:
    """Requests a second that keep the node busy for the wanted share of the time."""
    rate = (
        args.requests_per_s
        or float(np.interp(args.hot_share, node.config.hot_share, node.config.requests_per_s))
        * node.config.probe_ms
        / node.probe_ms()
    )
    busy = []
    for _ in range(2 if args.requests_per_s is None else 0):
        trial = start(node, args.plan(1), rate)
        trial.run(args.low_centi, args.warm_s)
        busy.append(trial.run(args.low_centi, args.warm_s / 2).utilisation)
        rate *= args.utilisation / max(busy[-1], args.utilisation / 4)
    return {"requests_per_s": rate, "busy": busy}


def report(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """P99 of each kind of second, and over that without a move: of all requests, and the mean of seconds.

    What a move does may show in the second after the next: so seconds without one are told apart by whether
    one without a move went before, where `--still` makes such.
    """
    groups: dict[tuple[str, int, str], list[Floats]] = {}
    none: list[Floats] = []
    after: list[Floats] = []
    settled: list[Floats] = []
    for record in records:
        before = ""
        for window in record["windows"]:
            arm, step, latency_ms = (
                window["arm"],
                window["step_centi"],
                np.array(window["latency_ms"]),
            )
            if arm == NO_MOVE:
                none.append(latency_ms)
                (settled if before == NO_MOVE else after).append(latency_ms)
            else:
                for direction in ("up" if step > 0 else "down", "either"):
                    groups.setdefault((arm, abs(step), direction), []).append(latency_ms)
            before = arm
    require(any(group.size for group in none), "records", "no requests", "some")
    if settled:
        groups[NO_MOVE, 0, "after a move"], groups[NO_MOVE, 0, "later"] = after, settled
    return {
        "no_move": {"seconds": len(none), "p99_ms": asdict(pooled_percentile(none, 0.99))},
        "utilisation": float(np.mean([record["utilisation"] for record in records])),
        "requests_per_s": float(np.mean([record["requests_per_s"] for record in records])),
        "rows": [_row(key, groups[key], none, settled) for key in sorted(groups)],
    }


def _row(
    key: tuple[str, int, str], found: list[Floats], none: list[Floats], settled: list[Floats]
) -> dict[str, Any]:
    arm, size, direction = key
    some = any(group.size for group in found)
    pooled = partial(ratio_of_pooled_percentiles, share=0.99, paired=False)
    return {
        "refill": arm,
        "by_centi": size,
        "direction": direction,
        "seconds": len(found),
        "requests": int(sum(group.size for group in found)),
        "p99_ms": asdict(pooled_percentile(found, 0.99)) if some else None,
        "over_no_move": asdict(pooled(found, none)) if some else None,
        "second_over_no_move": _of_seconds(found, none),
        "second_over_later": _of_seconds(found, settled),
    }


def _of_seconds(found: list[Floats], others: list[Floats]) -> dict[str, float] | None:
    """Mean P99 of a second over that of others."""
    ours, theirs = (
        np.array([np.percentile(g, 99) for g in of if g.size]) for of in (found, others)
    )
    if not (ours.size and theirs.size):
        return None
    return asdict(ratio_of_separate_means(ours, theirs))


def print_report(found: Mapping[str, Any], console: Console) -> None:
    """A line a kind of move."""
    base = found["no_move"]["p99_ms"]
    table = Table(
        title=f"P99 of requests that arrive in the second after a move, {found['requests_per_s']:.1f}/s,"
        f" busy {100 * found['utilisation']:.0f} %; without a move {_shown(base)} ms over"
        f" {found['no_move']['seconds']} seconds",
        title_justify="left",
    )  # fmt: skip
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in found["rows"]:
        table.add_row(
            row["refill"], f"{row['by_centi'] / 100:.2f}", row["direction"], str(row["seconds"]),
            str(row["requests"]), _shown(row["p99_ms"]), _shown(row["over_no_move"], 2),
            _shown(row["second_over_no_move"], 2), _shown(row["second_over_later"], 2),
        )  # fmt: skip
    console.print(table)


def _shown(estimate: Mapping[str, float] | None, digits: int = 1) -> str:
    if estimate is None:
        return "-"
    value, low, high = (f"{estimate[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def main(args: Args) -> int:
    """Measure what is missing, as far as time allows; show what there is."""
    config = LiveConfig.load(args.preset)
    config = replace(config, epoch_seconds=min(config.epoch_seconds, 1.0), warmup_epochs=0)
    part = Slice(
        args.records, args.seconds, command("eval.non_disruption"), args.commit, args.share
    )
    clock = clock_name(args.clock, config.device)
    hold_to_options(args, config, clock, part)
    count = -(-args.moves // (2 * args.rounds))
    pieces = [Piece(f"round-{number:03d}", args.piece_s) for number in range(1, count + 1)]
    missing = [piece for piece in pieces if not part.has(piece.name)]
    if missing and not args.report:
        node = LiveNode(config, time_source=make_clock(clock, config.device))
        try:
            rate = float(part.once("rate", lambda: find_rate(node, args))["requests_per_s"])

            def execute(piece: Piece) -> Mapping[str, Any]:
                number = int(piece.name.rpartition("-")[2])
                return {"clock": clock, **measure_piece(node, args, rate, number)}

            missing = part.run(pieces, execute)
        finally:
            node.close()
    print(time_left(missing, args.seconds, START_S))
    records = [part.read(piece.name) for piece in pieces if part.has(piece.name)]
    if not records:
        return 0
    found = report(records)
    print_report(found, Console(width=160))
    if args.json is not None:
        payload = {"preset": config.to_json(), "clock": clock, "alpha": args.alpha,
                   "window_s": args.window_s, "hot_share": args.hot_share, **found}  # fmt: skip
        write_result(args.json, command("eval.non_disruption"), payload)
    return 0


if __name__ == "__main__":
    run_command(
        "eval.non_disruption", main, Args, lambda args: f"what had ended is in {args.records}"
    )
