"""The README's table of claims, out of the committed records: `python -m eval.claims`.

Every figure is read from a file of docs/results, beside the hardware that the file names. A record that
is not there yet makes a row that says so. `--check` changes nothing and fails where the README differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hlem_env.command_line import run_command
from hlem_env.errors import ArtefactError, require

BEGIN, END = "<!-- claims: begin -->", "<!-- claims: end -->"
RESULTS = Path("docs/results")
MISSING = "not measured yet"
Values = Mapping[str, Any]


@dataclass
class Args:
    """Write or check the README's table of claims."""

    readme: Path = Path("README.md")
    """file with the two markers"""
    results: Path = RESULTS
    """folder of the records"""
    check: bool = False
    """fail where the file is out of date, write nothing"""


@dataclass(frozen=True)
class Claim:
    """A row."""

    what: str
    record: str
    """File in docs/results."""
    figure: Callable[[Values], str]


def hardware(values: Values) -> str:
    """What the record was measured on, or that nothing was."""
    if values.get("clock") == "simulated":
        return "simulated"
    for key in ("gpu", "device"):
        if isinstance(values.get(key), str) and values[key] != "CPU memory":
            return str(values[key])
    live = values.get("preset")
    if isinstance(live, Mapping) and live.get("device") == "cuda":
        profile = values.get("profile", {})
        return str(profile.get("hardware", live.get("measured_on", "GPU"))).partition(";")[0]
    about = values["machine"]
    cores = about["cores"]
    where = f"{about['cpu']}, {cores} core{'' if cores == 1 else 's'}"
    return where + (", emulated link" if isinstance(live, Mapping) and "device" in live else "")


def _interval(estimate: Mapping[str, float], digits: int, scale: float = 1.0) -> str:
    value, low, high = (f"{scale * estimate[k]:.{digits}f}" for k in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _over_best_static(regime: str, controller: str) -> Callable[[Values], str]:
    def figure(values: Values) -> str:
        cell = next(
            cell
            for cell in values["cells"]
            if cell["workload"].endswith(regime) and cell["kv_policy"] == "scan_resistant"
        )
        summary = cell["controllers"][controller]["summary"]
        if summary["saturated"] or "p99_over_best_static" not in summary:
            return "saturated"
        return _interval(summary["p99_over_best_static"], 3)

    return figure


def _attention(heads: int, head_dim: int) -> Callable[[Values], str]:
    def figure(values: Values) -> str:
        row = next(
            row
            for row in values["full"]
            if (row["heads"], row["head_dim"], row["tokens"]) == (heads, head_dim, 4096)
        )
        return f"{row['tflops']:.0f} TFLOP/s (CUTLASS, published: {row['cutlass_tflops']})"

    return figure


def _decision(kind: str) -> Callable[[Values], str]:
    def figure(values: Values) -> str:
        times = values["microseconds"][kind]
        return f"{times['p50']:.1f} us, P99 {times['p99']:.1f} us"

    return figure


def _surrogate(values: Values) -> str:
    row = next(row for row in values["rows"] if row["name"] == values["bar"]["row"])
    return f"{row['median_requests_per_s'] / 1e6:.1f} million requests/s a core"


def _embedding(key: str) -> Callable[[Values], str]:
    def figure(values: Values) -> str:
        bar = values["bars"][key]
        return f"{bar['value']:.2f} times (bar {bar['bar']:g}: {bar['result']})"

    return figure


def _service(values: Values) -> str:
    times = {row["kind"]: row["p50_ms"] for row in values["services"] if not row["waiting"]}
    return f"{times['hot']:.1f} ms cached, {times['cold']:.1f} ms not"


def _move(values: Values) -> str:
    rows = [row for row in values["moves"] if abs(row["step_centi"]) == 10]
    return f"median {max(row['median_ms'] for row in rows):.2f} ms of host time"


def _agreement(values: Values) -> str:
    summary = values["summary"]
    rank, error = summary["mean_rank_correlation"], summary["median_p99_error"]
    shown = "-" if error is None else f"{100 * error:.0f} %"
    return (
        f"median P99 error {shown}, hit rates {summary['median_kv_hit_points']:.1f} and"
        f" {summary['median_emb_hit_points']:.1f} points, rank correlation"
        f" {'-' if rank is None else f'{rank:.2f}'}, best alpha off by"
        f" {summary['mean_best_alpha_difference']:.2f}; {summary['runs']} runs,"
        f" {summary['disturbed']} disturbed, {summary['saturated']} saturated"
    )


def _end_to_end(regime: str, allocation: str, reference: str) -> Callable[[Values], str]:
    def figure(values: Values) -> str:
        for row in values["rows"]:
            if (row["regime"], row["kv_policy"], row["allocation"]) == (
                regime, "scan_resistant", allocation,
            ):  # fmt: skip
                if row[reference] is None:
                    return "saturated" if any(row["saturated"]) else MISSING
                repeats = int(row[reference]["seeds"])
                if repeats == 1:
                    return f"{row[reference]['value']:.3f}, one repeat"
                return f"{_interval(row[reference], 3)}, {repeats} repeats"
        return MISSING

    return figure


def _non_disruption(values: Values) -> str:
    found = [
        f"{row['by_centi'] / 100:.2f}: {_interval(row['over_no_move'], 2)}"
        for row in values["rows"]
        if row["direction"] == "either" and row["refill"] == "throttled" and row["over_no_move"]
    ]
    return "times as without a move, by 95 % intervals: " + ", ".join(found)


def _twin(values: Values) -> str:
    found = values["summary"]
    median, p90 = (f"{100 * found[f'{name}_p99_error']:.0f} %" for name in ("median", "p90"))
    kv, emb = (f"{found[f'median_{name}_hit_points']:.1f}" for name in ("kv", "emb"))
    return (
        f"P99 error {median} at the median, {p90} at P90, hit rates {kv} and {emb} points;"
        f" {found['counted']} runs; with {found['disturbed']} that a slow host disturbed"
        f" {100 * found['median_p99_error_with_disturbed']:.0f} and"
        f" {100 * found['p90_p99_error_with_disturbed']:.0f} %"
    )


def _room(regime: str) -> Callable[[Values], str]:
    def figure(values: Values) -> str:
        found = values["regimes"][regime]["live"].get(SMART)
        if found is None:
            return MISSING
        room = f"a room of {100 * found['room']:.1f} %, {len(found['seeds'])} repeats"
        if found["room_recovered"] is None:
            return f"{room}: too little to say"
        return f"{_interval(found['room_recovered'], 0, 100)} % of {room}"

    return figure


def _replicates(values: Values) -> str:
    found = values["agreement"]

    def apart(name: str) -> str:
        return f"{100 * found[name]['median']:.0f} % apart, P90 {100 * found[name]['p90']:.0f} %"

    return f"{apart('on one host')}; as it was {apart('live')}; {found['pairs']} pairs"


COMPARED, SMART = "compare-controllers-default.json", "smart"
TWIN, LIVE = "end-to-end-h200-8gib-simulated.json", "end-to-end-h200-8gib-one-host.json"
CLAIMS = (
    Claim("Simulated, Trend: P99 of PPO with the working set over the best static split's",
          COMPARED, _over_best_static("trend", "ppo-only (working set)")),
    Claim("Simulated, Trend: the working-set rule over it",
          COMPARED, _over_best_static("trend", "working-set rule")),
    Claim("Simulated, Burst: PPO with the working set over it",
          COMPARED, _over_best_static("burst", "ppo-only (working set)")),
    Claim("Simulated, Burst: the working-set rule over it",
          COMPARED, _over_best_static("burst", "working-set rule")),
    Claim("Simulated, Burst: the allocator over it",
          "compare-allocator-default.json", _over_best_static("burst", "SmartAllocator")),
    Claim("Simulated, Burst on taobao: the allocator over it",
          "compare-allocator-taobao.json", _over_best_static("burst", "SmartAllocator")),
    Claim("A decision of the frozen policy", "bench_decision.json", _decision("act")),
    Claim("A decision of the allocator, its learning on the same core at a priority that hardly gets it",
          "bench_decision_allocator.json", _decision("allocator_decide_learning")),
    Claim("The plain surrogate's speed", "bench_surrogate.json", _surrogate),
    Claim("HSTU attention, 4 heads of 64, 4,096 tokens",
          "bench_attention.json", _attention(4, 64)),
    Claim("HSTU attention, 4 heads of 128", "bench_attention.json", _attention(4, 128)),
    Claim("Embedding lookups, a fifth resident, beside FBGEMM's cached TBE",
          "bench_embedding.json", _embedding("speedup_cached_0.2")),
    Claim("The same, half resident", "bench_embedding_h200.json", _embedding("speedup_cached_0.5")),
    Claim("A request on a live node", "bench_node_h200.json", _service),
    Claim("A move of a tenth of the pool", "bench_node_h200.json", _move),
    Claim("Live node and surrogate on the same requests, calibrated on another machine, by the host's speed"
          " in each second", "sim-to-real-h200-host-speed.json", _agreement),
    Claim("The same, as calibrated", "sim-to-real-h200.json", _agreement),
    Claim("The same, mean service times matched run by run",
          "sim-to-real-h200-matched.json", _agreement),
    Claim("Four older machines and nodes with that profile, by their hosts' speed: the first",
          "sim-to-real-h200-machine-1.json", _agreement),
    Claim("The second", "sim-to-real-h200-machine-2.json", _agreement),
    Claim("The third", "sim-to-real-h200-machine-3.json", _agreement),
    Claim("The fourth", "sim-to-real-h200-machine-4.json", _agreement),
    Claim("As calibrated, on a node with slow spells", "sim-to-real-h100.json", _agreement),
    Claim("As calibrated, on a CPU", "sim-to-real-cpu-small.json", _agreement),
    Claim("The same, by the host's speed", "sim-to-real-cpu-small-host-speed.json", _agreement),
    Claim("The same, mean service times matched run by run",
          "sim-to-real-cpu-small-matched.json", _agreement),
    Claim("As calibrated, on another CPU, whose host was steady",
          "sim-to-real-cpu-small-machine-2.json", _agreement),
    Claim("On a live node's twin, Books, Trend: SmartAllocator's P99 over plain LRU with its design point",
          TWIN, _end_to_end("trend", SMART, "over_lru_design")),
    Claim("The same in Burst", TWIN, _end_to_end("burst", SMART, "over_lru_design")),
    Claim("Trend, over scan-resistant KV with the best static split",
          TWIN, _end_to_end("trend", SMART, "over_best_static")),
    Claim("The same in Burst", TWIN, _end_to_end("burst", SMART, "over_best_static")),
    Claim("Live runs under load beside the surrogate, as fast as the host was, on five machines",
          "end-to-end-h200-8gib-twin.json", _twin),
    Claim("P99 of the same live run again, as on one host", LIVE, _replicates),
    Claim("Live, as on one host, Books, Trend: SmartAllocator's P99 over plain LRU with its design point",
          LIVE, _end_to_end("trend", SMART, "over_lru_design")),
    Claim("The same in Burst", LIVE, _end_to_end("burst", SMART, "over_lru_design")),
    Claim("Trend: admission alone, scan-resistant KV with its design point over the same",
          LIVE, _end_to_end("trend", "design point", "over_lru_design")),
    Claim("Burst: admission alone", LIVE, _end_to_end("burst", "design point", "over_lru_design")),
    Claim("Steady: SmartAllocator", LIVE, _end_to_end("steady", SMART, "over_lru_design")),
    Claim("Steady: admission alone", LIVE, _end_to_end("steady", "design point", "over_lru_design")),
    Claim("Trend, over scan-resistant KV with the best static split",
          LIVE, _end_to_end("trend", SMART, "over_best_static")),
    Claim("The same in Burst", LIVE, _end_to_end("burst", SMART, "over_best_static")),
    Claim("Live, Trend: what SmartAllocator recovers of the simulated room over the best static split",
          "end-to-end-h200-8gib-room.json", _room("trend")),
    Claim("The same in Burst", "end-to-end-h200-8gib-room.json", _room("burst")),
    Claim("P99 in the second after a move of alpha, refill held by the token bucket",
          "non-disruption-h200.json", _non_disruption),
)  # fmt: skip


def table(results: Path) -> str:
    """The table, Markdown.

    Raises:
        ArtefactError: a record is there and does not have what its claim reads.
    """
    lines = ["| claim | figure | measured on | record |", "|---|---|---|---|"]
    for claim in CLAIMS:
        path = results / claim.record
        figure, where = MISSING, ""
        if path.is_file():
            try:
                values = json.loads(path.read_text("utf-8"))
                figure, where = claim.figure(values), hardware(values)
            except (ValueError, KeyError, TypeError, StopIteration) as error:
                raise ArtefactError(f"{path} has not what a claim reads: {error!r}") from error
            link = f"[{claim.record}]({(RESULTS / claim.record).as_posix()})"
        else:
            link = claim.record
        lines.append(f"| {claim.what} | {figure} | {where} | {link} |")
    return "\n".join(lines) + "\n"


def with_table(text: str, new: str) -> str:
    """The text with the table between the markers.

    Raises:
        ArgumentError: the markers are not there, once each and in order.
    """
    good = text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)
    require(good, "readme", "no markers", f"{BEGIN} and {END}, once each, in this order")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{new}{END}{rest.partition(END)[2]}"


def main(args: Args) -> int:
    """Write, or check."""
    text = args.readme.read_text("utf-8")
    wanted = with_table(text, table(args.results))
    if wanted == text:
        print(f"{args.readme} is up to date")
        return 0
    if args.check:
        print(f"{args.readme} is out of date: run python -m eval.claims", file=sys.stderr)
        return 1
    args.readme.write_text(wanted, encoding="utf-8")
    print(f"{args.readme}: {len(CLAIMS)} claims written")
    return 0


if __name__ == "__main__":
    run_command("eval.claims", main, Args)
