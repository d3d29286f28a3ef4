"""Code that all commands share: the parser of options, error messages and exit codes."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmpq.cli.parser import EXIT_BAD_INPUT, Parser
from llmpq.cli.verbose import details, fault_text, is_for_users, told_as_asked
from quant.common.errors import HeadLostError, LlmpqError, StageLostError
from quant.common.text import printable

if TYPE_CHECKING:
    from rich.console import Console

    from planner.cluster.spec import ClusterSpec

__all__ = [
    "EXIT_BAD_INPUT",
    "EXIT_DONE",
    "EXIT_ERROR_ROWS",
    "EXIT_FAILED",
    "EXIT_INTERRUPTED",
    "EXIT_TERMINATED",
    "Parser",
    "command_line",
    "console",
    "print_notes",
    "run_command",
    "tell_written",
]

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_ERROR_ROWS = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def console(stderr: bool = False) -> Console:
    """A console that prints no markup: as wide as COLUMNS says, else as the terminal of this
    process, else 80 columns.
    """
    from llmpq.cli.safe_console import SafeConsole

    return SafeConsole(stderr=stderr, markup=False)


def tell_written(path: str | Path, then: str = "", stderr: bool = False) -> None:
    """Say that `path` was written and what comes next; `stderr`: standard output is data."""
    line = f"wrote {path}{f'; {then}' if then else ''}"
    console(stderr).print(line, soft_wrap=True, highlight=False)


def command_line(*words: str | Path) -> str:
    """The words as a command that a shell takes."""
    return shlex.join(str(word) for word in words)


def print_notes(spec: ClusterSpec) -> ClusterSpec:
    """Print what was assumed of the cluster's names, and return the cluster."""
    for note in spec.notes:
        console(stderr=True).print(f"note: {note}", soft_wrap=True)
    return spec


@contextmanager
def _warnings_of(command: str) -> Iterator[None]:
    """Show warnings to users of `command` without the line of source that gave them."""
    usual = warnings.formatwarning

    def shown(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        if not is_for_users(category, filename):
            return ""
        if category is not UserWarning:
            return usual(message, category, filename, lineno, line)
        return f"{command}: warning: {printable(str(message))}\n"

    warnings.formatwarning = shown
    try:
        yield
    finally:
        warnings.formatwarning = usual


def run_command(name: str, command: Callable[[], int]) -> int:
    """Run `command` and return its exit code. An error that the user can mend becomes one message
    and exit code 2; a lost stage or Ray, and a fault of ours, one message and 1. Our warnings are
    one line each. With `--verbose` tracebacks stand beside the messages.
    """
    with told_as_asked():
        return _run_told(name, command)


def _run_told(name: str, command: Callable[[], int]) -> int:
    try:
        with _warnings_of(name):
            return command()
    except LlmpqError as error:
        sys.stderr.write(f"{name}: error: {error}{details(error)}\n")
        return EXIT_BAD_INPUT
    except (StageLostError, HeadLostError) as error:
        sys.stderr.write(f"{name}: failed: {printable(str(error))}{details(error)}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted; what was finished is kept\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:  # whatever it is, users get one line
        sys.stderr.write(f"{name}: {fault_text(error)}\n")
        return EXIT_FAILED
