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
A node that the surrogate cannot be, such as a small one on a CPU, is fitted in proportion: histories over
their maximum, the hot users' KV over the pool, requests an epoch, and the log's utilisation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError
from hlem_env.mdp import HOT_REQUESTS, HOT_WINDOW_EPOCHS, MdpConfig
from hlem_env.scenario import Scenario
from hlem_env.surrogate.load import load_curve
from hlem_env.surrogate.node import NodeConfig
from hlem_env.workload.regimes import RegimePath, draw_path
from hlem_env.workload.requests import Catalogue
from serving_bridge.log_reader import LoggedEpoch, read_epochs

ABOUT_FIELDS = ("pool_bytes", "tables", "rows_per_table", "layers", "zipf")
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
    working_set: float
    """Mean KV bytes of the hot users over the pool."""
    requests_per_epoch: float


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
    values: dict[str, Any] = vars(base or Scenario()).copy() | {"trace": None}
    values |= {"steady_hot_share": round(float(shown.hot_share.mean()), 4)}
    values["regime"] = _regime(shown.hot_share, Scenario(**values))
    if _has_the_surrogate_s_sizes(run.about):
        values |= {name: run.about[name] for name in ABOUT_FIELDS if name in run.about}
        return _fit_as_it_is(shown, values, run.config)
    return _fit_in_proportion(shown, values, run.config)


def _has_the_surrogate_s_sizes(about: dict[str, Any]) -> bool:
    """Whether a Scenario can be this node: pages, rows and KV blocks are the surrogate's own."""
    node, catalogue = NodeConfig(), Catalogue()
    dim = about.get("heads", 8) * about.get("head_dim", 64)
    return bool(
        about.get("pool_bytes", node.pool_bytes) >= 100 * node.page_bytes
        and about.get("page_bytes", node.page_bytes) == node.page_bytes
        and 2 * dim == catalogue.row_bytes
        and about.get("dtype", "bfloat16") != "float32"
    )


def _fit_as_it_is(shown: Shown, values: dict[str, Any], config: MdpConfig) -> Fit:
    values |= {
        "epoch_seconds": config.epoch_seconds,
        "max_history_tokens": max(config.max_history_tokens, shown.longest_tokens),
        "mean_history_tokens": round(shown.mean_history_tokens, 1),
    }
    path = _path(Scenario(**values))
    values["population_factor"] = _factor(values, shown.hot_users, float(path.hot_users.mean()))
    values["utilisation"], notes = _utilisation(shown, Scenario(**values))
    return Fit(Scenario(**values), shown, notes)


def _fit_in_proportion(shown: Shown, values: dict[str, Any], config: MdpConfig) -> Fit:
    longest = values["max_history_tokens"]
    share = shown.mean_history_tokens / max(config.max_history_tokens, shown.longest_tokens)
    values["mean_history_tokens"] = round(max(share * longest, 1.0), 1)
    low, high = UTILISATIONS
    values["utilisation"] = round(min(max(shown.utilisation, low), high), 4)
    scenario = Scenario(**values)
    node = scenario.node()
    entry_bytes = node.kv_pages(int(scenario.mean_history_tokens)) * node.page_bytes
    users = shown.working_set * node.pool_bytes / entry_bytes
    values["population_factor"] = _factor(values, users, float(_path(scenario).hot_users.mean()))
    seconds = shown.requests_per_epoch / _rate(Scenario(**values))
    values["epoch_seconds"] = round(min(max(seconds, 0.05), 60.0), 4)
    note = (
        "the surrogate cannot be a node of these sizes: fitted in proportion, to histories over their"
        f" maximum ({share:.2f}), hot users' KV over the pool ({shown.working_set:.2f}), requests an"
        f" epoch ({shown.requests_per_epoch:.0f}) and utilisation"
    )
    return Fit(Scenario(**values), shown, (note,))


def table(fit: Fit) -> list[tuple[str, str, str]]:
    """Rows of what was fitted: name, in the log, in the scenario."""
    log, scenario = fit.log, fit.scenario
    path = _path(scenario)
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
        ("requests/s", f"{log.requests_per_s:.2f}", f"{_rate(scenario):.2f}"),
        ("requests an epoch", f"{log.requests_per_epoch:.0f}",
         f"{_rate(scenario) * scenario.epoch_seconds:.0f}"),
        ("hot users' KV over the pool", f"{log.working_set:.2f}", f"{_working_set(scenario):.2f}"),
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
        working_set=float(np.mean([s.working_set for s in stats])),
        requests_per_epoch=sum(s.requests for s in stats) / len(stats),
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


def _path(scenario: Scenario) -> RegimePath:
    return draw_path(scenario.regime_config(), np.random.default_rng(0))


def _rate(scenario: Scenario) -> float:
    """Mean requests/s of the scenario."""
    config = scenario.regime_config()
    curve = load_curve(config, scenario.node(), scenario.profile(), scenario.utilisation)
    return float(curve(_path(scenario).hot_share).mean())


def _working_set(scenario: Scenario) -> float:
    """KV bytes of the scenario's mean hot population over its pool."""
    node = scenario.node()
    pages = node.kv_pages(int(scenario.mean_history_tokens))
    users = float(_path(scenario).hot_users.mean())
    return users * pages / node.pool_pages


def _factor(values: dict[str, Any], wanted: float, usual: float) -> float:
    """Population factor that makes `usual` hot users the wanted ones."""
    factor = float(values["population_factor"]) * wanted / max(usual, 1.0)
    return round(min(max(factor, 0.01), 100.0), 3)


def _utilisation(shown: Shown, scenario: Scenario) -> tuple[float, tuple[str, ...]]:
    wanted = scenario.utilisation * shown.requests_per_s / _rate(scenario)
    low, high = UTILISATIONS
    if low <= wanted <= high:
        return round(wanted, 4), ()
    taken = min(max(shown.utilisation, low), high)
    note = (
        f"at the log's {shown.requests_per_s:.2f} requests/s the surrogate ({scenario.hardware}) would"
        f" be busy for {wanted:.2f} of the time: it is given the log's utilisation instead, {taken:.2f}"
    )
    return round(taken, 4), (note,)
