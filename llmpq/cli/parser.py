"""The parser of all commands: declared options, two spellings taken and one shown, the help."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from llmpq.cli.common import EXIT_BAD_INPUT, add_verbose
from planner.option_rules import FINITE_REMEDY, Option, Rule, options_of, refuse_ignored
from quant.common.errors import SpecError
from quant.common.text import printable

T = TypeVar("T")

MOST_COLUMNS = 100
"""Longer lines are read badly, however wide the terminal is."""

_HELP_COLUMN = 26
_GENERAL = ("help", "version", "verbose")
"""Options of every command, which no usage line has to announce."""


class Parser(argparse.ArgumentParser):
    """Takes `--global-bz` and `--global_bz` alike, shows the latter, which is the name in Python,
    and never takes a shortened option. What is parsed has only what was given.

    `examples` are commands with `%(prog)s` as their name; `rules` say which options others make
    useless. `command`: the name of what stands behind `--`, where anything may.
    """

    def __init__(
        self,
        prog: str | None = None,
        description: str | None = None,
        examples: Sequence[str] = (),
        rules: Sequence[Rule] = (),
        command: str | None = None,
        **options: Any,
    ) -> None:
        self.rules, self._command = tuple(rules), command
        title = "example" if len(examples) == 1 else "examples"
        shown = [f"{title}:", *(f"  {each}" for each in examples)] if examples else []
        options.setdefault("epilog", "\n".join(shown) or None)
        super().__init__(
            prog,
            description=None if description is None else _wrapped(description),
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=HelpFormatter,
            **options,
        )
        self._optionals.title = "other options"
        if self.add_help:
            self.add_argument(
                "--version", action=_Version, nargs=0, help="show the version of llmpq and exit"
            )
            add_verbose(self)

    def declare(self, groups: Mapping[str, str], *kinds: Any) -> None:
        """Add those options of the dataclasses `kinds` that `groups` name.

        `groups`: the names by the title of their group, with its description behind a colon, in the
        order of the help; of options that are joined by `|` one can be given.
        """
        known: dict[str, tuple[Option, Any, Any]] = {}
        for kind in kinds:
            types, defaults = get_type_hints(kind), {each.name: each for each in fields(kind)}
            for name, each in options_of(kind).items():
                field = defaults[name]
                default = None if field.default_factory is not MISSING else field.default
                known.setdefault(name, (each, types[name], default))
        for title, names in groups.items():
            what, _, description = title.partition(": ")
            group = self.add_argument_group(what, description or None)
            for together in names.split():
                several = together.split("|")
                within = group if len(several) == 1 else group.add_mutually_exclusive_group()
                for name in several:
                    self._add(within, name, *known.pop(name))

    def _add(
        self, group: argparse._ActionsContainer, name: str, option: Option, type_: Any, default: Any
    ) -> None:
        names = (name,) if option.by_place else option.names or (f"--{name}",)
        more = {**_reading(option, type_), "help": _with_default(option.help, default)}
        if isinstance(option.value, str):
            more["metavar"] = option.value
        elif option.value is not None:
            more["choices"] = option.value
        if not option.by_place:
            more |= {"dest": name, "required": default is MISSING}
        action = group.add_argument(*names, **{**more, **option.more})
        for each in action.option_strings:
            # One name of the action is what help, messages and completion show.
            self._option_string_actions.setdefault(_spelled(each, "_", "-"), action)

    def format_help(self) -> str:
        """The help with the options of no group at its end."""
        groups = self._action_groups
        self._action_groups = sorted(groups, key=lambda group: group is self._optionals)
        try:
            return super().format_help()
        finally:
            self._action_groups = groups

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options that were given, by name; leaves as `refuse_ignored`."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        end = len(words)
        if self._command is not None and "--" in words:
            end = words.index("--")
        options, unknown = self.parse_known_args(words[:end])
        if unknown:
            self.error(self._unknown(unknown))
        if self._command is not None:
            setattr(options, self._command, words[end + 1 :])
        self.refuse_ignored(options)
        for action in self._subcommands():
            action.choices[getattr(options, action.dest)].refuse_ignored(options)
        return options

    def refuse_ignored(self, options: argparse.Namespace) -> None:
        """Leave with one line and exit code 2 where the rules refuse one of the options."""
        try:
            refuse_ignored(vars(options), self.rules, lambda name: f"--{name}")
        except SpecError as error:
            self.error(str(error))

    def error(self, message: str) -> NoReturn:
        """Print one line and leave with exit code 2."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {printable(message)}\n")

    def _unknown(self, words: Sequence[str]) -> str:
        """What to say of words that are no option and no option's value."""
        option = next((word for word in words if word.startswith("-")), None)
        if option is None:
            return f"{words[0]!r} belongs to no option"
        name = option.partition("=")[0]
        near = get_close_matches(_spelled(name, "-", "_"), self._names())
        nearest = f"nearest: {', '.join(near)}" if near else f"{self.prog} --help lists them"
        return f"unknown option {name}; {nearest}"

    def _names(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
        for action in self._subcommands():
            for parser in action.choices.values():
                yield from parser._names()

    def _subcommands(self) -> Iterator[argparse._SubParsersAction[Parser]]:
        return (each for each in self._actions if isinstance(each, argparse._SubParsersAction))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = ", ".join(map(str, action.choices))
        raise argparse.ArgumentError(action, f"unknown value {value!r}; choose from {choices}")


class _Version(argparse.Action):
    """Prints the version, which takes longer to look up than a help text may."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from llmpq.version import llmpq_version

        sys.stdout.write(f"{parser.prog} {llmpq_version()}\n")
        parser.exit()


def finite_number(text: str) -> float:
    """A number that is none of inf, -inf and nan."""
    value = number_or_inf(text, FINITE_REMEDY)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{text!r} is infinite; {FINITE_REMEDY}")
    return value


def number_or_inf(text: str, remedy: str = "give a number, or inf for no limit") -> float:
    """A number of an option that has no limit with inf."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or value == -math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; {remedy}")
    return value


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"{text!r} is no whole number; give one, such as 8"
        raise argparse.ArgumentTypeError(message) from None


def auto_or_number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def taken(kind: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Those fields of a dataclass that were given, by name."""
    return {each.name: getattr(options, each.name) for each in fields(kind) if each.name in options}


def made(kind: type[T], options: argparse.Namespace) -> T:
    """The dataclass of what was given, and its defaults; raises what it raises."""
    return kind(**taken(kind, options))


def _reading(option: Option, type_: Any) -> dict[str, Any]:
    """How `argparse` reads an option of that type."""
    several, kinds = _parts(type_)
    if kinds == {bool} and option.parse is None:
        return {"action": "store_const", "const": True}
    nargs = {"nargs": "+"} if several else {}
    if option.parse is not None:
        return {"type": option.parse, **nargs}
    if int in kinds:
        return {"type": auto_or_number if str in kinds else whole_number, **nargs}
    if float in kinds:
        return {"type": number_or_inf if str in kinds else finite_number, **nargs}
    return {"type": Path, **nargs} if kinds == {Path} else nargs


def _parts(type_: Any) -> tuple[bool, set[Any]]:
    """Whether a type is of several values, and the plain types that it has."""
    origin, inner = get_origin(type_), get_args(type_)
    if origin in (Union, UnionType):
        found = [_parts(each) for each in inner if each is not type(None)]
        return any(several for several, _ in found), set().union(*(kinds for _, kinds in found))
    if origin is Literal:
        return False, {type(each) for each in inner}
    if origin in (tuple, list):
        return True, _parts(inner[0])[1]
    return False, {type_}


def _with_default(text: str, default: Any) -> str:
    """The help of an option with its default, where it does not say it itself."""
    if default in (None, MISSING) or isinstance(default, bool) or "(default:" in text:
        return text
    values = default if isinstance(default, tuple | list) else (default,)
    shown = " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)
    return f"{text} (default: {shown})" if shown else text


def _spelled(name: str, old: str, new: str) -> str:
    """`name` with another sign between its words; the dashes at its beginning stay."""
    body = name.lstrip("-")
    return name[: len(name) - len(body)] + body.replace(old, new)


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS) - 2


def _wrapped(text: str) -> str:
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
        if action.choices is not None and action.nargs == "+":
            return f"{self._metavar_formatter(action, default)(1)[0]} ..."
        return self._format_args(action, default)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {self._value(action)}"
