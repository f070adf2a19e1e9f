"""A control loop compiles nothing once it is asked."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# In a process of its own: elsewhere other tests have compiled before.
PROGRAM = """
import gc
from dataclasses import replace
from numba.core.dispatcher import Dispatcher
from serving_bridge import control_loop
from serving_bridge.control_loop import ControlLoop, ControlSettings
from serving_bridge.policy import FrozenPolicy
from tests.serving_bridge.made_epochs import CONFIG, served_of, stats_of

def compiled():
    return {(d.py_func.__qualname__, s) for d in gc.get_objects() if isinstance(d, Dispatcher)
            for s in d.signatures}

if not REHEARSED:
    control_loop.rehearse = lambda *_: None
loop = ControlLoop(FrozenPolicy.load("agents/pretrained/working_set"), CONFIG,
                   ControlSettings(background=False))
before = compiled()
for epoch in range(4):
    stats = replace(stats_of(epoch), alpha_target=loop._alpha_centi / 100)
    loop.tick(stats)
    stats = replace(stats_of(epoch + 100), alpha_target=loop._alpha_centi / 100)
    loop.epoch(stats, served_of(stats))
loop.allocator.close()
assert loop.allocator.adapter.learner.seen > 0
loop.close()
print(sorted(name for name, _ in compiled() - before))
"""


@pytest.mark.parametrize("rehearsed", [True, False])
def test_what_is_compiled_once_it_is_asked(rehearsed: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("REHEARSED", str(rehearsed))],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip() == "[]") == rehearsed, done.stdout
