"""The header of a GGUF file: its metadata, checked, and where its tensors lie.

Headers hold the vocabulary, hundreds of thousands of short texts, for each of which
`gguf.GGUFReader` makes four numpy views: 12 s for SmolLM2 where this takes 0.2 s (two cores, both
busy). Block sizes and dequantization are those of the library.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quant.common.errors import CheckpointError, SpecError

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
    library = gguf_library(type_name)
    values: np.ndarray[Any, Any] = library.dequantize(
        blocks, library.GGMLQuantizationType[type_name]
    )
    return values


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT_KEY = "general.alignment"
_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_TEXT, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
"""Metadata types by number (`gguf.GGUFValueType`), as `struct` names them."""

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class StoredBlocks:
    """A tensor by llama.cpp's name and type, its shape with rows first, its half-open range of
    bytes.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class _MalformedError(Exception):
    pass


_FAULTS = (_MalformedError, struct.error, ValueError, IndexError, OverflowError, RecursionError)
"""Errors of parsing bytes of any content; `UnicodeDecodeError` is a ValueError."""


def read_gguf_header(path: Path) -> tuple[Metadata, list[StoredBlocks]]:
    """Read the header, mapped, and check that the file has all bytes of its tensors;
    CheckpointError for another format or version, or a cut file.
    """
    gguf_library(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < len(_MAGIC):
                raise _MalformedError("it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Parser(content).header()
    except _FAULTS as error:
        reason = str(error) or type(error).__name__
        raise CheckpointError(
            f"{path} ({size} bytes) is no GGUF file, or a truncated or damaged one: {reason:.200}; "
            "download it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


class _Parser:
    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at = content, 0

    def header(self) -> tuple[Metadata, list[StoredBlocks]]:
        if self._take(len(_MAGIC)) != _MAGIC:
            raise _MalformedError("it does not begin with GGUF")
        version = self._number("I")
        if version not in _VERSIONS:
            raise _MalformedError(
                f"its version is {version}, not {' or '.join(map(str, _VERSIONS))}"
            )
        tensors, entries = self._number("Q"), self._number("Q")
        metadata = {self._text(): self._value(self._number("I")) for _ in range(entries)}
        found = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise _MalformedError(f"{_ALIGNMENT_KEY} is {alignment!r:.40}")
        data = -(-self._at // alignment) * alignment
        return metadata, [self._placed(data, *each) for each in found]

    def _placed(
        self, data: int, name: str, type_number: int, shape: tuple[int, ...], offset: int
    ) -> StoredBlocks:
        type_name, tensor_bytes = _stored_bytes(name, type_number, shape)
        stop = data + offset + tensor_bytes
        if stop > len(self._content):
            raise _MalformedError(f"tensor {name:.80} ends at byte {stop}")
        return StoredBlocks(name, type_name, shape, data + offset, stop)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise _MalformedError(f"tensor {name:.80} has {dimensions} dimensions")
        sizes = [self._number("Q") for _ in range(dimensions)]
        return name, self._number("I"), tuple(reversed(sizes)), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        if kind not in _NUMBERS:
            raise _MalformedError(f"metadata of unknown type {kind}")
        value = self._number(_NUMBERS[kind])
        # A float32 as the decimal that its makers wrote: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(value))) if _NUMBERS[kind] == "f" else value

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind in _NUMBERS:
            item = np.dtype(_NUMBERS[kind]).newbyteorder("<")
            values = np.frombuffer(self._take(count * item.itemsize), item)
            return values.tolist()  # type: ignore[no-any-return]
        if count > len(self._content) - self._at:  # each takes a byte or more
            raise _MalformedError(f"an array claims {count} entries")
        return [self._value(kind) for _ in range(count)]

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _text(self) -> str:
        return self._take(self._number("Q")).decode("utf-8")

    def _take(self, count: int) -> bytes:
        stop = self._at + count
        if stop > len(self._content):
            raise _MalformedError(f"it ends before byte {stop}")
        taken = self._content[self._at : stop]
        self._at = stop
        return taken


def _stored_bytes(name: str, type_number: int, shape: tuple[int, ...]) -> tuple[str, int]:
    library = gguf_library(name)
    try:
        kind = library.GGMLQuantizationType(type_number)
        block, block_bytes = library.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise _MalformedError(
            f"tensor {name:.80} has type {type_number}, which the package gguf does not know"
        ) from error
    elements = math.prod(shape)
    if shape[-1] % block or not elements:
        raise _MalformedError(f"tensor {name:.80} of shape {shape} has no whole blocks of {block}")
    return str(kind.name), elements // block * block_bytes


NO_MODEL = ("none", "no_vocab")
"""Kinds of tokenizer of files without one."""


@dataclass(frozen=True)
class Entries:
    """Metadata whose keys begin with `architecture`; what is read raises SpecError naming file, key
    and value.
    """

    path: Path
    values: Metadata
    architecture: str

    def size(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(self._full(key), value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.refusal(self._full(key), value, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str | None:
        value = self.values.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.refusal(key, value, "a text")
        return value

    def token(self, key: str, vocabulary: int) -> int | None:
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < vocabulary):
            raise self.refusal(key, value, f"a token id from 0 to {vocabulary - 1}")
        return value

    def tokens(self, rows: int) -> list[str]:
        """Texts of the tokens, at most `rows`, none twice; none where there is no vocabulary."""
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
        return self.values.get(self._full(key))

    def refusal(self, key: str, value: Any, needed: str) -> SpecError:
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
    is_one = isinstance(value, list) and all(isinstance(each, kind) for each in value)
    return value if is_one else None
