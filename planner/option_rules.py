"""Options that do not exist, that would change nothing beside others, or that are no numbers: rules
in tables, and one check for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from quant.common.errors import SpecError


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
