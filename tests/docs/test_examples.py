"""What README, docs and Makefile tell a reader to run: examples run, commands and links exist."""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from agents.actor_critic import ActorCritic
from eval.lineup import resolve
from eval.records import Record
from eval.unit import Unit, run_unit
from hlem_env.mdp import MdpConfig
from hlem_env.scenario import Scenario
from serving_bridge.policy import export_policy

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)#]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text("utf-8")) if kind == language]


def examples() -> list[object]:
    return [
        pytest.param(page, body, id=f"{page.stem}-{i}")
        for page in PAGES
        for i, body in enumerate(blocks(page, "python"))
    ]


def commands() -> list[object]:
    """Every `python -m train.X ...` and `python -m eval.X ...` of the pages and the Makefile."""
    texts = {page.stem: "\n".join(blocks(page, "sh")) for page in PAGES}
    texts["Makefile"] = (ROOT / "Makefile").read_text("utf-8")
    found = set()
    for stem, text in texts.items():
        for line in text.replace("\\\n", " ").splitlines():
            if re.search(r"python -m (train|eval)\.", line):
                found.add((stem, " ".join(line.split("#")[0].split())))
    return [pytest.param(line, id=f"{stem}: {line}") for stem, line in sorted(found)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an untrained policy where the pages expect one."""
    network = ActorCritic(7)
    inputs, logits = network.parity_vectors(np.random.default_rng(0))
    export_policy(
        tmp_path / "runs" / "demo" / "policy",
        network.actor_weights(),
        mdp_config=MdpConfig(),
        parity_inputs=inputs,
        parity_logits=logits,
        env_spec={},
        training_command="none",
        seed=0,
        git_revision="unknown",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("page", "body"), examples())
def test_examples_run(
    page: Path, body: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(compile(body, str(page), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip(), "an example shows what it did"


def test_the_pages_have_examples() -> None:
    pages = {page.name for page in PAGES if blocks(page, "python")}
    assert {"README.md", "controllers.md"} <= pages


def test_a_new_controller_needs_one_file(workplace: Path) -> None:
    """The page's example, saved as the page says, runs in a comparison by its dotted path."""
    page = ROOT / "docs" / "controllers.md"
    (workplace / "my_rule.py").write_text(blocks(page, "python")[0])
    named = "my_rule:HotShareRule"
    assert any(named in line for line in blocks(page, "sh"))
    scenario = Scenario.parse("trend", episode_epochs=12)
    unit = Unit(scenario, 1, 50, resolve((named,)), (), 5.0, False, 4, 1, str(workplace / "out"))
    result = run_unit(unit)
    assert not result["failed"]
    record = Record.load(workplace / "out" / result["rows"]["hot-share rule"]["record"])
    assert record.alpha_centi[0] == 50 and len(set(record.alpha_centi)) > 3


@pytest.mark.parametrize("line", commands())
def test_commands_exist(line: str) -> None:
    """The module is there and has every option that the page gives it."""
    words = shlex.split(line)
    module = importlib.import_module(words[words.index("-m") + 1])
    known = {field.name.removesuffix("_") for field in dataclasses.fields(module.Args)}
    options = {word[2:].split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    options.discard("help")
    unknown = {o for o in options if o not in known and o.removeprefix("no_") not in known}
    assert not unknown, f"unknown options {sorted(unknown)}; there are {sorted(known)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
