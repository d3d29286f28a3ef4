"""The error of stored weights as a sensitivity: what kernels hold, and what a layer alone costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from llmpq.quality.indicator import TokenIds
from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import Windows
from planner.model.finding import model_shape
from quant.backends.kernel_classes import BACKENDS
from quant.backends.selection import layer_rule
from quant.importance.statistics import InputStatistics
from quant.linear import dtype_name
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.rounding import Rounding
from quant.scheme import FULL_BITS, LinearShape
from quant.sensitivity.errors import Stored
from quant.sensitivity.indicators import Matrix

ALONE_TOKENS = 1024
"""Most tokens on which layers are quantized one at a time: with so few, the divergence of a layer
is known to some 5 %."""

MEASURED_ALONE = 8
"""A bitwidth that is measured in each layer beside the lowest one: its kernels may round what they
multiply too, of which the stored weight tells nothing."""

_HIDDEN_BYTES = 2 << 30
"""Most memory for the hidden states of the models that differ in one layer."""


def stored_here(rounding: str, compute: Compute) -> Stored:
    """The weights that this machine's kernels multiply with, rounded by `rounding`."""

    def stored(name: str, weight: Tensor, bits: int, inputs: InputStatistics) -> Tensor:
        shape = LinearShape(weight.shape[1], weight.shape[0])
        rule = layer_rule(compute.processor, bits, shape, dtype_name(compute.dtype))
        return BACKENDS[rule.name].represent(weight, Rounding.of_tensor(rounding, name), inputs)

    return stored


def divergence_alone(
    folder: Path,
    token_ids: TokenIds,
    bitwidths: tuple[int, ...],
    rounding: str,
    compute: Compute,
    progress: ReportProgress | None = None,
) -> Matrix:
    """Divergence `[layers, K]` in nats a token of the model with one layer alone at a bitwidth.

    Measured with this machine's kernels at the lowest of the ascending `bitwidths` and at
    `MEASURED_ALONE`, on the first of `token_ids` `[sequences, length]` up to `ALONE_TOKENS`; NaN at
    others, 0 at 16 bit. `progress` counts layers over all passes. Raises as `evaluate`.
    """
    length = token_ids.shape[1]
    some = token_ids[: max(1, ALONE_TOKENS // length)]
    windows = Windows(some, np.full(len(some), length))
    shape = model_shape(str(folder))
    found = np.full((shape.layers, len(bitwidths)), np.nan)
    found[:, [bits == FULL_BITS for bits in bitwidths]] = 0.0
    columns = [
        k for k, b in enumerate(bitwidths) if b < FULL_BITS and (not k or b == MEASURED_ALONE)
    ]
    wanted = [(layer, column) for column in columns for layer in range(shape.layers)]
    at_once = max(1, _HIDDEN_BYTES // (some.size * shape.hidden_size * compute.dtype.itemsize))
    passes = -(-len(wanted) // at_once)
    for number in range(passes):
        part = wanted[number * at_once : (number + 1) * at_once]
        subjects = [_alone(shape.layers, -1, FULL_BITS, rounding, compute)]
        subjects += [
            _alone(shape.layers, layer, bitwidths[column], rounding, compute)
            for layer, column in part
        ]
        before = number * shape.layers

        def report(done: int, layers: int, before: int = before) -> None:
            if progress is not None:
                progress(before + done, passes * layers)

        _, *results = evaluate(folder, windows, subjects, compute.device, report)
        for (layer, column), result in zip(part, results, strict=True):
            found[layer, column] = max(0.0, result.divergence or 0.0)
    return found


def _alone(layers: int, which: int, bits: int, rounding: str, compute: Compute) -> Subject:
    """The model at 16 bit but for layer `which`."""
    schemes = [
        LayerScheme(bits if layer == which else FULL_BITS, dtype=compute.dtype, rounding=rounding)
        for layer in range(layers)
    ]
    return Subject(f"layer {which}", tuple(schemes), compute.dtype, compute.dtype)
