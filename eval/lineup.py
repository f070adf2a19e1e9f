"""Which controllers a comparison runs, by the names of `--controllers`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from agents.forecast import ABOUT_FILE, PRETRAINED
from agents.ppo_only import PpoOnly
from agents.registry import BUILT_IN, factory, make
from agents.sb3 import FOLDER as SB3
from agents.settings import SETTINGS_FILE
from agents.smart import SHIPPED
from agents.static import Static
from eval.names import BEST_STATIC, DESIGN_POINT
from hlem_env.controller import Controller
from hlem_env.errors import ArgumentError
from hlem_env.scenario import Scenario
from serving_bridge.policy import METADATA_FILE, FrozenPolicy

STATIC_CENTI = (10, 30, 50, 70, 90)

REFERENCES = ("static", "design-point", "ppo", "oracles")
"""What the comparison itself makes; the other names are the registry's. The best static split in
hindsight always runs: ratios are to it."""
DEFAULT = ("static", "design-point", "working-set", "ppo", "oracles")
ALL = (*DEFAULT, *(name for name in BUILT_IN if name not in DEFAULT))

Entry = tuple[str, Callable[[], Controller]]
"""A name, for when it cannot be made, and what makes it."""


def resolve(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names with "all" and "default" written out, each once, in order.

    Raises:
        ArgumentError: a name that is neither a reference nor in the registry.
    """
    groups = {"all": ALL, "default": DEFAULT}
    resolved = tuple(dict.fromkeys(n for name in names for n in groups.get(name, (name,))))
    for name in resolved:
        if name not in REFERENCES:
            try:
                # What the controller's module raises is told of in the results.
                with suppress(ImportError):
                    factory(name)
            except ArgumentError as error:
                allowed = ", ".join(("all", "default", *REFERENCES)) + ", " + error.allowed
                raise ArgumentError("--controllers", name, allowed) from error
    return resolved


def entries(
    names: tuple[str, ...],
    scenario: Scenario,
    best_centi: int,
    design_centi: int,
    policies: tuple[str, ...],
) -> Iterator[Entry]:
    """What makes the controllers of the names, oracles left out.

    Args:
        names: resolved.
        scenario: handed to controllers that know their node.
        best_centi: the best static alpha in hindsight.
        design_centi: the one of the design point.
        policies: folders.
    """
    if "static" in names:
        for alpha in STATIC_CENTI:
            yield f"static {alpha / 100:.2f}", partial(Static, alpha)
    yield BEST_STATIC, partial(Static, best_centi, BEST_STATIC)
    for name in names:
        if name == "design-point":
            yield DESIGN_POINT, partial(Static, design_centi, DESIGN_POINT)
        elif name == "ppo":
            for controller in frozen_policies(policies):
                yield controller.name, partial(_same, controller)
        elif name not in REFERENCES:
            yield name, partial(make, name, scenario)


def _same(controller: Controller) -> Controller:
    return controller


def frozen_policies(folders: tuple[str, ...]) -> list[PpoOnly]:
    """Controllers of the folders, named by features and training reward.

    Where two have the same name their folders are added.
    """
    controllers = [PpoOnly(FrozenPolicy.load(folder)) for folder in folders]
    for controller in controllers:
        if controller.policy.mdp_config.reward == "eq5":
            controller.name += " [Eq. 5]"
    names = [controller.name for controller in controllers]
    for controller, folder in zip(controllers, folders, strict=True):
        if names.count(controller.name) > 1:
            controller.name += f" <{os.path.relpath(folder)}>"
    return controllers


def baselines_digest(names: tuple[str, ...] = ()) -> str:
    """Hash (16 hex digits) of the baselines' tuned settings and models.

    Args:
        names: of the controllers. SB3's policies and the allocator's count where they run, so that
            finished work of other controllers stays valid.
    """
    files = [PRETRAINED.parent / SETTINGS_FILE, *sorted(PRETRAINED.glob(f"*/{ABOUT_FILE}"))]
    files += [
        SB3 / name.removeprefix("sb3-") / METADATA_FILE
        for name in ("sb3-dqn", "sb3-ppo")
        if name in names
    ]
    if any(name.split("-")[0] == "allocator" for name in names):
        files.append(PRETRAINED / SHIPPED / METADATA_FILE)
    content = b"".join(Path(file).read_bytes() for file in files)
    return hashlib.sha256(content).hexdigest()[:16]


def shipped_policies() -> tuple[str, ...]:
    """Folders of the policies in the package."""
    return tuple(sorted(str(p.parent) for p in PRETRAINED.glob("*/policy.json")))
