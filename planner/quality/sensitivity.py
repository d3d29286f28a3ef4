"""The sensitivity of each layer at each bitwidth: from an omega file, else from sizes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from planner.model.finding import ModelShape
from planner.quality.omega_file import (
    Matrix,
    as_matrix,
    bare_array,
    check_falling,
    check_shape,
    nested,
    read_content,
)
from quant.common.errors import SpecError
from quant.common.files import write_whole
from quant.scheme import FULL_BITS

REFERENCE_BITS = 4
"""Default sensitivities of all layers at this bitwidth sum to 1."""

DEFAULT_SOURCE = "default: parameters x (2^b - 1)^-2"
_KEYS = ("bits", "model_fingerprint", "matrix")
_REPEATED_ENTRIES = (
    "method",
    "rounding",
    "scheme",
    "scales",
    "unit",
    "calibration_tokens",
    "calibration",
)
"""Entries of the provenance that plans repeat."""
_MOST = sys.float_info.max
"""Largest number, as integers of JSON may have any size."""

_LONGEST = 40
"""Most characters of one entry of the provenance, which anyone may have written."""


@dataclass(frozen=True)
class MeasuredPoint:
    """The measured perplexity of the model with `bitwidths`, one for each layer.

    `error`: standard error of its distance to the perplexity at 16 bit on the same text.
    """

    bitwidths: tuple[int, ...]
    perplexity: float
    error: float


@dataclass(frozen=True)
class WeighedPoint:
    """A measured perplexity by its summed sensitivity."""

    omega: float
    perplexity: float
    error: float


@dataclass(frozen=True)
class Omega:
    """Sensitivities `matrix` [L, K] of the bitwidths asked for, their source, and perplexities."""

    matrix: Matrix
    source: str
    points: tuple[WeighedPoint, ...] = ()


@dataclass(frozen=True)
class OmegaContent:
    """The content of llmpq's own omega files; `matrix` [L, K], K ascending `bits`."""

    bits: tuple[int, ...]
    model_fingerprint: str
    matrix: Matrix
    provenance: Mapping[str, str | int | float] = field(default_factory=dict)
    points: tuple[MeasuredPoint, ...] = ()

    def summed(self, bitwidths: Sequence[int]) -> float:
        """The sensitivity of the whole model with `bitwidths`, one for each layer."""
        columns = [self.bits.index(bits) for bits in bitwidths]
        return math.fsum(self.matrix[range(len(columns)), columns])

    def weighed_points(self) -> tuple[WeighedPoint, ...]:
        """The measured points by their summed sensitivity."""
        return tuple(
            WeighedPoint(self.summed(point.bitwidths), point.perplexity, point.error)
            for point in self.points
        )


def default_sensitivity(shape: ModelShape, bitwidths: Sequence[int]) -> Matrix:
    """Estimate sensitivities [L, K]: noise grows with the squared step, (2^b - 1)^-2.

    They are 0 at 16 bit; `bitwidths` [K] ascend. They are normalised so that all layers at 4 bit
    sum to 1.
    """
    noise = np.array([0.0 if bits == FULL_BITS else _noise(bits) for bits in bitwidths])
    row = noise / (_noise(REFERENCE_BITS) * shape.layers)
    return np.tile(row, (shape.layers, 1))


def load_omega(path: str | Path, shape: ModelShape, bitwidths: Sequence[int]) -> Omega:
    """Read measured sensitivities (omega, LLM-PQ section 4.2) of `shape` at ascending `bitwidths`.

    `planner.quality.omega_file` has the forms of file that are read. SpecError for a pickle,
    another model's file, a wrong shape, a bitwidth that is missing, and entries that are negative,
    not finite or rise with the bitwidth.
    """
    path = Path(path)
    content = read_content(path)
    if not isinstance(content, Mapping):
        matrix = bare_array(content, path, shape.layers, bitwidths)
        check_falling(matrix, path, bitwidths)
        return Omega(matrix, str(path))
    if content and all(key.isdecimal() for key in content):
        bits, full = nested(content, path, shape.layers)
        content = {}
    else:
        bits, full = _named(content, path, shape)
    check_shape(full, path, (shape.layers, len(bits)))
    missing = [str(wanted) for wanted in bitwidths if wanted not in bits]
    if missing:
        raise SpecError(
            f"omega file {path} has no column for {', '.join(missing)} bits; has {bits}"
        )
    chosen = full[:, [bits.index(wanted) for wanted in bitwidths]]
    check_falling(chosen, path, bitwidths)
    measured = OmegaContent(tuple(bits), shape.fingerprint(), full)
    points = tuple(_points(content.get("points", []), path, measured))
    return Omega(chosen, f"{path}{_provenance_text(content.get('provenance'))}", points)


def save_omega(path: str | Path, content: OmegaContent) -> None:
    """Write an omega file; an existing one is replaced whole or not at all, else SpecError."""
    target = Path(path)
    if not target.name:
        raise SpecError(f"cannot write sensitivities to {str(path)!r}: name a file")
    text = json.dumps(asdict(content) | {"matrix": content.matrix.tolist()}, indent=1)
    try:
        write_whole(target, text + "\n")
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise SpecError(f"cannot write sensitivities to {target}: {error}") from error


def _noise(bits: int) -> float:
    return float((2**bits - 1) ** -2)


def _named(content: Mapping[str, Any], path: Path, shape: ModelShape) -> tuple[list[Any], Matrix]:
    """Read bits and matrix of the keyed form; SpecError where it belongs to another shape."""
    missing = [key for key in _KEYS if key not in content]
    if missing:
        raise SpecError(
            f"omega file {path} lacks {', '.join(missing)}; it needs {', '.join(_KEYS)}"
        )
    found = content["model_fingerprint"]
    if found != shape.fingerprint():
        raise SpecError(
            f"omega file {path} belongs to a model of shape {found}, but {shape.name} has shape "
            f"{shape.fingerprint()}; measure the sensitivity of this model"
        )
    bits = content["bits"]
    if not isinstance(bits, list) or len(set(map(str, bits))) != len(bits):
        raise SpecError(f"omega file {path}: bits is {bits!r}; a list, each once")
    return bits, as_matrix(content["matrix"], path)


def _points(items: object, path: Path, measured: OmegaContent) -> Iterator[WeighedPoint]:
    """Yield the measured points by their sensitivity; SpecError for one that cannot be used."""
    if not isinstance(items, list):
        raise SpecError(f"omega file {path}: points is no list of measured perplexities")
    layers = len(measured.matrix)
    for number, item in enumerate(items):
        given = item if isinstance(item, Mapping) else {}
        bits = given.get("bitwidths")
        figures = [given.get("perplexity"), given.get("error")]
        numbers = [f for f in figures if isinstance(f, int | float)]
        if (
            not isinstance(bits, list)
            or len(bits) != layers
            or not all(type(b) is int and b in measured.bits for b in bits)
            or len(numbers) != len(figures)
            or not (1 <= numbers[0] <= _MOST and 0 <= numbers[1] <= _MOST)
        ):
            raise SpecError(
                f"omega file {path}: point {number} needs bitwidths ({layers}, among "
                f"{list(measured.bits)}), perplexity (at least 1) and error (at least 0)"
            )
        yield WeighedPoint(measured.summed(bits), float(numbers[0]), float(numbers[1]))


def _provenance_text(provenance: object) -> str:
    """The provenance that plans repeat, in brackets."""
    given = provenance if isinstance(provenance, Mapping) else {}
    items = [
        f"{key.replace('_', ' ')} {given[key]}" if key.startswith("calibration") else given[key]
        for key in _REPEATED_ENTRIES
        if isinstance(given.get(key), str | int | float)
    ]
    texts = ("".join(filter(str.isprintable, str(item)))[:_LONGEST] for item in items)
    text = ", ".join(filter(None, texts))
    return f" ({text})" if text else ""
