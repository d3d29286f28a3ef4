"""Names of the fields that llmpq reads in a row, and names that are probably meant as one of them.

Whatever else a row carries is the user's own and comes out with its result, so that only a near
miss is a mistake. Short names (`stop`, `seed`) are near misses in another spelling alone, as
`Top-P`: too many words are one letter away. Longer ones may differ in one letter, and from nine
letters on in two, so that `max_token` is one and `customer_id` and `num_tokens` are not.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import NamedTuple

from actors.messages import Sampling
from llmpq.rows.openai_fields import REQUEST_FIELDS

PROMPT_FIELDS = ("prompt", "messages")
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))
SPELLINGS = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}

_READ = ("custom_id", *PROMPT_FIELDS, "body", "sampling", *SAMPLING_FIELDS, *SPELLINGS)
KNOWN_FIELDS = frozenset((*_READ, *REQUEST_FIELDS))
"""Fields that have a meaning in a row, and never are its own columns."""

_ELSEWHERE = {
    "max_length": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "stop_sequences": "stop",
    "stop_strings": "stop",
}
"""Names that transformers, llama.cpp and others have for fields of ours."""

_EXACT_LETTERS, _ONE_OFF_LETTERS = 4, 8
_REMEMBERED = 4096


class _Plain(NamedTuple):
    """A known field, and the letters of its name."""

    field: str
    letters: str


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


_PLAIN = tuple(_Plain(field, _letters(field)) for field in _READ)


@lru_cache(_REMEMBERED)
def nearest_field(name: str) -> str | None:
    """The field that `name` is probably meant as; None for a name of the user's own.

    A number at the end (`prompt_2`) makes a name one's own.
    """
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    letters = _letters(name)
    if name in KNOWN_FIELDS or not letters or letters[-1].isdigit():
        return None
    near = ((_differences(letters, each.letters), each) for each in _PLAIN)
    found = min(((off, each) for off, each in near if off <= _allowed(each)), default=None)
    return None if found is None else found[1].field


def _allowed(known: _Plain) -> int:
    """Letters in which a near miss may differ."""
    length = len(known.letters)
    return (length > _EXACT_LETTERS) + (length > _ONE_OFF_LETTERS)


def _differences(one: str, other: str) -> int:
    """Letters that are put in, left out, replaced or swapped between two words.

    It is the optimal string alignment distance. Words of lengths that are further apart than any
    near miss are not compared.
    """
    if abs(len(one) - len(other)) > 2:
        return max(len(one), len(other))
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        before, above, row = row, before, [i]
        for j, against in enumerate(other, start=1):
            best = min(before[j] + 1, row[-1] + 1, before[j - 1] + (letter != against))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == against:
                best = min(best, above[j - 2] + 1)
            row.append(best)
    return row[-1]
