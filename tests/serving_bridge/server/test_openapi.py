"""The OpenAPI document says what the API does: schemathesis calls what it describes and compares."""

import subprocess
import sys
from pathlib import Path

from serving_bridge.server.contract import INPUTS, OUTPUTS
from serving_bridge.server.openapi import EXAMPLE, openapi_document
from tests.serving_bridge.server.fake_node import LIMITS, TOKEN, FakeNode
from tests.serving_bridge.server.wire import send


def test_schemathesis_finds_nothing(node: FakeNode, tmp_path: Path) -> None:
    """All its checks but one: a body may fit the schema and be refused, for a shape that differs from the
    number of elements is nothing that a schema can say."""
    program = Path(sys.executable).parent / "schemathesis"
    command = [
        str(program), "run", f"http://{node.url}/openapi.json", "--checks", "all", "--exclude-checks",
        "positive_data_acceptance", "--phases", "examples,coverage,fuzzing", "--max-examples", "5",
        "--generation-deterministic", "--continue-on-failure", "--no-color", "-H",
        f"Authorization: Bearer {TOKEN}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "Tested: 15" in done.stdout
    # Beside the refusals there were requests that were served.
    assert node.scorer.asked


def test_the_example_is_served(node: FakeNode) -> None:
    answer = send(node, EXAMPLE)
    assert answer.status == 200 and answer.json["id"] == EXAMPLE["id"]


def test_admin_is_described_only_where_it_is_on(node: FakeNode) -> None:
    assert send(node, path="/openapi.json", method="GET").json == openapi_document(LIMITS, True)
    assert not [path for path in openapi_document(LIMITS, False)["paths"] if "admin" in path]


def test_every_tensor_is_described() -> None:
    schemas = openapi_document(LIMITS, False)["components"]["schemas"]
    inputs = schemas["Request"]["properties"]["inputs"]["items"]["oneOf"]
    assert [one["properties"]["name"]["const"] for one in inputs] == list(INPUTS)
    outputs = schemas["Answer"]["properties"]["outputs"]["items"]["properties"]["name"]["enum"]
    assert outputs == list(OUTPUTS)
