"""docs/serving_api.md: its examples run, its tables are what the code says."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from serving_bridge.server.contract import INPUTS, OUTPUTS
from serving_bridge.server.refusals import REFUSALS
from tests.serving_bridge.server.fake_node import TOKEN, FakeNode

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "serving_api.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(sh|py)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def at(node: FakeNode, text: str) -> str:
    return text.replace("localhost:8080", node.url).replace("localhost:8081", node.grpc_url)


def test_the_examples_run_in_order(node: FakeNode) -> None:
    if shutil.which("curl") is None or shutil.which("bash") is None:
        pytest.skip("the examples call curl in bash, and one of them is not there")
    ran = 0
    for kind, text in BLOCKS:
        if kind == "sh" and "curl" in text:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", at(node, text)], capture_output=True, text=True,
                timeout=60, env=os.environ | {"HLEM_ADMIN_TOKEN": TOKEN},
            )  # fmt: skip
            assert done.returncode == 0, text + done.stdout + done.stderr
            ran += 1
        elif kind == "py":
            exec(compile(at(node, text), "serving_api.md", "exec"), {})
            grpc = text.replace("tritonclient.http", "tritonclient.grpc").replace(":8080", ":8081")
            exec(compile(at(node, grpc), "serving_api.md", "exec"), {})
            ran += 1
    assert ran == 5
    assert [-1 if asked.new_items is None else len(asked.new_items) for asked in node.scorer.asked] == [
        -1, 1, 2, 2,
    ]  # fmt: skip
    assert node.control.mode == "shadow" and node.control.policy is not None


def test_the_tables_are_complete() -> None:
    for name in (*INPUTS, *OUTPUTS):
        assert f"| `{name}` | " in PAGE
    rows = dict(re.findall(r"^\| (\d{3}) \| *`?(\w*)`? *\|", PAGE, re.MULTILINE))
    for told in REFUSALS.values():
        assert rows[str(told.http)] in (told.grpc, ""), told
        assert f"`{told.outcome}`" in PAGE
