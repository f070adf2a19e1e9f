"""The command as a user runs it: the same scores as in process, what was acknowledged survives kill -9."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from hlem_env.command_line import run_command
from serving_bridge import serve
from serving_bridge.epoch_log import EpochLog
from serving_bridge.log_reader import read_epochs
from serving_bridge.scoring import ScoreRequest
from serving_bridge.serve import Args, build_node, main
from tests.serving_bridge.made_epochs import CONFIG as MADE
from tests.serving_bridge.made_epochs import entry
from tests.serving_bridge.server.test_clients import inputs
from tests.serving_bridge.small_engine import CONFIG, TOLERANCE, engine_in, items

ROOT = Path(__file__).resolve().parents[2]
POLICY = ROOT / "agents" / "pretrained" / "working_set"
TOKEN = "a token of a test, long enough"


class Node(NamedTuple):
    popen: subprocess.Popen[str]
    port: int
    grpc_port: int

    def clients(self) -> list[Any]:
        return [
            tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.port}"),
            tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.grpc_port}"),
        ]

    def ask(self, path: str, document: Any = None) -> Any:
        data = None if document is None else json.dumps(document).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        method = "GET" if data is None else "PUT"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


@contextmanager
def served(folder: Path, *options: str) -> Iterator[Node]:
    """The command on a small preset; killed at the end if it still runs."""
    preset = folder / "small.json"
    preset.write_text(json.dumps(CONFIG.to_json()))
    command = [
        sys.executable, "-m", "serving_bridge.serve", "--policy", str(POLICY), "--preset", str(preset),
        "--data", str(folder / "data"), "--port", "0", "--grpc-port", "0", *options,
    ]  # fmt: skip
    popen = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HLEM_ADMIN_TOKEN": TOKEN},
    )  # fmt: skip
    with popen:
        try:
            assert popen.stdout is not None
            line = popen.stdout.readline()
            found = re.fullmatch(
                r"REST http://127\.0\.0\.1:(\d+), gRPC 127\.0\.0\.1:(\d+); admin API on",
                line.strip(),
            )
            assert found, line
            yield Node(popen, int(found[1]), int(found[2]))
        finally:
            popen.kill()


def score(client: Any, user: str, given: dict[str, Any]) -> Any:
    return client.infer("hlem", inputs(client, given, user))


def logged(folder: Path, at_least: int) -> list[tuple[str, int]]:
    """Run and number of every epoch in the log, once there are so many."""
    end = time.monotonic() + 30
    while True:
        found = [
            (epoch.run.name, epoch.record.epoch) for epoch in read_epochs(folder / "data" / "log")
        ]
        if len(found) >= at_least:
            return found
        assert time.monotonic() < end
        time.sleep(0.05)


def run_here(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", *options])
    run_command("serving_bridge.serve", main, Args)


def test_scores_faults_and_restart(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, new, candidates = items(500, 1), items(7, 2), items(20, 3)
    with engine_in(tmp_path / "own") as engine:
        full = engine.submit(ScoreRequest("ann", candidates, history=history)).result(60)
        delta = engine.submit(ScoreRequest("ann", candidates, new_items=new)).result(60)
    assert np.abs(full.scores - delta.scores).max() > 100 * TOLERANCE
    with served(tmp_path) as node:
        for client in node.clients():
            with pytest.raises(InferenceServerException, match="history"):
                score(client, "stranger", {"NEW_ITEMS": new, "CANDIDATES": candidates})
            for given, wanted in (({"HISTORY": history}, full), ({"NEW_ITEMS": new}, delta)):
                got = score(client, "ann", given | {"CANDIDATES": candidates})
                np.testing.assert_allclose(
                    got.as_numpy("SCORES"), wanted.scores, rtol=TOLERANCE, atol=TOLERANCE
                )
                assert got.as_numpy("HISTORY_TOKENS").tolist() == [wanted.history_tokens]
            client.close()
        assert node.ask("/admin/hold", {"alpha_centi": 30}) == {"alpha_centi": 30}
        assert node.ask("/admin/policy", {"folder": str(POLICY)}) == {"swapped": True}
        with pytest.raises(SystemExit, match=r"in use|another process"):
            run_here(monkeypatch, "--policy", str(POLICY), "--data", str(tmp_path / "data"))
        assert node.ask("/admin/mode", {"mode": "frozen"}) == {"mode": "frozen"}
        before = logged(tmp_path, len(logged(tmp_path, 0)) + 2)  # one of them wholly held
        node.popen.kill()
    with served(tmp_path) as node:
        http, grpc = node.clients()
        assert node.ask("/admin/mode") == {"mode": "frozen"}
        again = score(http, "ann", {"NEW_ITEMS": items(0), "CANDIDATES": candidates})
        np.testing.assert_allclose(
            again.as_numpy("SCORES"), delta.scores, rtol=TOLERANCE, atol=TOLERANCE
        )
        assert again.as_numpy("HISTORY_TOKENS").tolist() == [507]
        http.close()
        grpc.close()
        logged(tmp_path, len(before) + 1)
        node.popen.send_signal(signal.SIGTERM)
        assert node.popen.wait(60) == 0
    after = logged(tmp_path, len(before) + 1)
    assert after[: len(before)] == before
    assert len({run for run, _ in after}) == 2
    # The second run goes on from the alpha that the first one had, and holds it.
    epochs = list(read_epochs(tmp_path / "data" / "log"))
    record = epochs[len(before)].record
    assert (record.alpha_centi, record.hold_centi) == (30, 30)


@pytest.mark.parametrize(
    ("held", "options", "holds"),
    [(33, {}, 33), (None, {}, None), (33, {"release": True}, None), (2, {}, 10)],
)
def test_a_held_alpha_is_held_after_a_restart_unless_it_is_let_go(
    tmp_path: Path, held: int | None, options: dict[str, bool], holds: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("LiveNode", "Engine"):
        monkeypatch.setattr(serve, name, lambda *_, **__: SimpleNamespace(close=lambda: None))
    log, last = EpochLog(tmp_path / "log", MADE), entry(0)
    assert log.put(last._replace(record=replace(last.record, hold_centi=held)))
    log.close()
    with ExitStack() as stack:
        _, control = build_node(Args(POLICY, data=tmp_path, **options), stack)
        assert control.held_alpha_centi == holds


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "no-such-folder"], "no-such-folder"),
        (["--policy", str(POLICY), "--preset", "zq9"], "cpu-small, h100"),
        (["--policy", str(POLICY), "--mode", "zq9"], "mode="),
        (["--policy", str(POLICY), "--queue", "0"], "queue=0"),
    ],
)
def test_what_cannot_be_served_is_told_in_a_line(
    tmp_path: Path, options: list[str], words: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        run_here(monkeypatch, "--data", str(tmp_path / "data"), *options)
    told = f"{ended.value.code}{capsys.readouterr().err}"
    assert words in told and "Traceback" not in told
