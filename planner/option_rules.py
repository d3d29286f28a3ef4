"""Options that would change nothing beside others: rules in tables, and one check for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quant.common.errors import SpecError


@dataclass(frozen=True)
class Rule:
    """When each of `options` is refused, and the `remedy`.

    That is beside the option `beside` (with one of `values`, where these are named), and without
    every one of `without`. A value among `honoured` is what happens anyway, and passes.
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
