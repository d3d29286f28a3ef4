"""The sensitivity of each layer at each bitwidth: from an omega file, else from sizes."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from tokenize import TokenError  # raised for a header that numpy takes for one of Python 2
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.plan.parts import PlannedImportance
from planner.plan.spec import PlanSpec
from quant.common.errors import CheckpointError, SpecError
from quant.common.files import write_whole
from quant.rounding.importance_header import read_importance_header
from quant.scheme import BITWIDTHS, FULL_BITS

Matrix = npt.NDArray[np.float64]

_NPY_MAGIC = b"\x93NUMPY"
_PICKLE_MAGIC = b"\x80"
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_NAMES = (".pkl", ".pickle", ".pt", ".pth", ".npz")
_NO_ARRAY = (ValueError, TypeError, OverflowError, EOFError, SyntaxError, TokenError)
"""Errors that numpy raises for headers that it cannot read, or of impossible arrays."""

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
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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


def bare_array(rows: object, path: Path, layers: int, bitwidths: Sequence[int]) -> Matrix:
    """Take the columns `[layers, K]` of a bare array: as many as bitwidths, or those of 3, 4, 8, 16
    bit; the prototype sorts them as text (16, 3, 4, 8), which shows as a layer loses next to
    nothing at 16 bit.
    """
    matrix = as_matrix(rows, path)
    columns: Sequence[int] = bitwidths
    if matrix.ndim == 2 and matrix.shape[1] == len(BITWIDTHS):
        columns = BITWIDTHS
        by_text = sorted(BITWIDTHS, key=str)
        if not is_falling(matrix) and is_falling(
            matrix[:, [by_text.index(bits) for bits in BITWIDTHS]]
        ):
            columns = by_text
    check_shape(matrix, path, (layers, len(columns)))
    return matrix[:, [columns.index(bits) for bits in bitwidths]]


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


def as_matrix(rows: object, path: Path) -> Matrix:
    try:
        return np.array(rows, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"omega file {path} holds no matrix of numbers: {error}") from error


def check_shape(matrix: Matrix, path: Path, expected: tuple[int, int]) -> None:
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


def check_falling(matrix: Matrix, path: Path, bitwidths: Sequence[int]) -> None:
    for column, (low, high) in enumerate(pairwise(bitwidths)):
        rising = np.flatnonzero(matrix[:, column + 1] > matrix[:, column])
        if rising.size:
            raise SpecError(
                f"omega file {path}: layer {rising[0]} loses more at {high} than at {low} bits; "
                "sensitivity cannot rise with the bitwidth"
            )


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
    """The perplexity with `bitwidths` [layers]; `error` of its distance to 16 bit."""

    bitwidths: tuple[int, ...]
    perplexity: float
    error: float


@dataclass(frozen=True)
class WeighedPoint:
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
        columns = [self.bits.index(bits) for bits in bitwidths]
        return math.fsum(self.matrix[range(len(columns)), columns])

    def weighed_points(self) -> tuple[WeighedPoint, ...]:
        return tuple(
            WeighedPoint(self.summed(point.bitwidths), point.perplexity, point.error)
            for point in self.points
        )


def default_sensitivity(shape: ModelShape, bitwidths: Sequence[int]) -> Matrix:
    """Estimate sensitivities [L, K] as squared steps, (2^b - 1)^-2, of each layer's share of all
    weights: 0 at 16 bit, in all 1 at 4.
    """
    noise = np.array([0.0 if bits == FULL_BITS else _noise(bits) for bits in bitwidths])
    weights = [shape.layer(layer).layer_linear_parameters for layer in range(shape.layers)]
    shares = np.array([[sum(weights) / own] for own in weights])
    return np.asarray(noise / (_noise(REFERENCE_BITS) * shares))


def load_omega(path: str | Path, shape: ModelShape, bitwidths: Sequence[int]) -> Omega:
    """Read measured sensitivities (omega, LLM-PQ section 4.2) at ascending `bitwidths` in three
    forms: llmpq's own, a bare array [L][K] (JSON, `.npy`), `{layer: {bits: value}}`. SpecError for
    a pickle (which runs code), another model's file, and wrong entries.
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
    given = provenance if isinstance(provenance, Mapping) else {}
    items = [
        f"{key.replace('_', ' ')} {given[key]}" if key.startswith("calibration") else given[key]
        for key in _REPEATED_ENTRIES
        if isinstance(given.get(key), str | int | float)
    ]
    texts = ("".join(filter(str.isprintable, str(item)))[:_LONGEST] for item in items)
    text = ", ".join(filter(None, texts))
    return f" ({text})" if text else ""


FILE_ENTRY = "importance_file"
FINGERPRINT_ENTRY = "importance"
"""Entries of an omega file's provenance; the file is named as seen from the omega file's folder."""


def planned_importance(
    plan: PlanSpec, options: PlanOptions, shape: ModelShape
) -> PlannedImportance | None:
    """What `plan` rounds by; None: nothing, or what stages measure when they load."""
    if not plan.needs_importance(shape.stored is not None):
        return None
    if options.importance is not None:
        return _of_file(Path(options.importance), shape)
    if options.omega_file is None:
        return None
    content = read_content(Path(options.omega_file))
    told = content.get("provenance") if isinstance(content, dict) else None
    if not isinstance(told, dict) or FINGERPRINT_ENTRY not in told:
        return None
    path = Path(options.omega_file).absolute().parent / str(told.get(FILE_ENTRY, ""))
    if not path.is_file():
        raise SpecError(
            f"omega file {options.omega_file} was measured with the importance "
            f"{told[FINGERPRINT_ENTRY]!s:.40} in {path}, which is not there; put it there, name it "
            "with --importance, or measure both again with llmpq indicator"
        )
    return _of_file(path, shape)


def _of_file(path: Path, shape: ModelShape) -> PlannedImportance:
    try:
        found = read_importance_header(path)
    except CheckpointError as error:
        raise SpecError(str(error)) from error
    if found.shape != shape.fingerprint():
        raise SpecError(
            f"importance {path} belongs to a model of shape {found.shape}, but {shape.name} has "
            f"shape {shape.fingerprint()}; measure that of this model with llmpq indicator"
        )
    return PlannedImportance(found.fingerprint, str(path.expanduser().absolute()))
