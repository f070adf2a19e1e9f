"""A node may have as many connections open as it allows, whatever the shell's limit on files is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import resource
from hlem_env.machine import allow_open_files
from serving_bridge.server.connections import CONNECTIONS
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
allow_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] > min(CONNECTIONS + 256, hard - 1))
"""


def test_the_soft_limit_is_raised() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
