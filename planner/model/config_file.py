"""Reading entries of a `config.json`, with errors that name file, entry and remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.model.shape import MAX_SIZE
from quant.checkpoint.text_part import TEXT_SECTION, TIED_KEY, text_entries
from quant.common.errors import SpecError


@dataclass(frozen=True)
class ConfigFile:
    """A text model's entries, in a section of a larger model's file but for the `outer` ones."""

    name: str
    values: Mapping[str, Any]
    place: str
    outer: frozenset[str] | None = None

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any], place: str) -> ConfigFile:
        """The text model's entries of a parsed `config.json`; SpecError where it has none."""
        text = text_entries(values, place)
        if text is values:
            return cls(name, values, place)
        outer = frozenset(text) - frozenset(values[TEXT_SECTION])
        return cls(name, text, place, outer | {TIED_KEY})

    def entry(self, key: str) -> str:
        """The place of an entry in words, for messages."""
        is_outer = self.outer is None or key.partition(".")[0] in self.outer
        return f"{self.place}: {key}" if is_outer else f"{self.place}: {TEXT_SECTION}.{key}"

    def refusal(self, key: str, value: Any, needed: str) -> SpecError:
        return SpecError(f"{self.entry(key)} is {shown(value)}; it must be {needed}")

    def integer(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if type(value) is not int:
                raise self.refusal(key, value, "a whole number")
            return value
        if default is None:
            raise SpecError(f"{self.entry(' or '.join(keys))} is missing")
        return default

    def size(self, *keys: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = self.integer(*keys, default=default)
        if not 1 <= value <= most:
            key = next((key for key in keys if self.values.get(key) is not None), keys[0])
            raise self.refusal(key, value, f"1 to {most}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def per_head(self, width: int, heads: int) -> int:
        if heads < 1 or width % heads:
            raise SpecError(f"{self.place}: hidden size {width} cannot be split over {heads} heads")
        return width // heads


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether `value` is a finite number above `least` and at most `most`."""
    if type(value) not in (int, float) or (type(value) is float and not math.isfinite(value)):
        return False
    return bool(least < value <= most)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
