"""Controllers by name: built in, from an installed package's entry points, or by dotted path.

A factory is called without arguments, or with `scenario=` where it takes a parameter of that name:
what an operator knows of the node. What it returns follows `hlem_env.controller.Controller`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from hlem_env.controller import Controller
from hlem_env.errors import ArgumentError
from hlem_env.scenario import Scenario

GROUP = "hlem.controllers"
"""Entry-point group in which other packages name their controllers."""

Factory = Callable[..., Controller]

BUILT_IN: dict[str, str] = {
    "working-set": "agents.working_set:WorkingSetRule",
    "pid": "agents.pid:Pid",
    "bayesian": "agents.bayesian:BayesianOptimisation",
    "milp": "agents.milp:MilpPlanner",
    "boosted-trees": "agents.boosted_trees:BoostedTrees",
    "lstm": "agents.lstm:Lstm",
    "lstm-oft": "agents.lstm:FineTunedLstm",
    "lstm-oft-rc": "agents.lstm:with_recovery",
    "sb3-ppo": "agents.sb3:ppo",
    "sb3-dqn": "agents.sb3:dqn",
    "allocator": "agents.smart:allocator",
}

PARTS: dict[str, str] = {
    "allocator-ppo": "agents.smart:policy_alone",
    "allocator-adapter": "agents.smart:with_adapter",
    "allocator-p99": "agents.smart:with_p99_recovery",
}
"""The allocator with layers left out, for the ablation: known by name, neither listed nor part of "all"."""


def names() -> tuple[str, ...]:
    """All names that need no dotted path: the built-in ones, then those of installed packages."""
    installed = (point.name for point in entry_points(group=GROUP))
    return (*BUILT_IN, *(name for name in installed if name not in BUILT_IN))


def factory(name: str) -> Factory:
    """The factory of a name or of a dotted path `package.module:attribute`.

    Raises:
        ArgumentError: there is none; lists the names. What the module itself raises passes through.
    """
    allowed = ", ".join(names()) + ", or a dotted path package.module:factory"
    path = BUILT_IN.get(name) or PARTS.get(name, name)
    if ":" in path:
        module, _, attribute = path.partition(":")
        here = str(Path.cwd())
        if here not in sys.path:  # a script's own folder is there, the one it runs in is not
            sys.path.append(here)
        try:
            found = getattr(import_module(module), attribute)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there; something that it imports is not
            raise ArgumentError("controller", name, allowed) from error
        except AttributeError as error:
            raise ArgumentError("controller", name, allowed) from error
    else:
        points = [point for point in entry_points(group=GROUP) if point.name == name]
        if not points:
            raise ArgumentError("controller", name, allowed)
        found = points[0].load()
    if not callable(found):
        raise ArgumentError("controller", name, "a class or function that makes a controller")
    made: Factory = found
    return made


def make(name: str, scenario: Scenario | None = None) -> Controller:
    """A new controller.

    Args:
        name: as `factory` takes it.
        scenario: handed to factories that have a parameter `scenario`; None is the default one.

    Raises:
        ArgumentError: there is no such controller, or what was made is none; says what it lacks.
    """
    build = factory(name)
    controller = build(scenario=scenario or Scenario()) if _takes_scenario(build) else build()
    members = ("name", "period", "initial_alpha_centi", "reset", "decide")
    missing = [member for member in members if not hasattr(controller, member)]
    if missing:
        raise ArgumentError("controller", name, "one with " + ", ".join(missing))
    return controller


def _takes_scenario(build: Factory) -> bool:
    try:
        return "scenario" in inspect.signature(build).parameters
    except ValueError:  # some classes of C code have no signature
        return False
