"""How the weights of a checkpoint are stored, without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quant.scheme import FULL_BITS

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
GPTQ_CONFIG_FILE = "quantize_config.json"
CONFIG_KEY = "quantization_config"
STORED_BITS = (3, 4, 8)
"""Bitwidths of stored codes for which there are kernels."""

WORD_BITS = 32

WHOLE_ROW = -1
"""The group size of one scale per output row."""

GPTQ_METHOD, AWQ, FP8, COMPRESSED = "gptq", "awq", "fp8", "compressed-tensors"
BITSANDBYTES = "bitsandbytes"


@dataclass(frozen=True)
class StoredLinear:
    bits: int
    group_size: int


@dataclass(frozen=True)
class Scheme:
    """How modules are stored whose names match one of `targets`. `bits` of integer codes, with a
    scale for `group_size` columns of a row (-1: for all), and a zero unless `symmetric`; FULL_BITS
    of floating-point numbers, with a scale for a `block` of rows and columns, or a row, or all.
    """

    targets: tuple[str, ...] = (".*",)
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
    ignored: tuple[str, ...] = ()

    @property
    def keeps_codes(self) -> bool:
        return self.bits != FULL_BITS

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
        if any(re.match(pattern, module) for pattern in self.ignored):
            return None
        return next(
            (s for s in self.schemes if any(re.match(each, module) for each in s.targets)), None
        )


def bits_of_words(words: int, count: int) -> int | None:
    """The bits with which `count` codes fill so many words, or need them, the last not full."""
    full = next((bits for bits in STORED_BITS if words * WORD_BITS == count * bits), None)
    return full or next((b for b in STORED_BITS if words == -(-count * b // WORD_BITS)), None)
