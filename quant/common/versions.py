"""Words for files of another version than the one that is read, above all of a newer llmpq."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import ValidationError

_MOST_DIGITS = 9
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Kinds of pydantic's errors for a field that is not known."""


def other_version(found: object, known: int, remedy: str) -> str:
    """Tell what is wrong with the version `found`, where `known` is read, and what to do."""
    number = found
    if isinstance(found, str) and found.isdecimal() and len(found) <= _MOST_DIGITS:
        number = int(found)
    if type(number) is int and number > known:
        return f"version {number} of a newer llmpq, this one reads {known}; update it, or {remedy}"
    return f"version {found!r:.40}, this llmpq reads {known}; {remedy}"


def unknown_fields(names: Collection[str], remedy: str) -> str:
    """Tell what is wrong with fields that no version up to this one has."""
    shown = ", ".join(sorted(names)[:3])
    return f"field {shown} is unknown here: a newer llmpq may have made it; update it, or {remedy}"


def unknown_in(error: ValidationError) -> list[str]:
    """The fields of which pydantic says that they are not known."""
    return [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] in _UNKNOWN]
