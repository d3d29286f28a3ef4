"""How much quality each layer loses at each bitwidth: from an omega file, else from sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.model_shape import ModelShape
from quant.errors import SpecError

REFERENCE_BITS = 4  # all layers at this bitwidth sum to 1
FULL_BITS = 16
_KEYS = ("bits", "model_fingerprint", "matrix")

Matrix = npt.NDArray[np.float64]


def default_sensitivity(shape: ModelShape, bitwidths: Sequence[int]) -> Matrix:
    """Sensitivity [L, K] without measurement: noise grows with the squared step, (2^b - 1)^-2.

    None at 16 bit; `bitwidths` [K] ascending. Normalised so that all layers at 4 bit sum to 1.
    """
    noise = np.array([0.0 if bits == FULL_BITS else _noise(bits) for bits in bitwidths])
    row = noise / (_noise(REFERENCE_BITS) * shape.layers)
    return np.tile(row, (shape.layers, 1))


def load_sensitivity(path: str | Path, shape: ModelShape, bitwidths: Sequence[int]) -> Matrix:
    """Measured sensitivities (omega, LLM-PQ section 4.2) of `shape` at `bitwidths`, from JSON.

    Either `{"bits": [...], "model_fingerprint": "...", "matrix": [L][K]}` or the bare array [L][K]
    whose columns are `bitwidths`. SpecError for another model's file, a wrong shape, a bitwidth
    that is missing, and entries that are negative, not finite or rise with the bitwidth.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SpecError(f"omega file {path} cannot be read as JSON: {error}") from error
    columns: Sequence[Any] = tuple(bitwidths)
    rows = content
    if isinstance(content, Mapping):
        columns, rows = _named(content, path, shape)
    matrix = _matrix(rows, path, (shape.layers, len(columns)))
    missing = [str(bits) for bits in bitwidths if bits not in columns]
    if missing:
        raise SpecError(
            f"omega file {path} has no column for {', '.join(missing)} bits; has {columns}"
        )
    chosen = matrix[:, [columns.index(bits) for bits in bitwidths]]
    _check_falls(chosen, path, bitwidths)
    return chosen


def save_sensitivity(
    path: str | Path, matrix: Matrix, bitwidths: Sequence[int], model_fingerprint: str
) -> None:
    """Write `matrix` [L, K] so that `load_sensitivity` takes it."""
    content = {
        "bits": list(bitwidths),
        "model_fingerprint": model_fingerprint,
        "matrix": matrix.tolist(),
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _noise(bits: int) -> float:
    return float((2**bits - 1) ** -2)


def _named(
    content: Mapping[str, Any], path: Path, shape: ModelShape
) -> tuple[Sequence[Any], object]:
    """Bits and rows of the keyed form, if it belongs to `shape`."""
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
    if not isinstance(content["bits"], list) or len(set(map(str, content["bits"]))) != len(
        content["bits"]
    ):
        raise SpecError(f"omega file {path}: bits is {content['bits']!r}; a list, each once")
    return content["bits"], content["matrix"]


def _matrix(rows: object, path: Path, expected: tuple[int, int]) -> Matrix:
    try:
        matrix = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SpecError(f"omega file {path} holds no matrix of numbers: {error}") from error
    if matrix.shape != expected:
        raise SpecError(
            f"omega file {path} holds an array {list(matrix.shape)}; {expected[0]} layers by "
            f"{expected[1]} bitwidths are needed"
        )
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        layer, column = np.argwhere(~np.isfinite(matrix) | (matrix < 0))[0]
        raise SpecError(
            f"omega file {path}: layer {layer}, column {column} is {matrix[layer, column]}; "
            "sensitivities are finite and not negative"
        )
    return matrix


def _check_falls(matrix: Matrix, path: Path, bitwidths: Sequence[int]) -> None:
    for column, (low, high) in enumerate(pairwise(bitwidths)):
        rising = np.flatnonzero(matrix[:, column + 1] > matrix[:, column])
        if rising.size:
            raise SpecError(
                f"omega file {path}: layer {rising[0]} loses more at {high} than at {low} bits; "
                "sensitivity cannot rise with the bitwidth"
            )
