"""How the help of a command is set: within 80 columns, a default once, names before values."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable

MOST_COLUMNS = 100
"""Longer lines are read badly, however wide the terminal is."""

_HELP_COLUMN = 26
_GENERAL = ("help", "version", "verbose")
"""Options of every command, which no usage line has to announce."""


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS) - 2


def wrapped(text: str) -> str:
    """`text` in lines that fit the terminal."""
    return textwrap.fill(" ".join(text.split()), _columns())


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Usage lines name what is needed only; `-o, --output FILE`; defaults behind the help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=_columns())

    def _format_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[argparse._MutuallyExclusiveGroup],
        prefix: str | None,
    ) -> str:
        if usage is None:
            usage = " ".join(["%(prog)s", *self._needed(list(actions))])
        begin = "usage: " if prefix is None else prefix
        text = begin + usage % {"prog": self._prog}
        indent = " " * (len(begin) + len(self._prog) + 1)
        lines = textwrap.fill(text, self._width, subsequent_indent=indent, break_on_hyphens=False)
        return f"{lines}\n\n"

    def _needed(self, actions: list[argparse.Action]) -> list[str]:
        """What has to be given, and whether there is more."""
        needed = [each for each in actions if each.required and each.option_strings]
        places = [each for each in actions if not each.option_strings]
        words = [f"{each.option_strings[0]} {self._value(each)}" for each in needed]
        usual = {*_GENERAL, *(each.dest for each in (*needed, *places))}
        more = ["[options]"] if any(each.dest not in usual for each in actions) else []
        return [*words, *(self._value(each) for each in places), *more]

    def _value(self, action: argparse.Action) -> str:
        default = (
            self._get_default_metavar_for_optional(action)
            if action.option_strings
            else self._get_default_metavar_for_positional(action)
        )
        return self._format_args(action, default)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {self._value(action)}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        default = action.default
        if default is None or isinstance(default, bool) or default == argparse.SUPPRESS:
            return text
        if isinstance(default, list | tuple):
            return f"{text} (default: {' '.join(map(str, default))})" if default else text
        shown = f"{default:g}" if isinstance(default, float) else "%(default)s"
        return f"{text} (default: {shown})"
