"""Code that all commands share: exit codes, error messages, `--verbose`, which has them say all."""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.remote.words import LOGGER, is_verbose
from quant.common.errors import NO_TORCH, HeadLostError, InputError, LlmpqError, StageLostError
from quant.common.files import names_a_file, write_whole
from quant.common.text import printable, without_secrets

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from planner.cluster.spec import ClusterSpec

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_ERROR_ROWS = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def console(stderr: bool = False) -> Console:
    """A console without markup: as wide as COLUMNS says, else as the terminal, else 80 columns."""
    from llmpq.cli.terminal import SafeConsole

    return SafeConsole(stderr=stderr, markup=False)


def say(line: str, highlight: bool = True) -> None:
    """Print a line, however long, beside the data that standard output is for."""
    console(stderr=True).print(line, soft_wrap=True, highlight=highlight)


def tell_notes(notes: Iterable[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def tell_written(path: str | Path, then: str = "", stderr: bool = False) -> None:
    """Say that `path` was written and what comes next; `stderr`: standard output is data."""
    line = f"wrote {path}{f'; {then}' if then else ''}"
    console(stderr).print(line, soft_wrap=True, highlight=False)


def target_file(name: str | Path) -> Path:
    """The path of a file that can be written; raises `InputError` before work that takes long."""
    target = Path(name)
    if not names_a_file(target):
        raise InputError(f"cannot write {target}: name a file in a folder that exists")
    return target


def write_json(path: Path, values: object) -> None:
    """Write indented JSON, and say so; an existing file is replaced whole or not at all."""
    try:
        write_whole(path, json.dumps(values, indent=1) + "\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InputError(f"cannot write {path}: {error}") from error
    tell_written(path)


def command_line(*words: str | Path) -> str:
    return shlex.join(str(word) for word in words)


def print_notes(spec: ClusterSpec) -> ClusterSpec:
    """Print what was assumed of the cluster's names, and return the cluster."""
    tell_notes(spec.notes)
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
    if not is_verbose():
        for variable, value in _QUIET.items():
            os.environ.setdefault(variable, value)
    try:
        return _run_told(name, command)
    finally:
        logging.getLogger(LOGGER).setLevel(logging.NOTSET)  # what `--verbose` has set


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
        lacks_torch = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        said = f"error: {NO_TORCH}" if lacks_torch else fault_text(error)
        sys.stderr.write(f"{name}: {said}\n")
        return EXIT_BAD_INPUT if lacks_torch else EXIT_FAILED


FAULT_CHARACTERS = 300

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Variables by which libraries keep their advice to themselves, unless the user has set them."""

_LIBRARIES = ("torch", "transformers", "ray", "huggingface_hub", "numba", "numpy", "google")
"""Packages whose warnings are for their callers."""

_OF_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the system that are no fault of the code that meets them."""


def add_verbose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verbose",
        action=_Verbose,
        nargs=0,
        default=argparse.SUPPRESS,
        help="show the words of Ray, torch and transformers, and whole tracebacks",
    )


class _Verbose(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: object
    ) -> None:
        setattr(namespace, self.dest, True)
        show_all()


def show_all() -> None:
    logging.getLogger(LOGGER).setLevel(logging.DEBUG)


def is_for_users(category: type[Warning], filename: str) -> bool:
    """Whether a warning from a line of `filename` tells users of commands anything."""
    if is_verbose():
        return True
    parts = filename.replace("\\", "/").split("/")
    if "site-packages" in parts or "dist-packages" in parts:
        return not any(name in parts for name in _LIBRARIES)
    developers = (DeprecationWarning, PendingDeprecationWarning, FutureWarning, ResourceWarning)
    return not issubclass(category, developers)


def details(error: BaseException) -> str:
    """What follows an `error`'s one line: Ray's words, how to see them, or all with traceback."""
    if is_verbose():
        return f"\n{_trace(error).rstrip()}"
    return " (--verbose shows Ray's own words)" if getattr(error, "__notes__", None) else ""


def fault_text(error: Exception) -> str:
    """One line on an unforeseen error, its traceback in a file; or all of it if asked."""
    what = _what(error)
    if is_verbose():
        return f"{_trace(error)}{what}; please report it with the lines above"
    path = _kept(_trace(error))
    where = "" if path is None else f" (its traceback is in {path})"
    return f"{what}{where}; run again with --verbose to see all, and please report it"


def _what(error: Exception) -> str:
    """The kind of fault, and the last thing that is said of it."""
    kind = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if kind.startswith("RayTaskError"):  # the traceback of the process, whose last line says it
        return f"a fault of llmpq in a process of Ray: {_short(lines[-1] if lines else kind)}"
    said = _short(f"{kind}: {lines[0]}" if lines else kind)
    if type(error).__module__.partition(".")[0] == "ray":
        return f"failed: Ray: {said}"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) in _OF_MACHINE:
        return f"failed: {said}"
    return f"a fault of llmpq: {said}"


def _short(text: str) -> str:
    return printable(text if len(text) <= FAULT_CHARACTERS else f"{text[:FAULT_CHARACTERS]}…")


def _trace(error: BaseException) -> str:
    return without_secrets("".join(traceback.format_exception(error)))


def _kept(text: str) -> str | None:
    """The file, readable by this user alone, that keeps `text`; None where none can be written."""
    with suppress(OSError):
        number, path = tempfile.mkstemp(prefix="llmpq-fault-", suffix=".txt")
        with os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return path
    return None


_WIDEST = 80


def print_json(shown: list[dict[str, Any]] | dict[str, Any]) -> None:
    console().print(json.dumps(shown, indent=1), soft_wrap=True, highlight=False)


def print_table(shown: RenderableType) -> None:
    """Print in at most 80 columns, however wide the terminal is."""
    screen = console()
    screen.print(shown, width=min(screen.width, _WIDEST), highlight=False)


def plain_table(heads: Iterable[str], left: Iterable[str], gap: int) -> Table:
    """A table with these heads, `gap` columns between two; all but `left` are numbers."""
    from rich.table import Table

    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    texts = frozenset(left)
    for head in heads:
        table.add_column(head, justify="left" if head in texts else "right", no_wrap=True)
    return table


def facts_table(facts: Iterable[tuple[str, str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value:
            table.add_row(name, value)
    return table


def with_notes(table: RenderableType, *notes: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    return Group(table, *(line for note in notes for line in (Text(), Text(note))))
