"""The parser of all commands: one spelling shown and two taken, named groups, short usage lines."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from llmpq.cli.help_text import HelpFormatter, wrapped
from llmpq.cli.verbose import add_verbose
from planner.option_rules import FINITE_REMEDY, Rule, refuse_ignored
from quant.common.errors import SpecError
from quant.common.text import printable

EXIT_BAD_INPUT = 2


@dataclass(frozen=True)
class OptionGroup:
    """A named group of a parser's options."""

    parser: Parser
    group: argparse._ActionsContainer

    def option(self, *names: str, **options: Any) -> None:
        """Add an option to the group; see `Parser.option`."""
        self.parser.add_to(self.group, *names, **options)

    def one_of(self) -> OptionGroup:
        """A group within this one, of whose options one can be given."""
        return OptionGroup(self.parser, self.group.add_mutually_exclusive_group())


class Parser(argparse.ArgumentParser):
    """Takes `--global-bz` and `--global_bz` alike, shows the latter, which is the name in Python,
    and never takes a shortened option. `examples` are commands with `%(prog)s` as their name;
    `rules` say which options others make useless.
    """

    def __init__(
        self,
        prog: str | None = None,
        description: str | None = None,
        examples: Sequence[str] = (),
        rules: Sequence[Rule] = (),
        **options: Any,
    ) -> None:
        self.examples, self.rules = tuple(examples), tuple(rules)
        title = "example" if len(examples) == 1 else "examples"
        shown = [f"{title}:", *(f"  {each}" for each in examples)] if examples else []
        options.setdefault("epilog", "\n".join(shown) or None)
        super().__init__(
            prog,
            description=None if description is None else wrapped(description),
            allow_abbrev=False,
            formatter_class=HelpFormatter,
            **options,
        )
        self._optionals.title = "other options"
        if self.add_help:
            self.add_argument(
                "--version", action=_Version, nargs=0, help="show the version of llmpq and exit"
            )
            add_verbose(self)

    def group(self, title: str, description: str | None = None) -> OptionGroup:
        """A named group of options, which the help shows in the order of these calls."""
        return OptionGroup(self, self.add_argument_group(title, description))

    def option(self, *names: str, **options: Any) -> None:
        """Add an option that belongs to no group, under `names`, with dashes or underscores.

        The first name is the one in Python. Without a default it is missing where it is not given.
        """
        self.add_to(self, *names, **options)

    def add_to(self, container: argparse._ActionsContainer, *names: str, **options: Any) -> None:
        """Add an option to a group of this parser."""
        shown = [_spelled(name, "-", "_") for name in names]
        if options.get("type") in _NUMBERS:
            options["type"] = _NUMBERS[options["type"]]
        if names[0].startswith("-"):
            options.setdefault("dest", shown[0].lstrip("-"))
        if options.get("action") != "store_true" and options.get("default") is None:
            options.setdefault("default", argparse.SUPPRESS)
        action = container.add_argument(*shown, **options)
        for name in shown:
            # One name of the action is what help, messages and completion show.
            self._option_string_actions.setdefault(_spelled(name, "_", "-"), action)

    def format_help(self) -> str:
        """The help with the options of no group at its end."""
        groups = self._action_groups
        self._action_groups = sorted(groups, key=lambda group: group is self._optionals)
        try:
            return super().format_help()
        finally:
            self._action_groups = groups

    def parse(
        self, arguments: Sequence[str] | None, rules: Sequence[Rule] | None = None
    ) -> argparse.Namespace:
        """Parse the options; leave with one line and exit code 2 where `rules` refuse one."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(self._unknown(unknown))
        self.refuse_ignored(options, arguments, self.rules if rules is None else rules)
        for action in self._subcommands():
            word = getattr(options, action.dest)
            given = list(sys.argv[1:] if arguments is None else arguments)
            chosen = action.choices[word]
            chosen.refuse_ignored(options, given[given.index(word) + 1 :], chosen.rules)
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
            refuse_ignored(vars(given), rules, lambda name: f"--{name}")
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
        """Every option that the help shows, those of subcommands too."""
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


_NUMBERS: dict[object, Callable[[str], float]] = {float: finite_number, int: whole_number}
"""What an option that takes numbers takes: no option means anything with nan, and those alone mean
something with inf that name `number_or_inf`."""


def _spelled(name: str, old: str, new: str) -> str:
    """`name` with another sign between its words; the dashes at its beginning stay."""
    body = name.lstrip("-")
    return name[: len(name) - len(body)] + body.replace(old, new)
