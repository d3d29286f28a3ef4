"""How the weights of a checkpoint are stored, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from quant.common.errors import SpecError
from quant.scheme import (
    AFFINE_BITS,
    FULL_BITS,
    NEAR_FULL_BITS,
    LinearShape,
    ScaleForm,
    group_size,
    rounded_group,
)

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
GPTQ_CONFIG_FILE = "quantize_config.json"
CONFIG_KEY = "quantization_config"
STORED_BITS = (3, 4, 8)
"""Bitwidths of codes that other programs store, for which there are kernels."""

OWN_BITS = (*AFFINE_BITS, NEAR_FULL_BITS)
"""Those of llmpq's own format."""

WORD_BITS = 32

WHOLE_ROW = -1
"""The group size of one scale per output row."""

ROUNDED_AGAIN = 0
"""That of a weight of which a plan keeps no code: its groups are those of any that is rounded."""

GPTQ_METHOD, AWQ, FP8, COMPRESSED = "gptq", "awq", "fp8", "compressed-tensors"
BITSANDBYTES, MODELOPT, TORCHAO = "bitsandbytes", "modelopt", "torchao"
NARROW_LAYOUT = "llmpq"
"""The format of GPTQ whose scales and zeros have a byte each (`quant.narrow`)."""

GGUF = "GGUF"
"""What the method of a GGUF file begins with, before the type of most of its blocks."""

_NAME_PARTS = 32
"""Parts of a module's name beyond which no name within it is looked for; real ones have ten."""

MOST_PATTERNS, _PATTERN_CHARACTERS, _MATCH_S = 1000, 2000, 0.1
"""What patterns that somebody else wrote may take; a usual match takes microseconds."""

_COUNT = re.compile(r"(?<![\w\].])\{|\{[^}]{6}")
"""Counts of other than one character, or large ones: libraries write such patterns out."""


@dataclass(frozen=True)
class StoredLinear:
    """`form`: how scale and zero of a group are held."""

    bits: int
    group_size: int
    form: ScaleForm = ScaleForm.PAIRS

    def held(self, linear: LinearShape, layer_bits: int) -> LinearShape:
        """`linear` as stages hold it in a layer of `layer_bits`, with the groups of its codes."""
        size, usual = self.group_size, group_size(linear.in_features)
        group = usual if size == WHOLE_ROW or size % usual == 0 else size
        again = size == ROUNDED_AGAIN
        return replace(
            linear,
            stored_group=rounded_group(linear.in_features) if again else group,
            stored_bits=None if self.bits == layer_bits else self.bits,
            stored_form=ScaleForm.NARROW if again else self.form,
        )


_EVERY = frozenset(("Linear", "_default"))
"""All modules, for compressed-tensors and for torchao."""


@dataclass(frozen=True)
class Modules:
    """Modules by their names, by names within theirs, and by patterns of how theirs begin, or
    `every` one. `place` says where these stand.
    """

    every: bool = False
    names: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    place: str = field(default="", compare=False, repr=False)

    @classmethod
    def of_names(cls, values: Mapping[str, Any], key: str, place: str) -> Modules:
        """Those that have one of the names at `key` within theirs; SpecError for other values."""
        listed = _names(values.get(key), key, place)
        return cls(within=frozenset(name for name in listed if name))

    @classmethod
    def of_targets(cls, value: Any, key: str, place: str) -> Modules:
        """Those that compressed-tensors means, by names, by patterns, or by their class, of which
        there is one here. SpecError for what is no pattern.
        """
        listed, where = _names(value, key, place), f"{place}: {key}"
        patterns = tuple(each.removeprefix("re:") for each in listed if each.startswith("re:"))
        if len(patterns) > MOST_PATTERNS:
            raise SpecError(f"{where} has {len(patterns)} patterns; {MOST_PATTERNS} are taken")
        for pattern in patterns:
            _compiled(pattern, where)
        return cls(not _EVERY.isdisjoint(listed), frozenset(listed), frozenset(), patterns, where)

    def have(self, module: str) -> bool:
        """SpecError where that takes a pattern too long."""
        if self.every or module in self.names:
            return True
        parts = module.split(".", _NAME_PARTS) if self.within else []
        spans = (parts[i:j] for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        if any(".".join(span) in self.within for span in spans):
            return True
        return any(self._match(pattern, module) for pattern in self.patterns)

    def _match(self, pattern: str, module: str) -> bool:
        try:
            return _compiled(pattern, self.place).match(module, timeout=_MATCH_S) is not None
        except TimeoutError as error:
            raise SpecError(
                f"{self.place} has {f're:{pattern}'!r:.60}, which takes more than {_MATCH_S} s "
                f"to match {module:.60}; write it without repetitions within others"
            ) from error


def _compiled(pattern: str, place: str) -> Any:
    """The pattern of a library that stops in time; SpecError for one that is none or too large."""
    import regex

    try:
        if len(pattern) > _PATTERN_CHARACTERS or _COUNT.search(pattern):
            raise ValueError(f"longer than {_PATTERN_CHARACTERS} characters, or counts too much")
        return regex.compile(pattern)
    except (ValueError, regex.error, OverflowError, RecursionError, MemoryError) as error:
        raise SpecError(
            f"{place} has {f're:{pattern}'!r:.60}, no pattern: {error!s:.100}"
        ) from error


def _names(value: Any, key: str, place: str) -> list[str]:
    listed = [] if value is None else value
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise SpecError(f"{place}: {key} is {value!r:.60}; it must be a list of names")
    return listed


@dataclass(frozen=True)
class Scheme:
    """How `targets` are stored. `bits` of integer codes, with a scale for `group_size` columns of a
    row (-1: for all), and a zero unless `symmetric`; FULL_BITS of floating-point numbers, with a
    scale for a `block` of rows and columns, or a row, or all.
    """

    targets: Modules = Modules(every=True)
    bits: int = FULL_BITS
    group_size: int = WHOLE_ROW
    symmetric: bool = True
    block: tuple[int, int] | None = None


@dataclass(frozen=True)
class StoredConfig:
    """`bits` and `group_size` (-1: whole rows) are most modules', `bits` FULL_BITS where there are
    no integer codes: weights are decoded then, and rounded as those of other checkpoints. With
    `desc_act` columns of a group may lie apart. `zero_offset` is added to stored zeros. `linears`:
    of each of a layer, where they are not alike. The first of `schemes` that takes a module tells
    how it is stored, unless it is `ignored`.
    """

    bits: int
    group_size: int
    desc_act: bool = False
    zero_offset: int = 0
    linears: tuple[StoredLinear, ...] = ()
    method: str = GPTQ_METHOD
    schemes: tuple[Scheme, ...] = ()
    ignored: Modules = Modules()

    @property
    def keeps_codes(self) -> bool:
        return self.bits != FULL_BITS

    @property
    def is_gguf(self) -> bool:
        """Whether there is but this file of a model: it is rounded where others are refused."""
        return self.method.startswith(GGUF)

    @property
    def words(self) -> str:
        """Method and number format, for messages."""
        if self.keeps_codes:
            return f"{self.bits} bit ({self.method})"
        blocks = {scheme.block for scheme in self.schemes if scheme.block is not None}
        each = " and ".join(f"{rows} x {columns}" for rows, columns in sorted(blocks))
        return f"{self.method}{f' in blocks of {each}' if each else ''}"

    def bits_of_layer(self, weights: Mapping[int, int]) -> int:
        """The bits by which a layer is known that has so many `weights` of each: those of most
        modules of the model, if it has any, else those of most of its weights.
        """
        if self.bits in weights:
            return self.bits
        return max(weights, key=lambda bits: weights[bits], default=FULL_BITS)

    def scheme_of(self, module: str) -> Scheme | None:
        """How `module` is stored, by these settings; None: as it is."""
        if self.ignored.have(module):
            return None
        return next((each for each in self.schemes if each.targets.have(module)), None)


def period_of(bits: int) -> int:
    """Codes that fill whole words, at the least."""
    return WORD_BITS // gcd(WORD_BITS, bits)


def bits_of_words(words: int, count: int) -> int | None:
    """The bits with which `count` codes fill so many words, or need them, the last not full."""
    full = next((bits for bits in OWN_BITS if words * WORD_BITS == count * bits), None)
    return full or next((b for b in STORED_BITS if words == -(-count * b // WORD_BITS)), None)
