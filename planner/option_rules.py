"""Declaring options as fields of a dataclass, with help and range; rules on those that change
nothing.
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
    """The values that an option may have, and the words behind its name and value otherwise."""

    holds: Callable[[Any], bool]
    wanted: str


def one_of(values: Sequence[object]) -> Range:
    return Range(values.__contains__, f"it must be one of {', '.join(map(str, values))}")


def among(values: Sequence[object]) -> Range:
    return Range(lambda chosen: {*chosen} <= {*values}, f"it must be among {list(values)}")


ANY = Range(lambda value: True, "")
"""The range of what others check."""

AT_LEAST_0 = Range(lambda value: value >= 0, "it must be at least 0")
AT_LEAST_1 = Range(lambda value: value >= 1, "it must be at least 1")
ABOVE_0_S = Range(lambda value: value > 0, "it must be more than 0 seconds")
SHARE_BELOW_1 = Range(lambda value: 0 <= value < 1, "it must be at least 0 and below 1")


@dataclass(frozen=True)
class Option:
    """What command line and help say of a field. `value`: what it is called, or the values there
    are; None for a switch. `names`: spellings other than its name. `within`: None is any. `parse`
    reads a word where the type does not say how. `more`: for `argparse`.
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
        return None if isinstance(self.value, str) else self.value


def declared(value: str | Sequence[object] | None, help: str, **more: Any) -> Mapping[str, Option]:
    return {_KEY: Option(value, help, **more)}


def option(
    value: str | Sequence[object] | None, help: str, default: Any = None, **more: Any
) -> Any:
    return dataclasses.field(default=default, metadata=declared(value, help, **more))


def flag(help: str, **more: Any) -> Any:
    return option(None, help, False, **more)


def argument(value: str | Sequence[object], help: str, default: Any = None, **more: Any) -> Any:
    return option(value, help, default, by_place=True, **more)


def options_of(kind: Any) -> dict[str, Option]:
    fields = dataclasses.fields(kind)
    return {each.name: each.metadata[_KEY] for each in fields if _KEY in each.metadata}


def refuse_outside(options: Any) -> None:
    """Raise SpecError for the first field that is not finite, else out of its range or values."""
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
    """`options` refused with the `remedy` beside the option `beside` (with one of `values`), or
    where all of `without` are missing; a value among `honoured` happens anyway.
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
    """Raise SpecError for the first option that changes nothing; None and False are not given."""
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
    """Raise SpecError for the first name that is not `known`, with the nearest ones, or all."""
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
