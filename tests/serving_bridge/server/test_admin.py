"""The admin API: not there without a token, and nothing without the right one."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hlem_env.errors import ArgumentError
from serving_bridge.server.admin import read_token
from serving_bridge.server.lifecycle import Listen, NodeServer
from tests.serving_bridge.server.fake_node import TOKEN, FakeControl, FakeNode, FakeScorer
from tests.serving_bridge.server.wire import Answer, send

BEARER = {"Authorization": f"Bearer {TOKEN}"}
CALLS = [("GET", "/admin/mode", None), ("PUT", "/admin/mode", {"mode": "frozen"}),
         ("PUT", "/admin/hold", {"alpha_centi": 40}),
         ("PUT", "/admin/policy", {"folder": "new"})]  # fmt: skip


def put(node: FakeNode, path: str, document: Any) -> Answer:
    return send(node, document, BEARER, f"/admin/{path}", "PUT")


@pytest.mark.parametrize(("method", "path", "document"), CALLS)
@pytest.mark.parametrize(
    "given", [None, "", "Bearer", "Bearer ", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}",
              "Bearer \u00e9", TOKEN]
)  # fmt: skip
def test_nothing_without_the_token(
    node: FakeNode, method: str, path: str, document: Any, given: str | None
) -> None:
    headers = {} if given is None else {"Authorization": given}
    answer = send(node, document, headers, path, method)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert (node.control.mode, node.control.held, node.control.policy) == ("active", None, None)


@pytest.mark.parametrize(("method", "path", "document"), CALLS)
def test_not_there_without_a_configured_token(method: str, path: str, document: Any) -> None:
    class Holder:
        server: NodeServer
        url = ""

    async def ask() -> Answer:
        holder.server = NodeServer(
            FakeScorer(), Listen(port=0, grpc_port=None), control=FakeControl(), admin_token=None
        )
        await holder.server.start()
        holder.url = f"127.0.0.1:{holder.server.port}"
        try:
            return await asyncio.to_thread(send, holder, document, BEARER, path, method)  # type: ignore[arg-type]
        finally:
            await holder.server.stop()

    holder = Holder()
    assert asyncio.run(ask()).status == 404


def test_mode(node: FakeNode) -> None:
    for mode in ("shadow", "frozen", "active"):
        assert put(node, "mode", {"mode": mode}).json == {"mode": mode}
        assert node.control.mode == mode
        assert send(node, None, BEARER, "/admin/mode", "GET").json == {"mode": mode}


def test_hold(node: FakeNode) -> None:
    assert put(node, "hold", {"alpha_centi": 40}).status == 200
    assert node.control.held == 40
    assert put(node, "hold", {"alpha_centi": None}).status == 200
    assert node.control.held is None


def test_policy(node: FakeNode) -> None:
    assert put(node, "policy", {"folder": "policies/new"}).status == 200
    assert node.control.policy == Path("policies/new")
    answer = put(node, "policy", {"folder": "policies/corrupt"})
    assert answer.status == 409 and "corrupt" not in answer.json["error"]
    assert node.control.policy == Path("policies/new")


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("mode", {"mode": "zq9"}), ("mode", {}), ("mode", []), ("mode", b"zq9"),
        ("mode", {"mode": ["active"]}),
        ("mode", {"mode": "frozen", "zq9": 1}), ("hold", {"alpha_centi": 101}),
        ("hold", {"alpha_centi": -1}), ("hold", {"alpha_centi": 50.0}), ("hold", {"alpha_centi": True}),
        ("hold", {"alpha_centi": "50"}), ("hold", {"alpha_centi": 5}), ("policy", {"folder": ""}),
        ("policy", {"folder": 7}), ("policy", {"folder": "a\0zq9"}),
    ],
)  # fmt: skip
def test_bad_values(node: FakeNode, path: str, document: Any) -> None:
    answer = put(node, path, document)
    assert answer.status == 400
    assert "zq9" not in answer.json["error"] and "Error" not in answer.json["error"]
    assert (node.control.mode, node.control.held, node.control.policy) == ("active", None, None)


def test_body_over_the_limit(node: FakeNode) -> None:
    assert put(node, "mode", b" " * 70_000).status == 413


def test_token_from_file_or_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HLEM_ADMIN_TOKEN", raising=False)
    assert read_token(None) is None
    monkeypatch.setenv("HLEM_ADMIN_TOKEN", TOKEN)
    assert read_token(None) == TOKEN
    (tmp_path / "token").write_text("another token of a file\n")
    assert read_token(tmp_path / "token") == "another token of a file"


def test_token_that_is_too_weak_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for weak in ("short", "", "not ascii but long é"):
        monkeypatch.setenv("HLEM_ADMIN_TOKEN", weak)
        with pytest.raises(ArgumentError) as caught:
            read_token(None)
        assert not weak or weak not in str(caught.value)
    with pytest.raises(ArgumentError):
        read_token(tmp_path / "missing")
