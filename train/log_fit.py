"""Fits the surrogate's workload to an epoch log: what a Scenario can express, beside what the log shows.

    hot share over time   the regime whose hot shares, in order of size, are nearest to the log's;
                          Steady unless another is clearly nearer; its share is the log's mean
    population            distinct hot users (at least 3 requests in the trailing 12 epochs) over what
                          the regimes have at that hot share, per byte of pool
    lengths               mean and maximum of the histories
    rate                  the utilisation at which the surrogate's load curve gives the log's rate; the
                          utilisation that the log measured where the surrogate's hardware is so much
                          faster or slower that this is none to train at

The node's own sizes (pool, tables, layers, epoch) are taken from the log's header where they stand there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError
from hlem_env.mdp import HOT_REQUESTS, HOT_WINDOW_EPOCHS
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import load_curve
from hlem_env.workload.regimes import draw_path
from serving_bridge.log_reader import LoggedEpoch, read_epochs

ABOUT_FIELDS = ("pool_bytes", "tables", "rows_per_table", "layers", "zipf", "hardware", "preset")
"""Of a Scenario, that a log's header may give."""
UTILISATIONS = (0.30, 0.95)
"""Outside them no split matters, or none helps."""
_LEAST_EPOCHS = 2 * HOT_WINDOW_EPOCHS
_CLEARLY = 0.7


@dataclass(frozen=True)
class Shown:
    """What a log, or a workload, shows."""

    epochs: int
    requests_per_s: float
    hot_share: NDArray[np.float64]
    """[epochs], of requests."""
    hot_users: float
    """Mean distinct hot users of an epoch's window."""
    mean_history_tokens: float
    longest_tokens: int
    utilisation: float


@dataclass(frozen=True)
class Fit:
    """A scenario and where it comes from."""

    scenario: Scenario
    log: Shown
    notes: tuple[str, ...]


def fit_log(folder: str | Path, base: Scenario | None = None) -> Fit:
    """Fit a scenario to all epochs of a log that have telemetry.

    Args:
        folder: of the log.
        base: fields that neither the log nor its header give.

    Raises:
        ArtefactError: too few epochs, or none with requests.
        ArgumentError, ImportError: as of `log_reader.read_epochs`.
    """
    epochs = [e for e in read_epochs(folder) if e.stats is not None and e.requests is not None]
    shown = _shown(epochs, folder)
    run = epochs[-1].run
    known = {field.name for field in fields(Scenario)} & set(ABOUT_FIELDS)
    values: dict[str, Any] = vars(base or Scenario()).copy()
    values |= {name: run.about[name] for name in known if name in run.about}
    values |= {
        "trace": None,
        "epoch_seconds": run.config.epoch_seconds,
        "max_history_tokens": max(run.config.max_history_tokens, shown.longest_tokens),
        "mean_history_tokens": round(shown.mean_history_tokens, 1),
    }
    values["regime"] = _regime(shown.hot_share, Scenario(**values))
    values["steady_hot_share"] = round(float(shown.hot_share.mean()), 4)
    scenario = Scenario(**values)
    values["population_factor"] = round(_population(shown, scenario), 3)
    scenario = Scenario(**values)
    values["utilisation"], notes = _utilisation(shown, scenario)
    return Fit(Scenario(**values), shown, notes)


def table(fit: Fit) -> list[tuple[str, str, str]]:
    """Rows of what was fitted: name, in the log, in the scenario."""
    log, scenario = fit.log, fit.scenario
    config = scenario.regime_config()
    path = draw_path(config, np.random.default_rng(0))
    curve = load_curve(config, scenario.node(), scenario.profile(), scenario.utilisation)
    low, middle, high = np.quantile(log.hot_share, (0.1, 0.5, 0.9))
    own = np.quantile(path.hot_share, (0.1, 0.5, 0.9))
    return [
        ("epochs", f"{log.epochs}", f"{scenario.episode_epochs} an episode"),
        ("regime", "", f"{scenario.preset}/{scenario.regime}"),
        ("hot share, mean", f"{log.hot_share.mean():.3f}", f"{path.hot_share.mean():.3f}"),
        ("hot share, 10/50/90 %", f"{low:.3f} / {middle:.3f} / {high:.3f}",
         f"{own[0]:.3f} / {own[1]:.3f} / {own[2]:.3f}"),
        ("hot users", f"{log.hot_users:.0f}", f"{path.hot_users.mean():.0f}"),
        ("history, mean tokens", f"{log.mean_history_tokens:.0f}",
         f"{scenario.mean_history_tokens:.0f}"),
        ("history, longest", f"{log.longest_tokens}", f"{scenario.max_history_tokens} allowed"),
        ("requests/s", f"{log.requests_per_s:.2f}", f"{curve(path.hot_share).mean():.2f}"),
        ("utilisation", f"{log.utilisation:.2f}", f"{scenario.utilisation:.2f} at its best alpha"),
    ]  # fmt: skip


def _shown(epochs: list[LoggedEpoch], folder: str | Path) -> Shown:
    if len(epochs) < _LEAST_EPOCHS:
        raise ArtefactError(
            f"{folder}: {len(epochs)} epochs with telemetry; a fit needs {_LEAST_EPOCHS}"
        )
    stats = [e.stats for e in epochs if e.stats is not None]
    requests = [e.requests for e in epochs if e.requests is not None]
    lengths = np.concatenate([r.history_length for r in requests])
    if not lengths.size:
        raise ArtefactError(f"{folder}: no epoch of the log has requests")
    seconds = sum(s.duration_s for s in stats)
    return Shown(
        epochs=len(epochs),
        requests_per_s=sum(s.requests for s in stats) / seconds,
        hot_share=np.array([s.hot_share for s in stats if s.requests]),
        hot_users=float(np.mean(list(_hot_users(epochs)))),
        mean_history_tokens=float(lengths.mean()),
        longest_tokens=int(lengths.max()),
        utilisation=sum(s.utilisation * s.duration_s for s in stats) / seconds,
    )


def _hot_users(epochs: list[LoggedEpoch]) -> Iterator[int]:
    """Distinct hot users at the end of each full window of a run."""
    for end in range(HOT_WINDOW_EPOCHS, len(epochs) + 1):
        window = epochs[end - HOT_WINDOW_EPOCHS : end]
        if window[0].run.name != window[-1].run.name:
            continue
        users = np.concatenate([e.requests.user for e in window if e.requests is not None])
        yield int((np.unique(users, return_counts=True)[1] >= HOT_REQUESTS).sum())


def _regime(hot_share: NDArray[np.float64], scenario: Scenario) -> str:
    """The regime with the nearest hot shares in order of size (Wasserstein's distance)."""
    distance: dict[str, float] = {}
    ranks = (np.arange(200) + 0.5) / 200
    mine = np.quantile(hot_share, ranks)
    for regime in ("steady", "trend", "burst"):
        values = vars(scenario) | {
            "regime": regime, "steady_hot_share": float(hot_share.mean()), "episode_epochs": 2000
        }  # fmt: skip
        path = draw_path(Scenario(**values).regime_config(), np.random.default_rng(0))
        distance[regime] = float(np.abs(np.quantile(path.hot_share, ranks) - mine).mean())
    nearest = min(distance, key=lambda regime: distance[regime])
    return nearest if distance[nearest] < _CLEARLY * distance["steady"] else "steady"


def _population(shown: Shown, scenario: Scenario) -> float:
    """Hot users over those of the regimes' table at the log's mean hot share."""
    usual = draw_path(scenario.regime_config(), np.random.default_rng(0)).hot_users.mean()
    factor = scenario.population_factor * shown.hot_users / max(float(usual), 1.0)
    return min(max(factor, 0.01), 100.0)


def _utilisation(shown: Shown, scenario: Scenario) -> tuple[float, tuple[str, ...]]:
    config = scenario.regime_config()
    path = draw_path(config, np.random.default_rng(0))
    curve = load_curve(config, scenario.node(), scenario.profile(), scenario.utilisation)
    rate = float(curve(path.hot_share).mean())
    wanted = scenario.utilisation * shown.requests_per_s / rate
    low, high = UTILISATIONS
    if low <= wanted <= high:
        return round(wanted, 4), ()
    taken = min(max(shown.utilisation, low), high)
    note = (
        f"at the log's {shown.requests_per_s:.2f} requests/s the surrogate ({scenario.hardware}) would be"
        f" busy for {wanted:.2f} of the time: it is given the log's utilisation instead, {taken:.2f}"
    )
    return round(taken, 4), (note,)
