# mypy: disallow-untyped-calls=False
"""What batches of every kind take on a live node: the measurements that a profile is fitted to.

One list of samples for each model depth. Kinds differ in what the fit has to tell apart: nothing cached
and rows missing (cold), nothing cached and rows resident (again), all but a few tokens cached (hot),
a longer piece that is new (delta), several requests (hot, cold), some of each (mixed), a next batch that
waits (ahead), rows moved meanwhile (refill). A batch starts when the one before has completed.

Then come batches as a served load makes them (stream), after one another and after pauses.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hlem_env.live.config import LiveConfig
from hlem_env.live.machine_state import MachineState
from hlem_env.live.node import Executed, LiveNode
from hlem_env.live.serving import TRANSFER_STEP_S, LiveBackend
from hlem_env.live_scenario import live_workload
from hlem_env.scenario import Scenario
from hlem_env.workload.requests import Requests, Workload
from train.host_speed import STREAM

USERS = 1 << 16
"""Who may come back."""
ALPHAS_CENTI = (10, 50)
LENGTHS = (0.25, 0.5, 1.0)
"""Of the mean history; the longest possible comes beside."""
HOT_TOGETHER = (1, 2, 4, 8, 16)
DELTAS = (0.03, 0.1, 0.3)
"""Of the history, new since the last visit."""
MIXED = (1, 4)
"""Cached requests beside one of which nothing is."""
MOST_WARMING = 400
STREAMS = (("scan_resistant", 10), ("scan_resistant", 35), ("scan_resistant", 80), ("lru", 90))
"""KV policy and alpha of each, hundredths; no alpha twice. Under LRU nearly every request evicts another."""
STREAM_LOAD = 0.85
"""Of the preset's rate, in proportion to the machine's speed."""
STREAM_HOT_SHARE = 0.4
STREAM_SEED = 1001
LIGHT_LOAD = 0.15
"""Of the preset's rate, for the time that the serving loop adds to a batch."""


@dataclass(frozen=True)
class Sample:
    """One batch."""

    kind: str
    alpha: float
    history: list[int]
    cached: list[int]
    missed_rows: int
    """Distinct rows that came over the link."""
    hit_rows: int
    """Lookups, of all tables, that found their row resident."""
    ahead: bool
    """Whether rows of the next batch were looked for meanwhile."""
    refilling: bool
    prefetch_bytes: int
    """0 in a stream."""
    ms: float
    idle_ms: float = 0.0
    """In a stream: how long the server had waited for the batch; 0 of the first one noted."""
    evicted: int = 0
    """KV entries that went for it."""
    stored: int = 0
    """History tokens whose K and V went to the cache."""


class Bench:
    """Batches on demand, timed one at a time.

    Args:
        node: under plain LRU, so that whoever came last is cached.
    """

    def __init__(self, node: LiveNode) -> None:
        self.node, self.config = node, node.config
        self.samples: list[Sample] = []
        self._now_s = 0.0
        self._next_user = 0
        self.alpha_centi = -1
        node.reset(USERS)

    def move(self, alpha_centi: int) -> None:
        """Move alpha and fill the embedding cache with rows of users who come once."""
        self.node.move(alpha_centi)
        self.node.refill.refill(0)
        self.alpha_centi = alpha_centi
        length = round(self.config.mean_history_tokens)
        for _ in range(MOST_WARMING):
            self.execute(self.cold([length]))
            cache = self.node.embedding
            if cache.resident_rows >= 0.98 * cache.capacity_rows:
                break

    def cold(self, lengths: list[int]) -> Requests:
        """Users whom nobody has seen."""
        first = self._next_user
        self._next_user = (first + len(lengths)) % (USERS - 64)
        if self._next_user < first:  # the first ones again: their windows have to go
            self.node.reset(USERS)
        return self.requests(first + np.arange(len(lengths)), lengths, lengths)

    def hot(self, lengths: list[int], new: int) -> Requests:
        """Users whose histories are cached but for `new` tokens, after the visit that does it."""
        lengths = [max(length - new, 1) for length in lengths]
        users = []
        for length in lengths:
            one = self.cold([length])
            users += one.user.tolist()
            self.execute(one)
        grown = [length + new for length in lengths]
        return self.requests(np.array(users), grown, [new] * len(users))

    def again(self, length: int) -> Requests:
        """A user whose rows were just read and whose history was edited since: nothing is cached."""
        one = self.cold([length + 1])
        self.execute(one)
        return self.requests(one.user, [length], [0])

    def requests(self, users: NDArray[Any], lengths: list[int], new: list[int]) -> Requests:
        """A batch."""
        return Requests(
            np.full(len(lengths), self._now_s), np.asarray(users, np.int64),
            np.array(lengths, np.int32), np.array(new, np.int32),
        )  # fmt: skip

    def execute(self, requests: Requests, waiting: Requests | None = None) -> Executed:
        """Run a batch, a millisecond of the workload's clock after the last."""
        self._now_s += 1e-3
        following = requests[:0] if waiting is None else waiting
        return self.node.execute(requests, following, self._now_s)

    def time(self, kind: str, requests: Requests, waiting: Requests | None = None) -> None:
        """Run a batch to its completion, and note what it took."""
        node = self.node
        node.take_ahead_bytes()  # waits for what is still under way
        refilling = node.refill.refilling
        done = self.execute(requests, waiting)
        self.note(kind, requests, done, refilling, prefetch_bytes=node.take_ahead_bytes().prefetch)

    def note(
        self, kind: str, requests: Requests, done: Executed, refilling: bool, idle_ms: float = 0.0,
        prefetch_bytes: int = 0,
    ) -> None:  # fmt: skip
        """Note what a batch took; nothing waits for the device."""
        sample = Sample(
            kind=kind,
            alpha=self.alpha_centi / 100,
            history=requests.history_length.tolist(),
            cached=done.reused.tolist(),
            missed_rows=done.rows_fetched,
            hit_rows=done.rows_hit,
            ahead=done.ahead,
            refilling=refilling,
            prefetch_bytes=prefetch_bytes,
            ms=1e3 * done.device_s,
            idle_ms=idle_ms,
            evicted=done.evicted,
            stored=done.stored,
        )
        self.samples.append(sample)


class Stream(LiveBackend):
    """A live backend that notes every batch.

    Args:
        workload: where requests come from.
        bench: of the node; its samples grow.
    """

    def __init__(self, workload: Workload, bench: Bench) -> None:
        super().__init__(workload, bench.node)
        self._bench = bench
        self._done_s: float | None = None
        self.noting = False

    def execute(self, batch: Requests, waiting: Requests, now_s: float) -> Executed:
        """One batch. Nothing else waits for the device: what a batch leaves under way delays the next."""
        if not self.noting:
            return super().execute(batch, waiting, now_s)
        node, now = self.node, self.node.time_source.now
        idle_ms = 0.0 if self._done_s is None else 1e3 * (now() - self._done_s)
        refilling = node.refill.refilling
        done = super().execute(batch, waiting, now_s)
        self._done_s = now()
        self._bench.note(STREAM, batch, done, refilling, idle_ms)
        return done


def lengths_of(config: LiveConfig) -> list[int]:
    """Histories to measure, tokens."""
    some = [round(share * config.mean_history_tokens) for share in LENGTHS]
    return sorted({*some, round(0.95 * config.max_history_tokens)})


def run_kinds(bench: Bench, repeats: int) -> None:
    """Every kind of batch at every length and alpha."""
    config = bench.config
    for alpha_centi in ALPHAS_CENTI:
        bench.move(alpha_centi)
        for _ in range(repeats):  # in turns: a machine's slow seconds fall on all kinds
            for length in lengths_of(config):
                _one_round(bench, length)


def _one_round(bench: Bench, length: int) -> None:
    config = bench.config
    bench.time("cold", bench.cold([length]))
    bench.time("again", bench.again(length))
    following = bench.cold([length])
    bench.time("ahead", bench.cold([length]), following)
    bench.time("after", following)
    pages = bench.node.kv.layout.pages(np.array([length]), bench.node.kv.blocks_per_page)
    together = 0.8 * bench.node.kv.capacity_pages / int(pages[0])
    for n in (n for n in HOT_TOGETHER if n <= together):
        bench.time(f"hot {n}", bench.hot([length] * n, config.new_items))
    for share in DELTAS:
        bench.time(f"delta {share}", bench.hot([length], max(round(share * length), 1)))
    if 2 * (length + config.candidates) <= config.token_budget:
        bench.time("cold 2", bench.cold([length] * 2))
    if length + 5 * config.candidates <= config.token_budget:
        for n in (n for n in MIXED if n + 1 <= together):
            cached = bench.hot([length] * n, config.new_items)
            bench.time(f"mixed {n}", cached.then(bench.cold([length])))


def run_refill(bench: Bench, seconds: float) -> dict[str, float]:
    """Cold batches beside refill without a bucket, and refill alone: its rate in GB/s.

    On a CPU rows move while nobody waits alone.
    """
    node, length = bench.node, round(bench.config.mean_history_tokens)
    refill, bucket = node.refill, node.refill.bucket
    refill.bucket = refill.slo_ms = None
    rates = {}
    for name in ("busy", "idle") if node.device.type == "cuda" else ("idle",):
        bench.move(10)
        node.move(60)
        refill.refill(0)
        free = node.embedding.capacity_rows - node.embedding.resident_rows
        seed = torch.Generator(node.device).manual_seed(1)
        some = torch.randint(
            node.tables.n_rows, (free,), generator=seed, device=node.device, dtype=torch.int64
        )
        node.take_ahead_bytes()
        refill.insert(some)
        source = node.time_source
        start_s = source.now()
        while refill.refilling and source.now() - start_s < seconds:
            if name == "busy":
                bench.time("cold", bench.cold([length]))
            else:
                node.idle(source.now())
                source.sleep(TRANSFER_STEP_S)
        moved = node.refill.refill_bytes
        rates[name] = moved / (source.now() - start_s) / 1e9
        refill.refill(0)
        node.reset(USERS)
        refill = node.refill
        refill.bucket = refill.slo_ms = None
    refill.bucket, refill.slo_ms = bucket, node.config.slo_ms
    return rates


def run_streams(bench: Bench, seconds: float) -> list[dict[str, Any]]:
    """Batches as a steady load makes them, at several alphas, after as long without a note.

    Returns:
        the machine's state after each second.
    """
    state, samples = MachineState(bench.node), list[dict[str, Any]]()
    node, config = bench.node, bench.config
    before = node.kv_policy
    speed = config.probe_ms / node.probe_ms()
    scenario = Scenario(
        steady_hot_share=STREAM_HOT_SHARE, utilisation=STREAM_LOAD * config.utilisation
    )
    for node.kv_policy, alpha_centi in STREAMS:
        stream = Stream(live_workload(scenario, config, node.entries_in_pool, speed), bench)
        stream.reset(STREAM_SEED)
        bench.alpha_centi = alpha_centi
        for stream.noting in (False, True):
            for _ in range(round(seconds / config.epoch_seconds)):
                stream.run(alpha_centi, config.epoch_seconds)
                samples.append(state.sample())
    node.kv_policy = before
    node.reset(USERS)
    return samples


def bandwidths(node: LiveNode, repeats: int = 10) -> dict[str, float]:
    """Rates of rows from the host tables, rows in device memory, and a copy in one piece; lookups.

    GB/s each; a lookup's time is of a resident row, in nanoseconds.
    """
    device, tables = node.device, node.tables
    n = min(100_000, tables.n_rows // 4)
    generator = torch.Generator(device).manual_seed(2)

    def draw() -> torch.Tensor:
        rows = torch.randint(tables.n_rows, (n,), generator=generator, device=device)
        return rows.sort().values

    def best(run: Any) -> float:
        times = []
        for _ in range(repeats + 2):
            prepared = draw()
            _synchronise(device)
            start_s = node.time_source.now()
            run(prepared)
            _synchronise(device)
            times.append(node.time_source.now() - start_s)
        return float(np.median(times[2:]))

    n_bytes = n * tables.row_bytes
    host_s = best(node.embedding._fetch)
    slab = node.embedding.state.slab
    hbm_s = best(lambda rows: slab[rows % len(slab)])
    whole = tables.rows[: min(4 * n, tables.n_rows)]
    link_s = best(lambda rows: whole.to(device, copy=True))
    node.reset(USERS)
    node.move(50)
    node.refill.refill(0)
    link, node.embedding.emulated_link_gbps = node.embedding.emulated_link_gbps, None
    few = min(n, node.embedding.capacity_rows // 2)
    keys = draw()[:few]
    node.embedding.lookup(keys, 0.0)
    key_ns = {}
    for size in (few // 8, few):
        seconds = best(lambda rows, size=size: node.embedding.lookup(keys[:size], 0.0))
        key_ns[size] = 1e9 * seconds
    node.embedding.emulated_link_gbps = link
    node.reset(USERS)
    slope = (key_ns[few] - key_ns[few // 8]) / (few - few // 8)
    return {
        "gather_gbps": n_bytes / host_s / 1e9,
        "hbm_gbps": 2 * n_bytes / hbm_s / 1e9,
        "link_gbps": whole.numel() * whole.itemsize / link_s / 1e9,
        "lookup_ns_per_key": max(slope, 0.0),
    }


def loop_overhead_ms(node: LiveNode, seconds: float) -> dict[str, float]:
    """What the serving loop adds to a batch's own time.

    Returns:
        `median_ms` from arrival to completion, for requests that met an idle server; `busy_ms` of it
        keeps the server busy.
    """
    config = node.config
    scenario = Scenario(steady_hot_share=0.3, utilisation=LIGHT_LOAD * config.utilisation)
    backend = LiveBackend(live_workload(scenario, config, node.entries_in_pool, 1.0), node)
    backend.reset(1)
    backend.run(30, seconds / 2)
    stats = backend.run(30, seconds)
    more = np.sort(stats.latency_ms - stats.service_ms)
    busy_ms = 1000.0 * stats.utilisation * seconds - float(stats.service_ms.sum())
    return {
        "median_ms": float(np.percentile(more, 40)) if more.size else 0.0,
        "busy_ms": max(busy_ms / max(more.size, 1), 0.0),
        "requests": float(more.size),
        "utilisation": stats.utilisation,
    }


def measure(node: LiveNode, repeats: int, seconds: float) -> dict[str, Any]:
    """All of one node, as plain values.

    Args:
        node: of the wanted depth, under plain LRU.
        repeats: of each kind at each length and alpha.
        seconds: for each of refill and the serving loop; twice as many for each stream.
    """
    bench = Bench(node)
    run_kinds(bench, repeats)
    node.reset(USERS)
    rates = run_refill(bench, seconds)
    machine_state = run_streams(bench, 2 * seconds)
    return {
        "preset": node.config.to_json(),
        "machine_state": machine_state,
        "samples": [asdict(sample) for sample in bench.samples],
        "refill_gbps": rates,
        "bandwidths": bandwidths(node),
        "loop": loop_overhead_ms(node, seconds),
        "probe_ms": node.probe_ms(),
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
