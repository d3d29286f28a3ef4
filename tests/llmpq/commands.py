"""Commands as a shell sees them: by their exit code, whoever leaves with it."""

from __future__ import annotations

from collections.abc import Callable


def exit_code(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """The exit code of a command that returns it, or leaves while it parses."""
    try:
        return main(arguments)
    except SystemExit as left:
        return int(left.code or 0)
