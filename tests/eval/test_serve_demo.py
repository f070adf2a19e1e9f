"""The demo with a real node: it serves its page, and Ctrl-C leaves no process behind."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from eval.node_process import node_process
from eval.serve_demo import default_workload
from hlem_env.errors import BackendError

ROOT = Path(__file__).resolve().parents[2]


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_ends_all_of_it(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "eval.serve_demo", "--workload", "steady", "--port", "0", "--grpc-port",
        "0", "--no-browser", "--output", str(tmp_path),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    demo = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    with demo:
        try:
            assert demo.stdout is not None
            address = next(line for line in demo.stdout if "page:" in line).split()[-1]
            with urllib.request.urlopen(address, timeout=30) as answer:
                assert b"<title>HLEM node</title>" in answer.read()
            (node,) = children(demo.pid)
            demo.send_signal(signal.SIGINT)
            assert demo.wait(60) == 0
        finally:
            demo.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{node}").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert "draining" in (tmp_path / "node.log").read_text()


def test_a_node_that_does_not_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(BackendError, match="invalid int value: 'none'"),
        node_process(["none"], tmp_path / "node.log", "http.server"),
    ):
        pass


def test_the_trace_is_taken_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLEM_TRACES", str(tmp_path))
    assert default_workload() == "steady"
    (tmp_path / "taobao-userbehavior-2h.csv").touch()
    assert default_workload() == f"trace:{tmp_path / 'taobao-userbehavior-2h.csv'}"
