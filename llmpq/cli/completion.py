"""`llmpq completion`: a script by which a shell completes commands, options and their values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from llmpq.cli.common import EXIT_DONE, run_command
from llmpq.cli.main import SUBCOMMANDS, Subcommand
from llmpq.cli.parser import Parser, made
from planner.option_rules import REQUIRED, argument

PROG = "llmpq completion"
SHELLS = ("bash", "zsh", "fish", "tcsh")

_DESCRIPTION = """
Print a script by which a shell completes the commands of llmpq, their options, the values of
options that have few, and names of files.
"""
_EXAMPLES = (
    "%(prog)s bash > ~/.local/share/bash-completion/completions/llmpq",
    '%(prog)s zsh > "${fpath[1]}/_llmpq"',
    "%(prog)s fish > ~/.config/fish/completions/llmpq.fish",
)

_FILES, _FOLDERS = ("FILE", "PATH"), ("FOLDER", "DIR")
"""What the value of an option is called where it is a file, and where it is a folder."""


@dataclass(frozen=True)
class CompletionCommand:
    """The shell."""

    shell: str = argument(SHELLS, "which shell the script is for", REQUIRED)


def main(arguments: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Entry point; returns the exit code."""
    options = made(CompletionCommand, completion_parser(prog).parse(arguments))
    return run_command(prog, lambda: _print(options.shell))


def completion_parser(prog: str | None = PROG) -> Parser:
    """The parser of all options of the command."""
    parser = Parser(prog, _DESCRIPTION, _EXAMPLES)
    parser.declare({"shell": "shell"}, CompletionCommand)
    return parser


def _print(shell: str) -> int:
    sys.stdout.write(script(shell) + "\n")
    return EXIT_DONE


def script(shell: str) -> str:
    """The completion script of `llmpq` for `shell`."""
    import shtab

    root = whole_parser()
    for each in _parsers(root):
        for action in each._actions:
            complete = _complete(action)
            if complete is not None:
                action.complete = complete  # type: ignore[attr-defined]  # where shtab looks
    made: str = shtab.complete(root, shell)
    return made


def whole_parser() -> Parser:
    """The parser of `llmpq` with those of all its subcommands."""
    root = Parser("llmpq")
    made = cast(type[Parser], _made)
    commands = root.add_subparsers(metavar="COMMAND", parser_class=made)
    for name, each in SUBCOMMANDS.items():
        commands.add_parser(name, help=each.summary, make=partial(_parser_of, name, each))
    return root


def _made(make: Callable[[], Parser], **_: object) -> Parser:
    """The parser that `make` makes, in place of an empty one."""
    return make()


def _parser_of(name: str, command: Subcommand) -> Parser:
    return command.parser(f"llmpq {name}")


def _parsers(root: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """`root` and the parsers of all commands below it."""
    yield root
    for action in root._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _parsers(below)


def _complete(action: argparse.Action) -> Any:
    """What a shell offers as values: files, folders, or None for neither."""
    import shtab

    if action.choices is not None:
        return None
    if action.metavar in _FILES:
        return shtab.FILE
    return shtab.DIRECTORY if action.metavar in _FOLDERS else None


if __name__ == "__main__":
    raise SystemExit(main())
