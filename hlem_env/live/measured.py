"""What a node measures of itself: requests that completed, turned into the stats of a stretch of time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hlem_env.live.hot_users import HotUsers
from hlem_env.live.node import Executed, LiveNode
from hlem_env.telemetry import EpochStats
from hlem_env.workload.requests import Requests


@dataclass
class Completed:
    """Requests that completed and are not yet in an epoch's stats, in order of completion."""

    done_s: list[float] = field(default_factory=list)
    arrival_s: list[float] = field(default_factory=list)
    service_ms: list[float] = field(default_factory=list)
    is_hot: list[bool] = field(default_factory=list)
    history: list[int] = field(default_factory=list)
    reused: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    rows_hit: list[float] = field(default_factory=list)

    def take_until(self, end_s: float) -> tuple[NDArray[np.float64], ...]:
        """Remove and return, as arrays in the fields' order, those that completed until `end_s`."""
        n = int(np.searchsorted(np.array(self.done_s), end_s, side="right"))
        columns = []
        for name in self.__dataclass_fields__:
            values = getattr(self, name)
            columns.append(np.array(values[:n], np.float64))
            del values[:n]
        return tuple(columns)


class Measured:
    """What ran and completed on a node, until it is taken as stats.

    Args:
        node: whose pool and caches are asked.
        hot: who is hot; sees every request that completes.
    """

    def __init__(self, node: LiveNode, hot: HotUsers) -> None:
        self._node, self._hot = node, hot
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        self._hot.reset()
        self._busy: list[tuple[float, float]] = []
        self._completed = Completed()

    def ran(self, start_s: float, done_s: float) -> None:
        """The device ran a batch."""
        self._busy.append((start_s, done_s))

    def completed(self, batch: Requests, executed: Executed, done_s: float) -> None:
        """A batch has been answered; batches come in order of that."""
        done = self._completed
        share = executed.computed / executed.computed.sum()
        for i, (user, arrival_s) in enumerate(
            zip(batch.user.tolist(), batch.arrival_s.tolist(), strict=True)
        ):
            done.done_s.append(done_s)
            done.arrival_s.append(arrival_s)
            done.is_hot.append(self._hot.visit(user, arrival_s, int(executed.pages[i])))
        done.service_ms += (1000.0 * executed.device_s * share).tolist()
        done.history += batch.history_length.tolist()
        done.reused += executed.reused.tolist()
        done.computed += executed.computed.tolist()
        done.rows_hit += (executed.rows_hit * share).tolist()

    def take(
        self, begin_s: float, end_s: float, alpha_centi: int, waiting: int, *waiting_since_s: float
    ) -> EpochStats:
        """Stats of [begin, end], and of the node as it is now. What completed later is kept.

        Args:
            begin_s: where the last stats ended.
            end_s: not after now.
            alpha_centi: commanded embedding share, hundredths.
            waiting: requests that arrived until the end and have not completed.
            waiting_since_s: arrival of the oldest of them.
        """
        done_s, arrival_s, service_ms, is_hot, history, reused, computed, rows_hit = (
            self._completed.take_until(end_s)
        )
        # Answered beyond the end, not yet at it; where the clock never stops, some came later, too.
        late = [arrived for arrived in self._completed.arrival_s if arrived <= end_s]
        oldest_s = min([end_s, *late, *waiting_since_s])
        node = self._node
        pool, ahead = node.pool.stats(), node.take_ahead_bytes()
        return EpochStats(
            duration_s=end_s - begin_s,
            latency_ms=1000.0 * (done_s - arrival_s),
            service_ms=service_ms,
            arrival_s=arrival_s,
            is_hot=is_hot.astype(np.bool_),
            history_tokens=int(history.sum()),
            reused_tokens=int(reused.sum()),
            rows_looked_up=int(computed.sum()) * node.config.tables,
            rows_hit=float(rows_hit.sum()),
            computed_tokens=int(computed.sum()),
            refill_bytes=float(ahead.refill),
            prefetch_bytes=float(ahead.prefetch),
            evictions=node.take_kv_evictions(),
            alpha_target=alpha_centi / 100,
            alpha_resident=node.embedding.resident_rows / node.rows_in_pool,
            embedding_pages=pool.embedding,
            kv_pages=pool.kv,
            free_pages=pool.free,
            pending_pages=pool.pending,
            pool_bytes=node.pool.pages * node.pool.page_bytes,
            working_set_bytes=float(self._hot.pages(end_s) * node.pool.page_bytes),
            backlog=waiting + len(late),
            backlog_age_s=end_s - oldest_s,
            utilisation=self._busy_s(begin_s, end_s) / (end_s - begin_s),
        )

    def _busy_s(self, begin_s: float, end_s: float) -> float:
        """Seconds of [begin, end] in which a batch ran; forgets what lies before the end."""
        total = sum(max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in self._busy)
        self._busy = [(a, b) for a, b in self._busy if b > end_s]
        return total
