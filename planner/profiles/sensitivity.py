"""The sensitivity of each layer at each bitwidth: from an omega file, else from sizes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.model.shape import ModelShape
from planner.options import PlanOptions
from planner.plan.parts import DivergenceScale, PlannedImportance
from planner.plan.spec import PlanSpec
from planner.profiles.omega_file import (
    Matrix,
    as_matrix,
    bare_array,
    check_falling,
    check_shape,
    chosen_columns,
    nested,
    read_content,
)
from quant.common.errors import CheckpointError, SpecError
from quant.common.files import write_whole
from quant.rounding.importance_header import read_importance_header
from quant.scheme import FULL_BITS, NEAR_FULL_BITS

REFERENCE_BITS = 4
"""Default sensitivities of all layers at this bitwidth sum to 1."""

NATS = "nats a token"
"""The unit of sensitivities that files name where they have one."""

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

_ROUNDED = 1e-9
"""Relative error that sums and differences of sensitivities may have."""

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
    """Sensitivities `matrix` [L, K] of the bitwidths asked for, their source, and perplexities;
    `experts` [L, K]: the part of the layers' experts in them, None where it was not measured;
    `in_nats`: they are nats a token; `scale` reads sums of them so. `head`: what embedding and LM
    head lose by their bits.
    """

    matrix: Matrix
    source: str
    points: tuple[WeighedPoint, ...] = ()
    experts: Matrix | None = None
    in_nats: bool = False
    scale: DivergenceScale | None = None
    head: Mapping[int, float] = field(default_factory=dict)

    def with_head(self, bits: int) -> Omega:
        """These sensitivities where embedding and head have so many bits, whose loss stands with
        that of the last layer at each of its bits.
        """
        if bits == FULL_BITS:
            return self
        matrix = self.matrix.copy()
        matrix[-1] += self.head[bits]
        return replace(self, matrix=matrix)

    def beside_stored(self, shape: ModelShape, bitwidths: Sequence[int]) -> Omega:
        """What layers of a quantized `shape` lose beside what is stored, which is the reference:
        nothing at bits at which none of their weights is rounded.
        """
        kinds = map(shape.layer, range(shape.layers))
        rounds = np.array([[kind.rounds(bits) for bits in bitwidths] for kind in kinds])
        experts = None if self.experts is None else self.experts * rounds
        return replace(self, matrix=self.matrix * rounds, experts=experts)


@dataclass(frozen=True)
class OmegaContent:
    """The content of llmpq's own omega files; `matrix` [L, K], K ascending `bits`, and the part of
    `experts` in it, None in files of models without, and in those from before it was written;
    `head`: what embedding and LM head lose by their bits, None where it was not measured.
    """

    bits: tuple[int, ...]
    model_fingerprint: str
    matrix: Matrix
    provenance: Mapping[str, str | int | float] = field(default_factory=dict)
    points: tuple[MeasuredPoint, ...] = ()
    experts: Matrix | None = None
    head: Mapping[int, float] | None = None

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
    weights, of experts those that a token asks: 0 at 16 bit, in all 1 at 4.
    """
    noise = np.array([0.0 if bits == FULL_BITS else _noise(bits) for bits in bitwidths])
    weights = [_asked_weights(shape.layer(layer)) for layer in range(shape.layers)]
    shares = np.array([[sum(weights) / own] for own in weights])
    return np.asarray(noise / (_noise(REFERENCE_BITS) * shares))


def _asked_weights(shape: ModelShape) -> int:
    per_token = 0 if shape.experts is None else shape.experts.per_token
    experts = per_token * sum(linear.parameters for linear in shape.expert_linears)
    return experts + sum(linear.parameters for linear in shape.layer_linears)


HEAD_SHARE = 0.7
"""What embedding and LM head lose at 8 bit, as a share of what all layers lose at 8 bit: of SmolLM2
and the demo model the geometric mean, by `benchmarks.quantization.head`."""


HEAD_TIMES = {6: 4.5, NEAR_FULL_BITS: 1.0}
"""How many times as much as at 8 bit they lose: as layers that are rounded to the nearest code, by
`benchmarks.quantization.forecast --anchors`."""


def assumed_head(matrix: Matrix, bitwidths: Sequence[int]) -> dict[int, float]:
    """What embedding and head lose by their bits, where it was not measured, by sensitivities of
    layers [L, K] at 8 bit, or at the bits next to them.
    """
    below = [bits for bits in bitwidths if bits != FULL_BITS]
    if not below:
        return _head_from(0.0)
    nearest = max(below)
    summed = float(matrix[:, list(bitwidths).index(nearest)].sum())
    return _head_from(HEAD_SHARE * summed * _noise(NEAR_FULL_BITS) / _noise(nearest))


def _head_from(eight: float, measured: Mapping[int, float] | None = None) -> dict[int, float]:
    """What ends lose at all of their bits by what they lose at 8, unless that was `measured`."""
    return {bits: times * eight for bits, times in HEAD_TIMES.items()} | dict(measured or {})


def load_omega(path: str | Path, shape: ModelShape, bitwidths: Sequence[int]) -> Omega:
    """Read measured sensitivities (omega, LLM-PQ section 4.2) at ascending `bitwidths` in three
    forms: llmpq's own, a bare array [L][K] (JSON, `.npy`), `{layer: {bits: value}}`. SpecError for
    a pickle (which runs code), another model's file, and wrong entries.
    """
    path = Path(path)
    content = read_content(path)
    if not isinstance(content, Mapping):
        bits, full = bare_array(content, path, shape.layers, bitwidths)
        content = {}
    elif content and all(key.isdecimal() for key in content):
        bits, full = nested(content, path, shape.layers)
        content = {}
    else:
        bits, full = _named(content, path, shape)
    check_shape(full, path, (shape.layers, len(bits)))
    experts = _experts(content, path, shape, full)
    rest = full if experts is None else full - experts
    chosen = chosen_columns(rest, bits, bitwidths, path)
    if experts is not None:
        experts = chosen_columns(experts, bits, bitwidths, path)
        chosen = chosen + experts
    check_falling(chosen, path, bitwidths)
    if experts is not None:
        check_falling(experts, f"{path}, field experts", bitwidths)
        rounded = _ROUNDED * float(chosen.max())
        check_falling(chosen - experts, f"{path}, matrix - experts", bitwidths, rounded)
    measured = OmegaContent(tuple(bits), shape.fingerprint(), full)
    points = tuple(_points(content.get("points", []), path, measured))
    told = content.get("provenance")
    in_nats = isinstance(told, Mapping) and told.get("unit") == NATS
    source = f"{path}{_provenance_text(told)}"
    unsaid = [str(each) for each in bitwidths if each not in bits]
    if unsaid:
        source += f"; {' and '.join(unsaid)} bit between its 4 and 8"
    head = _head(content, path, full, bits)
    return Omega(chosen, source, points, experts, in_nats, head=head)


def save_omega(path: str | Path, content: OmegaContent) -> None:
    target = Path(path)
    if not target.name:
        raise SpecError(f"cannot write sensitivities to {str(path)!r}: name a file")
    held = {key: value for key, value in asdict(content).items() if value is not None}
    text = json.dumps(held, indent=1, default=np.ndarray.tolist)
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


def _experts(
    content: Mapping[str, Any], path: Path, shape: ModelShape, full: Matrix
) -> Matrix | None:
    """The part of experts in the sensitivities `full`; None: the file does not tell it."""
    if content.get("experts") is None:
        return None
    place = f"{path}, field experts"
    experts = as_matrix(content["experts"], place)
    check_shape(experts, place, full.shape)
    most = full * (1 + _ROUNDED)
    most[[shape.layer(layer).experts is None for layer in range(shape.layers)]] = 0.0
    if (experts > most).any():
        layer, column = np.argwhere(experts > most)[0]
        raise SpecError(
            f"omega file {place}: layer {layer}, column {column} is {experts[layer, column]}, more "
            f"than experts of that layer can lose ({most[layer, column]:.6g}); measure again with "
            "llmpq indicator, or leave experts out"
        )
    return np.minimum(experts, full)


def _head(
    content: Mapping[str, Any], path: Path, full: Matrix, bits: Sequence[int]
) -> dict[int, float]:
    found = content.get("head")
    if found is None:
        return assumed_head(full, bits)
    if not isinstance(found, Mapping):  # of files before there were heads of 6 bit
        found = {str(NEAR_FULL_BITS): found}
    known = list(map(str, HEAD_TIMES))
    if str(NEAR_FULL_BITS) not in found or not set(found) <= set(known):
        raise SpecError(
            f"omega file {path}: head has {', '.join(found) or 'no'} bits; it is what embedding "
            f"and LM head lose at {' and '.join(known)} bit, or leave it out"
        )
    for own in found.values():
        if isinstance(own, bool) or not isinstance(own, int | float) or not 0 <= own <= _MOST:
            raise SpecError(
                f"omega file {path}: head is {own!r:.40}; a number of at least 0, what embedding "
                "and LM head lose, or leave it out"
            )
    losses = {int(key): float(own) for key, own in found.items()}
    return _head_from(losses[NEAR_FULL_BITS], losses)


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
    if not plan.needs_importance(shape):
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
            f"shape {shape.fingerprint()}; leave it out, and stages measure their own, or measure "
            "that of this model with llmpq indicator"
        )
    return PlannedImportance(found.fingerprint, str(path.expanduser().absolute()))
