"""REST: Open Inference Protocol v2, metrics, status and admin, as an ASGI application.

Every handler reads its request itself: what FastAPI would check and report, it would report with the
input in the message.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from serving_bridge.scoring import InvalidRequest, ScoringError
from serving_bridge.server import metrics
from serving_bridge.server.admin import Control, admin_routes
from serving_bridge.server.contract import MODEL, VERSION, model_metadata, server_metadata
from serving_bridge.server.dispatch import Dispatch
from serving_bridge.server.json_codec import (
    HEADER_LENGTH,
    header_length,
    read_inference,
    write_inference,
)
from serving_bridge.server.openapi import openapi_document
from serving_bridge.server.page import HEADERS, page_files
from serving_bridge.server.refusals import FAILED, ClientGone, refusal, retry_after
from serving_bridge.server.request_body import JSON, RAW, read_body
from serving_bridge.status import StatusSource

logger = logging.getLogger("hlem.server")

Endpoint = Callable[[Request], Awaitable[Response]]
_HTTP_WORDS: Final = {
    404: "there is nothing at this path",
    405: "this path does not take this method",
}
_EPOCH: Final = re.compile(r"-1|[0-9]{1,18}")


def build_app(
    dispatch: Dispatch,
    status: StatusSource | None = None,
    control: Control | None = None,
    admin_token: str | None = None,
) -> FastAPI:
    """The application.

    Args:
        dispatch: to the scorer.
        status: the node's epochs; without it `/status` has none.
        control: what the admin API acts on.
        admin_token: None leaves the admin API out.
    """
    app = FastAPI(
        title="HLEM node", docs_url=None, redoc_url=None, redirect_slashes=False, openapi_url=None
    )
    admin = control is not None and admin_token is not None
    document = orjson.dumps(openapi_document(dispatch.limits, admin))
    # Routes are tried in order: the one that matters is the first.
    for path in (f"/v2/models/{MODEL}/infer", f"/v2/models/{MODEL}/versions/{VERSION}/infer"):
        _add(app, path, "POST", _infer(dispatch))
    for path, endpoint in _inference_routes(dispatch).items():
        _get(app, path, endpoint)
    _get(app, "/metrics", _metrics(dispatch))
    _get(app, "/status", _status(dispatch, status))
    _get(app, "/openapi.json", _fixed(document))
    for path, file in page_files().items():
        _get(app, path, _fixed(file.content, file.media_type, HEADERS))
    if control is not None and admin_token is not None:
        app.include_router(admin_routes(control, admin_token))
    app.add_exception_handler(ScoringError, _refused)
    app.add_exception_handler(HTTPException, _no_such_thing)
    app.add_exception_handler(ClientGone, _gone)
    app.add_exception_handler(Exception, _failed)
    return app


def _get(app: FastAPI, path: str, endpoint: Endpoint) -> None:
    _add(app, path, "GET", endpoint)


def _add(app: FastAPI, path: str, method: str, endpoint: Endpoint) -> None:
    app.add_route(path, endpoint, methods=[method], include_in_schema=False)


def _inference_routes(dispatch: Dispatch) -> dict[str, Endpoint]:
    """What can be asked of the server and its model, besides inference."""
    model = f"/v2/models/{MODEL}"

    async def live(_: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(_: Request) -> Response:
        return _readiness(dispatch, {"ready": dispatch.ready})

    async def model_ready(_: Request) -> Response:
        return _readiness(dispatch, {"name": MODEL, "ready": dispatch.ready})

    about = _fixed(orjson.dumps(model_metadata()))
    return {
        "/v2": _fixed(orjson.dumps(server_metadata())),
        "/v2/health/live": live,
        "/v2/health/ready": ready,
        model: about,
        f"{model}/versions/{VERSION}": about,
        f"{model}/ready": model_ready,
        f"{model}/versions/{VERSION}/ready": model_ready,
    }


def _readiness(dispatch: Dispatch, answer: dict[str, Any]) -> Response:
    return (
        JSONResponse(answer) if answer["ready"] else JSONResponse(answer, 503, {"Retry-After": "1"})
    )


def _fixed(
    content: bytes, media_type: str = JSON, headers: Mapping[str, str] | None = None
) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(content, headers=headers, media_type=media_type)

    return endpoint


def _infer(dispatch: Dispatch) -> Endpoint:
    async def infer(request: Request) -> Response:
        with dispatch.admitted("rest"):
            limits = dispatch.limits
            body = await read_body(request, limits.body_bytes)
            json_bytes = header_length(request.headers.get(HEADER_LENGTH), len(body))
            inference = read_inference(body, json_bytes, limits)
            del body  # not held while the request waits for its turn
            scored = await dispatch.score(inference.request, partial(_until_gone, request))
            content, json_bytes = write_inference(inference, scored)
        if json_bytes is None:
            return Response(content, media_type=JSON)
        return Response(content, headers={HEADER_LENGTH: str(json_bytes)}, media_type=RAW)

    return infer


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _metrics(dispatch: Dispatch) -> Endpoint:
    async def endpoint(_: Request) -> Response:
        return Response(dispatch.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})

    return endpoint


def _status(dispatch: Dispatch, status: StatusSource | None) -> Endpoint:
    # Epochs count from 0 again after a restart: by this a reader sees that there was one.
    run = secrets.token_hex(8)

    async def endpoint(request: Request) -> Response:
        after = request.query_params.get("after", "-1")
        if _EPOCH.fullmatch(after) is None:
            raise InvalidRequest("after must be the number of an epoch, or -1")
        records = [] if status is None else status.recent(int(after))
        # orjson reads the fields of a dataclass itself, a hundred times faster than `asdict`.
        told = {
            "run": run,
            "ready": dispatch.ready,
            "draining": dispatch.draining,
            "epochs": records,
        }
        return Response(orjson.dumps(told, default=dict), media_type=JSON)

    return endpoint


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ScoringError)
    told = refusal(error)
    headers: dict[str, str] = {}
    wait = retry_after(error)
    if wait is not None:
        headers["Retry-After"] = wait
    if told.http in (408, 413):
        # What is left of the body is not read.
        headers["Connection"] = "close"
    return JSONResponse({"error": str(error)}, told.http, headers)


async def _no_such_thing(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = _HTTP_WORDS.get(error.status_code, "this node does not do that")
    return JSONResponse({"error": text}, error.status_code, error.headers)


async def _gone(_: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _failed(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(FAILED)}, 500)
