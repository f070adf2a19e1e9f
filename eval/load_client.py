"""A client of a served node over HTTP: new items first, the whole history where the node has none.

The user's next request waits for the answer to the one before, as it would on a user's own device. What
was refused or lost is sent with the next one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import aiohttp
import orjson

from eval.load_users import Catalogue, Items, User, Visit

INFER: Final = "/v2/models/hlem/infer"
TIMEOUT_S: Final = 60.0
CONNECTIONS: Final = 4096
"""More than the node allows, so that it is the node that refuses."""


class Answer(NamedTuple):
    """How a request ended."""

    outcome: str
    """served, refused (overload), failed (an answer that is none of the two) or lost (no answer)."""
    detail: str
    """Status and words of a failure."""
    asked_again: bool
    """The node did not know the user and got the whole history."""
    wrong_length: bool
    """The node's history has another length than the client's."""


@dataclass
class _Turn:
    """Whose turn it is among the requests of one user."""

    lock: asyncio.Lock
    waiting: int = 0


class Client:
    """Requests to one node, on connections that stay open.

    Args:
        url: of the node, without a path.
        catalogue: of items.
        candidates: of each request.
        prefix: of users' ids: runs with different ones meet different users.
    """

    def __init__(self, url: str, catalogue: Catalogue, candidates: int, prefix: str) -> None:
        self.url, self._catalogue, self._prefix = url.rstrip("/"), catalogue, prefix
        self._candidates = candidates
        self._turns: dict[int, _Turn] = {}
        self._sent = 0

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def status(self, after: int) -> dict[str, Any]:
        """The node's epochs after one, and its state.

        Raises:
            OSError: it does not answer.
        """
        try:
            async with self._session.get(f"{self.url}/status", params={"after": after}) as answer:
                found: dict[str, Any] = orjson.loads(await answer.read())
                return found
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise OSError(f"no status from {self.url}") from error

    async def ask(self, number: int, user: User, visit: Visit) -> Answer:
        """Score candidates for a user on a visit."""
        turn = self._turns.setdefault(number, _Turn(asyncio.Lock()))
        turn.waiting += 1
        try:
            async with turn.lock:
                return await self._ask(number, user, visit)
        finally:
            turn.waiting -= 1
            if not turn.waiting:
                del self._turns[number]

    async def _ask(self, number: int, user: User, visit: Visit) -> Answer:
        self._sent += 1
        candidates = self._catalogue.candidates(self._sent, self._candidates)
        unsent = user.unsent(visit)
        if unsent is None:
            return await self._whole(number, user, visit, candidates, again=False)
        sent = Visit(visit.first, max(visit.end, unsent))
        items = self._catalogue.history(number, unsent, sent.end)
        status, told = await self._post(number, "NEW_ITEMS", items, candidates)
        if status == 409:
            return await self._whole(number, user, visit, candidates, again=True)
        return self._end(user, sent, status, told, again=False)

    async def _whole(
        self, number: int, user: User, visit: Visit, candidates: Items, again: bool
    ) -> Answer:
        items = self._catalogue.history(number, *visit)
        status, told = await self._post(number, "HISTORY", items, candidates)
        return self._end(user, visit, status, told, again)

    def _end(self, user: User, sent: Visit, status: int, told: Any, again: bool) -> Answer:
        """Note what the node has now, and say how the request ended."""
        if status == 200:
            wrong = _history_tokens(told) != sent.end - sent.first
            user.stored = None if wrong else sent
            return Answer("served", "", again, wrong)
        if status == 503:
            if again:
                user.stored = None  # the node has none of it, so new items would be refused again
            return Answer("refused", "", again, False)
        # Written or not: only the whole history is sure to be right.
        user.stored = None
        if status == 0:
            return Answer("lost", str(told), again, False)
        words = told.get("error", "") if isinstance(told, dict) else ""
        return Answer("failed", f"{status} {words}", again, False)

    async def _post(
        self, number: int, name: str, items: Items, candidates: Items
    ) -> tuple[int, Any]:
        """Status and document of the answer; status 0 and the reason where there was none."""
        inputs = [
            {
                "name": "USER",
                "datatype": "BYTES",
                "shape": [1],
                "data": [f"{self._prefix}{number}"],
            },
            {"name": name, "datatype": "INT64", "shape": [items.size], "data": items},
            {"name": "CANDIDATES", "datatype": "INT64", "shape": [candidates.size]}
            | {"data": candidates},
        ]
        body = orjson.dumps({"inputs": inputs}, option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self.url + INFER, data=body, headers=headers) as answer:
                return answer.status, orjson.loads(await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            return 0, type(error).__name__


def _history_tokens(told: Any) -> int:
    outputs = told.get("outputs", []) if isinstance(told, dict) else []
    found = [one["data"][0] for one in outputs if one.get("name") == "HISTORY_TOKENS"]
    return int(found[0]) if found else -1
