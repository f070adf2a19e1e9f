"""Sends malformed requests to a served node's protocol servers: what they answer, and what memory they keep.

    python -m eval.fuzz_server --requests 10000 --json runs/bench/fuzz_server.json

Three of four requests go over REST, on raw sockets, one of four over gRPC. Each is a good request that was
spoilt in one or more ways: bytes flipped, cut or repeated; values, types and keys of the JSON exchanged;
headers that lie. A spoilt request may still be a good one, so 200 is no fault. Faults are: an answer of 5xx
other than 503, a connection that is neither answered nor closed, an error that is longer than
`LONGEST_ERROR` or repeats a word that was planted in the request, and a server that does not answer a good
request at the end.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gzip
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson

from eval.server_process import Server, server_process
from eval.server_requests import (
    GRPC_INFER,
    INFER,
    binary_request,
    grpc_request,
    http_request,
    json_request,
)
from hlem_env.command_line import run_command
from hlem_env.errors import require
from hlem_env.machine import command, write_result
from serving_bridge.scoring import Limits

LIMITS = Limits(history_tokens=2_000, candidates=200, body_bytes=2**17)
PLANTED = "xq7planted"
"""Stands for the user's data in every request; no error may repeat it."""
PARTS = 10
"""After each of which the server's memory is looked at: a leak grows from part to part."""
LONGEST_ERROR = 400
PATIENCE_S = 0.25
"""After which a request without an answer is ended."""
TIMEOUT_S = 20.0
BAD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 1.5, 1e300, 2**31, 2**63 - 1, 2**63, -(2**63), "", "1", PLANTED,
    "INT64", "BYTES", "FP32", "HISTORY", "USER", "\ud7ff", [], [[]], [[1], [2, 3]], [1, [2]], [-1],
    [2**62, 4], [0], [1, 1], {}, {"a": 1}, {"binary_data_size": 8}, {"binary_data_size": -1},
    {"binary_data_size": "8"}, {"binary_data_size": 2**64}, {"classification": 3}, list(range(70)),
    [PLANTED] * 3, [True] * 70, [0.5] * 70, 10**25,
)  # fmt: skip
BAD_HEADERS: tuple[dict[str, str], ...] = (
    {"Inference-Header-Content-Length": "1.5"}, {"Inference-Header-Content-Length": "-1"},
    {"Inference-Header-Content-Length": "99999999"}, {"Inference-Header-Content-Length": ""},
    {"Inference-Header-Content-Length": "0x10"}, {"Inference-Header-Content-Length": "\u00b2"},
    {"Inference-Header-Content-Length": "7"}, {"Content-Type": "text/plain"},
    {"Content-Type": f"application/json; {PLANTED}"}, {"Content-Type": "a" * 2000},
    {"Content-Encoding": "gzip"}, {"Content-Encoding": "deflate"}, {"Content-Encoding": "br"},
    {"Content-Encoding": f"gzip, {PLANTED}"}, {"Accept": PLANTED}, {"X-Long": "b" * 20_000},
    {"Transfer-Encoding": "chunked"}, {"Expect": "100-continue"}, {"Connection": "upgrade"},
)  # fmt: skip
PATHS = (
    "/v2/models/hlem/versions/1/infer", "/v2/models/hlem/versions/2/infer", "/v2/models/x/infer",
    f"/{PLANTED}", "/v2/models/hlem/infer/", "/status?after=x", "/admin/mode", "//v2", "/v2/%00",
    "/v2/models/hlem/../infer", "/v2/repository/models/hlem/unload", "/metrics",
)  # fmt: skip


@dataclass
class Args:
    """Sends malformed requests to the protocol servers and counts what comes back."""

    requests: int = 10_000
    """how many"""
    seed: int = 0
    """of what is spoilt, and how"""
    json: Path | None = None
    """file for the counts"""

    def __post_init__(self) -> None:
        good = self.requests >= 4 * PARTS and self.requests % PARTS == 0
        require(good, "requests", self.requests, f"a multiple of {PARTS}, {4 * PARTS} or more")


@dataclass
class Outcome:
    """What came back."""

    rest: collections.Counter[str] = field(default_factory=collections.Counter)
    """By status; "none" for a connection that was closed without one."""
    grpc: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Count what another part brought."""
        self.rest += other.rest
        self.grpc += other.grpc
        self.faults += other.faults


def main(args: Args) -> int:
    """Run, print and write the counts; 1 if there was a fault."""
    outcome = Outcome()
    with server_process(LIMITS) as server:
        fuzz(server, min(args.requests, 500), args.seed + PARTS)  # what is made once is made
        resident = [resident_kib(server.pid)]
        for part in range(PARTS):
            outcome.add(fuzz(server, args.requests // PARTS, args.seed + part))
            resident.append(resident_kib(server.pid))
    print(f"REST: {dict(sorted(outcome.rest.items()))}")
    print(f"gRPC: {dict(sorted(outcome.grpc.items()))}")
    shown = ", ".join(f"{kib / 1024:.1f}" for kib in resident)
    print(f"resident memory, MiB, before and after each of {PARTS} parts: {shown}")
    for fault in outcome.faults[:20]:
        print(f"fault: {fault}")
    if args.json is not None:
        counts = {
            "requests": args.requests, "rest": dict(sorted(outcome.rest.items())),
            "grpc": dict(sorted(outcome.grpc.items())), "faults": outcome.faults,
            "resident_kib": resident,
        }  # fmt: skip
        write_result(args.json, command("eval.fuzz_server"), counts)
    return 1 if outcome.faults else 0


def fuzz(server: Server, requests: int, seed: int) -> Outcome:
    """Send so many spoilt requests, and a good one at the end."""
    rng = np.random.default_rng(seed)
    outcome = Outcome()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary(GRPC_INFER)
        for i in range(requests):
            if i % 4 == 3:
                _send_grpc(call, spoilt_message(rng), outcome)
            else:
                _send_rest(server.port, spoilt_request(rng), outcome)
    last = Outcome()
    _send_rest(server.port, http_request(json_request(*_items(rng)), {}), last)
    if last.rest != {"200": 1}:
        outcome.faults.append(f"a good request at the end got {dict(last.rest)}")
    return outcome


def spoilt_request(rng: np.random.Generator) -> bytes:
    """An HTTP request, spoilt."""
    headers: dict[str, str] = {}
    body = json_request(*_items(rng), PLANTED)
    kind = int(rng.integers(8))
    if kind == 0:
        body, headers = binary_request(*_items(rng), PLANTED)
    if kind <= 1:
        body = _spoilt_bytes(rng, body)
    elif kind <= 5:
        document = orjson.loads(body)
        for _ in range(int(rng.integers(1, 4))):
            _spoil(rng, document)
        body = orjson.dumps(document) if _fits(document) else str(document).encode()
    if kind == 5 or rng.random() < 0.1:
        body, headers = gzip.compress(body, 1), headers | {"Content-Encoding": "gzip"}
    if rng.random() < 0.05:
        body = body * int(rng.integers(2, 200))
    if kind == 6:
        headers |= BAD_HEADERS[int(rng.integers(len(BAD_HEADERS)))]
    request = http_request(body[:1_000_000], headers)
    if kind == 7:
        request = request.replace(
            INFER.encode(), PATHS[int(rng.integers(len(PATHS)))].encode("utf-8"), 1
        )
        if rng.random() < 0.5:
            method = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "BREW")
            request = request.replace(b"POST", method[int(rng.integers(7))].encode(), 1)
    if rng.random() < 0.03:
        request = _spoilt_bytes(rng, request)
    return request


def spoilt_message(rng: np.random.Generator) -> bytes:
    """A ModelInferRequest, spoilt."""
    message = grpc_request(*_items(rng), PLANTED)
    for _ in range(int(rng.integers(1, 4))):
        message = _spoilt_bytes(rng, message)
    return message


def resident_kib(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    found = re.search(r"VmRSS:\s+(\d+)", status)
    return int(found[1]) if found else 0


def _items(rng: np.random.Generator) -> tuple[Any, Any]:
    return rng.integers(0, 10**6, int(rng.integers(1, 300))), rng.integers(0, 10**6, 20)


def _spoilt_bytes(rng: np.random.Generator, data: bytes) -> bytes:
    """Flip, cut out, repeat or add some bytes."""
    if not data:
        return b"\0"
    spoilt = bytearray(data)
    # Most of a request is items: half of the changes go where the names and shapes are.
    room = len(spoilt) if rng.random() < 0.5 else min(len(spoilt), 200)
    at = int(rng.integers(room))
    length = int(rng.integers(1, 16))
    match int(rng.integers(5)):
        case 0:
            spoilt[at] ^= 1 << int(rng.integers(8))
        case 1:
            del spoilt[at : at + length]
        case 2:
            spoilt[at:at] = spoilt[at : at + length] * int(rng.integers(1, 4))
        case 3:
            spoilt[at : at + length] = rng.bytes(length)
        case 4:
            del spoilt[at:]
    return bytes(spoilt)


def _spoil(rng: np.random.Generator, document: Any) -> None:
    """Exchange one value of a document, take a key away, add one or repeat an element."""
    holders = [holder for holder in _holders(document) if holder]
    if not holders:
        return
    holder = holders[int(rng.integers(len(holders)))]
    bad = copy.deepcopy(BAD_VALUES[int(rng.integers(len(BAD_VALUES)))])
    if isinstance(holder, list):
        at: Any = int(rng.integers(len(holder)))
    else:
        at = list(holder)[int(rng.integers(len(holder)))]
    match int(rng.integers(4)):
        case 0:
            del holder[at]
        case 1 if isinstance(holder, list):
            holder.append(holder[at])
        case 1:
            holder[PLANTED] = bad
        case _:
            holder[at] = bad


def _holders(value: Any) -> list[Any]:
    """Every list and object of a document."""
    if isinstance(value, dict):
        return [value, *(found for inner in value.values() for found in _holders(inner))]
    if isinstance(value, list):
        return [value, *(found for inner in value for found in _holders(inner))]
    return []


def _fits(document: Any) -> bool:
    """Whether orjson writes it: it writes no integer past 64 bits."""
    with contextlib.suppress(TypeError):
        orjson.dumps(document)
        return True
    return False


def _send_rest(port: int, request: bytes, outcome: Outcome) -> None:
    """One connection for each request, for many a request leaves it in no state to go on."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
        with contextlib.suppress(ConnectionError, TimeoutError):
            connection.sendall(request)
            answer = _received(connection)
        if not answer:
            # The server may wait for more of a request that was cut: there is none.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(TIMEOUT_S)
            try:
                answer = _received(connection)
            except ConnectionError:
                pass
            except TimeoutError:
                outcome.faults.append(f"neither answered nor closed: {request[:200]!r}")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head[9:12].decode("ascii", "replace") if answer.startswith(b"HTTP/1.") else "none"
    outcome.rest[status] += 1
    if status.startswith("5") and status != "503":
        outcome.faults.append(f"{status} to {request[:200]!r}")
    if status.startswith(("4", "5")) and (len(body) > LONGEST_ERROR or PLANTED.encode() in body):
        outcome.faults.append(f"an error says too much: {body[:200]!r}")


def _received(connection: socket.socket) -> bytes:
    """An answer, or what came of it before the connection was closed."""
    answer = b""
    while chunk := connection.recv(65_536):
        answer += chunk
        if _complete(answer):
            break
    return answer


def _complete(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return bool(found) and length is not None and len(body) >= int(length[1])


def _send_grpc(call: Any, message: bytes, outcome: Outcome) -> None:
    try:
        call(message, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        status, told = error.code().name, error.details() or ""
        if status not in ("INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE"):
            outcome.faults.append(f"{status} to {message[:200]!r}")
        if len(told) > LONGEST_ERROR or PLANTED in told:
            outcome.faults.append(f"an error says too much: {told[:200]!r}")
    else:
        status = "OK"
    outcome.grpc[status] += 1


if __name__ == "__main__":
    run_command("eval.fuzz_server", main, Args)
