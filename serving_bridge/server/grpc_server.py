"""gRPC: Open Inference Protocol v2 on grpc.aio, with the protocol's public message classes.

Only the calls that this node serves are registered; gRPC answers any other with UNIMPLEMENTED.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as messages

from serving_bridge.scoring import InvalidRequest, Limits, ScoringError
from serving_bridge.server.contract import EXTENSIONS, model_metadata, server_metadata
from serving_bridge.server.dispatch import Dispatch
from serving_bridge.server.grpc_codec import check_model, read_message, write_message
from serving_bridge.server.refusals import FAILED, refusal, retry_after

logger = logging.getLogger("hlem.server")

SERVICE: Final = "inference.GRPCInferenceService"
STREAMS: Final = 128
"""Calls at once on one connection."""
Call = Callable[[Any], Awaitable[Any]]


def build_server(dispatch: Dispatch) -> grpc.aio.Server:
    """The server, not started and without a port."""
    limits = dispatch.limits
    server = grpc.aio.server(
        options=server_options(limits),
        # Health and metadata calls have room beside the requests that `Dispatch` lets in.
        maximum_concurrent_rpcs=2 * limits.queue + STREAMS,
    )
    server.add_generic_rpc_handlers((_handlers(dispatch),))
    return server


def server_options(limits: Limits) -> list[tuple[str, int]]:
    """Limits that gRPC itself keeps."""
    return [
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_concurrent_streams", STREAMS),
        ("grpc.max_metadata_size", 16_384),
        # Two servers on one port would share the load without anybody's knowing.
        ("grpc.so_reuseport", 0),
    ]


def _handlers(dispatch: Dispatch) -> Any:
    async def server_live(_: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def server_ready(_: Any) -> Any:
        return messages.ServerReadyResponse(ready=dispatch.ready)

    async def model_ready(message: Any) -> Any:
        check_model(message.name, message.version)
        return messages.ModelReadyResponse(ready=dispatch.ready)

    async def about_server(_: Any) -> Any:
        about = server_metadata()
        # Tensors of gRPC are always raw: the extension is one of REST.
        about["extensions"] = [name for name in EXTENSIONS if name != "binary_tensor_data"]
        return messages.ServerMetadataResponse(**about)

    async def about_model(message: Any) -> Any:
        check_model(message.name, message.version)
        return messages.ModelMetadataResponse(**model_metadata())

    async def infer(message: Any) -> Any:
        inference = read_message(message, dispatch.limits)
        message.Clear()  # not held while the request waits for its turn
        return write_message(inference, await dispatch.score(inference.request))

    calls: dict[str, tuple[Any, Call]] = {
        "ServerLive": (messages.ServerLiveRequest, server_live),
        "ServerReady": (messages.ServerReadyRequest, server_ready),
        "ModelReady": (messages.ModelReadyRequest, model_ready),
        "ServerMetadata": (messages.ServerMetadataRequest, about_server),
        "ModelMetadata": (messages.ModelMetadataRequest, about_model),
        "ModelInfer": (messages.ModelInferRequest, infer),
    }
    table = {
        name: grpc.unary_unary_rpc_method_handler(_handler(dispatch, name, kind, call))
        for name, (kind, call) in calls.items()
    }
    return grpc.method_handlers_generic_handler(SERVICE, table)


def _handler(
    dispatch: Dispatch, name: str, kind: Any, call: Call
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """A call on bytes: gRPC would tell a message that it cannot read as a fault of the server."""

    async def answered(raw: bytes) -> bytes:
        try:
            message = kind.FromString(raw)
        except DecodeError:
            raise InvalidRequest("the message is not one of this call") from None
        return (await call(message)).SerializeToString()  # type: ignore[no-any-return]

    async def handle(raw: bytes, context: Any) -> bytes:
        dispatch.grpc_calls += 1
        try:
            if name != "ModelInfer":
                return await answered(raw)
            with dispatch.admitted("grpc"):
                return await answered(raw)
        except ScoringError as error:
            told = error
        except Exception:
            logger.exception("a gRPC call failed")
            told = FAILED
        wait = retry_after(told)
        metadata = () if wait is None else (("retry-after", wait),)
        await context.abort(getattr(grpc.StatusCode, refusal(told).grpc), str(told), metadata)
        raise AssertionError("abort raises")

    return handle
