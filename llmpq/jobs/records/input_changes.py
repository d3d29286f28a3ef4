"""Differences between the rows of an input and those that its job was begun with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from quant.common.errors import InputError

NAMED = 3
"""Number of ids that a message shows of each kind of change."""

_ID_CHARACTERS = 80


@dataclass(frozen=True)
class Places:
    """A number of rows of the input, and the places of the first of them."""

    count: int = 0
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class InputChanges:
    """Differences between the rows of the input and those that the job was begun with.

    Rows that are `new`; the number of those that are `gone`; rows whose id has `another` prompt or
    sampling; `blocked`: one of these has a result already, beside which no other has room. Rows
    that ended in an error, or could not be read, may be changed or taken out.
    """

    new: Places = Places()
    gone: int = 0
    another: Places = Places()
    blocked: bool = False

    def __bool__(self) -> bool:
        """Whether there are any differences."""
        return bool(self.new.count or self.gone or self.another.count or self.blocked)

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the rows that a message names."""
        return (*self.new.first, *self.another.first)

    def error(self, output: Path, names: Mapping[int, str], gone: Iterable[str]) -> InputError:
        """The error that tells the differences.

        `names` has the ids at `places`, `gone` those of results without row, which are looked for
        only if there are any.
        """
        new, another = ([names[at] for at in each.first] for each in (self.new, self.another))
        lost = list(islice(gone, NAMED)) if self.gone else []
        parts = (
            _part(self.new.count, "is new", "are new", new),
            _part(self.gone, "of before is gone", "of before are gone", lost),
            _part(
                self.another.count,
                "has another prompt or sampling",
                "have another prompt or sampling",
                another,
            ),
        )
        remedy = "pass --extend to keep what is done and do the other rows too"
        if self.blocked:
            remedy = "give a row of another prompt another custom_id"
        told = ", ".join(part for part in parts if part)
        return InputError(
            f"output {output} was made from other rows than those of this input: {told}; {remedy}, "
            "name another output or pass --overwrite"
        )


def shown_id(custom_id: str) -> str:
    """An id as a message shows it: a long one is cut."""
    cut = "…" if len(custom_id) > _ID_CHARACTERS else ""
    return f"{custom_id[:_ID_CHARACTERS]!r}{cut}"


def _part(count: int, one: str, many: str, ids: Sequence[str]) -> str:
    if not count:
        return ""
    more = ", …" if ids and count > len(ids) else ""
    named = f" ({', '.join(map(shown_id, ids))}{more})" if ids else ""
    return f"{count} {one if count == 1 else many}{named}"
