"""Numbers that tell something of how long an answer a prompt asks for."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from llmpq.lengths.predictor import Prompt

Features = npt.NDArray[np.float32]
_Whole = TypeVar("_Whole", str, tuple[int, ...])

MOST_CHARACTERS = 1 << 14
MOST_IDS = 1 << 12
"""Of a longer prompt the first and the last half of so many are read; all are counted."""

FIRST_WORDS = 2
LAST_IDS = 4
_WORD_CELLS = 64
_FIRST_CELLS = 32
_ID_CELLS = 64

_ASKED = (
    ("list", "lists", "bullet", "bullets", "enumerate", "table"),
    ("steps", "step", "guide", "tutorial", "plan", "recipe"),
    ("essay", "story", "article", "poem", "blog", "letter", "speech"),
    ("code", "function", "program", "script", "implement", "python", "class"),
    ("explain", "describe", "detail", "detailed", "elaborate", "compare", "discuss"),
    ("summarize", "summary", "summarise", "shorten", "abstract"),
    ("translate", "rewrite", "rephrase", "correct", "edit", "convert"),
    ("short", "brief", "briefly", "concise", "only", "just", "word", "sentence"),
    ("yes", "no", "true", "false", "classify", "which", "choose"),
    ("what", "who", "when", "where", "how", "why"),
    ("examples", "example", "ideas", "several", "many", "all", "every"),
)
"""Words that ask for answers of a similar length, one feature each group."""

_WORD = re.compile(r"[^\W_]+")
_NUMBERED = re.compile(r"^\s*(?:\d+[.)]|[-*•])\s", re.MULTILINE)
_NUMBER = re.compile(r"\d{1,6}")

TEXT_FEATURES = 15 + len(_ASKED) + FIRST_WORDS * _FIRST_CELLS + _WORD_CELLS
ID_FEATURES = 2 + _ID_CELLS + LAST_IDS * _FIRST_CELLS


def features_of(prompt: Prompt, with_text: bool, with_ids: bool) -> Features:
    """The features of a prompt: those of its text, then those of its token ids, as far as wanted.

    They are the same on every machine, as words are hashed by CRC-32.
    """
    found: list[float] = []
    if with_text:
        found += _of_text(prompt.text)
    if with_ids:
        found += _of_ids(prompt.token_ids)
    return np.array(found, dtype=np.float32)


def _of_text(text: str) -> list[float]:
    """Length, kinds of characters, lines, marks, words that ask for something, hashed words."""
    characters = len(text)
    text = _ends(text, MOST_CHARACTERS)
    read = max(1, len(text))
    words = [word.lower() for word in _WORD.findall(text)]
    numbers = [int(each) for each in _NUMBER.findall(text)]
    shape = [
        np.log1p(characters),
        np.log1p(len(words)),
        sum(map(len, words)) / max(1, len(words)),
        np.log1p(text.count("\n")),
        sum(map(str.isdigit, text)) / read,
        sum(map(str.isupper, text)) / read,
        sum(map(str.isspace, text)) / read,
        (read - sum(map(str.isascii, text))) / read,
        text.count("?"),
        float(text.rstrip().endswith("?")),
        float(text.rstrip().endswith(":")),
        np.log1p(text.count('"') + text.count("'")),
        np.log1p(sum(map(text.count, "{}()[];="))) + text.count("```"),
        np.log1p(len(_NUMBERED.findall(text))),
        np.log1p(max(numbers, default=0)),
    ]
    asked = [float(sum(word in group for word in words)) for group in _ASKED]
    first = [_one_of(words, place, _FIRST_CELLS) for place in range(FIRST_WORDS)]
    cells = _counts((_hashed(word) for word in words), _WORD_CELLS)
    return [*shape, *asked, *(value for each in first for value in each), *cells]


def _of_ids(ids: tuple[int, ...]) -> list[float]:
    """Their number, which ones there are, and the last ones."""
    tokens = len(ids)
    ids = _ends(ids, MOST_IDS)
    cells = _counts(map(_hashed_id, ids), _ID_CELLS)
    last = [str(each) for each in reversed(ids[-LAST_IDS:])]
    placed = [_one_of(last, place, _FIRST_CELLS) for place in range(LAST_IDS)]
    return [np.log1p(tokens), float(tokens), *cells, *(value for each in placed for value in each)]


def _ends(whole: _Whole, most: int) -> _Whole:
    """The first and the last half of what may be read of `whole`."""
    if len(whole) <= most:
        return whole
    return whole[: most // 2] + whole[-(most // 2) :]


def _one_of(words: Sequence[str], place: int, cells: int) -> list[float]:
    """A one in the cell of the word at `place`, if there is one."""
    found = [0.0] * cells
    if place < len(words):
        found[_hashed(words[place]) % cells] = 1.0
    return found


def _counts(hashes: Iterable[int], cells: int) -> list[float]:
    """Logarithms of how many hashes fall into each cell."""
    numbers = np.fromiter((each % cells for each in hashes), dtype=np.int64)
    counted: list[float] = np.log1p(np.bincount(numbers, minlength=cells)).tolist()
    return counted


def _hashed(word: str) -> int:
    return zlib.crc32(word.encode("utf-8", "backslashreplace"))


def _hashed_id(token_id: int) -> int:
    return token_id * 2654435761 >> 16  # Knuth's multiplicative hashing
