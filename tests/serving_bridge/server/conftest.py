from collections.abc import Iterator

import pytest

from tests.serving_bridge.server.fake_node import FakeNode, running


@pytest.fixture(scope="session")
def shared_node() -> Iterator[FakeNode]:
    with running(FakeNode()) as node:
        yield node


@pytest.fixture
def node(shared_node: FakeNode) -> FakeNode:
    """A running node as if it had just started, but for its metrics."""
    shared_node.reset()
    return shared_node
