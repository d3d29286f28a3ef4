"""Kinds of errors: messages that differ only in their numbers and names are of one kind."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_KINDS = 40
"""Kinds that are told apart; what comes after them is of one kind, `OTHERS`."""

OTHERS = "other errors"

_KIND_CHARACTERS = 160
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_NUMBER = re.compile(r"(?<![\w…])[+−-]?\d[\d,]*(?:\.\d+)?(?:[eE][+-]?\d+)?")


@dataclass(frozen=True)
class ErrorKind:
    """Rows that ended in one kind of error, and the first of them."""

    what: str
    count: int
    custom_id: str
    error: str


def kind_of(error: str) -> str:
    """The message with … in place of numbers and quoted names, cut to a line."""
    text = " ".join(error[: 8 * _KIND_CHARACTERS].split())
    text = _NUMBER.sub("…", _QUOTED.sub("'…'", text))
    return text if len(text) <= _KIND_CHARACTERS else text[: _KIND_CHARACTERS - 1] + "…"


class ErrorCounts:
    """Counts rows by their kind of error."""

    def __init__(self) -> None:
        self.kinds: dict[str, ErrorKind] = {}

    def add(self, custom_id: str, error: str) -> ErrorKind:
        """Count a row; returns its kind as it stands now."""
        what = kind_of(error)
        if what not in self.kinds and len(self.kinds) >= MOST_KINDS:
            what = OTHERS
        return self.merge(ErrorKind(what, 1, custom_id, error))

    def merge(self, more: ErrorKind) -> ErrorKind:
        """Add rows of a kind; its first example stays."""
        before = self.kinds.get(more.what)
        if before is not None:
            more = ErrorKind(more.what, before.count + more.count, before.custom_id, before.error)
        self.kinds[more.what] = more
        return more

    def most_first(self) -> tuple[ErrorKind, ...]:
        """All kinds, those with the most rows first."""
        return tuple(sorted(self.kinds.values(), key=lambda kind: (-kind.count, kind.what)))
