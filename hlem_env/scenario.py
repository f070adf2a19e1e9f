"""A scenario: everything that makes one surrogate node and its requests, as plain values."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArgumentError, require, require_choice, require_number
from hlem_env.eviction.policies import POLICIES
from hlem_env.surrogate.hardware import HardwareProfile
from hlem_env.surrogate.load import (
    HOT_SHARES,
    TARGET_UTILISATION,
    Optimum,
    estimate_optimum,
    load_curve,
)
from hlem_env.surrogate.node import NodeConfig, SurrogateBackend
from hlem_env.workload.regimes import PRESETS, REGIMES, RegimeConfig, SyntheticWorkload
from hlem_env.workload.requests import Catalogue, Workload
from hlem_env.workload.trace_readers import read_trace, read_user_counts
from hlem_env.workload.traces import (
    TOKENS_PER_INTERACTION,
    Trace,
    TraceWorkload,
    with_base_histories,
)

TRACE_SEED = 20260504
"""Draws a trace's synthetic base histories, the same in every run."""


@dataclass(frozen=True)
class Scenario:
    """A workload and the node that serves it. Every field is a plain value.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    preset: str = "default"
    regime: str = "steady"
    trace: str | None = None
    """Path of a trace file; it replaces the regime. Its format is `trace_format`, or guessed."""
    trace_format: str | None = None
    trace_on_bad_line: str = "raise"
    """"raise": a bad line is an error; "skip": it is left out and counted."""
    trace_counts: str | None = None
    """Path of per-user counts for the synthetic base histories; None: their published mean and median."""
    trace_histories: str = "base"
    """"base": a synthetic base history for each user; "native": the trace's own lengths."""
    trace_jitter: bool = False
    """Move every arrival by up to a second, anew in every episode, so that episodes differ by seed."""
    time_scale: float | None = None
    """Simulated seconds for each second of the trace; None: what gives the wanted utilisation."""
    mean_history_tokens: float = 10_000
    max_history_tokens: int = 15_000
    steady_hot_share: float | None = None
    """None: the preset's."""
    population_factor: float = 1.0
    burst_users: str = "new"
    tables: int = 10
    rows_per_table: int = 50_000_000
    zipf: float | None = None
    """None: the trace's own item popularity where its format has items, else the preset's."""
    utilisation: float = TARGET_UTILISATION
    """At the node's own best alpha."""
    hardware: str = "h100"
    compute_scale: float = 1.0
    gather_scale: float = 1.0
    hbm_scale: float = 1.0
    layers: int = 6
    pool_bytes: int = 60_000_000_000
    kv_policy: str = "scan_resistant"
    refill: bool = True
    warmup_epochs: int = 12
    epoch_seconds: float = 5.0
    episode_epochs: int = 240

    def __post_init__(self) -> None:
        require_choice("workload preset", self.preset, PRESETS)
        require_choice("workload regime", self.regime, REGIMES)
        require_choice("kv_policy", self.kv_policy, POLICIES)
        require_choice("trace_on_bad_line", self.trace_on_bad_line, ("raise", "skip"))
        require_choice("trace_histories", self.trace_histories, ("base", "native"))
        require_number("utilisation", self.utilisation)
        require_number("epoch_seconds", self.epoch_seconds)
        require_number("episode_epochs", self.episode_epochs, whole=True)
        require(
            1 <= self.episode_epochs <= 10**6, "episode_epochs", self.episode_epochs, "1 to 10^6"
        )
        for name in ("trace", "trace_format", "trace_counts", "hardware"):
            value = getattr(self, name)
            good = isinstance(value, str) or (value is None and name != "hardware")
            require(good, name, value, "text")
        require(0.01 <= self.utilisation < 5, "utilisation", self.utilisation, "0.01 to below 5")
        for name in ("compute_scale", "gather_scale", "hbm_scale"):
            value = getattr(self, name)
            require_number(name, value)
            require(0 < value <= 1000, name, value, "above 0, at most 1000")

    @classmethod
    def parse(cls, workload: str | dict[str, Any] | Scenario, **overrides: Any) -> Scenario:
        """A scenario from what a user writes.

        Args:
            workload: "trend" (a regime of the default preset), "books/trend" (preset and regime),
                "trace:PATH", a mapping of this class's fields, or a scenario.
            overrides: fields that replace those.

        Raises:
            ArgumentError: naming what is wrong and what is allowed.
        """
        if isinstance(workload, cls):
            return replace(workload, **overrides)
        if isinstance(workload, str):
            values = cls._from_text(workload)
        elif isinstance(workload, dict):
            values = dict(workload)
        else:
            allowed = "a name like 'trend' or 'books/trend', 'trace:PATH', or a mapping of fields"
            raise ArgumentError("workload", workload, allowed)
        known = {field.name for field in fields(cls)}
        for name in values.keys() | overrides.keys():
            require(name in known, "workload field", name, "one of " + ", ".join(sorted(known)))
        return cls(**(values | overrides))

    @staticmethod
    def _from_text(text: str) -> dict[str, Any]:
        if text.startswith("trace:"):
            return {"trace": text[len("trace:") :]}
        preset, _, regime = text.rpartition("/")
        allowed = (
            f"a regime ({', '.join(REGIMES)}), PRESET/REGIME with a preset of"
            f" {', '.join(PRESETS)}, 'trace:PATH', or 'training'"
        )
        require(regime in REGIMES and (preset or "default") in PRESETS, "workload", text, allowed)
        return {"preset": preset or "default", "regime": regime}

    @property
    def name(self) -> str:
        """Short name: preset/regime or the trace's file name."""
        return f"trace:{Path(self.trace).name}" if self.trace else f"{self.preset}/{self.regime}"

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `Scenario.parse` takes them back."""
        return asdict(self)

    def digest(self) -> str:
        """Hash (8 hex digits) of the fields."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:8]

    def profile(self) -> HardwareProfile:
        """The hardware, with this scenario's scales."""
        base = HardwareProfile.load(self.hardware)
        return base.scaled(self.compute_scale, self.gather_scale, self.hbm_scale)

    def node(self) -> NodeConfig:
        """The node."""
        return NodeConfig(
            pool_bytes=self.pool_bytes,
            layers=self.layers,
            kv_policy=self.kv_policy,
            refill=self.refill,
            warmup_epochs=self.warmup_epochs,
            epoch_seconds=self.epoch_seconds,
        )

    def regime_config(self) -> RegimeConfig:
        """The synthetic workload, without its load."""
        zipf = PRESETS[self.preset].zipf if self.zipf is None else self.zipf
        share = PRESETS[self.preset].steady_hot_share
        return RegimeConfig(
            regime=self.regime,
            steady_hot_share=share if self.steady_hot_share is None else self.steady_hot_share,
            population_factor=self.population_factor,
            mean_history_tokens=self.mean_history_tokens,
            max_history_tokens=self.max_history_tokens,
            burst_users=self.burst_users,
            pool_bytes=self.pool_bytes,
            episode_epochs=self.episode_epochs,
            epoch_seconds=self.epoch_seconds,
            catalogue=Catalogue(self.tables, self.rows_per_table, zipf=zipf),
        )

    def optimum(self) -> tuple[NDArray[np.float64], Optimum] | None:
        """Hot shares [n] and the closed form's optimum there; None for traces."""
        if self.trace is not None:
            return None
        config, node, hardware = self.regime_config(), self.node(), self.profile()
        load = load_curve(config, node, hardware, self.utilisation)
        shares = np.array(HOT_SHARES)
        return shares, estimate_optimum(config, node, hardware, shares, load)

    def workload(self) -> Workload:
        """The requests, at the wanted utilisation."""
        if self.trace is not None:
            return self._trace_workload()
        config = self.regime_config()
        load = load_curve(config, self.node(), self.profile(), self.utilisation)
        return SyntheticWorkload(config, load)

    def recorded(self, tokens_per_interaction: float = TOKENS_PER_INTERACTION) -> Trace:
        """The trace, with histories as `trace_histories` says.

        Args:
            tokens_per_interaction: of synthetic base histories, which are cut to `max_history_tokens`.

        Raises:
            ArgumentError: there is no trace, or it is no file.
            TraceFormatError: a line is bad.
        """
        require(self.trace is not None, "trace", self.trace, "the path of a file")
        trace = read_trace(str(self.trace), self.trace_format, self.trace_on_bad_line)
        if self.trace_histories == "native":
            return trace
        counts = read_user_counts(self.trace_counts) if self.trace_counts else None
        rng = np.random.default_rng(TRACE_SEED)
        return with_base_histories(
            trace, counts, rng, tokens_per_interaction, self.max_history_tokens
        )

    def build(self) -> SurrogateBackend:
        """A surrogate node that serves the workload."""
        return SurrogateBackend(self.workload(), self.node(), self.profile())

    def _trace_workload(self) -> TraceWorkload:
        trace = self.recorded()
        catalogue = self.regime_config().catalogue
        if self.zipf is None and "item_zipf" in trace.metadata:
            catalogue = replace(catalogue, zipf=round(float(trace.metadata["item_zipf"]), 2))
        workload = TraceWorkload(
            trace, catalogue, self.max_history_tokens, jitter_at_reset=self.trace_jitter
        )
        if self.time_scale is not None:
            return workload.scaled_to(workload.mean_requests_per_s / self.time_scale)
        return scale_to_utilisation(workload, self.node(), self.profile(), self.utilisation)


def scale_to_utilisation(
    workload: TraceWorkload, node: NodeConfig, hardware: HardwareProfile, utilisation: float
) -> TraceWorkload:
    """The trace at the speed at which the node, at its best alpha, is busy for `utilisation` of it.

    The service time at a speed is simulated for alphas of a grid of 0.1 over the whole trace (at
    most 120 epochs), and the speed set by the least; three times, since speed changes what is cached.
    """
    node = replace(node, kv_policy="scan_resistant")
    rate = 200.0
    seconds = 120 * node.epoch_seconds
    for _ in range(3):
        backend = SurrogateBackend(workload.scaled_to(rate), node, hardware)
        services = []
        for alpha_centi in range(0, 101, 10):
            backend.reset(0)
            backend.run(alpha_centi, backend.warmup_s)
            services.append(backend.run(alpha_centi, seconds).mean_service_ms)
        rate = 1000 * utilisation / min(services)
    return workload.scaled_to(rate)


@dataclass(frozen=True)
class TrainingDomain:
    """Random scenarios for training, over the presets taobao and video-games.

    Never drawn, so that they are there to test on: population x2.0, histories of 14k tokens, 25
    tables, halved gather bandwidth, the a100 profile, the preset books, real traces.
    """

    presets: tuple[str, ...] = ("taobao", "video-games")
    regimes: tuple[str, ...] = (*REGIMES, "burst")
    """drawn alike, Burst twice: few of its epochs show what an action did to a burst"""
    hot_share: tuple[float, float] = (0.05, 0.60)
    mean_history_tokens: tuple[float, float] = (7_000, 12_500)
    population_factor: tuple[float, float] = (0.5, 1.5)
    tables: tuple[int, int] = (5, 18)
    zipf: tuple[float, float] = (0.30, 1.00)
    utilisation: tuple[float, float] = (0.62, 0.73)
    hardware_scale: tuple[float, float] = (0.8, 1.2)
    crowded_share: float = 0.0
    """Share of the draws whose hot users' KV can outgrow the pool while items are skewed enough to make
    embedding space worth more then: hardly any others do. Their length, population and exponent are
    from the next three ranges."""
    crowded_history_tokens: tuple[float, float] = (11_500, 13_000)
    crowded_population_factor: tuple[float, float] = (1.2, 1.5)
    crowded_zipf: tuple[float, float] = (0.80, 1.00)

    def __post_init__(self) -> None:
        require_number("crowded_share", self.crowded_share)
        require(0 <= self.crowded_share <= 1, "crowded_share", self.crowded_share, "0 to 1")

    def sample(self, base: Scenario, rng: np.random.Generator) -> Scenario:
        """`base` with the randomised fields drawn anew."""
        scenario = replace(
            base,
            preset=str(rng.choice(self.presets)),
            regime=str(rng.choice(self.regimes)),
            steady_hot_share=float(rng.uniform(*self.hot_share)),
            mean_history_tokens=float(rng.uniform(*self.mean_history_tokens)),
            population_factor=float(rng.uniform(*self.population_factor)),
            tables=int(rng.integers(self.tables[0], self.tables[1], endpoint=True)),
            zipf=round(float(rng.uniform(*self.zipf)), 2),
            utilisation=float(rng.uniform(*self.utilisation)),
            compute_scale=float(rng.uniform(*self.hardware_scale)),
            gather_scale=float(rng.uniform(*self.hardware_scale)),
            hbm_scale=float(rng.uniform(*self.hardware_scale)),
        )
        # With a share of 0 nothing more is drawn, so that a seed's scenarios stay what they were.
        if self.crowded_share == 0 or rng.random() >= self.crowded_share:
            return scenario
        return replace(
            scenario,
            mean_history_tokens=float(rng.uniform(*self.crowded_history_tokens)),
            population_factor=float(rng.uniform(*self.crowded_population_factor)),
            zipf=round(float(rng.uniform(*self.crowded_zipf)), 2),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
