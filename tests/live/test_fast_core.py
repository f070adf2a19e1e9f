"""The thread that serves has a core to itself; everything is as before afterwards."""

import os
import subprocess
import sys
import threading
import time

import pytest

from hlem_env.live import core_scout, fast_core
from hlem_env.live.fast_core import FastCore

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs threads that can be pinned, and two cores",
)


def wait_until_alone(thread: int, seconds: float = 20.0) -> int:
    """The core that a thread has come to have for itself."""
    end_s = time.monotonic() + seconds
    while len(cores := os.sched_getaffinity(thread)) > 1:
        assert time.monotonic() < end_s, cores
        time.sleep(0.05)
    return next(iter(cores))


def test_the_serving_thread_is_alone_on_its_core_until_it_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fast_core, "LEAST_CORES", 2)
    before = os.sched_getaffinity(0)
    done, other = threading.Event(), threading.Thread(target=lambda: done.wait(60))
    other.start()
    core = FastCore()
    try:
        core.here()
        serving = threading.get_native_id()
        wait_until_alone(serving)
        assert other.native_id is not None
        deadline = time.monotonic() + 20.0
        while (theirs := os.sched_getaffinity(other.native_id)) & os.sched_getaffinity(serving):
            assert time.monotonic() < deadline, theirs  # read while both were being moved
        core.close()
        core.close()
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == before
    finally:
        done.set()
        core.close()


def test_a_node_that_is_killed_leaves_no_scout() -> None:
    code = (
        "import time; from hlem_env.live import fast_core; fast_core.LEAST_CORES = 2\n"
        "core = fast_core.FastCore(); core.here(); print(core._scout.pid, flush=True); time.sleep(60)"
    )
    node = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    scout = int(node.stdout.readline())
    node.kill()
    node.communicate()
    deadline = time.monotonic() + 20.0
    while os.path.exists(f"/proc/{scout}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_fastest_core_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_scout, "loop_s", {3: 2.0, 5: 1.0, 8: 1.5}.__getitem__)
    assert core_scout.fastest([3, 5, 8]) == 5


def test_few_cores_leave_nothing_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_core, "LEAST_CORES", 10**6)
    before = os.sched_getaffinity(0)
    core = FastCore()
    core.here()
    assert core._scout is None
    assert os.sched_getaffinity(0) == before
