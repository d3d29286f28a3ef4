"""What the command lines share: option spelling, error messages and exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from rich.console import Console

from quant.errors import LlmpqError, StageLostError

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_ERROR_ROWS = 3
EXIT_INTERRUPTED = 130


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

    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message}\n")


def console(stderr: bool = False) -> Console:
    """A console that keeps tables whole when the output is no terminal, and names as they are."""
    plain = Console(stderr=stderr, markup=False)
    return plain if plain.is_terminal else Console(stderr=stderr, markup=False, width=140)


def run_command(name: str, command: Callable[[], int]) -> int:
    """Exit code of `command`; what the user can mend becomes one message and exit code 2,
    a lost stage one message and 1.
    """
    try:
        return command()
    except LlmpqError as error:
        sys.stderr.write(f"{name}: error: {error}\n")
        return EXIT_BAD_INPUT
    except StageLostError as error:
        sys.stderr.write(f"{name}: failed: {error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted; what was finished is kept\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_FAILED
