"""The admin API: mode, policy, hold. It is not there at all unless a token is configured."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hlem_env.errors import ArgumentError, ArtefactError, HlemError, require
from serving_bridge.scoring import InvalidRequest
from serving_bridge.server.request_body import JSON, read_body
from serving_bridge.status import MODES

TOKEN_VARIABLE: Final = "HLEM_ADMIN_TOKEN"
SHORTEST_TOKEN: Final = 16
BODY_BYTES: Final = 65_536

Act = Callable[[Request, dict[str, Any]], Awaitable[Any]]
"""Does what a request with this document asks for, and gives what its answer says."""

logger = logging.getLogger("hlem.server")


class Control(Protocol):
    """What the admin API speaks to. Any thread may call it."""

    @property
    def mode(self) -> str:
        """In force, one of `MODES`."""

    def set_mode(self, mode: str) -> None:
        """From the next decision on."""

    def hold(self, alpha_centi: int | None) -> None:
        """Keep alpha at a value, hundredths; None decides again.

        Raises:
            ArgumentError: out of bounds.
        """

    def swap_policy(self, folder: Path) -> None:
        """Decide by another policy; the old one stays where the new one cannot be taken.

        Raises:
            ArtefactError: missing, damaged, or it does not decide as its parity vectors say.
        """


def read_token(file: Path | None) -> str | None:
    """The token from a file, or else from $HLEM_ADMIN_TOKEN; None if neither is given.

    Raises:
        ArgumentError: the file cannot be read, or the token is shorter than 16 characters or not ASCII.
    """
    if file is None:
        token = os.environ.get(TOKEN_VARIABLE)
        if token is None:
            return None
    else:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ArgumentError("admin_token_file", str(file), "a readable text file") from error
    # The token itself is in no message.
    good = len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable()
    allowed = f"{SHORTEST_TOKEN} or more printable ASCII characters"
    require(good, "admin token", f"{len(token)} characters", allowed)
    return token


def admin_routes(control: Control, token: str) -> APIRouter:
    """The routes under /admin, each for bearers of the token only."""
    router = APIRouter(prefix="/admin")

    async def answer(request: Request, act: Act) -> Response:
        """Check the token before anything of the body is read, then act on the body."""
        if not _authorised(request, token):
            return JSONResponse(
                {"error": "the admin token is needed"}, 401, {"WWW-Authenticate": "Bearer"}
            )
        body = b"{}" if request.method == "GET" else await read_body(request, BODY_BYTES, (JSON,))
        try:
            return JSONResponse(await act(request, _document(body)))
        except ArtefactError as error:
            logger.warning("policy not taken: %s", error)
            return JSONResponse(
                {"error": "there is no policy that can be taken; the one in force stays"}, 409
            )
        except HlemError as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest("the value is not one that this node takes") from error

    async def mode(request: Request, document: dict[str, Any]) -> Any:
        if request.method == "PUT":
            wanted = _field(document, "mode")
            if wanted not in MODES:
                raise InvalidRequest(f"mode must be one of {', '.join(MODES)}")
            await asyncio.to_thread(control.set_mode, wanted)
        return {"mode": control.mode}

    async def hold(_: Request, document: dict[str, Any]) -> Any:
        alpha = _field(document, "alpha_centi")
        if alpha is not None and (type(alpha) is not int or not 0 <= alpha <= 100):
            raise InvalidRequest("alpha_centi must be a whole number from 0 to 100, or null")
        await asyncio.to_thread(control.hold, alpha)
        return {"alpha_centi": alpha}

    async def swap(_: Request, document: dict[str, Any]) -> Any:
        folder = _field(document, "folder")
        if not isinstance(folder, str) or not folder or "\0" in folder:
            raise InvalidRequest("folder must be a path on the node")
        await asyncio.to_thread(control.swap_policy, Path(folder))
        return {"swapped": True}

    def add(path: str, methods: list[str], act: Act) -> None:
        async def endpoint(request: Request) -> Response:
            return await answer(request, act)

        router.add_api_route(path, endpoint, methods=methods, include_in_schema=False)

    add("/mode", ["GET", "PUT"], mode)
    add("/hold", ["PUT"], hold)
    add("/policy", ["PUT"], swap)
    return router


def _authorised(request: Request, token: str) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Compared as bytes, in a time that does not tell how much of it is right.
    same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode("ascii"))
    return scheme.lower() == "bearer" and same


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = orjson.loads(body)
    except ValueError:
        raise InvalidRequest("the body must be JSON") from None
    if not isinstance(document, dict):
        raise InvalidRequest("the body must be an object")
    return document


def _field(document: dict[str, Any], name: str) -> Any:
    if set(document) != {name}:
        raise InvalidRequest(f"the body must have the key {name} and no other")
    return document[name]
