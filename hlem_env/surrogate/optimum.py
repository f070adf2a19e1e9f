"""Oracles: what the best alpha would have been, found by trying.

alpha*      epoch by epoch, the alpha that gives the lowest mean P99 when held since the
episode's start, over repeats that redraw arrivals (the paper's optimum)
reachable   the best sequence that obeys the step limit, cache delays included, on the very
requests that are evaluated
foreseen    the best sequence that obeys the step limit by alpha*'s mean P99: it knows the course
of the workload to come, but not the arrivals, which no controller can know
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hlem_env.errors import ArtefactError, require
from hlem_env.mdp import ACTIONS_CENTI, MdpConfig
from hlem_env.surrogate.node import NodeState, SurrogateBackend
from hlem_env.workload.requests import Requests, Workload

Floats = NDArray[np.float64]
REPEATS = 16
WAYS = 3
"""Ways to an alpha that the reachable oracle tries: those that were cheapest until then."""


class RedrawnWorkload(Workload, Protocol):
    """A workload whose course can be held while its arrivals are drawn anew."""

    def redraw(self, rng: np.random.Generator, start_s: float) -> None:
        """Start anew on the same course with other arrivals."""

    def digest(self) -> str:
        """Hash of the course."""


@dataclass(frozen=True, eq=False)
class Episode:
    """One episode's requests, by epoch, so that many alphas can be tried on the same ones."""

    warmup: Requests
    epochs: tuple[Requests, ...]
    warmup_s: float
    epoch_seconds: float

    @cached_property
    def whole(self) -> Requests:
        """The requests of all epochs, the warm-up left out."""
        parts = self.epochs
        return Requests(
            np.concatenate([r.arrival_s for r in parts]),
            np.concatenate([r.user for r in parts]),
            np.concatenate([r.history_length for r in parts]),
            np.concatenate([r.new_items for r in parts]),
        )


def record_episode(backend: SurrogateBackend, epochs: int) -> Episode:
    """Take `epochs` epochs of requests, and the warm-up before, from a workload just reset."""
    seconds, workload = backend.node.epoch_seconds, backend.workload
    warmup = workload.take(0.0)
    taken = tuple(workload.take((i + 1) * seconds) for i in range(epochs))
    return Episode(warmup, taken, backend.warmup_s, seconds)


def hold(node: SurrogateBackend, episode: Episode, alpha_centi: int) -> Floats:
    """P99 in milliseconds, [epochs], with alpha held from the warm-up to the end."""
    node.empty()
    if episode.warmup_s > 0:
        node.serve(episode.warmup, alpha_centi, episode.warmup_s)
    return node.hold(episode.whole, alpha_centi, episode.epoch_seconds, len(episode.epochs))


def hold_all(
    backend: SurrogateBackend, episode: Episode, alphas_centi: Sequence[int], jobs: int = 2
) -> Floats:
    """P99 in milliseconds, [alphas, epochs]: `hold` for each alpha, on `jobs` threads."""

    def some(part: Sequence[int]) -> list[Floats]:
        node = backend.twin()
        return [hold(node, episode, alpha) for alpha in part]

    return np.stack(_in_parallel(some, alphas_centi, jobs))


@dataclass(frozen=True, eq=False)
class AlphaStar:
    """The optimum of every epoch."""

    alphas_centi: NDArray[np.int64]
    """[alphas] that were tried."""
    p99_ms: Floats
    """[alphas, epochs] mean over the repeats."""

    @property
    def alpha_centi(self) -> NDArray[np.int64]:
        """[epochs] alpha* in hundredths."""
        best: NDArray[np.int64] = self.alphas_centi[self.p99_ms.argmin(axis=0)]
        return best

    @property
    def best_p99_ms(self) -> Floats:
        """[epochs] P99 at alpha*."""
        best: Floats = self.p99_ms.min(axis=0)
        return best


def alpha_star(
    backend: SurrogateBackend,
    config: MdpConfig,
    epochs: int,
    step_centi: int = 1,
    repeats: int = REPEATS,
    jobs: int = 2,
    cache: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AlphaStar:
    """alpha* for the course that the backend's workload is on (reset it first).

    Args:
        step_centi: grid of alpha within the bounds, hundredths.
        repeats: drawings of the arrivals, the same for every alpha.
        cache: folder of results by content; a finished one is read instead of computed.
        progress: called with (repeats done, repeats).
    """
    require(repeats >= 1, "repeats", repeats, "at least 1")
    workload: Any = backend.workload
    alphas = np.arange(config.alpha_min_centi, config.alpha_max_centi + 1, step_centi)
    file = None
    if cache is not None:
        key = [workload.digest(), asdict(backend.node), backend.hardware.to_json()]
        key += [alphas.tolist(), epochs, repeats]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
        file = cache / f"alpha-star-{name}.npy"
        if file.is_file():
            return AlphaStar(alphas, _cached(file, (alphas.size, epochs)))
    total = np.zeros((alphas.size, epochs))
    for repeat in range(repeats):
        workload.redraw(np.random.default_rng([repeat, 0xA1]), -backend.warmup_s)
        total += hold_all(backend, record_episode(backend, epochs), alphas.tolist(), jobs)
        if progress is not None:
            progress(repeat + 1, repeats)
    result = AlphaStar(alphas, total / repeats)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".part.npy")
        np.save(partial, result.p99_ms)
        partial.replace(file)
    return result


def _cached(file: Path, shape: tuple[int, int]) -> Floats:
    try:
        p99_ms: Floats = np.load(file, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ArtefactError(f"{file} is damaged ({error}); delete it to compute it anew") from error
    if p99_ms.shape != shape:
        raise ArtefactError(
            f"{file} holds {p99_ms.shape}, not {shape}; delete it to compute it anew"
        )
    return p99_ms


def foreseen(star: AlphaStar) -> NDArray[np.int64]:
    """The alphas [epochs] (hundredths) under the step limit with the least sum of alpha*'s P99.

    Dynamic programming over the grid that alpha* was found on; it may start anywhere.
    """
    grid = star.alphas_centi
    reach = max(ACTIONS_CENTI)
    near = np.abs(grid[:, None] - grid[None, :]) <= reach
    cost = star.p99_ms[:, 0].copy()
    came_from = []
    for p99_ms in star.p99_ms.T[1:]:
        ways = np.where(near, cost[None, :], np.inf)
        came_from.append(ways.argmin(axis=1))
        cost = ways.min(axis=1) + p99_ms
    path = [int(cost.argmin())]
    for previous in reversed(came_from):
        path.append(int(previous[path[-1]]))
    best: NDArray[np.int64] = grid[path[::-1]]
    return best


@dataclass
class _Path:
    """The best way found to one alpha."""

    cost: float
    state: NodeState
    p99_ms: tuple[float, ...]
    alphas_centi: tuple[int, ...]


def reachable(
    backend: SurrogateBackend,
    config: MdpConfig,
    episode: Episode,
    jobs: int = 2,
    reach_centi: int = max(ACTIONS_CENTI),
    ways: int = WAYS,
) -> tuple[NDArray[np.int64], Floats]:
    """The best alphas [epochs] (hundredths) under the step limit, and their P99 [epochs].

    Dynamic programming over alpha on a grid of 0.02 that starts anywhere, caches warm: for every
    epoch and alpha the cheapest way to get there is kept, with the node's state. It sees the
    requests to come, so it is a bound, not a controller. With steps beyond the actions' largest the
    cheapest ways come from the same few alphas, to every alpha; the way that stays is then tried too.

    Args:
        jobs: threads.
        reach_centi: the largest step of an epoch, hundredths, an even number.
        ways: to each alpha that are tried, those that were cheapest until then.
    """
    require(reach_centi >= 2 and reach_centi % 2 == 0, "reach_centi", reach_centi, "even, from 2")
    require(ways >= 1, "ways", ways, "1 or more")
    steps = range(-reach_centi, reach_centi + 1, 2)
    grid = range(config.alpha_min_centi, config.alpha_max_centi + 1, 2)

    def begin(part: Sequence[int]) -> list[_Path]:
        node, paths = backend.twin(), []
        for alpha in part:
            node.empty()
            if episode.warmup_s > 0:
                node.serve(episode.warmup, alpha, episode.warmup_s)
            p99 = node.serve(episode.epochs[0], alpha, episode.epoch_seconds).p99_ms
            paths.append(_Path(p99, node.save(), (p99,), (alpha,)))
        return paths

    frontier = dict(zip(grid, _in_parallel(begin, grid, jobs), strict=True))
    # States of ways that were given up, by worker: to save into new memory takes longer than to serve.
    spares: list[list[NodeState]] = [[] for _ in range(jobs)]
    nodes = [backend.twin() for _ in range(jobs)]
    for node in nodes:
        node.empty()
    with ThreadPoolExecutor(jobs) as pool:
        for requests in episode.epochs[1:]:

            def extend(worker: int, paths: dict[int, _Path], requests: Requests) -> list[_Path]:
                node, spare, found = nodes[worker], spares[worker], []
                for alpha in list(grid)[worker::jobs]:
                    best: _Path | None = None
                    before = [paths[alpha - s] for s in steps if alpha - s in paths]
                    before = sorted(before, key=lambda w: w.cost)
                    tried, rest = before[:ways], before[ways:]
                    if reach_centi > max(ACTIONS_CENTI):
                        tried += [way for way in rest if way.alphas_centi[-1] == alpha]
                    for way in tried:
                        node.restore(way.state)
                        p99 = node.serve(requests, alpha, episode.epoch_seconds).p99_ms
                        if best is None or way.cost + p99 < best.cost:
                            if best is not None:
                                spare.append(best.state)
                            best = _Path(
                                way.cost + p99,
                                node.save(spare.pop() if spare else None),
                                (*way.p99_ms, p99),
                                (*way.alphas_centi, alpha),
                            )
                    assert best is not None
                    found.append(best)
                return found

            parts = pool.map(extend, range(jobs), [frontier] * jobs, [requests] * jobs)
            found = {path.alphas_centi[-1]: path for part in parts for path in part}
            for worker, spare in enumerate(spares):
                spare += [frontier[alpha].state for alpha in list(grid)[worker::jobs]]
            frontier = found
    best = min(frontier.values(), key=lambda path: path.cost)
    return np.array(best.alphas_centi), np.array(best.p99_ms)


def _in_parallel(
    work: Callable[[Sequence[Any]], list[Any]], items: Sequence[Any], jobs: int
) -> list[Any]:
    """`work` on interleaved parts of `items`, on `jobs` threads; results in the items' order."""
    results: list[Any] = [None] * len(items)
    with ThreadPoolExecutor(jobs) as pool:
        for worker, part in enumerate(pool.map(work, [items[w::jobs] for w in range(jobs)])):
            results[worker::jobs] = part
    return results
