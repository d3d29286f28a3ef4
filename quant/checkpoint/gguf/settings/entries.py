"""Entries of a GGUF file's metadata, checked when they are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.checkpoint.gguf.header import Metadata
from quant.common.errors import SpecError

NO_MODEL = ("none", "no_vocab")
"""Kinds of tokenizer of files without one."""


@dataclass(frozen=True)
class Entries:
    """The metadata `values` of the file `path`, of an `architecture` that keys begin with.

    What is read raises `SpecError` naming file, key and value.
    """

    path: Path
    values: Metadata
    architecture: str

    def size(self, key: str, default: int | None = None) -> int:
        """The whole number of at least 1 under `{architecture}.{key}`."""
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(self._full(key), value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The number under `{architecture}.{key}`."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.refusal(self._full(key), value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """The truth value under `key`, as it stands."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        """The text under `key`, as it stands; None where it is missing."""
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, value, "a text")
        return value

    def token(self, key: str, vocabulary: int) -> int | None:
        """The token id under `key`, as it stands; None where it is missing."""
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < vocabulary):
            raise self.refusal(key, value, f"a token id from 0 to {vocabulary - 1}")
        return value

    def tokens(self, rows: int) -> list[str]:
        """The texts of the tokens, which are no more than `rows` of the embedding, none twice; none
        at all where the file has no vocabulary.
        """
        key = "tokenizer.ggml.tokens"
        if self.values.get("tokenizer.ggml.model", "none") in NO_MODEL:
            return []
        found = list_of(self.values.get(key), str)
        if found is None or len(found) > rows:
            raise SpecError(
                f"{self.path}: {key} is no list of at most {rows} texts, the rows of the "
                "embedding; download the file again"
            )
        if len(set(found)) < len(found):
            raise SpecError(f"{self.path}: {key} has a token twice")
        return found

    def of_architecture(self, key: str) -> Any:
        """The value of `{architecture}.{key}`; None where it is missing."""
        return self.values.get(self._full(key))

    def refusal(self, key: str, value: Any, needed: str) -> SpecError:
        """Make an error: `key` is `value` but must be what `needed` says."""
        shown = repr(value)
        return SpecError(
            f"{self.path}: {key} is {shown if len(shown) <= 60 else f'{shown[:60]}…'}; "
            f"it must be {needed}"
        )

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _value(self, key: str, default: Any) -> Any:
        value = self.of_architecture(key)
        if value is None and default is None:
            raise SpecError(f"{self.path}: {self._full(key)} is missing; download the file again")
        return default if value is None else value


def list_of(value: Any, kind: type | tuple[type, ...]) -> list[Any] | None:
    """`value` where it is a list of that kind, else None."""
    is_one = isinstance(value, list) and all(isinstance(each, kind) for each in value)
    return value if is_one else None
