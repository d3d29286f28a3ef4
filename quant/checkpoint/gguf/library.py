"""The package `gguf`, which knows llama.cpp's block types; it needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quant.common.errors import SpecError

UNPACKED: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "F64": np.dtype("<f8"),
}
"""Types of plain numbers in numpy."""

BFLOAT16 = "BF16"
_SCALED_APART = "NVFP4"
"""A type whose scales are tensors of their own."""


def gguf_library(wanted_for: Path | str) -> Any:
    """The package `gguf`; raises `SpecError` where it is missing and `wanted_for` needs it."""
    try:
        import gguf
    except ImportError as error:
        raise SpecError(
            f"{wanted_for} is a GGUF file, which the package gguf reads; run: "
            "pip install 'llmpq[gguf]'"
        ) from error
    return gguf


@cache
def can_dequantize(type_name: str) -> bool:
    """Whether the package can make float32 of blocks of the type, tried on one block."""
    library = gguf_library(type_name)
    kind = library.GGMLQuantizationType[type_name]
    if type_name in UNPACKED:
        return True
    if type_name == _SCALED_APART:
        return False
    _, block_bytes = library.GGML_QUANT_SIZES[kind]
    try:
        library.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def dequantize(blocks: np.ndarray[Any, Any], type_name: str) -> np.ndarray[Any, Any]:
    """`blocks` [rows, bytes] of a type as float32 [rows, elements]."""
    library = gguf_library(type_name)
    values: np.ndarray[Any, Any] = library.dequantize(
        blocks, library.GGMLQuantizationType[type_name]
    )
    return values
