"""Synthetic requests: the regimes Steady, Trend and Burst over a population whose histories persist.

A hot user visits every few epochs, a warm one rarely, a one-off user once. Regimes set the hot share
of requests over time; the hot population and the request rate follow the hot share.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArgumentError, require, require_choice, require_number
from hlem_env.workload.requests import Catalogue, Requests

REGIMES = ("steady", "trend", "burst")

HOT_SHARES = (0.05, 0.10, 0.20, 0.32, 0.50, 0.60)
HOT_USERS = (100.0, 150.0, 200.0, 260.0, 340.0, 400.0)
"""Hot users at those hot shares for a pool of 60 GB; interpolated between, scaled by the pool."""
HOT_USERS_POOL_BYTES = 60e9

TREND_SHARES = (0.05, 0.60)
BURST_BASE_SHARE = 0.15
BURST_SHARES = (0.50, 0.60)
BURST_EPOCHS = (3, 5)
BURST_MEAN_GAP_EPOCHS = 30.0
BURST_RING = 8
"""Bursts until the ids of a burst's users are given out again, to users with new histories."""


@dataclass(frozen=True)
class Preset:
    """A dataset's shape.

    Share of requests from its 5 % most active users (the HLEM paper, table I), and the Zipf exponent
    of its items' popularity (maximum likelihood on the public data).
    """

    steady_hot_share: float
    zipf: float


PRESETS = {
    "default": Preset(0.20, 0.90),
    "taobao": Preset(0.18, 0.37),
    "video-games": Preset(0.24, 0.69),
    "books": Preset(0.38, 0.61),
}


@dataclass(frozen=True)
class LoadCurve:
    """Requests a second as a function of the hot share, linear between points."""

    hot_share: tuple[float, ...]
    requests_per_s: tuple[float, ...]
    source: str = "given"
    """"table" (committed, simulated), "estimate" (closed form) or "given"."""

    def __post_init__(self) -> None:
        ok = len(self.hot_share) == len(self.requests_per_s) >= 1
        require(
            ok and list(self.hot_share) == sorted(self.hot_share),
            "load.hot_share",
            self.hot_share,
            "ascending, one entry for each of requests_per_s",
        )
        require(
            all(0 < rate <= 1e6 for rate in self.requests_per_s),
            "load.requests_per_s",
            self.requests_per_s,
            "rates above 0 and at most 1e6",
        )

    def __call__(self, hot_share: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rates [n] at hot shares [n]."""
        return np.interp(hot_share, self.hot_share, self.requests_per_s)

    def scaled(self, factor: float) -> LoadCurve:
        """The same curve at `factor` times the rate."""
        return replace(self, requests_per_s=tuple(factor * r for r in self.requests_per_s))


@dataclass(frozen=True)
class RegimeConfig:
    """A synthetic workload. Numbers of the regimes are the module's constants.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    regime: str = "steady"
    steady_hot_share: float = 0.20
    population_factor: float = 1.0
    mean_history_tokens: float = 10_000
    history_spread: float = 0.20
    """First lengths are uniform in mean x (1 +- spread)."""
    new_items: int = 10
    """Mean items a returning user appended since the last visit (uniform in 1 .. 2 x mean - 1)."""
    max_history_tokens: int = 15_000
    """Beyond it the oldest quarter is dropped at once."""
    warm_share: float = 0.10
    """Share of the other requests that come from warm users."""
    warm_users: int = 5000
    burst_users: str = "new"
    """"new": a burst's extra hot users were never seen; "existing": they are the regular ones."""
    pool_bytes: int = 60_000_000_000
    """Scales the hot population."""
    episode_epochs: int = 240
    """Period of the regime."""
    epoch_seconds: float = 5.0
    catalogue: Catalogue = field(default_factory=Catalogue)

    def __post_init__(self) -> None:
        require_number("mean_history_tokens", self.mean_history_tokens)
        require_number("pool_bytes", self.pool_bytes, whole=True)
        require_number("epoch_seconds", self.epoch_seconds)
        require(self.epoch_seconds > 0, "epoch_seconds", self.epoch_seconds, "above 0")
        require(self.pool_bytes > 0, "pool_bytes", self.pool_bytes, "above 0")
        require_choice("regime", self.regime, REGIMES)
        require_choice("burst_users", self.burst_users, ("new", "existing"))
        require(
            0 <= self.steady_hot_share <= 1, "steady_hot_share", self.steady_hot_share, "0 to 1"
        )
        require(
            0 < self.population_factor <= 100,
            "population_factor",
            self.population_factor,
            "above 0, at most 100",
        )
        require(
            1 <= self.mean_history_tokens <= self.max_history_tokens,
            "mean_history_tokens",
            self.mean_history_tokens,
            f"1 to max_history_tokens={self.max_history_tokens}",
        )
        require(0 <= self.history_spread < 1, "history_spread", self.history_spread, "0 to below 1")
        require(1 <= self.new_items <= 10_000, "new_items", self.new_items, "1 to 10,000")
        require(0 <= self.warm_share <= 1, "warm_share", self.warm_share, "0 to 1")
        require(1 <= self.warm_users <= 10**7, "warm_users", self.warm_users, "1 to 10^7")
        require(
            1 <= self.episode_epochs <= 10**6, "episode_epochs", self.episode_epochs, "1 to 10^6"
        )

    @classmethod
    def preset(cls, preset: str, regime: str, **overrides: Any) -> RegimeConfig:
        """A dataset preset under a regime."""
        require_choice("preset", preset, PRESETS)
        shape = PRESETS[preset]
        catalogue = overrides.pop("catalogue", None) or Catalogue()
        values: dict[str, Any] = {
            "regime": regime,
            "steady_hot_share": shape.steady_hot_share,
            "catalogue": replace(catalogue, zipf=shape.zipf),
        }
        return cls(**(values | overrides))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RegimeConfig:
        """The config that `asdict` wrote."""
        try:
            return cls(**(values | {"catalogue": Catalogue(**values.get("catalogue", {}))}))
        except TypeError as error:
            raise ArgumentError(
                "workload", values, f"the fields of RegimeConfig ({error})"
            ) from error

    def hot_users(self, hot_share: NDArray[np.float64]) -> NDArray[np.int64]:
        """Hot population [n] at hot shares [n]; proportional below the table's first point."""
        shares = (0.0, *HOT_SHARES)
        users = np.interp(hot_share, shares, (0.0, *HOT_USERS))
        scale = self.population_factor * self.pool_bytes / HOT_USERS_POOL_BYTES
        return np.where(hot_share > 0, np.maximum(np.rint(users * scale), 1), 0).astype(np.int64)


@dataclass(frozen=True, eq=False)
class RegimePath:
    """What a regime does, epoch by epoch ([epochs] each)."""

    hot_share: NDArray[np.float64]
    hot_users: NDArray[np.int64]
    """Hot users, a burst's new ones included."""
    new_users: NDArray[np.int64]
    """Of those, how many belong to the running burst alone."""
    burst: NDArray[np.int64]
    """Number of the running burst, counted from 1; 0 between bursts."""

    def digest(self) -> str:
        """Hash of the path's content (16 hex digits)."""
        content = b"".join(
            np.ascontiguousarray(a).tobytes()
            for a in (self.hot_share, self.hot_users, self.new_users, self.burst)
        )
        return hashlib.sha256(content).hexdigest()[:16]


def draw_path(config: RegimeConfig, rng: np.random.Generator) -> RegimePath:
    """One period of the regime. Only Burst draws from `rng`."""
    epochs = config.episode_epochs
    burst = np.zeros(epochs, np.int64)
    if config.regime == "steady":
        share = np.full(epochs, config.steady_hot_share)
    elif config.regime == "trend":
        low, high = TREND_SHARES
        phase = np.arange(epochs) / max(epochs - 1, 1)
        share = low + (high - low) * (1 - np.abs(2 * phase - 1))
    else:
        share = np.full(epochs, BURST_BASE_SHARE)
        start, number = rng.exponential(BURST_MEAN_GAP_EPOCHS), 1
        while start < epochs:
            length = int(rng.integers(BURST_EPOCHS[0], BURST_EPOCHS[1], endpoint=True))
            part = slice(int(start), int(start) + length)
            share[part] = rng.uniform(*BURST_SHARES)
            burst[part] = number
            start += length + rng.exponential(BURST_MEAN_GAP_EPOCHS)
            number += 1
    users = config.hot_users(share)
    new = np.zeros(epochs, np.int64)
    if config.burst_users == "new":
        base = config.hot_users(np.array([BURST_BASE_SHARE]))[0]
        new = np.where(burst > 0, np.maximum(users - base, 0), 0)
    return RegimePath(share, users, new, burst)


@numba.njit(cache=True, nogil=True)
def _fill(  # type: ignore[no-untyped-def]
    gaps, draws, start_s, end_s, hot_share, base_users, new_users, new_first, warm_share,
    warm_first, warm_users, next_one_off, lengths, shortest, spread, new_items, longest,
    arrival_s, user, history_length, new_tokens,
):  # fmt: skip
    """Write n requests of one regime epoch; returns the next one-off id.

    gaps [n + 1] are exponential: their normalised running sum is a Poisson process given its count.
    draws [2, n] are uniform: the first picks the user, the second lengths and new items.
    """
    n = arrival_s.size
    total = 0.0
    for gap in gaps:
        total += gap
    scale = (end_s - start_s) / total
    passed = 0.0
    for i in range(n):
        passed += gaps[i]
        arrival_s[i] = start_s + passed * scale
        pick = draws[0, i]
        if pick < hot_share:
            k = int(pick / hot_share * (base_users + new_users))
            u = k if k < base_users else new_first + k - base_users
        else:
            pick = (pick - hot_share) / (1.0 - hot_share)
            if pick >= warm_share:
                user[i] = next_one_off
                next_one_off += 1
                length = min(int(shortest + spread * draws[1, i]), longest)
                history_length[i] = new_tokens[i] = length
                continue
            u = warm_first + int(pick / warm_share * warm_users)
        added = 1 + int(draws[1, i] * (2 * new_items - 1))
        length = lengths[u] + added
        if length > longest:
            length -= length // 4
        lengths[u] = length
        user[i] = u
        history_length[i] = length
        new_tokens[i] = min(added, length)
    return next_one_off


class SyntheticWorkload:
    """Requests of one regime.

    Args:
        config: the regime and its population.
        load: requests a second by hot share.

    `hot_share` is that of the requests taken last, before the first that of the start.

    An epoch is drawn whole and handed out in parts, so that the requests are the same however finely
    they are taken: a controller that acts between epochs meets those of one that does not.
    """

    def __init__(self, config: RegimeConfig, load: LoadCurve) -> None:
        self.config = config
        self.load = load
        most = config.hot_users(np.array([0.0, 1.0, config.steady_hot_share])).max()
        self._hot_ids = int(most)
        self._ring_ids = BURST_RING * int(most) if config.regime == "burst" else 0
        self._warm_first = self._hot_ids + self._ring_ids

    @property
    def persistent_users(self) -> int:
        """User ids below this may come back."""
        return self._warm_first + self.config.warm_users

    @property
    def max_history_tokens(self) -> int:
        """No history is longer."""
        return self.config.max_history_tokens

    @property
    def mean_history_tokens(self) -> float:
        """Mean first history length."""
        return self.config.mean_history_tokens

    @property
    def catalogue(self) -> Catalogue:
        """What the tokens look up."""
        return self.config.catalogue

    def reset(self, rng: np.random.Generator, start_s: float) -> None:
        """Start anew at `start_s`: draw the regime's path, then histories and arrivals."""
        self._path_rng, arrivals = rng.spawn(2)
        self._follow(draw_path(self.config, self._path_rng))
        self.redraw(arrivals, start_s)

    def redraw(self, rng: np.random.Generator, start_s: float) -> None:
        """Start anew on the path at hand with other histories and arrivals."""
        self._rng = rng
        self._now_s = self._drawn_s = start_s
        self._rest = Requests.empty()
        self.hot_share = float(self.path.hot_share[0])
        self._period = 0
        self._burst = 0
        self._next_one_off = self.persistent_users
        self._lengths = self._first_lengths(self.persistent_users)

    def take(self, until_s: float) -> Requests:
        """Requests that arrive before `until_s`, from where the last call ended."""
        taken = None
        while self._now_s < until_s:
            if self._now_s >= self._drawn_s:
                epoch, self._drawn_s = self._epoch_at(self._now_s)
                self._rest = self._draw(epoch, self._drawn_s)
            if until_s < self._drawn_s:
                now = int(self._rest.arrival_s.searchsorted(until_s))
                more, self._rest, self._now_s = self._rest[:now], self._rest[now:], until_s
            else:
                more, self._rest, self._now_s = self._rest, Requests.empty(), self._drawn_s
            taken = more if taken is None else taken.then(more)
        return Requests.empty() if taken is None else taken

    def to_json(self) -> dict[str, Any]:
        """Plain values: config and load curve."""
        return {"kind": "regime", "config": asdict(self.config), "load": asdict(self.load)}

    def digest(self) -> str:
        """Hash of what the oracle's labels depend on: config, load and path."""
        content = json.dumps(self.to_json(), sort_keys=True) + self.path.digest()
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _epoch_at(self, now_s: float) -> tuple[int, float]:
        """Index into the path at `now_s`, and the time that it ends. Below 0 the first entry holds."""
        seconds = self.config.epoch_seconds
        if now_s < -1e-9:
            return 0, 0.0
        number = int(now_s / seconds + 1e-9)
        period, epoch = divmod(number, self.config.episode_epochs)
        if period != self._period:
            self._period = period
            self._follow(draw_path(self.config, self._path_rng))
        return epoch, (number + 1) * seconds

    def _draw(self, epoch: int, end_s: float) -> Requests:
        """Requests from now to `end_s`, the whole time of one entry of the path."""
        config = self.config
        share, rate, hot_users, new_users, burst = self._steps[epoch]
        self.hot_share = share
        new_first = self._start_burst(burst, new_users) if new_users else 0
        n = int(self._rng.poisson(rate * (end_s - self._now_s)))
        requests = Requests(
            np.empty(n), np.empty(n, np.int64), np.empty(n, np.int32), np.empty(n, np.int32)
        )
        width = 2 * config.history_spread * config.mean_history_tokens
        self._next_one_off = _fill(
            self._rng.standard_exponential(n + 1), self._rng.random((2, n)), self._now_s, end_s,
            share, hot_users - new_users, new_users, new_first, config.warm_share,
            self._warm_first, config.warm_users, self._next_one_off, self._lengths,
            config.mean_history_tokens - width / 2, width, config.new_items,
            config.max_history_tokens, requests.arrival_s, requests.user,
            requests.history_length, requests.new_items,
        )  # fmt: skip
        return requests

    def _follow(self, path: RegimePath) -> None:
        """Take a path, as plain numbers: looking them up in arrays would cost more than drawing."""
        self.path = path
        columns = (
            path.hot_share, self.load(path.hot_share), path.hot_users, path.new_users, path.burst,
        )  # fmt: skip
        self._steps = list(zip(*(column.tolist() for column in columns), strict=True))

    def _start_burst(self, burst: int, users: int) -> int:
        """First id of the burst's new users, with new histories when it has just begun."""
        first = self._hot_ids + (burst % BURST_RING) * self._hot_ids
        if burst != self._burst:
            self._burst = burst
            self._lengths[first : first + users] = self._first_lengths(users)
        return first

    def _first_lengths(self, users: int) -> NDArray[np.int32]:
        mean, spread = self.config.mean_history_tokens, self.config.history_spread
        lengths = self._rng.uniform(mean * (1 - spread), mean * (1 + spread), users)
        return np.minimum(lengths, self.config.max_history_tokens).astype(np.int32)
