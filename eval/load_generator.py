"""Loads a served node over HTTP: `python -m eval.load_generator --url http://127.0.0.1:8080`.

An open loop: requests leave when the workload says so, whatever the node does, and a latency counts from
that moment. First the rate is set so that the node is busy for --utilisation of the time, as it says
itself; then the load runs, with a burst of new hot users in its middle. Prints P50, P99, what was refused
and what failed as it goes. Ctrl-C ends it early, with the summary.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from eval.load_burst import FIRST_USER, Burst, BurstMix
from eval.load_client import Answer, Client
from eval.load_totals import OUTCOMES, Totals
from eval.load_users import Catalogue, User, Users, Visit
from hlem_env import mdp
from hlem_env.command_line import run_command
from hlem_env.errors import ArgumentError, require
from hlem_env.live.config import LiveConfig
from hlem_env.live_scenario import live_workload
from hlem_env.machine import allow_open_files, command, write_result
from hlem_env.scenario import Scenario
from hlem_env.workload.requests import Workload

CHUNK_S: Final = 0.1
"""Requests are drawn for so long ahead."""
FIRST_SPEED: Final = 0.25
"""Of the preset's rate, before the node has said how busy that keeps it."""
SPEEDS: Final = 0.02, 4.0
PROMPT_S: Final = 1.0
"""A node that answers a single request as fast as that has compiled its kernels."""
AWAKE_S: Final = 180.0
"""It is given for that."""
LAST_ANSWERS_S: Final = 5.0
"""For requests on their way at the end."""
SCALE_ROUNDS: Final = 3
SATURATED: Final = 0.9
"""Busier than that, a node says little of how much less it could do with."""


@dataclass
class Args:
    """Requests to a served node, in an open loop."""

    url: str = "http://127.0.0.1:8080"
    """of the node"""
    workload: str = "steady"
    """a regime, PRESET/REGIME, or trace:FILE"""
    trace_counts: str | None = None
    """per-user counts for the trace's synthetic base histories"""
    preset: str = "cpu-small"
    """of the node: how long histories are, how many candidates"""
    seconds: float = 180.0
    """of load, after the rate is set"""
    utilisation: float = 0.6
    """of the node outside the burst; the rate follows from it"""
    rate: float | None = None
    """requests a second instead"""
    burst_at: float | None = None
    """seconds from the start; None: in the middle"""
    burst_seconds: float = 20.0
    """0: none"""
    burst_share: float = 0.5
    """of the requests in the burst, those of its new users"""
    burst_load: float = 1.25
    """factor on the rate in the burst"""
    burst_users: int = 16
    """that come in the burst, and only there"""
    users: str | None = None
    """what their ids begin with; None: drawn, so that the node knows none of them"""
    seed: int = 1
    """of requests and items"""
    report_seconds: float = 5.0
    """between lines"""
    json: Path | None = None
    """file for the figures"""

    def __post_init__(self) -> None:
        for name in ("seconds", "report_seconds"):
            value = getattr(self, name)
            require(0 < value <= 1e7, name, value, "above 0, at most 1e7")
        require(0 < self.utilisation <= 2, "utilisation", self.utilisation, "above 0, at most 2")
        if self.rate is not None:
            require(0 < self.rate <= 1e5, "rate", self.rate, "above 0, at most 1e5")


class Generator:
    """One run against one node.

    Args:
        args: see there.
        say: gets the lines; None prints them.
    """

    def __init__(self, args: Args, say: Callable[[str], None] | None = None) -> None:
        self.args, self._say = args, say or partial(print, flush=True)
        self.config = config = LiveConfig.load(args.preset)
        scenario = Scenario.parse(args.workload, trace_counts=args.trace_counts)
        self.workload: Workload = live_workload(scenario, config, entries_in_pool(config), 1.0)
        rng = np.random.default_rng(args.seed)
        self.workload.reset(rng.spawn(1)[0], 0.0)
        burst_at = (args.seconds - args.burst_seconds) / 2
        self._burst = Burst(
            burst_at if args.burst_at is None else args.burst_at, args.burst_seconds,
            args.burst_share, args.burst_users, args.burst_load, config.mean_history_tokens,
            config.max_history_tokens, config.new_items,
        )  # fmt: skip
        self._mix = BurstMix(self._burst, rng.spawn(1)[0])
        self._users = Users(self.workload.persistent_users)
        self._burst_users = Users(FIRST_USER + args.burst_users)
        self._catalogue = Catalogue(
            config.rows_per_table, self.workload.catalogue.zipf or config.zipf, args.seed
        )
        self._prefix = args.users if args.users is not None else f"{secrets.token_hex(4)}-"
        self.total, self._lately = Totals(), Totals()
        self._tasks: set[asyncio.Task[None]] = set()
        self._speed, self._workload_s = FIRST_SPEED, 0.0
        self._epoch = -1
        self._last: dict[str, Any] = {"alpha_centi": 0, "state": "no epoch"}
        self._node_lost = False
        self._fault: BaseException | None = None
        self.passed_s = 0.0
        """Of the load."""

    async def run(self, stop: asyncio.Event) -> Totals:
        """Load the node until the time is up or `stop` is set.

        Raises:
            ArgumentError: nothing answers at the address.
        """
        allow_open_files()
        async with Client(
            self.args.url, self._catalogue, self.config.candidates, self._prefix
        ) as client:
            try:
                await client.status(-1)
            except OSError as error:
                raise ArgumentError(
                    "url", self.args.url, "where a node answers; none does"
                ) from error
            await self._wake(client, stop)
            await self._set_rate(client, stop)
            self._say(
                f"{self.args.seconds:g} s of {self.args.workload} at {self._speed:.2f} times the"
                f" preset's rate; burst at {self._burst.start_s:g} s for {self._burst.seconds:g} s"
            )
            reports = asyncio.create_task(self._report(client))
            try:
                await self._load(client, self.args.seconds, stop, measured=True)
            finally:
                reports.cancel()
                await self._settle(LAST_ANSWERS_S)
        self._say(summary(self.total))
        return self.total

    async def _wake(self, client: Client, stop: asyncio.Event) -> None:
        """Single requests until one is answered promptly: a node that has just started may compile."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for number in range(FIRST_USER - 1, 0, -1):
            sent_s = loop.time()
            answer = await client.ask(number, *self._users.visit(number, 100, 100))
            prompt = answer.outcome == "served" and loop.time() - sent_s < PROMPT_S
            if prompt or stop.is_set() or loop.time() - start_s > AWAKE_S:
                break
            await asyncio.sleep(CHUNK_S)
        if loop.time() - start_s > PROMPT_S:
            self._say(f"{loop.time() - start_s:.1f} s until the node answered promptly")

    async def _set_rate(self, client: Client, stop: asyncio.Event) -> None:
        """The speed of the workload's clock at which the node is as busy as wanted."""
        window_s = mdp.HOT_WINDOW_EPOCHS * self.config.epoch_seconds
        if self.args.rate is not None:
            before = self.workload.take(window_s)
            self._speed, self._workload_s = (
                self.args.rate * window_s / max(len(before), 1),
                window_s,
            )
            return
        for _ in range(SCALE_ROUNDS):
            self._say(
                f"{window_s:g} s at {self._speed:.2f} times the preset's rate, to see how busy it is"
            )
            await self._load(client, window_s, stop, measured=False)
            await self._settle(window_s + LAST_ANSWERS_S)
            epochs = (await client.status(self._epoch))["epochs"]
            busy = [epoch["utilisation"] for epoch in epochs if epoch["requests"]]
            if stop.is_set() or not busy:
                return
            self._epoch = epochs[-1]["epoch"]
            found = float(np.mean(busy[len(busy) // 2 :]))
            self._say(f"  utilisation {found:.2f}, {self.args.utilisation:.2f} is wanted")
            factor = self.args.utilisation / max(found, 0.05)
            self._speed *= min(factor, 0.5) if found > SATURATED else min(factor, 3.0)
            self._speed = float(np.clip(self._speed, *SPEEDS))

    async def _load(
        self, client: Client, seconds: float, stop: asyncio.Event, measured: bool
    ) -> None:
        """Send what arrives, chunk by chunk; a chunk begins when its time has come, never earlier."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        for chunk in range(math.ceil(seconds / CHUNK_S)):
            if stop.is_set():
                break
            passed_s = chunk * CHUNK_S
            self.passed_s = passed_s if measured else 0.0
            burst = measured and self._burst.runs(passed_s)
            speed = self._speed * (self._burst.load if burst else 1.0)
            begun_s, self._workload_s = self._workload_s, self._workload_s + CHUNK_S * speed
            requests = self.workload.take(self._workload_s)
            if burst:
                requests = self._mix.mixed(requests)
            due_s = start_s + passed_s + (requests.arrival_s - begun_s) / speed
            for at_s, number, length, new in zip(
                due_s.tolist(), requests.user.tolist(), requests.history_length.tolist(),
                requests.new_items.tolist(), strict=True,
            ):  # fmt: skip
                users = self._burst_users if number >= FIRST_USER else self._users
                visit = users.visit(number, length, new)
                task = loop.create_task(self._send(client, at_s, number, *visit, measured))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            if self._fault is not None:
                raise self._fault
            await asyncio.sleep(max(start_s + passed_s + CHUNK_S - loop.time(), 0.0))

    async def _send(
        self, client: Client, at_s: float, number: int, user: User, visit: Visit, measured: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(at_s - loop.time(), 0.0))
        if measured:
            self.total.sent += 1
            self._lately.sent += 1
        try:
            answer = await client.ask(number, user, visit)
        except asyncio.CancelledError:
            answer = Answer("lost", "no answer by the end", False, False)
        if measured:
            latency_ms = 1e3 * (loop.time() - at_s)
            self.total.add(answer, latency_ms)
            self._lately.add(answer, latency_ms)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._fault = self._fault or task.exception()

    async def _settle(self, seconds: float) -> None:
        """Wait for the last answers; what has none by then is lost."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _report(self, client: Client) -> None:
        start_s = asyncio.get_running_loop().time()
        while True:
            await asyncio.sleep(self.args.report_seconds)
            try:
                epochs = (await client.status(self._epoch))["epochs"]
                self._node_lost = False
            except OSError:
                self._node_lost, epochs = True, []
            if epochs:
                self._last, self._epoch = epochs[-1], epochs[-1]["epoch"]
            passed_s = asyncio.get_running_loop().time() - start_s
            lately, self._lately = self._lately, Totals()
            self._say(self._line(passed_s, lately))

    def _line(self, passed_s: float, lately: Totals) -> str:
        node = f"alpha {self._last['alpha_centi'] / 100:.2f} {self._last['state']}"
        if self._node_lost:
            node = "the node does not answer"
        burst = " BURST" if self._burst.runs(passed_s - self.args.report_seconds / 2) else ""
        outcomes = ", ".join(f"{name} {lately.outcomes[name]}" for name in OUTCOMES)
        line = (
            f"{passed_s:6.0f} s  {lately.sent / self.args.report_seconds:6.1f} requests/s"
            f"  P50 {lately.percentile_ms(0.5):7.1f} ms  P99 {lately.percentile_ms(0.99):7.1f} ms"
            f"  {outcomes}, whole history asked for {lately.asked_again}  {node}{burst}"
        )
        return line + _details(lately)


def entries_in_pool(config: LiveConfig) -> int:
    """Histories of mean length that the node's whole pool would hold, K and V of all layers."""
    blocks = -(-round(config.mean_history_tokens) // config.block_tokens) * config.layers
    block_bytes = 2 * config.block_tokens * config.row_bytes
    pages = -(-blocks * block_bytes // config.page_bytes)
    return max(config.pool_bytes // config.page_bytes // pages, 1)


def summary(total: Totals) -> str:
    """The whole run in a few words."""
    outcomes = ", ".join(f"{name} {total.outcomes[name]}" for name in OUTCOMES)
    return (
        f"All: sent {total.sent}; {outcomes}; P50 {total.percentile_ms(0.5):.1f} ms, P99"
        f" {total.percentile_ms(0.99):.1f} ms; whole history asked for {total.asked_again} times;"
        f" history of another length {total.wrong_length} times"
        f"{_details(total)}"
    )


def _details(total: Totals) -> str:
    """The commonest failures, a line each."""
    return "".join(f"\n          {n} x {text}" for text, n in total.details.most_common(3))


def stop_on_signal() -> asyncio.Event:
    """Set once the process is told to stop; a second signal ends it at once. Of the running loop.

    To be called before anything takes long: until then Ctrl-C cancels whatever the loop is at.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal() -> None:
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    return stop


async def until_signal(args: Args) -> Totals:
    """Run until the time is up or the process is told to stop.

    Raises:
        ArgumentError: nothing answers at the address.
    """
    stop = stop_on_signal()
    return await Generator(args).run(stop)


def result(args: Args, total: Totals) -> dict[str, Any]:
    """What is written."""
    return {"workload": args.workload, "preset": args.preset, **total.to_json()}


def main(args: Args) -> int:
    """Load, print, write."""
    total = asyncio.run(until_signal(args))
    if args.json is not None:
        write_result(args.json, command("eval.load_generator"), result(args, total))
    return 0


if __name__ == "__main__":
    run_command("eval.load_generator", main, Args)
