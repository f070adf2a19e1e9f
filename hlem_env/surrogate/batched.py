"""The surrogate as a live node serves: batches, prefetch and refill as `hlem_env.live` has them.

Beside the plain surrogate (`hlem_env.surrogate.node`), for a profile calibrated on a live node:

    batches     all that has arrived, in order, up to the token budget; no user twice; no more KV pages
                than there are. A batch completes as a whole. Rows are fetched once a batch.
    rows        items are hashed to rows (`hit_rates.distinct_curve`)
    prefetch    rows of the next batch come while a batch runs, as many as its time allows
    refill      after a move up alone, of rows that were missed before, into free slots, under the token
                bucket; on a CPU only while nobody waits
    pause       neither while the last run's P99 is near the SLO
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import BackendError, require, require_choice
from hlem_env.eviction import recency
from hlem_env.surrogate.borrowed import borrowed
from hlem_env.surrogate.hardware import HardwareProfile, NodeProfile, compute_ms
from hlem_env.surrogate.hit_rates import (
    Curve,
    distinct_curve,
    distinct_rows,
    draws_to_fill,
    miss_probability,
)
from hlem_env.surrogate.node import (
    REFILL_HEADROOM,
    NodeConfig,
    NodeState,
    SurrogateBackend,
    _begin,
    _drop,
    _inlined,
    _kv_lookup,
    _kv_pages,
    _note_visit,
    _sweep_hot,
)
from hlem_env.telemetry import EpochStats, Floats
from hlem_env.workload.requests import Requests, Workload

PAUSE_AT = 0.9
"""Of the SLO: refill and prefetch pause from this P99 on."""
DEMAND_HALF_LIFE_S = 0.5
"""Of the critical misses' rate that the token bucket knows."""


@dataclass(frozen=True)
class BatchedNode(NodeConfig):
    """A node that serves in batches.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    token_budget: int = 16_384
    """Most tokens computed in one batch; a larger request is a batch of its own."""
    bucket_gbps: float = 50.0
    """Link bandwidth that refill and prefetch share out."""
    slo_ms: float = 30.0
    refill_while_idle: bool = False
    """Rows are refilled only while nobody waits: the host's thread computes, too."""
    only_graphs: bool = False
    """A batch ends before a request of more new tokens than share a graph (`NodeProfile.graph_tokens`). That
    a graph serves 32 to 64 requests at most is left out."""
    prefetch_beside: int = 0
    """Tokens times layers that a batch computes, from which on it plans a prefetch for the next one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("kv_policy", self.kv_policy, recency.POLICIES)  # learned ones are not built
        for name in ("token_budget", "bucket_gbps", "slo_ms"):
            require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        least = self.prefetch_beside
        require(least >= 0, "prefetch_beside", least, "0 or above")


_BATCHING = np.dtype(
    [
        # constants
        ("token_budget", "i8"),
        ("wake_ms", "f8"),
        ("loop_ms", "f8"),
        ("choose_ms", "f8"),
        ("request_ms", "f8"),
        ("graph_tokens", "i8"),
        ("eager_ms", "f8"),
        ("mixed_slowdown", "f8"),
        ("lookup_overlaps", "i8"),
        ("store_ms", "f8"),
        ("evict_ms", "f8"),
        ("ahead_ms", "f8"),
        ("ahead_hidden", "f8"),
        ("prefetch_tokens", "i8"),
        ("prefetch_beside", "i8"),  # tokens
        ("prefetch_rows_per_s", "f8"),  # rows: of one table, here and below
        ("refill_rows_per_s", "f8"),
        ("bucket_rows_per_s", "f8"),
        ("refill_while_idle", "i8"),
        ("only_graphs", "i8"),
        # of a run
        ("paused", "i8"),
        # state
        ("refill_left", "f8"),  # rows wanted for new pages
        ("refilled_until_s", "f8"),
        ("demand_rows_per_s", "f8"),
        ("demand_at_s", "f8"),
        ("ahead_rows", "f8"),  # missing rows that the next batch finds fetched
        ("prefetched_rows", "f8"),  # of the run
        ("serial", "i8"),  # of the batch in the profile's jitter
    ]
)

_OPEN = np.dtype(
    [
        ("arrival_s", "f8"),
        ("service_ms", "f8"),
        ("hits", "f8"),
        ("history", "i8"),
        ("reused", "i8"),
        ("tokens", "i8"),
        ("slot", "i8"),
        ("again", "f8"),
        ("hot", "i1"),
    ]
)
"""A request of the batch that runs."""


@_inlined
def _slot_of(run, user):  # type: ignore[no-untyped-def]
    if user >= run.persistent_users:
        return run.persistent_users + ((user - run.persistent_users) & run.one_off_mask)
    return user


@_inlined
def _reusable(users, run, user_id, length, new):  # type: ignore[no-untyped-def]
    """Tokens whose K and V a request that waits would reuse now."""
    if user_id >= run.persistent_users:
        return 0
    user = users[user_id]
    return 0 if user.length > length - new else min(user.cached, length)


@_inlined
def _batch_size(users, run, batching, user_ids, lengths, new_items, first, arrived):  # type: ignore[no-untyped-def]
    """Requests of the next batch, from `first` on, of those before `arrived`: at least one."""
    tokens, pages, count, longest = 0, 0, 0, 0
    for i in range(first, arrived):
        cached = _reusable(users, run, user_ids[i], lengths[i], new_items[i])
        mine = lengths[i] - cached + run.candidates
        tokens += mine
        longest = max(longest, mine)
        held = 0 if user_ids[i] >= run.persistent_users else users[user_ids[i]].pages
        wanted = _kv_pages(lengths[i], run)
        wanted = max(wanted, held) if wanted <= run.kv_capacity else held
        if count > 0:
            if tokens > batching.token_budget or pages + wanted > run.kv_capacity:
                break
            if batching.only_graphs and longest > batching.graph_tokens:
                break
            twice = False
            for j in range(first, i):
                twice |= user_ids[j] == user_ids[i]
            if twice:
                break
        pages += wanted
        count += 1
    return count


@_inlined
def _refill(clock, curve, run, batching, start_s, full):  # type: ignore[no-untyped-def]
    """Warm free slots with rows missed before, by what time and token bucket allowed since last time."""
    since_s = batching.refilled_until_s
    if batching.refill_while_idle:
        since_s = max(since_s, clock.server_free_s)
    seconds = max(start_s - since_s, 0.0)
    batching.refilled_until_s = start_s
    if batching.refill_left <= 0.0 or batching.paused or clock.reach >= full:
        return
    keep = 0.5 ** ((start_s - batching.demand_at_s) / DEMAND_HALF_LIFE_S)
    budget = batching.bucket_rows_per_s - keep * batching.demand_rows_per_s
    rate = min(batching.refill_rows_per_s, max(budget, 0.0))
    held = distinct_rows(curve, clock.reach)
    known = distinct_rows(curve, min(clock.draws, full))
    rows = min(min(rate * seconds, batching.refill_left), known - held)
    if rows > 0.0:
        clock.refill_rows += rows
        batching.refill_left -= rows
        clock.reach = min(draws_to_fill(curve, held + rows), full)
    elif known <= held:
        batching.refill_left = 0.0


@_inlined
def _observe_demand(batching, now_s, rows):  # type: ignore[no-untyped-def]
    seconds = max(now_s - batching.demand_at_s, 1e-6)
    keep = 0.5 ** (seconds / DEMAND_HALF_LIFE_S)
    rate = rows / seconds
    batching.demand_rows_per_s = keep * batching.demand_rows_per_s + (1.0 - keep) * rate
    batching.demand_at_s = now_s


@_inlined
def _complete(clock, opened, latency_ms, service_ms, arrival_s, is_hot):  # type: ignore[no-untyped-def]
    """Count the requests of the batch that ran: it has completed."""
    for k in range(clock.open):
        one, i = opened[k], clock.completed
        latency_ms[i] = 1000.0 * (clock.server_free_s - one.arrival_s)
        service_ms[i] = one.service_ms
        arrival_s[i] = one.arrival_s
        is_hot[i] = one.hot != 0
        clock.history += one.history
        clock.reused += one.reused
        clock.hits += one.hits
        clock.completed = i + 1
    clock.open = 0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _serve_batches(  # type: ignore[no-untyped-def]
    users, heap, lists, clocks, curve, compute, runs, batchings, opened,
    idle_ms, after_idle_ms, jitter, jitter_cold,
    begin_s, end_s, kv_capacity, rows_capacity,
    arrivals, user_ids, lengths, new_items, latency_ms, service_out, arrival_out, is_hot,
):  # fmt: skip
    """Serve until the first batch that would start at or after the end; returns the requests started."""
    users, heap, lists = borrowed(users), borrowed(heap), borrowed(lists)
    curve, compute, opened = borrowed(curve), borrowed(compute), borrowed(opened)
    clock, run, batching = clocks[0], runs[0], batchings[0]
    run.begin_s, run.end_s = begin_s, end_s
    run.kv_capacity, run.rows_capacity = kv_capacity, rows_capacity
    full = _begin(users, heap, clock, curve, run)
    batching.prefetched_rows = 0.0
    if clock.open and clock.server_free_s <= run.end_s:
        _complete(clock, opened, latency_ms, service_out, arrival_out, is_hot)
    first = arrived = 0
    while first < arrivals.size:
        start_s = clock.server_free_s
        if arrivals[first] > start_s:
            start_s = arrivals[first] + 1e-3 * batching.wake_ms
        if start_s >= run.end_s:
            break
        pause_ms = 1e3 * (start_s - clock.server_free_s)
        arrived = max(arrived, first)
        while arrived < arrivals.size and arrivals[arrived] <= start_s:
            arrived += 1
        count = _batch_size(users, run, batching, user_ids, lengths, new_items, first, arrived)
        count = min(count, opened.size)
        _refill(clock, curve, run, batching, start_s, full)

        # Every visit counts before any decides who is stored.
        for k in range(count):
            i = first + k
            one, slot = opened[k], _slot_of(run, user_ids[i])
            user = users[slot]
            one.hot = 0
            if user_ids[i] >= run.persistent_users:
                if user.pages > 0:
                    _drop(user, clock)
                    clock.evictions += 1
                user.score, user.length = 0.0, 0
            else:
                one.hot = _note_visit(user, lists, clock, slot, arrivals[i], run.hot_window_s)
            weight = np.exp2((arrivals[i] - clock.origin_s) / run.half_life_s)
            user.score = recency.touch(run.policy, user.score, arrivals[i], weight)
            one.slot, one.arrival_s = slot, arrivals[i]
            one.reused = _reusable(users, run, user_ids[i], lengths[i], new_items[i])
        some_cached = some_not = False
        total, longest_new = 0, 0
        compute_total = fresh = again = 0.0
        reach = clock.reach
        evicted = -clock.evictions
        for k in range(count):
            i = first + k
            one = opened[k]
            length, new = lengths[i], new_items[i]
            _kv_lookup(users, heap, lists, clock, run, one.slot, length, new)
            tokens = length - one.reused + run.candidates
            compute_total += compute_ms(compute, run.append_tokens, tokens, length + run.candidates)
            compute_total += batching.store_ms * max(users[one.slot].cached - one.reused, 0)
            some_cached |= one.reused > 0
            some_not |= one.reused == 0
            longest_new = max(longest_new, tokens)
            one.history, one.tokens, one.again = length, tokens, 0.0
            total += tokens
            mine = float(tokens)
            if one.reused == 0 and user_ids[i] < run.persistent_users:
                user = users[one.slot]
                age = clock.draws - user.read_at
                if age < reach:
                    one.again = float(length - new)
                    mine -= one.again
                    clock.draws += one.again * age / reach
                user.read_at = clock.draws + fresh + mine
            fresh += mine
            again += one.again

        evicted += clock.evictions
        missing = miss_probability(curve, reach)
        missed = distinct_rows(curve, reach + fresh) - distinct_rows(curve, reach)
        ahead = min(batching.ahead_rows, missed)
        batching.ahead_rows = 0.0
        # Lookups of a fetched row hit, and each missed row stands for as many as the average one.
        hit_by_ahead = ahead / missed * fresh * missing if missed > 0.0 else 0.0
        missed -= ahead
        clock.draws += fresh
        clock.missed_rows += missed
        if reach < full:
            clock.reach = min(reach + fresh, full)
        found = again + fresh * (1.0 - missing) + hit_by_ahead
        missed_ms = run.tables * missed * run.missed_row_ms
        if batching.lookup_overlaps:
            rows_ms = max(run.tables * total * run.resident_row_ms, missed_ms)
        else:
            slow = 1.0
            if batching.refill_left > 0.0 and clock.reach < full and not batching.paused:
                slow += run.refill_slowdown
            rows_ms = missed_ms * slow + run.tables * found * run.resident_row_ms
        _observe_demand(batching, start_s, missed)

        if some_cached and some_not:
            compute_total *= 1.0 + batching.mixed_slowdown
        batch_ms = run.overhead_ms + batching.request_ms * (count - 1) + compute_total + rows_ms
        eager = count > 1 and longest_new > batching.graph_tokens and batching.graph_tokens > 0
        batch_ms += batching.evict_ms * evicted
        if eager:
            batch_ms += batching.eager_ms
        if idle_ms.size > 1:
            batch_ms += np.interp(pause_ms, idle_ms, after_idle_ms)
        behind = first + count
        worth = batching.prefetch_rows_per_s > 0.0 and total >= batching.prefetch_beside
        if worth and arrived > behind and not batching.paused:
            following = _batch_size(
                users, run, batching, user_ids, lengths, new_items, behind, arrived
            )
            new_history, wanted = 0, 0.0
            for i in range(behind, behind + following):
                cached = _reusable(users, run, user_ids[i], lengths[i], new_items[i])
                new_history += lengths[i] - cached
                wanted += lengths[i] - cached + run.candidates
            if new_history >= batching.prefetch_tokens:
                # What the batch itself read is resident by then.
                least = distinct_rows(curve, clock.reach)
                wanted = distinct_rows(curve, clock.reach + wanted) - least
                time_s = max(1e-3 * (batch_ms - rows_ms), 0.0)
                rate = min(batching.prefetch_rows_per_s, batching.bucket_rows_per_s)
                batching.ahead_rows = min(wanted, rate * time_s)
                batching.prefetched_rows += batching.ahead_rows
                hidden_ms = 0.0 if eager else batching.ahead_hidden * compute_total
                batch_ms += max(batching.ahead_ms - hidden_ms, 0.0)
        if jitter.size > 0:
            batching.serial = (batching.serial + 1) % jitter.size
            batch_ms *= jitter_cold[batching.serial] if some_not else jitter[batching.serial]

        loop_ms = batching.loop_ms + (batching.choose_ms if arrived - behind + count > 1 else 0.0)
        done_s = start_s + 1e-3 * (loop_ms + batch_ms)
        for k in range(count):
            one = opened[k]
            one.service_ms = batch_ms * one.tokens / total
            one.hits = found * one.tokens / total
        clock.server_free_s = done_s
        clock.busy_s += min(done_s, run.end_s) - start_s
        clock.open, clock.open_arrival_s = count, arrivals[first]
        first = behind
        if done_s <= run.end_s:
            _complete(clock, opened, latency_ms, service_out, arrival_out, is_hot)
    _sweep_hot(users, lists, clock, run)
    return first


class BatchedBackend(SurrogateBackend):
    """A node that serves in batches, simulated request by request.

    Args:
        workload: where requests come from.
        node: pool, KV layout, batches and policies.
        hardware: calibrated on a live node.
    """

    node: BatchedNode
    hardware: NodeProfile

    def __init__(self, workload: Workload, node: NodeConfig, hardware: HardwareProfile) -> None:
        if not (isinstance(node, BatchedNode) and isinstance(hardware, NodeProfile)):
            raise BackendError("batches need a BatchedNode and a profile calibrated on a live node")
        super().__init__(workload, node, hardware)
        candidates = max(workload.catalogue.candidates, 1)
        self._most = node.token_budget // candidates + 1
        self._idle_ms = np.array((0.0, *hardware.idle_ms))
        self._after_idle_ms = np.array((0.0, *hardware.after_idle_ms))
        self._jitter = np.array(hardware.jitter, np.float64)
        self._jitter_cold = np.array(hardware.jitter_cold, np.float64)
        self.draw = 0
        """Which of many runs of a seed: each begins elsewhere in the profile's jitter."""

    def reset(self, seed: int) -> None:
        """As `SurrogateBackend.reset`; the jitter begins anew, at a place that goes with seed and `draw`."""
        super().reset(seed)
        if self._jitter.size > 0:
            place = np.random.default_rng((seed, self.draw)).integers(self._jitter.size)
            self._batching["serial"] = place

    def empty(self) -> None:
        """Empty queue and caches; the clock stands before the warm-up."""
        super().empty()
        self._batching = np.zeros(1, _BATCHING)
        for name, value in self._batch_constants().items():
            self._batching[name] = value
        for name in ("refilled_until_s", "demand_at_s"):
            self._batching[name] = self._now_s
        self._opened = np.zeros(self._most, _OPEN)
        self._pages_before = 0
        self._last_p99_ms = 0.0

    def set_speed(self, hardware: NodeProfile) -> None:
        """From the next run on, resets included, batches take what they take on the machine at another speed.

        Args:
            hardware: this node's, slower or faster (`NodeProfile.slower`, `NodeProfile.slower_host`).
        """
        self.hardware = hardware
        self._after_idle_ms = np.array((0.0, *hardware.after_idle_ms))
        self._compute, self._run = self._compute_table(), self._run_constants()
        for name, value in self._batch_constants().items():
            self._batching[name] = value

    def serve(self, arriving: Requests, alpha_centi: int, seconds: float) -> EpochStats:
        """Like `run`, with the requests that arrive given instead of taken from the workload."""
        pages = self._embedding_pages(alpha_centi)
        moved, self._pages_before = pages - self._pages_before, pages
        if self.node.refill and moved > 0:
            self._batching["refill_left"] = moved * self._rows_per_page
            self._batching["refilled_until_s"] = self._now_s
        self._batching["paused"] = self._last_p99_ms >= PAUSE_AT * self.node.slo_ms
        stats = super().serve(arriving, alpha_centi, seconds)
        self._last_p99_ms = stats.p99_ms
        return stats

    def hold(self, requests: Requests, alpha_centi: int, seconds: float, epochs: int) -> Floats:
        """As `SurrogateBackend.hold`, epoch by epoch."""
        begin_s, p99_ms, first = self._now_s, np.empty(epochs), 0
        for epoch in range(epochs):
            last = int(requests.arrival_s.searchsorted(begin_s + (epoch + 1) * seconds))
            p99_ms[epoch] = self.serve(requests[first:last], alpha_centi, seconds).p99_ms
            first = last
        self._waiting = None
        return p99_ms

    def save(self, spare: NodeState | None = None) -> NodeState:
        """As that of the plain surrogate."""
        more = (self._batching.copy(), self._opened.copy(), self._pages_before, self._last_p99_ms)
        return super().save(spare)._replace(more=more)

    def restore(self, state: NodeState) -> None:
        """Go back to a saved state of this node or a twin."""
        super().restore(state)
        batching, opened, self._pages_before, self._last_p99_ms = state.more
        self._batching[:], self._opened[:] = batching, opened

    def _serve_requests(
        self, requests: Requests, end_s: float, embedding_pages: int, outputs: tuple[Any, ...]
    ) -> int:
        return int(
            _serve_batches(
                self._users, self._heap, self._lists, self._clock, self._curve, self._compute,
                self._run, self._batching, self._opened,
                self._idle_ms, self._after_idle_ms, self._jitter, self._jitter_cold,
                self._now_s, end_s, self._pool_pages - embedding_pages,
                embedding_pages * self._rows_per_page,
                requests.arrival_s, requests.user, requests.history_length, requests.new_items,
                *outputs,
            )
        )  # fmt: skip

    def _batch_constants(self) -> dict[str, float]:
        node, hardware, catalogue = self.node, self.hardware, self.workload.catalogue
        rows = 1e9 / (catalogue.row_bytes * catalogue.tables)
        return {
            "token_budget": node.token_budget,
            "wake_ms": hardware.wake_ms,
            "loop_ms": hardware.loop_ms,
            "choose_ms": hardware.choose_ms,
            "request_ms": hardware.request_ms,
            "graph_tokens": hardware.graph_tokens,
            "eager_ms": hardware.eager_ms + node.layers * hardware.eager_layer_ms,
            "mixed_slowdown": hardware.mixed_slowdown,
            "lookup_overlaps": hardware.lookup_overlaps,
            "store_ms": node.layers * hardware.store_layer_ms,
            "evict_ms": hardware.evict_ms,
            "ahead_ms": hardware.ahead_ms,
            "ahead_hidden": hardware.ahead_hidden,
            "prefetch_tokens": hardware.prefetch_tokens,
            "prefetch_beside": -(-node.prefetch_beside // node.layers),
            "prefetch_rows_per_s": hardware.prefetch_gbps * rows,
            "refill_rows_per_s": hardware.refill_gbps * rows,
            "bucket_rows_per_s": (1 - REFILL_HEADROOM) * node.bucket_gbps * rows,
            "refill_while_idle": node.refill_while_idle,
            "only_graphs": node.only_graphs,
        }

    def _distinct_curve(self) -> Curve:
        catalogue = self.workload.catalogue
        return distinct_curve(catalogue.rows_per_table, catalogue.zipf, hashed=True)

    def _prefetched_bytes(self) -> float:
        catalogue = self.workload.catalogue
        rows: NDArray[np.float64] = self._batching["prefetched_rows"]
        return float(rows[0]) * catalogue.tables * catalogue.row_bytes
