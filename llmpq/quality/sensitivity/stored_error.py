"""The error of stored weights as a sensitivity: what kernels hold, and what a layer alone costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.sensitivity.indicator import TokenIds
from llmpq.quality.text_windows import Windows
from planner.model.finding import model_shape
from quant.backends.kernel_classes import BACKENDS
from quant.backends.selection import layer_rule
from quant.importance.file import Importance
from quant.importance.statistics import InputStatistics
from quant.linear import dtype_name
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.rounding.ways import Rounding
from quant.scheme import FULL_BITS, LinearShape
from quant.sensitivity.indicators import Matrix, Stored

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


@dataclass(frozen=True)
class LayerAlone:
    """A model in `folder` with one layer alone quantized, at 16 bit otherwise.

    `token_ids` `[sequences, length]`, of which the first `ALONE_TOKENS` are used; `bitwidths`
    ascend; `like` has the type to compute in and the rounding, by `importance`.
    """

    folder: Path
    token_ids: TokenIds
    bitwidths: tuple[int, ...]
    like: LayerScheme
    importance: Importance

    def divergence(
        self,
        device: torch.device,
        progress: ReportProgress | None = None,
        every_bitwidth: bool = False,
    ) -> Matrix:
        """The divergence in nats a token by layer and bitwidth, `[layers, K]`.

        Measured with this machine's kernels at the lowest of the bitwidths and at `MEASURED_ALONE`,
        or at `every_bitwidth`; NaN at others, 0 at 16 bit. `progress` counts layers over all
        passes. Raises as `evaluate`.
        """
        shape, length = model_shape(str(self.folder)), self.token_ids.shape[1]
        some = self.token_ids[: max(1, ALONE_TOKENS // length)]
        windows = Windows(some, np.full(len(some), length))
        found = np.full((shape.layers, len(self.bitwidths)), np.nan)
        found[:, [bits == FULL_BITS for bits in self.bitwidths]] = 0.0
        wanted = [
            (layer, column)
            for column in self._columns(every_bitwidth)
            for layer in range(shape.layers)
        ]
        itemsize = (self.like.dtype or torch.float32).itemsize
        at_once = max(1, _HIDDEN_BYTES // (some.size * shape.hidden_size * itemsize))
        passes = list(range(0, len(wanted), at_once))
        for number, first in enumerate(passes):
            part = wanted[first : first + at_once]
            subjects = [self._subject(shape.layers, None, FULL_BITS)]
            subjects += [self._subject(shape.layers, i, self.bitwidths[k]) for i, k in part]
            report = None
            if progress is not None:
                report = partial(_report, progress, number, len(passes))
            _, *results = evaluate(self.folder, windows, subjects, device, report)
            for (layer, column), result in zip(part, results, strict=True):
                found[layer, column] = max(0.0, result.divergence or 0.0)
        return found

    def _columns(self, every: bool) -> list[int]:
        """Columns of the bitwidths that are measured."""
        lowest = min(self.bitwidths)
        return [
            column
            for column, bits in enumerate(self.bitwidths)
            if bits < FULL_BITS and (every or bits in (lowest, MEASURED_ALONE))
        ]

    def _subject(self, layers: int, which: int | None, bits: int) -> Subject:
        """The model with layer `which` at `bits`."""
        own = replace(self.like, bits=bits)
        schemes = tuple(own if layer == which else self.like for layer in range(layers))
        return Subject(f"layer {which}", schemes, own.dtype, own.dtype, self.importance)


def _report(progress: ReportProgress, number: int, passes: int, done: int, layers: int) -> None:
    progress(number * layers + done, passes * layers)
