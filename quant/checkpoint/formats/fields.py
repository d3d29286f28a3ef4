"""Fields that settings of many methods have, checked."""

from __future__ import annotations

from typing import Any

from quant.checkpoint.stored_config import WHOLE_ROW
from quant.common.errors import SpecError

REMEDY = (
    "give the original 16-bit checkpoint, or one that GPTQModel, AutoAWQ (GEMM), llm-compressor or "
    "llmpq quantize makes of it"
)

MX_BLOCK = (1, 32)
"""Rows and columns that share a scale in MXFP8."""


def checked_bits(value: Any, known: tuple[int, ...], name: str, place: str) -> int:
    if type(value) is not int or value not in known:
        raise SpecError(
            f"{place}: its {name} weights have {value!r:.40} bits; there are kernels for "
            f"{', '.join(map(str, known))}: {REMEDY}"
        )
    return value


def checked_size(value: Any, key: str, place: str) -> int:
    if type(value) is not int or value == 0 or value < WHOLE_ROW:
        raise SpecError(f"{place}: {key} is {value!r:.40}; it must be -1 or positive")
    return value


def checked_block(value: Any, key: str, place: str) -> tuple[int, int]:
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise SpecError(f"{place}: {key} is {value!r:.40}; it must be two positive integers")
    return sizes[0], sizes[1]
