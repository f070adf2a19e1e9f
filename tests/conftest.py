"""What every test may use: shared traces, a skip of tests of a GPU, properties without deadline."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TRACES = Path(os.environ.get("HLEM_TRACES") or Path(__file__).parents[2] / "shared" / "traces")

# The first example of a property may have to compile.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # takes seconds, and most runs have no such test

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: two that wait for each other on a busy machine take many times as long."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def traces() -> Path:
    """Folder of the public traces: $HLEM_TRACES, or shared/traces beside the checkout."""
    if not TRACES.is_dir():
        pytest.skip(
            f"no traces: {TRACES} is not a folder, set HLEM_TRACES to the one that has them"
        )
    return TRACES


@pytest.fixture(scope="session")
def shared(traces: Path) -> Callable[[str], Path]:
    """A trace file by its name; skips the test where the folder does not have it."""

    def find(name: str) -> Path:
        path = traces / name
        if not path.is_file():
            pytest.skip(f"{name} is not in {traces}, set HLEM_TRACES to a folder that has it")
        return path

    return find
