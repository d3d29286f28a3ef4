"""Omega files as arrays: JSON and `.npy` of any hand, what their numbers must be, and refusals."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError  # raised for a header that numpy takes for one of Python 2
from typing import Any

import numpy as np
import numpy.typing as npt

from quant.common.errors import SpecError
from quant.common.json_text import loads
from quant.scheme import BITWIDTHS

Matrix = npt.NDArray[np.float64]

_NPY_MAGIC = b"\x93NUMPY"
_PICKLE_MAGIC = b"\x80"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_NAMES = (".pkl", ".pickle", ".pt", ".pth", ".npz")
_NO_ARRAY = (ValueError, TypeError, OverflowError, EOFError, SyntaxError, TokenError)
"""Errors that numpy raises for headers that it cannot read, or of impossible arrays."""

PROTOTYPE_BITS = (3, 4, 8, 16)
"""The columns of LLM-PQ's prototype."""

ENDS, BETWEEN = (4, 8), {5: 0.37, 6: 0.68}
"""Where 5 and 6 bit lie between 4 and 8 on a logarithmic scale: by the divergence of SmolLM2 0.38
and 0.67 of the way, of the demo model 0.36 and 0.69 (`benchmarks.quantization.forecast`)."""

LEAST = 0.0035
"""What 8 bit loses at the least of what 4 bit loses, as by their steps, for files that say 0."""

_MOST_DIGITS = 2
"""Most digits of a bitwidth."""

_MOST_BYTES = 1 << 26
"""Largest file, 64 MiB: ten thousand layers and as many measured points take less than 10 MiB."""


def read_content(path: Path) -> Any:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise SpecError(
                f"omega file {path} has {path.stat().st_size} bytes; sensitivities take a few "
                "thousand"
            )
        with path.open("rb") as file:
            head = file.read(len(_NPY_MAGIC))
        if head == _NPY_MAGIC:
            return _read_npy(path)
        if head.startswith((_PICKLE_MAGIC, _ZIP_MAGIC)) or path.suffix in _PICKLE_NAMES:
            raise SpecError(_refusal(path))
        return loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"omega file {path} cannot be read as JSON: {error}") from error


def _read_npy(path: Path) -> npt.NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (*_NO_ARRAY, OSError) as error:
        raise SpecError(
            f"omega file {path} cannot be read as an array of numbers: {error}"
        ) from error
    if array.dtype.kind not in "fiu":
        raise SpecError(f"omega file {path} holds {array.dtype} values; numbers are needed")
    found: npt.NDArray[Any] = array
    return found


def _refusal(path: Path) -> str:
    return (
        f"omega file {path} is a pickle or an archive, which can run code when it is read; where "
        'you trust it, convert it: python -c "import json, pickle, sys; '
        "print(json.dumps(pickle.load(open(sys.argv[1], 'rb')).tolist()))\" "
        f"{shlex.quote(path.name)} > omega.json"
    )


def bare_array(
    rows: object, path: Path, layers: int, bitwidths: Sequence[int]
) -> tuple[Sequence[int], Matrix]:
    """The columns `[layers, K]` of a bare array, and of which bits they are: as many as bitwidths,
    or those of the prototype, or all; the prototype sorts them as text (16, 3, 4, 8), which shows
    as a layer loses next to nothing at 16 bit.
    """
    matrix = as_matrix(rows, path)
    known = (bitwidths, PROTOTYPE_BITS, BITWIDTHS)
    columns = next((each for each in known if matrix.shape[1:] == (len(each),)), bitwidths)
    check_shape(matrix, path, (layers, len(columns)))
    by_text = sorted(columns, key=str)
    in_order = matrix[:, [by_text.index(bits) for bits in columns]]
    return columns, in_order if is_falling(in_order) and not is_falling(matrix) else matrix


def chosen_columns(
    matrix: Matrix, bits: Sequence[int], wanted: Sequence[int], path: Path
) -> Matrix:
    """The columns of the `wanted` bits; those of 5 and 6 that there are not lie between 4 and 8."""
    between = BETWEEN if all(each in bits for each in ENDS) else {}
    missing = [str(each) for each in wanted if each not in bits and each not in between]
    if missing:
        raise SpecError(
            f"omega file {path} has no column for {', '.join(missing)} bits; has {list(bits)}"
        )
    return np.column_stack(
        [
            matrix[:, bits.index(each)] if each in bits else _between(matrix, bits, BETWEEN[each])
            for each in wanted
        ]
    )


def _between(matrix: Matrix, bits: Sequence[int], share: float) -> Matrix:
    low, high = (matrix[:, bits.index(each)] for each in ENDS)
    return np.asarray(low ** (1 - share) * np.maximum(high, LEAST * low) ** share)


def nested(content: Mapping[str, Any], path: Path, layers: int) -> tuple[list[int], Matrix]:
    wanted = [str(layer) for layer in range(layers)]
    if sorted(content) != sorted(wanted):
        raise SpecError(
            f"omega file {path} names {len(content)} layers; 0 to {layers - 1} are needed"
        )
    first = content["0"]
    if not isinstance(first, Mapping) or not all(
        key.isdecimal() and len(key) <= _MOST_DIGITS for key in first
    ):
        raise SpecError(f"omega file {path}: layer 0 is no mapping of bitwidths to numbers")
    rows = []
    for layer in wanted:
        row = content[layer]
        if not isinstance(row, Mapping) or set(row) != set(first):
            raise SpecError(f"omega file {path}: layer {layer} has other bitwidths than layer 0")
        rows.append([row[key] for key in first])
    return [int(key) for key in first], as_matrix(rows, path)


def as_matrix(rows: object, path: Path | str) -> Matrix:
    try:
        return np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"omega file {path} holds no matrix of numbers: {error}") from error


def check_shape(matrix: Matrix, path: Path | str, expected: tuple[int, int]) -> None:
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


def is_falling(matrix: Matrix) -> bool:
    return bool((np.diff(matrix, axis=1) <= 0).all())


def check_falling(
    matrix: Matrix, path: Path | str, bitwidths: Sequence[int], slack: float = 0.0
) -> None:
    for column, (low, high) in enumerate(pairwise(bitwidths)):
        rising = np.flatnonzero(matrix[:, column + 1] > matrix[:, column] + slack)
        if rising.size:
            raise SpecError(
                f"omega file {path}: layer {rising[0]} loses more at {high} than at {low} bits; "
                "sensitivity cannot rise with the bitwidth"
            )
