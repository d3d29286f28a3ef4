"""Code that all commands share: option spelling, error messages and exit codes."""

from __future__ import annotations

import argparse
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from planner.cluster.spec import ClusterSpec
from planner.option_rules import Rule, refuse_ignored
from quant.common.errors import HeadLostError, LlmpqError, SpecError, StageLostError
from quant.common.safe_text import printable

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_ERROR_ROWS = 3
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class Parser(argparse.ArgumentParser):
    """Accepts `--global-bz` and `--global_bz` alike, and never a shortened option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter, **options
        )

    def option(self, *names: str, **options: Any) -> None:
        """Add an option under `names`, each with dashes and with underscores."""
        spellings: dict[str, None] = {}
        for name in names:
            body = name.lstrip("-")
            dashes = name[: len(name) - len(body)]
            spellings[dashes + body.replace("_", "-")] = None
            spellings[dashes + body.replace("-", "_")] = None
        options.setdefault("dest", names[0].lstrip("-").replace("-", "_"))
        if options.get("default") is None and "help" in options:
            options.setdefault("default", argparse.SUPPRESS)
        self.add_argument(*spellings, **options)

    def parse(self, arguments: Sequence[str] | None, rules: Sequence[Rule]) -> argparse.Namespace:
        """Parse the options; leave with one line and exit code 2 where `rules` refuse one."""
        options = self.parse_args(arguments)
        self.refuse_ignored(options, arguments, rules)
        return options

    def refuse_ignored(
        self,
        options: argparse.Namespace,
        arguments: Sequence[str] | None,
        rules: Sequence[Rule],
    ) -> None:
        """Check only the options that `arguments` name, not the defaults among their `options`."""
        unset = argparse.Namespace(**dict.fromkeys(vars(options)))
        given, _ = self.parse_known_args(arguments, unset)
        try:
            refuse_ignored(vars(given), rules, _as_option)
        except SpecError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with exit code 2."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {printable(message)}\n")


def _as_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _SafeConsole(Console):
    """A console that shows the control characters of names and messages and sends none."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as Rich does, whose own control codes are in segments of their own."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def console(stderr: bool = False) -> Console:
    """A console that prints no markup: as wide as COLUMNS says, else as the terminal of this
    process, else 80 columns.
    """
    return _SafeConsole(stderr=stderr, markup=False)


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
    and exit code 2; a lost stage or Ray one message and 1. Our warnings are one line each.
    """
    try:
        with _warnings_of(name):
            return command()
    except LlmpqError as error:
        sys.stderr.write(f"{name}: error: {error}\n")
        return EXIT_BAD_INPUT
    except (StageLostError, HeadLostError) as error:
        sys.stderr.write(f"{name}: failed: {printable(str(error))}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted; what was finished is kept\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED
