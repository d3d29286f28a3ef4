"""Declaring options: the help and the range of a field of a dataclass; and rules on options that do
not exist, or that would change nothing beside others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from typing import Any

from quant.common.errors import SpecError

REQUIRED = MISSING
"""The default of an option that has to be given."""


@dataclass(frozen=True)
class Range:
    """The values that an option may have, and the words behind its name and value where it has
    another one.
    """

    holds: Callable[[Any], bool]
    wanted: str


def one_of(values: Sequence[object]) -> Range:
    """The range of the `values`, which the message names."""
    return Range(values.__contains__, f"it must be one of {', '.join(map(str, values))}")


ANY = Range(lambda value: True, "")
"""The range of what others check."""

AT_LEAST_0 = Range(lambda value: value >= 0, "it must be at least 0")
AT_LEAST_1 = Range(lambda value: value >= 1, "it must be at least 1")
ABOVE_0_S = Range(lambda value: value > 0, "it must be more than 0 seconds")
SHARE_BELOW_1 = Range(lambda value: 0 <= value < 1, "it must be at least 0 and below 1")


@dataclass(frozen=True)
class Option:
    """What the command line and help say of a field.

    `value`: what its value is called, or the values that there are; None for a switch. `names`: its
    spellings in the order of the help, where these are not its name alone; one `by_place` has none.
    `within`: its range; None is in any. `parse` reads a word where the field's type does not say
    how. `more`: further arguments of `argparse`.
    """

    value: str | Sequence[object] | None
    help: str
    names: tuple[str, ...] = ()
    within: Range | None = None
    parse: Callable[[str], Any] | None = None
    by_place: bool = False
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def choices(self) -> Sequence[object] | None:
        """The values that there are, where they are few."""
        return None if isinstance(self.value, str) else self.value


def declared(value: str | Sequence[object] | None, help: str, **more: Any) -> Mapping[str, Option]:
    """The metadata of a field that is an `Option`, for one that needs a `field` of its own."""
    return {_KEY: Option(value, help, **more)}


def option(
    value: str | Sequence[object] | None, help: str, default: Any = None, **more: Any
) -> Any:
    """A field of a dataclass that is an `Option`."""
    return dataclasses.field(default=default, metadata=declared(value, help, **more))


def flag(help: str, **more: Any) -> Any:
    """A switch, which is off unless it is given."""
    return option(None, help, False, **more)


def argument(value: str | Sequence[object], help: str, default: Any = None, **more: Any) -> Any:
    """An argument that is given by its place."""
    return option(value, help, default, by_place=True, **more)


def options_of(kind: Any) -> dict[str, Option]:
    """The fields of a dataclass that are options, by name."""
    fields = dataclasses.fields(kind)
    return {each.name: each.metadata[_KEY] for each in fields if _KEY in each.metadata}


def refuse_outside(options: Any) -> None:
    """Raise SpecError for the first field that is infinite or no number, or else the first that is
    out of the range or not one of the values that its declaration names.
    """
    refuse_not_finite(options)
    for name, each in options_of(options).items():
        value = getattr(options, name)
        if value is None:
            continue
        if each.within is not None:
            holds, wanted = each.within.holds(value), each.within.wanted
        elif each.choices is not None:
            holds, wanted = value in each.choices, f"it must be one of {list(each.choices)}"
        else:
            continue
        if not holds:
            raise SpecError(f"{name} is {value!r}; {wanted}")


_KEY = "option"


@dataclass(frozen=True)
class Rule:
    """A rule by which each of `options` is refused, with the `remedy`.

    They are refused beside the option `beside` (with one of `values`, where these are named), or
    where every one of `without` is missing. A value among `honoured` happens anyway and passes.
    """

    options: tuple[str, ...]
    remedy: str
    beside: str | None = None
    values: tuple[object, ...] = ()
    without: tuple[str, ...] = ()
    honoured: tuple[object, ...] = ()

    def broken_by(self, given: Mapping[str, object]) -> str | None:
        """The first of the options that `given` names in vain."""
        beside = self.beside is None or (
            self.beside in given and (not self.values or given[self.beside] in self.values)
        )
        if not beside or any(name in given for name in self.without):
            return None
        wrong = (o for o in self.options if o in given and given[o] not in self.honoured)
        return next(wrong, None)


def refuse_ignored(
    given: Mapping[str, object], rules: Sequence[Rule], spelled: Callable[[str], str] = str
) -> None:
    """Raise SpecError for the first option that would change nothing, and what to do instead.

    Options that are None or False count as not given; `spelled` is how messages name them.
    """
    given = {
        name: value for name, value in given.items() if value is not None and value is not False
    }
    for rule in rules:
        option = rule.broken_by(given)
        if option is None:
            continue
        reason = f"without {' or '.join(map(spelled, rule.without))}"
        if rule.beside is not None:
            value = f" {given[rule.beside]}" if rule.values else ""
            reason = f"beside {spelled(rule.beside)}{value}"
        raise SpecError(f"{spelled(option)} has no effect {reason}: {rule.remedy}")


def refuse_unknown(given: Collection[str], known: Collection[str], what: str) -> None:
    """Raise SpecError for the first name, in the alphabet's order, that is not `known`: it names
    the nearest ones, or where none is near all.
    """
    for name in sorted(set(given) - set(known)):
        near = get_close_matches(name, known)
        choice = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"
        raise SpecError(f"unknown {what} {name!r}; {choice}")


def refuse_not_finite(options: object) -> None:
    """Raise SpecError for the first number among the fields that is infinite or none at all."""
    for name, value in vars(options).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{name} is {value!r}; {FINITE_REMEDY}")


FINITE_REMEDY = "give a finite number, or leave it out for what is usual"
