"""From a protocol server to the scorer and back: how many requests are in, how each one ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from serving_bridge.scoring import Limits, Overloaded, Scored, Scorer, ScoreRequest, ScoringError
from serving_bridge.server.metrics import Metrics
from serving_bridge.server.refusals import FAILED, ClientGone, refusal

logger = logging.getLogger("hlem.server")


class Dispatch:
    """What REST and gRPC hand their requests to. It lives in one event loop.

    Args:
        scorer: does the work.
        metrics: counts it.
    """

    def __init__(self, scorer: Scorer, metrics: Metrics) -> None:
        self.scorer, self.metrics = scorer, metrics
        self.draining = False
        self.grpc_calls = 0
        """That have come so far, of any kind."""
        self._in_flight = 0
        self._ended: asyncio.Future[None] | None = None

    @property
    def limits(self) -> Limits:
        """Of the node."""
        return self.scorer.limits

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return not self.draining and self.scorer.ready

    @contextmanager
    def admitted(self, protocol: str) -> Iterator[None]:
        """Room for one request from its first byte to its answer; times it and counts how it ended.

        Twice as many as the scorer's queue are let in, so that bodies which are still being read bound
        memory, and the queue decides who is turned away.

        Raises:
            Overloaded: there is no room.
        """
        start = time.perf_counter()
        outcome = "failed"
        self._in_flight += 1
        self.metrics.in_flight.set(self._in_flight)
        try:
            if self._in_flight > 2 * self.limits.queue:
                raise Overloaded("the node has too many requests", 1.0)
            yield
            outcome = "served"
        except ScoringError as error:
            outcome = refusal(error).outcome
            raise
        except (asyncio.CancelledError, ClientGone):
            outcome = "cancelled"
            raise
        finally:
            self._in_flight -= 1
            self.metrics.in_flight.set(self._in_flight)
            self.metrics.requests.labels(protocol, outcome).inc()
            if outcome == "served":
                self.metrics.latency.labels(protocol).observe(time.perf_counter() - start)

    async def score(
        self, request: ScoreRequest, gone: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> Scored:
        """Hand a request to the scorer and wait. Whatever ends the wait takes it out of the queue.

        Args:
            request: within the limits.
            gone: a coroutine of it returns when the client has gone away.

        Raises:
            ScoringError: it was not served, for whatever reason.
            ClientGone: `gone` returned first.
        """
        future = self._submit(request)
        if future.done():
            return _result(future)
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        watch = None if gone is None else asyncio.ensure_future(gone())
        try:
            ends: list[asyncio.Future[Any]] = [future, self._ended]
            await asyncio.wait(
                ends if watch is None else [*ends, watch], return_when=asyncio.FIRST_COMPLETED
            )
            if future.done():
                return _result(future)
            if watch is not None and watch.done():
                raise ClientGone
            raise Overloaded("the node stopped before the request's turn", 1.0)
        finally:
            future.cancel()
            if watch is not None:
                watch.cancel()

    def end(self) -> None:
        """Wait for nothing any more: who still waits is told to ask again."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _submit(self, request: ScoreRequest) -> asyncio.Future[Scored]:
        """The scorer's future in this loop; cancelling it cancels the scorer's."""
        try:
            return _here(self.scorer.submit(request))
        except ScoringError:
            raise
        except Exception as error:
            logger.exception("the scorer failed to take a request")
            raise FAILED from error


def _here(future: Future[Scored]) -> asyncio.Future[Scored]:
    """The future in this loop; one that is done needs no call from another thread to wake the loop."""
    if not future.done() or future.cancelled() or future.exception() is not None:
        return asyncio.wrap_future(future)
    done = asyncio.get_running_loop().create_future()
    done.set_result(future.result())
    return done


def _result(future: asyncio.Future[Scored]) -> Scored:
    """What a future that is done holds.

    Raises:
        ScoringError: the request was not served, for whatever reason.
    """
    if future.cancelled():
        raise FAILED
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, ScoringError):
        raise error
    logger.error("the scorer failed", exc_info=error)
    raise FAILED from error
