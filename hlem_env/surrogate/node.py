"""The fast backend: every request of an epoch through both caches and the queue of one node.

Per request, in order of arrival:

    KV         exact, a whole entry per user, by the policy of `hlem_env.eviction.recency`, or by a
               learned one (`ranked_kv`)
    rows       (new tokens + candidates) x tables, resident with the probability of `hit_rates`
    service    overhead + compute + missed rows / gather + resident rows / HBM + refill interference
    latency    arrival to completion on one server (Lindley's recursion)

A move of alpha changes capacities at once and content with delay: KV entries are evicted by policy
and come back when their users do; rows come with misses and refill.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, get_type_hints

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env import mdp
from hlem_env.errors import BackendError, require, require_choice, require_number
from hlem_env.eviction import laru, recency
from hlem_env.eviction.policies import POLICIES
from hlem_env.surrogate import ranked_kv
from hlem_env.surrogate.borrowed import borrowed
from hlem_env.surrogate.forecast import Forecast
from hlem_env.surrogate.hardware import ComputeTable, HardwareProfile, compute_ms
from hlem_env.surrogate.hit_rates import (
    Curve,
    distinct_curve,
    distinct_rows,
    draws_to_fill,
    miss_probability,
)
from hlem_env.telemetry import EpochStats, Floats, percentile
from hlem_env.workload.requests import Requests, Workload

REFILL_HEADROOM = 0.10
"""Share of the link that refill leaves free beside the critical misses."""
_ONE_OFF_SLOTS_PER_ENTRY = 2


@dataclass(frozen=True)
class NodeConfig:
    """A node: its pool, its model's KV layout, its policies.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    pool_bytes: int = 60_000_000_000
    page_bytes: int = 2 * 2**20
    block_tokens: int = 128
    """Tokens of one layer in a KV block."""
    block_bytes: int = 256 * 2**10
    """K and V of a block: 128 tokens x 2 x 512 x 2 bytes."""
    layers: int = 6
    kv_policy: str = "scan_resistant"
    refill: bool = True
    warmup_epochs: int = 12
    epoch_seconds: float = 5.0
    """Sets the hot window, the half-life of request counts, and the warm-up."""

    def __post_init__(self) -> None:
        for name in ("pool_bytes", "layers", "warmup_epochs"):
            require_number(name, getattr(self, name), whole=True)
        require(1 <= self.layers <= 1000, "layers", self.layers, "1 to 1000")
        require_number("epoch_seconds", self.epoch_seconds)
        require(isinstance(self.refill, bool), "refill", self.refill, "True or False")
        for name in ("page_bytes", "block_tokens", "block_bytes"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(
            100 * self.page_bytes <= self.pool_bytes <= 2**50,
            "pool_bytes",
            self.pool_bytes,
            f"100 pages of {self.page_bytes} bytes, to 2^50",
        )
        require_choice("kv_policy", self.kv_policy, POLICIES)
        require(
            0 <= self.warmup_epochs <= 10_000, "warmup_epochs", self.warmup_epochs, "0 to 10,000"
        )
        require(self.epoch_seconds > 0, "epoch_seconds", self.epoch_seconds, "above 0")

    @property
    def pool_pages(self) -> int:
        """Whole pages in the pool."""
        return self.pool_bytes // self.page_bytes

    def kv_pages(self, tokens: int) -> int:
        """Pages of a user's entry; a page's blocks belong to one user."""
        blocks = -(-tokens // self.block_tokens)
        return -(-blocks * self.layers * self.block_bytes // self.page_bytes)


_USER = np.dtype(
    [
        *recency.USER_FIELDS,
        ("cached", "i4"),  # tokens in the KV cache
        ("hot_listed", "i4"),
        ("arrival_1", "f8"),  # the last three arrivals, latest first
        ("arrival_2", "f8"),
        ("arrival_3", "f8"),
        ("read_at", "f8"),  # draw count at which the whole history was last read from the tables
        ("length", "i8"),  # history tokens at the last request
    ]
)
"""What the node knows of a user: one cache line."""

_LISTS = np.dtype([("hot", "i8"), ("victim", "i8")])
"""Slots of the users that may be hot, and scratch space of one eviction."""

_RUN = np.dtype(
    [
        ("begin_s", "f8"),
        ("end_s", "f8"),
        ("kv_capacity", "i8"),  # pages
        ("rows_capacity", "f8"),  # rows of one table that fit
        # the same in every run
        ("persistent_users", "i8"),
        ("one_off_mask", "i8"),  # their slots, a power of two, less one
        ("policy", "i8"),
        ("half_life_s", "f8"),
        ("hot_window_s", "f8"),
        ("block_tokens", "i8"),
        ("block_bytes", "i8"),  # of one block in every layer
        ("page_bytes", "i8"),
        ("candidates", "i8"),
        ("tables", "i8"),
        ("overhead_ms", "f8"),
        ("append_tokens", "f8"),
        ("missed_row_ms", "f8"),
        ("resident_row_ms", "f8"),
        ("refill_slowdown", "f8"),
        ("refill_rows_per_s", "f8"),  # of one table; 0: no refill
    ]
)
"""Constants of a run."""


class _ClockValues(NamedTuple):
    """State of a node beside its users, and the counts of the running epoch."""

    server_free_s: float
    origin_s: float  # of the decayed counts
    draws: float  # fresh draws from a table so far
    reach: float  # the row cache holds what this many last draws touched
    kv_used: int  # pages
    heap_size: int
    hot_listed: int
    # the request that started and has not completed
    open: int
    open_arrival_s: float
    open_service_ms: float
    open_hot: int
    open_history: int
    open_reused: int
    open_hits: float
    # of the running epoch
    completed: int
    busy_s: float
    history: int
    reused: int
    hits: float
    refill_rows: float
    missed_rows: float
    evictions: int
    hot_pages: int


_CLOCK = np.dtype([(name, np.dtype(kind)) for name, kind in get_type_hints(_ClockValues).items()])


_inlined = numba.njit(cache=True, nogil=True, error_model="numpy", forceinline=True)
"""For helpers of every request: handing them three arrays, field by field, takes a third of the time."""


@_inlined
def _kv_pages(tokens, run):  # type: ignore[no-untyped-def]
    blocks = (tokens + run.block_tokens - 1) // run.block_tokens
    return (blocks * run.block_bytes + run.page_bytes - 1) // run.page_bytes


@_inlined
def _drop(user, clock):  # type: ignore[no-untyped-def]
    """Free a user's KV entry. Its heap entry goes when it reaches the root."""
    clock.kv_used -= user.pages
    user.pages = user.cached = 0


@_inlined
def _lowest(users, heap, clock):  # type: ignore[no-untyped-def]
    """The resident user with the lowest score, at the heap's root; -1 when there is none."""
    clock.heap_size = recency.settle_root(users, heap, clock.heap_size)
    return heap[0].slot if clock.heap_size > 0 else -1


@_inlined
def _make_room(users, heap, lists, clock, pages, score, capacity):  # type: ignore[no-untyped-def]
    """Evict users of a lower score until `pages` more fit; all or nothing."""
    if clock.kv_used + pages <= capacity:
        return True
    if pages > capacity:
        return False
    freed, count, fits = 0, 0, True
    while fits and clock.kv_used + pages - freed > capacity:
        if count > 0:
            clock.heap_size = recency.pop(users, heap, clock.heap_size)
        slot = _lowest(users, heap, clock)
        fits = slot >= 0 and users[slot].score < score
        if fits:
            lists[count].victim = slot
            count += 1
            freed += users[slot].pages
    for i in range(count):
        slot = lists[i].victim
        if fits:
            _drop(users[slot], clock)
            clock.evictions += 1
        else:
            clock.heap_size = recency.push(users, heap, clock.heap_size, slot)
    return fits


@_inlined
def _kv_lookup(users, heap, lists, clock, run, slot, length, new_items):  # type: ignore[no-untyped-def]
    """Tokens reused for this request; stores, grows or replaces the user's entry by policy.

    A history that is shorter than the last one with the new items shrank or was edited: a miss,
    never a silent reuse.
    """
    user = users[slot]
    if user.length > length - new_items:
        _drop(user, clock)
    user.length = length
    reused = user.cached
    pages = _kv_pages(length, run)
    more = pages - user.pages
    if _make_room(users, heap, lists, clock, more, user.score, run.kv_capacity):
        clock.kv_used += more
        user.pages = pages
        user.cached = length
        clock.heap_size = recency.push(users, heap, clock.heap_size, slot)
    return reused


@_inlined
def _note_visit(user, lists, clock, slot, arrival_s, window_s):  # type: ignore[no-untyped-def]
    """Record a persistent user's arrival; returns whether that makes or keeps it hot."""
    hot = arrival_s - user.arrival_2 <= window_s
    user.arrival_3 = user.arrival_2
    user.arrival_2 = user.arrival_1
    user.arrival_1 = arrival_s
    if hot and not user.hot_listed:
        user.hot_listed = 1
        lists[clock.hot_listed].hot = slot
        clock.hot_listed += 1
    return hot


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _sweep_hot(users, lists, clock, run):  # type: ignore[no-untyped-def]
    """Drop users that are no longer hot from the list; count KV pages of the others."""
    kept, pages = 0, 0
    for i in range(clock.hot_listed):
        slot = lists[i].hot
        if run.end_s - users[slot].arrival_3 <= run.hot_window_s:
            lists[kept].hot = slot
            kept += 1
            pages += _kv_pages(users[slot].length, run)
        else:
            users[slot].hot_listed = 0
    clock.hot_listed = kept
    clock.hot_pages = pages


@_inlined
def _close(clock, latency_ms, service_ms, arrival_s, is_hot):  # type: ignore[no-untyped-def]
    """Count the open request: it has completed."""
    i = clock.completed
    latency_ms[i] = 1000.0 * (clock.server_free_s - clock.open_arrival_s)
    service_ms[i] = clock.open_service_ms
    arrival_s[i] = clock.open_arrival_s
    is_hot[i] = clock.open_hot != 0
    clock.history += clock.open_history
    clock.reused += clock.open_reused
    clock.hits += clock.open_hits
    clock.completed = i + 1
    clock.open = 0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _begin(users, heap, clock, curve, run):  # type: ignore[no-untyped-def]
    """Apply the capacities of a run; returns the row cache's reach when full."""
    clock.completed = clock.history = clock.reused = clock.evictions = 0
    clock.hits = clock.refill_rows = clock.missed_rows = 0.0
    clock.busy_s = max(min(clock.server_free_s, run.end_s) - run.begin_s, 0.0)
    half_lives = np.floor((run.begin_s - clock.origin_s) / run.half_life_s)
    if half_lives > recency.REBASE_HALF_LIVES:
        if run.policy != recency.LRU:
            recency.rebase(users, heap, clock.heap_size, half_lives)
        clock.origin_s += half_lives * run.half_life_s
    while clock.kv_used > run.kv_capacity:
        _drop(users[_lowest(users, heap, clock)], clock)
        clock.evictions += 1
    full = draws_to_fill(curve, run.rows_capacity)
    clock.reach = min(clock.reach, full)
    return full


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _refill(clock, curve, run, now_s, full):  # type: ignore[no-untyped-def]
    """Extend the reach of a row cache that is not full by what the link has brought until now.

    Token bucket: link - headroom (in `refill_rows_per_s`) - critical misses.
    """
    budget = run.refill_rows_per_s * (now_s - run.begin_s) - clock.missed_rows - clock.refill_rows
    held = distinct_rows(curve, clock.reach)
    rows = min(budget, run.rows_capacity - held)
    if rows > 0.0:
        clock.refill_rows += rows
        clock.reach = min(draws_to_fill(curve, held + rows), full)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _serve(  # type: ignore[no-untyped-def]
    users, heap, lists, clocks, curve, compute, runs, begin_s, end_s, kv_capacity, rows_capacity,
    arrivals, user_ids, lengths, new_items, latency_ms, service_out, arrival_out, is_hot, kv, gaps,
):  # fmt: skip
    """Serve requests until the first that would start at or after the end; returns how many.

    Without a learned policy `kv` is None, and numba compiles nothing of one.
    """
    users, heap, lists = borrowed(users), borrowed(heap), borrowed(lists)
    curve, compute = borrowed(curve), borrowed(compute)
    latency_ms, service_out = borrowed(latency_ms), borrowed(service_out)
    arrival_out, is_hot = borrowed(arrival_out), borrowed(is_hot)
    clock, run = clocks[0], runs[0]
    run.begin_s, run.end_s = begin_s, end_s
    run.kv_capacity, run.rows_capacity = kv_capacity, rows_capacity
    gone = 0 if kv is None else ranked_kv.shrink(users, clock, kv, kv_capacity)
    full = _begin(users, heap, clock, curve, run)
    clock.evictions += gone
    if clock.open and clock.server_free_s <= run.end_s:
        _close(clock, latency_ms, service_out, arrival_out, is_hot)
    reach = -1.0
    held = missing = near = bend = 0.0
    served = 0
    weighed_s = run.begin_s
    weight = np.exp2((weighed_s - clock.origin_s) / run.half_life_s)
    for i in range(arrivals.size):
        start_s = max(arrivals[i], clock.server_free_s)
        if start_s >= run.end_s:
            break
        served += 1
        weight *= recency.growth((arrivals[i] - weighed_s) / run.half_life_s)
        weighed_s = arrivals[i]
        length, new = lengths[i], new_items[i]
        one_off = user_ids[i] >= run.persistent_users
        if one_off:
            slot = run.persistent_users + ((user_ids[i] - run.persistent_users) & run.one_off_mask)
            user = users[slot]
            if user.pages > 0:
                _drop(user, clock)
                clock.evictions += 1
            user.score = 0.0
            user.length = 0
            hot = False
        else:
            slot = user_ids[i]
            user = users[slot]
            hot = _note_visit(user, lists, clock, slot, arrivals[i], run.hot_window_s)
        # By arrival, not start: the order is the same, and the processor need not wait for the queue.
        user.score = recency.touch(run.policy, user.score, arrivals[i], weight)
        if kv is None:
            reused = _kv_lookup(users, heap, lists, clock, run, slot, length, new)
        else:
            reused = ranked_kv.lookup(
                users, clock, kv, slot, one_off, _kv_pages(length, run), length, new,
                run.kv_capacity, arrivals[i], gaps[i],
            )  # fmt: skip
        tokens = length - reused + run.candidates

        # Rows. Fresh draws follow the popularity; a history read within reach is resident.
        slowdown = 1.0
        if clock.reach < full and run.refill_rows_per_s > 0.0:
            _refill(clock, curve, run, start_s, full)
            slowdown += run.refill_slowdown
        if clock.reach != reach:
            reach = clock.reach
            held = distinct_rows(curve, reach)
            missing = miss_probability(curve, reach)
            near = reach / 64.0
            bend = (miss_probability(curve, reach + near) - missing) / near if near > 0.0 else 0.0
        fresh, again = float(tokens), 0.0
        if reused == 0 and not one_off:
            age = clock.draws - user.read_at
            if age < reach:
                again = float(length - new)
                fresh -= again
                clock.draws += again * age / reach
            user.read_at = clock.draws + fresh
        if fresh < near:  # the curve's second-order expansion, within 1e-4
            missed_rows = fresh * (missing + 0.5 * fresh * bend)
        else:
            missed_rows = distinct_rows(curve, reach + fresh) - held
        clock.draws += fresh
        clock.missed_rows += missed_rows
        if reach < full:
            clock.reach = min(reach + fresh, full)
        found = again + fresh * (1.0 - missing)

        service_ms = (
            run.overhead_ms
            + compute_ms(compute, run.append_tokens, tokens, length + run.candidates)
            + run.tables
            * (missed_rows * run.missed_row_ms * slowdown + found * run.resident_row_ms)
        )
        done_s = start_s + 1e-3 * service_ms
        clock.server_free_s = done_s
        clock.busy_s += min(done_s, run.end_s) - start_s
        clock.open = 1
        clock.open_arrival_s = arrivals[i]
        clock.open_service_ms = service_ms
        clock.open_hot = hot
        clock.open_history = length
        clock.open_reused = reused
        clock.open_hits = found
        if done_s <= run.end_s:
            _close(clock, latency_ms, service_out, arrival_out, is_hot)
    _sweep_hot(users, lists, clock, run)
    return served


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _hold(  # type: ignore[no-untyped-def]
    users, heap, lists, clocks, curve, compute, runs, begin_s, seconds, kv_capacity, rows_capacity,
    arrivals, user_ids, lengths, new_items, p99_ms, kv, gaps,
):  # fmt: skip
    """P99 of each of p99_ms.size runs of `seconds`, one after the other."""
    most = arrivals.size + 1
    latency_ms, service_ms, arrival_s = np.empty(most), np.empty(most), np.empty(most)
    is_hot = np.empty(most, np.bool_)
    clock = clocks[0]
    first = 0
    for epoch in range(p99_ms.size):
        end_s = begin_s + (epoch + 1) * seconds
        first += _serve(
            users, heap, lists, clocks, curve, compute, runs,
            begin_s + epoch * seconds, end_s, kv_capacity, rows_capacity,
            arrivals[first:], user_ids[first:], lengths[first:], new_items[first:],
            latency_ms, service_ms, arrival_s, is_hot, kv, gaps[first:],
        )  # fmt: skip
        if clock.completed > 0:
            p99_ms[epoch] = percentile(latency_ms[: clock.completed], 0.99)
        else:
            oldest_s = end_s
            if clock.open:
                oldest_s = clock.open_arrival_s
            elif first < arrivals.size:
                oldest_s = min(arrivals[first], end_s)
            p99_ms[epoch] = 1000.0 * (end_s - oldest_s)


class NodeState(NamedTuple):
    """A node at one moment, to go back to."""

    users: NDArray[np.void]
    heap: NDArray[np.void]
    lists: NDArray[np.void]
    clock: NDArray[np.void]
    now_s: float
    waiting: Requests
    kv: ranked_kv.RankedKv | None
    forecast: Forecast | None
    waiting_gaps: Floats
    more: Any = None
    """What a node of another kind keeps beside."""


class SurrogateBackend:
    """One node, simulated request by request.

    Args:
        workload: where requests come from.
        node: pool, KV layout and policies.
        hardware: what requests cost.

    The simulation is a function of (workload, node, hardware, seed, alphas): the same ones give the
    same stats, bit for bit.
    """

    def __init__(self, workload: Workload, node: NodeConfig, hardware: HardwareProfile) -> None:
        self.workload = workload
        self.node = node
        self.hardware = hardware
        self.warmup_s = node.warmup_epochs * node.epoch_seconds
        catalogue = workload.catalogue
        self._compute = self._compute_table()
        self._curve = self._distinct_curve()
        typical = max(node.kv_pages(int(workload.mean_history_tokens / 2)), 1)
        entries = _ONE_OFF_SLOTS_PER_ENTRY * (node.pool_pages // typical + 1)
        self._one_off_slots = 1 << entries.bit_length()
        self._pool_pages = node.pool_pages
        self._rows_per_page = node.page_bytes / catalogue.row_bytes / catalogue.tables
        self._run = self._run_constants()
        self._now_s = 0.0
        self._waiting: Requests | None = None

    def reset(self, seed: int) -> None:
        """Empty queue and caches; the workload starts anew from `seed`, before its warm-up."""
        self.workload.reset(np.random.default_rng(seed), -self.warmup_s)
        self.empty()

    def empty(self) -> None:
        """Empty queue and caches; the clock stands before the warm-up."""
        slots = self.workload.persistent_users + self._one_off_slots
        self._users = np.zeros(slots, _USER)
        for field in ("arrival_1", "arrival_2", "arrival_3", "read_at"):
            self._users[field] = -np.inf
        self._heap = np.empty(slots, recency.HEAP_ENTRY)
        self._lists = np.empty(slots, _LISTS)
        self._clock = np.zeros(1, _CLOCK)
        self._now_s = -self.warmup_s
        self._clock["server_free_s"] = self._clock["origin_s"] = self._now_s
        self._waiting = Requests.empty()
        self._kv = ranked_kv.RankedKv.of(self.node.kv_policy, slots)
        half_life_s = mdp.KV_HALF_LIFE_EPOCHS * self.node.epoch_seconds
        self._forecast = Forecast(half_life_s) if self.node.kv_policy in laru.RULES else None
        self._waiting_gaps: Floats = np.empty(0)
        self._serving_gaps: Floats = self._waiting_gaps

    def run(self, alpha_centi: int, seconds: float) -> EpochStats:
        """Serve for `seconds` with the embedding share at `alpha_centi` hundredths, 0 to 100."""
        return self.serve(self.workload.take(self._now_s + seconds), alpha_centi, seconds)

    def serve(self, arriving: Requests, alpha_centi: int, seconds: float) -> EpochStats:
        """Like `run`, with the requests that arrive given instead of taken from the workload."""
        require(0 < seconds < 1e9, "seconds", seconds, "above 0 and below 1e9")
        embedding_pages = self._embedding_pages(alpha_centi)
        requests, gaps = self._queue().then(arriving), self._gaps(arriving)
        end_s = self._now_s + seconds
        most = len(requests) + max(int(self._clock["open"][0]), 1)
        outputs = (np.empty(most), np.empty(most), np.empty(most), np.empty(most, np.bool_))
        self._serving_gaps = gaps
        served = self._serve_requests(requests, end_s, embedding_pages, outputs)
        self._now_s = end_s
        self._waiting, self._waiting_gaps = requests[served:], gaps[served:]
        return self._stats(seconds, outputs, self._waiting, alpha_centi)

    def hold(self, requests: Requests, alpha_centi: int, seconds: float, epochs: int) -> Floats:
        """P99 in milliseconds, [epochs], of `epochs` runs of `seconds` at one alpha.

        The same as `serve` epoch by epoch, without the other stats and in one call, which makes it
        the fast way to try an alpha. The node cannot go on afterwards: `empty` or `restore` it.

        Args:
            requests: those of all epochs; those still waiting come before.
        """
        embedding_pages = self._embedding_pages(alpha_centi)
        every, gaps = self._queue().then(requests), self._gaps(requests)
        p99_ms = np.empty(epochs)
        _hold(
            self._users, self._heap, self._lists, self._clock, self._curve, self._compute,
            self._run, self._now_s, seconds, self._pool_pages - embedding_pages,
            embedding_pages * self._rows_per_page,
            every.arrival_s, every.user, every.history_length, every.new_items, p99_ms,
            self._kv, gaps,
        )  # fmt: skip
        self._waiting = None
        return p99_ms

    def twin(self) -> SurrogateBackend:
        """A node of the same kind with a state of its own, empty; it shares the workload."""
        return type(self)(self.workload, self.node, self.hardware)

    def save(self, spare: NodeState | None = None) -> NodeState:
        """The state at this moment: queue, caches, clock. The workload's is not part of it.

        Args:
            spare: a state of this node or a twin that nobody needs any more. The node takes its memory
                and gives its own away, which is faster than a copy; it cannot go on before `restore`.
        """
        if spare is None:
            users = self._users.copy()
        else:
            users, self._users = self._users, spare.users
        clock = self._clock.copy()
        heap = self._heap[: int(clock["heap_size"][0])].copy()
        lists = self._lists[: int(clock["hot_listed"][0])].copy()
        assert self._waiting is not None
        kv = None if self._kv is None else self._kv.copy()
        forecast = None if self._forecast is None else self._forecast.copy()
        return NodeState(
            users, heap, lists, clock, self._now_s, self._waiting, kv, forecast, self._waiting_gaps
        )

    def restore(self, state: NodeState) -> None:
        """Go back to a saved state of this node or a twin."""
        self._users.view(np.uint64)[:] = state.users.view(np.uint64)
        self._heap[: state.heap.size] = state.heap
        self._lists[: state.lists.size] = state.lists
        self._clock[:] = state.clock
        self._now_s, self._waiting = state.now_s, state.waiting
        for mine, theirs in zip(self._kv or (), state.kv or (), strict=True):
            mine[:] = theirs
        self._forecast = None if state.forecast is None else state.forecast.copy()
        self._waiting_gaps = state.waiting_gaps

    def __getstate__(self) -> dict[str, Any]:
        """State without the curve, which is looked up again: a copy would not be read-only."""
        return {k: v for k, v in self.__dict__.items() if k != "_curve"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` gave."""
        self.__dict__.update(state)
        self._curve = self._distinct_curve()

    def close(self) -> None:
        """Drop the state."""
        self._waiting = None

    def to_json(self) -> dict[str, Any]:
        """Plain values that make this backend again."""
        return {
            "workload": self.workload.to_json(),
            "node": asdict(self.node),
            "hardware": self.hardware.to_json(),
        }

    def _distinct_curve(self) -> Curve:
        catalogue = self.workload.catalogue
        return distinct_curve(catalogue.rows_per_table, catalogue.zipf)

    def _serve_requests(
        self, requests: Requests, end_s: float, embedding_pages: int, outputs: tuple[Any, ...]
    ) -> int:
        """Serve until `end_s`, into `outputs`: how many requests have started."""
        latency_ms, service_ms, arrival_s, is_hot = outputs
        return int(
            _serve(
                self._users, self._heap, self._lists, self._clock, self._curve, self._compute,
                self._run, self._now_s, end_s, self._pool_pages - embedding_pages,
                embedding_pages * self._rows_per_page,
                requests.arrival_s, requests.user, requests.history_length, requests.new_items,
                latency_ms, service_ms, arrival_s, is_hot, self._kv, self._serving_gaps,
            )
        )  # fmt: skip

    def _prefetched_bytes(self) -> float:
        """Of the last run: nothing is fetched ahead for waiting requests here."""
        return 0.0

    def _embedding_pages(self, alpha_centi: int) -> int:
        """Pages of the pool that an alpha of so many hundredths gives to the embedding cache."""
        require(0 <= alpha_centi <= 100, "alpha_centi", alpha_centi, "0 to 100")
        return self._pool_pages * alpha_centi // 100

    def _queue(self) -> Requests:
        """The requests that wait."""
        if self._waiting is None:
            raise BackendError("the surrogate has not been reset: call reset(seed) first")
        return self._waiting

    def _gaps(self, arriving: Requests) -> Floats:
        """Predicted gaps of those that wait and of these; none where no policy asks."""
        if self._forecast is None:
            return self._waiting_gaps
        return np.concatenate((self._waiting_gaps, self._forecast.gaps(arriving)))

    def _compute_table(self) -> ComputeTable:
        most_tokens = self.workload.max_history_tokens + self.workload.catalogue.candidates
        return self.hardware.compute_table(self.node.layers, most_tokens)

    def _run_constants(self) -> NDArray[np.void]:
        node, catalogue, hardware = self.node, self.workload.catalogue, self.hardware
        link_rows = hardware.link_gbps * 1e9 / (catalogue.row_bytes * catalogue.tables)
        run = np.zeros(1, _RUN)
        for name, value in {
            "persistent_users": self.workload.persistent_users,
            "one_off_mask": self._one_off_slots - 1,
            "policy": recency.POLICIES.get(node.kv_policy, recency.LRU),
            "half_life_s": mdp.KV_HALF_LIFE_EPOCHS * node.epoch_seconds,
            "hot_window_s": mdp.HOT_WINDOW_EPOCHS * node.epoch_seconds,
            "block_tokens": node.block_tokens,
            "block_bytes": node.layers * node.block_bytes,
            "page_bytes": node.page_bytes,
            "candidates": catalogue.candidates,
            "tables": catalogue.tables,
            "overhead_ms": hardware.overhead_ms,
            "append_tokens": hardware.append_tokens,
            "missed_row_ms": catalogue.row_bytes / hardware.gather_gbps * 1e-6,
            "resident_row_ms": 2 * catalogue.row_bytes / hardware.hbm_gbps * 1e-6,
            "refill_slowdown": hardware.refill_slowdown,
            "refill_rows_per_s": (1 - REFILL_HEADROOM) * link_rows if node.refill else 0.0,
        }.items():
            run[name] = value
        return run

    def _stats(
        self,
        seconds: float,
        outputs: tuple[NDArray[Any], ...],
        waiting: Requests,
        alpha_centi: int,
    ) -> EpochStats:
        catalogue, pool_pages = self.workload.catalogue, self._pool_pages
        page_bytes = self.node.page_bytes
        clock = _ClockValues(*self._clock.item())
        n = clock.completed
        latency_ms, service_ms, arrival_s, is_hot = outputs
        oldest_s = self._now_s
        if clock.open:
            oldest_s = clock.open_arrival_s
        elif len(waiting):
            oldest_s = float(waiting.arrival_s[0])
        rows = distinct_rows(self._curve, clock.reach)
        embedding_pages = self._embedding_pages(alpha_centi)
        tokens = clock.history - clock.reused + n * catalogue.candidates
        return EpochStats.of(
            duration_s=seconds,
            latency_ms=latency_ms[:n],
            service_ms=service_ms[:n],
            arrival_s=arrival_s[:n],
            is_hot=is_hot[:n],
            history_tokens=clock.history,
            reused_tokens=clock.reused,
            rows_looked_up=tokens * catalogue.tables,
            rows_hit=clock.hits * catalogue.tables,
            computed_tokens=tokens,
            refill_bytes=clock.refill_rows * catalogue.tables * catalogue.row_bytes,
            prefetch_bytes=self._prefetched_bytes(),
            evictions=clock.evictions,
            alpha_target=alpha_centi / 100,
            alpha_resident=rows / self._rows_per_page / pool_pages,
            embedding_pages=embedding_pages,
            kv_pages=clock.kv_used,
            free_pages=pool_pages - embedding_pages - clock.kv_used,
            pending_pages=0,
            pool_bytes=pool_pages * page_bytes,
            working_set_bytes=float(clock.hot_pages * page_bytes),
            backlog=len(waiting) + clock.open,
            backlog_age_s=self._now_s - oldest_s,
            utilisation=clock.busy_s / seconds,
        )
