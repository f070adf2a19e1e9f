"""How the project's commands start and end: arguments, errors in one line, Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tyro

from hlem_env.errors import HlemError

Arguments = TypeVar("Arguments")


def run_command(
    name: str,
    main: Callable[[Arguments], int | None],
    arguments: type[Arguments],
    interrupted: Callable[[Arguments], str] = lambda _: "nothing was written",
) -> NoReturn:
    """Parse the command line, run, and exit: 0 or what `main` returns, 1 after an error, 130 after Ctrl-C.

    Args:
        name: as in `python -m name`; what an error's line begins with.
        main: takes the arguments.
        arguments: a dataclass whose fields are the options.
        interrupted: what Ctrl-C leaves behind, for its line.
    """
    parsed: Arguments | None = None
    try:
        parsed = tyro.cli(arguments)
        raise SystemExit(main(parsed))
    except HlemError as error:
        raise SystemExit(f"{name}: {error}") from error
    except KeyboardInterrupt:
        left = "nothing was written" if parsed is None else interrupted(parsed)
        print(f"\nInterrupted: {left}.", file=sys.stderr)
        raise SystemExit(130) from None
