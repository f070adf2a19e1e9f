import pickle
import sys
from dataclasses import dataclass

import pytest

from hlem_env.command_line import run_command
from hlem_env.errors import ArgumentError, BackendError, require


@dataclass
class Args:
    """A command."""

    n: int = 1
    """a number"""

    def __post_init__(self) -> None:
        require(self.n < 10, "n", self.n, "below 10")


def ends(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException | None, *arguments: str
) -> SystemExit:
    def main(args: Args) -> int:
        if raised is not None:
            raise raised
        return args.n

    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    with pytest.raises(SystemExit) as exit_:
        run_command("eval.command", main, Args, lambda args: f"{args.n} file was written")
    return exit_.value


def test_what_main_returns_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, None, "--n", "3").code == 3


def test_an_error_is_one_line_with_the_commands_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ends(monkeypatch, BackendError("no node")).code == "eval.command: no node"


def test_ctrl_c_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(monkeypatch, KeyboardInterrupt()).code == 130
    assert "Interrupted: 1 file was written." in capsys.readouterr().err


def test_an_argument_that_is_refused_while_parsing_says_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ends(monkeypatch, None, "--n", "12").code != 0
    shown = capsys.readouterr()
    assert "below 10" in shown.err + shown.out


def test_an_argument_error_survives_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(ArgumentError("n", 12, "below 10")))
    assert (error.name, error.value, error.allowed) == ("n", 12, "below 10")
    assert str(error) == "n=12 is not allowed; allowed: below 10"
