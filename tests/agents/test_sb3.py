"""SB3's policies in the package: found by name, apart from ours."""

import pytest

from agents.registry import make
from agents.sb3 import FOLDER
from eval.lineup import ALL, baselines_digest, shipped_policies


@pytest.mark.parametrize("name", ["ppo", "dqn"])
def test_they_run_by_name_and_tables_say_whose_they_are(name: str) -> None:
    controller = make(f"sb3-{name}")
    assert controller.name == f"SB3 {name.upper()} (working set)"
    assert f"sb3-{name}" in ALL


def test_they_are_not_taken_for_our_ppo() -> None:
    assert not [folder for folder in shipped_policies() if str(FOLDER) in folder]


def test_finished_work_depends_on_them_only_where_they_run() -> None:
    assert baselines_digest(("pid", "lstm")) == baselines_digest()
    digests = {
        baselines_digest(n) for n in ((), ("sb3-ppo",), ("sb3-dqn",), ("sb3-ppo", "sb3-dqn"))
    }
    assert len(digests) == 4
