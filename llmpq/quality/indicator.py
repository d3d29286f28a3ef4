"""What each layer loses by quantization, measured with one decoder layer in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from actors.stage.layer_stream import LayerStream
from llmpq.quality.layer_inputs import AskedExperts, asked_weights, observed
from llmpq.quality.perplexity import ReportProgress
from llmpq.quality.scoring import Subject, evaluate
from llmpq.quality.text_windows import TokenIds, Windows
from planner.model.finding import model_shape
from quant.backends.kernel_classes import BACKENDS
from quant.backends.table import rule_for
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.linear import dtype_name
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.rounding.importance import (
    Importance,
    InputStatistics,
    LargestKeys,
    LayerImportance,
    LinearInputs,
)
from quant.rounding.indicators import Indicator, LayerStatistics, Matrix, Stored
from quant.rounding.ways import Rounding
from quant.scheme import FULL_BITS, HEAD_BITWIDTHS, LinearShape


def measure_indicators(
    checkpoint: Checkpoint | str | Path,
    token_ids: TokenIds,
    indicators: Mapping[str, Indicator],
    bitwidths: Sequence[int],
    compute: Compute,
    progress: ReportProgress | None = None,
) -> tuple[dict[str, Matrix], list[LayerImportance]]:
    """Each indicator as `[2, layers, K]` by its name, of the layers' own linears and of experts,
    and the importance of each layer, from one pass of the text through the model.

    `token_ids` `[sequences, length]`, without padding. Raises what `LayerStream` raises, and
    `CheckpointError` for layers whose inputs or indicators are not finite.
    """
    stream = LayerStream(checkpoint, compute)
    hidden = stream.embed(torch.from_numpy(token_ids))
    rows: dict[str, list[Matrix]] = {name: [] for name in indicators}
    importance: list[LayerImportance] = []
    for index in range(stream.layers):
        statistics = {name: indicator() for name, indicator in indicators.items()}
        try:
            found, own = _layer_rows(stream, index, hidden, statistics, bitwidths)
        except CheckpointError as error:
            raise CheckpointError(f"layer {index}: {error}") from error
        importance.append(own)
        for name, row in found.items():
            rows[name].append(row)
        if progress is not None:
            progress(index + 1, stream.layers)
    importance[-1] = importance[-1].with_head(stream.head_inputs(hidden))
    return {name: np.stack(parts, axis=1) for name, parts in rows.items()}, importance


def _layer_rows(
    stream: LayerStream,
    index: int,
    hidden: Tensor,
    statistics: Mapping[str, LayerStatistics],
    bitwidths: Sequence[int],
) -> tuple[dict[str, Matrix], LayerImportance]:
    """Send the text through the layer and the weights through every indicator.

    The layer is gone when this returns, before the next one is loaded.
    """
    layer = stream.layer(index, hidden)
    inputs, keys = LinearInputs(), LargestKeys()
    experts = AskedExperts(layer, list(statistics.values()))
    last = experts.observe_all_but_last()
    with (
        observed(layer.linears, list(statistics.values())) as source_of,
        inputs.watching(layer.linears, layer.experts),
        experts.shown(last),
    ):
        layer.advance(keys.see)
    importance = LayerImportance(inputs.results(), keys.result())
    weights = {name: linear.weight.detach() for name, linear in layer.linears.items()}
    found = {}
    for name, own in statistics.items():
        asked = asked_weights(stream, layer, experts.asked, importance.inputs)
        both = own.omega(weights, source_of, bitwidths), own.omega_of_experts(asked, bitwidths)
        found[name] = np.array(both)
    return found, importance


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
        rule = rule_for(compute.processor, bits, shape, dtype_name(compute.dtype))
        return BACKENDS[rule.name].represent(weight, Rounding.of_tensor(rounding, name, inputs))

    return stored


@dataclass(frozen=True)
class LayerAlone:
    """A model with the experts of one layer, or all else of it, quantized alone.

    `token_ids` `[sequences, length]`, of which the first `ALONE_TOKENS` are used; `bitwidths`
    ascend; `like` has the type to compute in and the rounding, by `importance`.
    """

    checkpoint: Checkpoint
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
        """The divergence in nats a token, `[2, layers, K]` as of `measure_indicators`.

        Measured with this machine's kernels at the lowest of the bitwidths and at `MEASURED_ALONE`,
        or at `every_bitwidth`; NaN at others, 0 at 16 bit and for experts that are not there.
        `progress` counts layers over all passes. Raises as `evaluate`.
        """
        shape, windows = model_shape(str(self.checkpoint.folder)), self._windows
        found = np.full((2, shape.layers, len(self.bitwidths)), np.nan)
        found[..., [bits == FULL_BITS for bits in self.bitwidths]] = 0.0
        dense = [shape.layer(layer).experts is None for layer in range(shape.layers)]
        found[1, dense] = 0.0
        measured = self.bitwidths if every_bitwidth else (min(self.bitwidths), MEASURED_ALONE)
        wanted = [
            (part, layer, column)
            for column, bits in enumerate(self.bitwidths)
            if bits in measured
            for part, layer in np.argwhere(np.isnan(found[..., column])).tolist()
        ]
        itemsize = (self.like.dtype or torch.float32).itemsize
        hidden = windows.token_ids.size * shape.hidden_size
        at_once = max(1, _HIDDEN_BYTES // (hidden * itemsize))
        passes = list(range(0, len(wanted), at_once))
        for number, first in enumerate(passes):
            cells = wanted[first : first + at_once]
            subjects = [self._subject([self.like] * shape.layers)]
            for part, layer, column in cells:
                bits = [FULL_BITS, FULL_BITS]
                bits[part] = self.bitwidths[column]
                schemes = [self.like] * shape.layers
                schemes[layer] = replace(self.like, bits=bits[0], expert_bits=bits[1])
                subjects.append(self._subject(schemes))
            report = progress and partial(_report, progress, number, len(passes))
            _, *results = evaluate(self.checkpoint, windows, subjects, device, report)
            for cell, result in zip(cells, results, strict=True):
                found[tuple(cell)] = max(0.0, result.divergence or 0.0)
        return found

    def divergence_of_ends(self, device: torch.device) -> dict[int, float]:
        """The divergence in nats a token with embedding and LM head alone, by their bits."""
        layers = [self.like] * model_shape(str(self.checkpoint.folder)).layers
        coded = HEAD_BITWIDTHS[:-1]
        subjects = [self._subject(layers, bits) for bits in (FULL_BITS, *coded)]
        _, *found = evaluate(self.checkpoint, self._windows, subjects, device)
        return {b: max(0.0, own.divergence or 0.0) for b, own in zip(coded, found, strict=True)}

    @property
    def _windows(self) -> Windows:
        length = self.token_ids.shape[1]
        some = self.token_ids[: max(1, ALONE_TOKENS // length)]
        return Windows(some, np.full(len(some), length))

    def _subject(self, schemes: Sequence[LayerScheme], head_bits: int = FULL_BITS) -> Subject:
        ends = LayerScheme(head_bits, dtype=self.like.dtype)
        return Subject("layer alone", tuple(schemes), ends, ends, self.importance)


def _report(progress: ReportProgress, number: int, passes: int, done: int, layers: int) -> None:
    progress(number * layers + done, passes * layers)
