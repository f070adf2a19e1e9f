"""What a request costs on a piece of hardware: data in `profiles/*.json`, never constants in code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArgumentError, ArtefactError, require

TOKENS_PER_POINT = 128


@dataclass(frozen=True)
class HardwareProfile:
    """Measured (or, where `estimate` says so, derived) costs of one device.

    Compute of a layer is piecewise linear in tokens: `recompute_layer_ms` at `recompute_tokens` for a
    history from nothing, `append_layer_ms` at `append_history_tokens` for `append_tokens` new ones
    against a cached history. Below the first point recompute goes to 0 in a straight line; beyond
    the last both go on with the last slope.
    """

    name: str
    estimate: bool
    hardware: str
    source: str
    gather_gbps: float
    """Missed embedding rows, host to device, in GB/s."""
    hbm_gbps: float
    """Gather of rows within HBM, bytes read plus written, in GB/s."""
    link_gbps: float
    """Bulk copy, host to device, in GB/s."""
    refill_slowdown: float
    """Share by which a critical gather slows down beside a bulk copy."""
    overhead_ms: float
    """Fixed cost of a request."""
    recompute_tokens: tuple[float, ...]
    recompute_layer_ms: tuple[float, ...]
    append_tokens: float
    append_history_tokens: tuple[float, ...]
    append_layer_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        for name in ("gather_gbps", "hbm_gbps", "link_gbps", "append_tokens"):
            value = getattr(self, name)
            require(value > 0, f"profile.{name}", value, "above 0")
        require(self.overhead_ms >= 0, "profile.overhead_ms", self.overhead_ms, "0 or above")
        for at, ms in (
            ("recompute_tokens", "recompute_layer_ms"),
            ("append_history_tokens", "append_layer_ms"),
        ):
            points, values = getattr(self, at), getattr(self, ms)
            good = len(points) == len(values) >= 2 and all(np.diff(points) > 0) and min(values) >= 0
            require(good, f"profile.{at}", points, f"at least 2, ascending, one for each {ms}")

    @classmethod
    def load(cls, name_or_path: str | Path) -> HardwareProfile:
        """A shipped profile by name, or one from a JSON file.

        Raises:
            ArgumentError: no such profile; lists the shipped ones.
            ArtefactError: the file is not a profile.
        """
        shipped = _shipped()
        if isinstance(name_or_path, str | Path):
            if str(name_or_path) in shipped:
                return shipped[str(name_or_path)]
            if Path(name_or_path).is_file():
                return _parse(name_or_path, Path(name_or_path).read_bytes())
        allowed = "one of " + ", ".join(shipped) + ", or the path of a profile's JSON file"
        raise ArgumentError("hardware", str(name_or_path), allowed)

    def scaled(
        self, compute: float = 1.0, gather: float = 1.0, hbm: float = 1.0
    ) -> HardwareProfile:
        """The same device with compute times, gather and HBM bandwidth multiplied."""
        return replace(
            self,
            gather_gbps=self.gather_gbps * gather,
            hbm_gbps=self.hbm_gbps * hbm,
            recompute_layer_ms=tuple(compute * v for v in self.recompute_layer_ms),
            append_layer_ms=tuple(compute * v for v in self.append_layer_ms),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as a profile's JSON file holds them."""
        return asdict(self)

    def compute_table(self, layers: int, max_tokens: int) -> ComputeTable:
        """Compute of a request with `layers` layers, for the simulation's inner loop."""
        tokens = np.arange(max_tokens // TOKENS_PER_POINT + 2) * float(TOKENS_PER_POINT)
        recompute = _extrapolate(
            tokens, (0.0, *self.recompute_tokens), (0.0, *self.recompute_layer_ms)
        )
        append = _extrapolate(tokens, self.append_history_tokens, self.append_layer_ms)
        table = np.empty(tokens.size, COMPUTE)
        table["recompute_ms"] = layers * recompute
        table["append_ms"] = np.minimum(layers * append, layers * recompute)
        return table


@dataclass(frozen=True)
class NodeProfile(HardwareProfile):
    """A profile calibrated on a live node (`train.calibrate`): what a batch of requests costs.

        batch = overhead + (requests - 1) request
                + eager + layers x eager_layer, unless it has a recorded graph
                + layers x sum of the requests' compute and of what storing K and V takes,
                  x mixed where some are cached and some not
                + rows (misses over the link, lookups in memory), less what prefetch brought
                + ahead, where it plans a prefetch, less the share `ahead_hidden` of a graph's compute
                + evict, for each KV entry that goes for one of the requests
                + after_idle, by how long the server had nothing to do

    `overhead_ms` is that of a batch of one request. Before each batch the serving loop takes `loop_ms`, and
    `choose_ms` where several requests wait; an idle server begins `wake_ms` after an arrival. The plain
    surrogate leaves these out.
    """

    wake_ms: float = 0.0
    """From an arrival to the batch's start, where the server was idle: nothing else is kept waiting."""
    loop_ms: float = 0.0
    """The serving loop's own time for a batch: no part of its service, but the next one waits."""
    choose_ms: float = 0.0
    """More of it where several requests wait: which of them make the batch."""
    request_ms: float = 0.0
    """Each further request of a batch."""
    graph_tokens: int = 0
    """Requests of at most so many new tokens share a recorded graph; 0: there are no graphs."""
    eager_ms: float = 0.0
    """Launching a batch of several requests without one."""
    eager_layer_ms: float = 0.0
    """And each of its layers."""
    mixed_slowdown: float = 0.0
    """Share by which compute slows down in a batch in which some requests are cached and some not."""
    lookup_overlaps: bool = False
    """Looking rows up in memory and waiting for the link happen at once (an emulated link)."""
    store_layer_ms: float = 0.0
    """In each layer, K and V of each token of history that go to the cache."""
    evict_ms: float = 0.0
    """The host's time for each KV entry that is given up, and to store another one in its place."""
    ahead_ms: float = 0.0
    """The host's time to plan a prefetch, in the batch that does it."""
    ahead_hidden: float = 0.0
    """Share of a recorded graph's compute behind which that is hidden; without one the device waits for the
    host."""
    prefetch_gbps: float = 0.0
    """Prefetch while a batch runs; 0: there is none."""
    prefetch_tokens: int = 512
    """New history of the next batch from which on its rows are fetched ahead."""
    refill_gbps: float = 1e3
    """Refill of scattered rows, as the host gets round to it, before the token bucket."""
    idle_ms: tuple[float, ...] = ()
    """Pauses before a batch, ascending; linear in between, from 0 without one, no more beyond the last."""
    after_idle_ms: tuple[float, ...] = ()
    """What a batch takes longer after each of them."""
    jitter: tuple[float, ...] = ()
    """Batch after batch as measured, its time over what the model says, were all of it cached: what makes
    one batch slow makes the next ones slow, too."""
    jitter_cold: tuple[float, ...] = ()
    """The same batches, were some of it not cached; as many."""
    probe_ms: dict[str, float] = field(default_factory=dict, compare=False, hash=False)
    """`LiveNode.probe_ms` of each depth when the rest was measured: how fast the machine was."""
    host_ms: dict[str, dict[str, float]] = field(default_factory=dict, compare=False, hash=False)
    """`hlem_env.live.machine_state.mean_host_ms` of each depth then: how fast the host was."""
    fit: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)
    """Commit, machine, and how well the model fits what was measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "wake_ms", "loop_ms", "choose_ms", "request_ms", "eager_ms", "eager_layer_ms", "mixed_slowdown",
            "store_layer_ms", "evict_ms", "ahead_ms", "ahead_hidden", "prefetch_gbps",
        ):  # fmt: skip
            value = getattr(self, name)
            require(value >= 0, f"profile.{name}", value, "0 or above")
        require(self.refill_gbps > 0, "profile.refill_gbps", self.refill_gbps, "above 0")
        pauses, more = self.idle_ms, self.after_idle_ms
        good = len(pauses) == len(more) and min((*pauses, *more), default=0.0) >= 0
        require(
            good and all(np.diff(pauses) > 0), "profile.idle_ms", pauses,
            "ascending, 0 or above, one for each after_idle_ms",
        )  # fmt: skip
        for name in ("jitter", "jitter_cold"):
            require(
                all(value > 0 for value in getattr(self, name)), f"profile.{name}",
                getattr(self, name), "all above 0",
            )  # fmt: skip
        require(
            len(self.jitter) == len(self.jitter_cold), "profile.jitter_cold", len(self.jitter_cold),
            f"{len(self.jitter)} values, as jitter has",
        )  # fmt: skip

    def slower(self, factor: float) -> NodeProfile:
        """The same machine while everything but the link takes `factor` times as long."""
        return replace(
            self.slower_host(factor),
            hbm_gbps=self.hbm_gbps / factor,
            store_layer_ms=self.store_layer_ms * factor,
            recompute_layer_ms=tuple(factor * v for v in self.recompute_layer_ms),
            append_layer_ms=tuple(factor * v for v in self.append_layer_ms),
        )

    def slower_host(self, factor: float) -> NodeProfile:
        """The same machine while what goes with no token and no row takes `factor` times as long."""
        return replace(
            self,
            overhead_ms=self.overhead_ms * factor,
            wake_ms=self.wake_ms * factor,
            loop_ms=self.loop_ms * factor,
            choose_ms=self.choose_ms * factor,
            request_ms=self.request_ms * factor,
            eager_ms=self.eager_ms * factor,
            eager_layer_ms=self.eager_layer_ms * factor,
            evict_ms=self.evict_ms * factor,
            ahead_ms=self.ahead_ms * factor,
            after_idle_ms=tuple(factor * v for v in self.after_idle_ms),
        )


@lru_cache(maxsize=1)
def _shipped() -> dict[str, HardwareProfile]:
    """The shipped profiles by name: read once, as every reset of a random scenario asks for one."""
    folder = resources.files("hlem_env.surrogate") / "profiles"
    files = {p.name[:-5]: p.read_bytes() for p in folder.iterdir() if p.name.endswith(".json")}
    return {name: _parse(name, files[name]) for name in sorted(files)}


def _parse(name_or_path: str | Path, data: bytes) -> HardwareProfile:
    try:
        values: dict[str, Any] = json.loads(data)
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        known = {one.name for one in fields(HardwareProfile)}
        return (NodeProfile if values.keys() - known else HardwareProfile)(**values)
    except (TypeError, ValueError, AttributeError) as error:
        raise ArtefactError(f"{name_or_path} is not a hardware profile: {error}") from error


def _extrapolate(
    x: NDArray[Any], at: tuple[float, ...], values: tuple[float, ...]
) -> NDArray[np.float64]:
    """Piecewise linear, going on beyond the last point with the last slope."""
    last_slope = (values[-1] - values[-2]) / (at[-1] - at[-2])
    result: NDArray[np.float64] = np.interp(x, at, values)
    return result + np.maximum(x - at[-1], 0.0) * last_slope


COMPUTE = np.dtype([("recompute_ms", "f8"), ("append_ms", "f8")])
"""At every 128 tokens of a sequence, all layers: everything new, or few new tokens against a cache.
A compute table is a structured array [points]."""
ComputeTable = Any


@numba.njit(cache=True, nogil=True, error_model="numpy")
def compute_ms(
    table: ComputeTable, append_tokens: float, new_tokens: float, all_tokens: float
) -> float:
    """Milliseconds of compute for `new_tokens` of a sequence of `all_tokens`; the rest is cached.

    a(all) when everything is new, b(all) up to `append_tokens` new ones, a straight line between.
    """
    position = all_tokens * (1.0 / TOKENS_PER_POINT)
    i = min(int(position), table.size - 2)
    part = position - i
    low, high = table[i], table[i + 1]
    full = low.recompute_ms + part * (high.recompute_ms - low.recompute_ms)
    if new_tokens >= all_tokens:
        return float(full)
    few = low.append_ms + part * (high.append_ms - low.append_ms)
    if new_tokens > append_tokens:
        few += (full - few) * (new_tokens - append_tokens) / (all_tokens - append_tokens)
    return float(few)
