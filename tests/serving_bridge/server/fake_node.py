"""A scorer that answers at once by a rule that a test can repeat, and its servers on a loop of a thread."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hlem_env.errors import ArgumentError, ArtefactError
from serving_bridge.scoring import (
    InvalidRequest,
    Limits,
    Overloaded,
    Scored,
    ScoreRequest,
    UnknownUser,
)
from serving_bridge.server.lifecycle import Listen, NodeServer
from serving_bridge.status import EpochRecord

LIMITS = Limits(history_tokens=15_000, candidates=200, queue=8, body_bytes=2**19)
TOKEN = "a token of enough characters"


def expected(history: list[int], candidates: list[int]) -> np.ndarray:
    """The score of a candidate: from the whole history's order and the candidate, in float32."""
    weights = np.arange(1, len(history) + 1)
    state = int(np.dot(np.array(history, object), weights)) % 9973
    return np.array([(c % 997 * 31 + state) / 7 for c in candidates], np.float32)


class FakeScorer:
    """Histories in memory. `held` futures never end by themselves; `failure` is raised or set."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.limits = limits
        self.reset()

    def reset(self) -> None:
        self.histories: dict[str, list[int]] = {}
        self.asked: list[ScoreRequest] = []
        self.held: list[Future[Scored]] = []
        self.hold = False
        self.raises: Exception | None = None
        self.fails: Exception | None = None
        self.ready = True
        self.drained = False

    def submit(self, request: ScoreRequest) -> Future[Scored]:
        if self.raises is not None:
            raise self.raises
        if self.drained:
            raise Overloaded("the node is draining", 1.0)
        self.asked.append(request)
        future: Future[Scored] = Future()
        if self.hold:
            self.held.append(future)
        elif self.fails is not None:
            future.set_exception(self.fails)
        else:
            self._answer(request, future)
        return future

    def _answer(self, request: ScoreRequest, future: Future[Scored]) -> None:
        known = self.histories.get(request.user, [])
        if request.history is None:
            assert request.new_items is not None
            if not known:
                future.set_exception(UnknownUser("no history is stored for this user"))
                return
            history = known + request.new_items.tolist()
        else:
            history = request.history.tolist()
        if len(history) > self.limits.history_tokens:
            future.set_exception(InvalidRequest("the history would be too long"))
            return
        self.histories[request.user] = history
        scores = expected(history, request.candidates.tolist())
        future.set_result(Scored(scores, len(history), len(known)))

    def drain(self, timeout_s: float) -> bool:
        self.drained = True
        end = time.monotonic() + timeout_s
        while any(not future.done() for future in self.held):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True


class FakeStatus:
    def __init__(self) -> None:
        self.records: list[EpochRecord] = []

    def recent(self, after_epoch: int = -1) -> list[EpochRecord]:
        return [record for record in self.records if record.epoch > after_epoch]


class FakeControl:
    def __init__(self) -> None:
        self.mode = "active"
        self.held: int | None = None
        self.policy: Path | None = None

    def set_mode(self, mode: str) -> None:
        self.mode = mode

    def hold(self, alpha_centi: int | None) -> None:
        if alpha_centi is not None and not 10 <= alpha_centi <= 90:
            raise ArgumentError("alpha_centi", alpha_centi, "10 to 90")
        self.held = alpha_centi

    def swap_policy(self, folder: Path) -> None:
        if folder.name == "corrupt":
            raise ArtefactError(f"{folder} is damaged")
        self.policy = folder


def record(epoch: int, **changed: object) -> EpochRecord:
    values: dict[str, object] = {
        "epoch": epoch, "end_unix_s": 1e9 + epoch, "duration_s": 5.0, "requests": 40, "refused": 3,
        "p50_ms": 11.0, "p99_ms": 25.0, "slo_ms": 30.0, "qos": 0.99, "hot_share": 0.2,
        "kv_hit": 0.625, "emb_hit": 0.875, "working_set": 0.4, "mean_history_tokens": 900.0,
        "utilisation": 0.7, "backlog": 2, "backlog_age_s": 0.5, "alpha_centi": 50,
        "alpha_resident": 0.48, "embedding_pages": 48, "kv_pages": 44, "free_pages": 5,
        "pending_pages": 3, "refill_bytes": 1e6, "prefetch_bytes": 2e6, "evictions": 4,
        "next_alpha_centi": 52, "wanted_alpha_centi": 54, "reason": "policy +0.04",
        "held": "at most 0.02 a step", "parts": {"policy": 4.0}, "decision_us": 32.0,
        "history_users": 1234, "history_bytes": 3 * 2**20, "histories_removed": 7,
    }  # fmt: skip
    return EpochRecord(**{**values, **changed})  # type: ignore[arg-type]


class FakeNode:
    """What a test holds of a running node."""

    def __init__(self, limits: Limits = LIMITS, drain_s: float = 5.0, port: int = 0) -> None:
        self.scorer, self.status, self.control = FakeScorer(limits), FakeStatus(), FakeControl()
        self.server = NodeServer(
            self.scorer,
            Listen(port=port, grpc_port=0, drain_s=drain_s),
            self.status,
            self.control,
            TOKEN,
        )

    def reset(self) -> None:
        self.scorer.reset()
        self.status.records.clear()
        self.control.__init__()  # type: ignore[misc]

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"


@contextmanager
def running(node: FakeNode) -> Iterator[FakeNode]:
    """Its servers on a thread's loop, stopped at the end."""
    started, end = threading.Event(), threading.Event()

    async def live() -> None:
        await node.server.start()
        started.set()
        await asyncio.to_thread(end.wait)
        await node.server.stop()

    thread = threading.Thread(target=asyncio.run, args=(live(),))
    thread.start()
    try:
        assert started.wait(20)
        yield node
    finally:
        end.set()
        thread.join(20)
        assert not thread.is_alive()
