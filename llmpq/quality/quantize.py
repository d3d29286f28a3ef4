"""A checkpoint with the bits of a plan, calibrated with GPTQ, one decoder layer at a time.

Linears are quantized in the order in which a layer runs them, each on inputs that come from those
before it as they are quantized, in this layer and in earlier ones; then experts, each on the inputs
of the tokens that ask it. Beside the layer, memory holds the hidden states of the calibration text
and, for the linear at hand, its X^T X of inputs x inputs in float32 (three times while it is
inverted), of experts as many as `SQUARES_BYTES` allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from actors.stage.layer_stream import LayerStream, StreamedLayer, stream_layers
from actors.stage.partial_model import architecture_of
from llmpq.quality.layer_inputs import SQUARES_BYTES, observed
from llmpq.quality.perplexity import ReportProgress
from quant.checkpoint.codes import GroupCodes
from quant.checkpoint.formats.writing import ANY_EXPERT, WrittenLayout
from quant.checkpoint.model_folder import check_target, copy_settings, write_files, writing
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_config import GPTQ_METHOD
from quant.common.errors import CheckpointError, SpecError
from quant.experts import QuantizedExperts, expert_shapes
from quant.loading.emulated_kernels import Compute
from quant.loading.expert_tensors import FUSED
from quant.rounding.encoding import Writer
from quant.rounding.gptq import gptq
from quant.rounding.gram import Gram
from quant.scheme import FULL_BITS, GptqOptions


@dataclass(frozen=True, eq=False)
class Quantization:
    """Options of quantizing a checkpoint: `bitwidths`, one a layer, calibrated on a text, and those
    of its experts, where they are others. `method`: the format, a name in `METHODS`; `beside`:
    texts that are written as files of these names too.

    `token_ids` `[sequences, length]`: the calibration text, without padding.
    """

    bitwidths: Sequence[int]
    token_ids: Tensor
    compute: Compute
    gptq: GptqOptions
    expert_bitwidths: Sequence[int] = ()
    method: str = GPTQ_METHOD
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Quantized:
    """The bytes of a checkpoint's tensors, and how many weights of experts too few inputs asked."""

    tensor_bytes: int
    seldom_asked: int


def quantize_checkpoint(
    source: Checkpoint | Path,
    target: Path,
    wanted: Quantization,
    overwrite: bool = False,
    progress: ReportProgress | None = None,
) -> Quantized:
    """Quantize the checkpoint `source` into the folder `target`, which appears when complete.

    Raises `InputError` if `target` exists (unless `overwrite`) or
    cannot be written, `SpecError` for bits or text that cannot be used, `CheckpointError` for
    unusable weights.
    """
    checkpoint = Checkpoint.of(source)
    check_target(checkpoint.place, target, overwrite)
    if not checkpoint.is_original:
        raise SpecError(
            f"{checkpoint.place} is quantized already; give the original 16-bit checkpoint"
        )
    stream = LayerStream(checkpoint, wanted.compute)
    bitwidths = wanted.bitwidths
    if len(bitwidths) != stream.layers:
        raise SpecError(f"{len(bitwidths)} bitwidths for {stream.layers} layers; give one a layer")
    heads = architecture_of(stream.config).head_names
    expert_bits = wanted.expert_bitwidths or bitwidths
    linears = [_shapes(stream, index) for index in range(stream.layers)]
    layout = WrittenLayout(
        stream.layers_name, bitwidths, expert_bits, linears, heads, wanted.method, wanted.gptq
    )
    seldom = 0
    with writing(target, overwrite) as folder:
        copy_settings(checkpoint.folder, folder)
        write_files(folder, wanted.beside)
        writer = Writer(folder, checkpoint, layout)
        for layer in stream_layers(stream, wanted.token_ids):
            weights = _quantize_layer(layer, layout, wanted)
            replaced: list[str] = []
            if expert_bits[layer.index] != FULL_BITS:
                experts = _Experts(stream, layer, expert_bits[layer.index], wanted)
                for name, tensors in stream.stored_experts(layer.index).items():
                    weights |= experts.quantize(name)
                    replaced += tensors.stored_names()
                seldom += experts.seldom_asked
            writer.write_layer(layer.index, weights, replaced)
            layer.advance()
            if progress is not None:
                progress(layer.index + 1, stream.layers)
        writer.finish()
    return Quantized(writer.total_bytes, seldom)


def _shapes(stream: LayerStream, index: int) -> dict[str, tuple[int, int]]:
    """`[out, in]` of all that is quantized of a layer, by name, of experts the parts of any."""
    found = stream.linear_shapes(index)
    for name, tensors in stream.stored_experts(index).items():
        _, *shapes = expert_shapes(tensors.module)
        for fused, shape in zip(FUSED, shapes, strict=True):
            parts = tensors.parts(fused)
            for part in parts:
                size = shape.out_features // len(parts), shape.in_features
                found[f"{name}.{ANY_EXPERT}.{part}"] = size
    return found


def _quantize_layer(
    layer: StreamedLayer, layout: WrittenLayout, wanted: Quantization
) -> dict[str, GroupCodes]:
    """Weights of the layer's linears, which hold the rounded ones afterwards."""
    weights: dict[str, GroupCodes] = {}
    linears = layer.linears
    bits = {name: layout.bits_of(layer.index, name) for name in linears}
    if {*bits.values()} <= {FULL_BITS}:
        return weights
    for shared in shared_inputs(layer):
        names = [name for name in shared if bits[name] != FULL_BITS]
        if not names:
            continue
        gram = _gram(layer, linears[names[0]], wanted.compute.device)
        for name in names:
            try:
                weights[name] = gptq(linears[name].weight.detach(), gram, bits[name], wanted.gptq)
            except CheckpointError as error:
                raise CheckpointError(f"layer {layer.index}, {name}: {error}") from error
            rounded = weights[name].dequantize()
            with torch.no_grad():
                linears[name].weight.copy_(rounded)
    return weights


LEAST_INPUTS = 64
"""Inputs below which an expert is rounded without them: what GPTQ makes up for so few is an error
to others (`quant.rounding.importance` draws them together)."""


class _Experts:
    """The experts of a layer while they are quantized: first gates and ups, then downs, whose
    inputs come from these. `seldom_asked`: weights that were rounded without calibration.
    """

    def __init__(
        self, stream: LayerStream, layer: StreamedLayer, bits: int, wanted: Quantization
    ) -> None:
        self.seldom_asked = 0
        self._layer, self._bits, self._wanted = layer, bits, wanted
        self._stored = stream.stored_experts(layer.index)

    def quantize(self, name: str) -> dict[str, GroupCodes]:
        """Weights by name within the layer, which hold the rounded ones afterwards."""
        tensors, experts = self._stored[name], self._layer.experts[name]
        weights: dict[str, GroupCodes] = {}
        for fused, held in zip(FUSED, (experts.gate_up, experts.down), strict=True):
            size, parts = held.shape.in_features, tensors.parts(fused)
            read = tensors.reader(fused, held.shape)
            at_once = max(1, SQUARES_BYTES // (4 * size * size))
            for first in range(0, held.count, at_once):
                own = range(first, min(first + at_once, held.count))
                for index, gram in self._grams(experts, fused, size, own).items():
                    weight = read(index).to(self._wanted.compute.device, torch.float32)
                    try:
                        made = gptq(weight, gram, self._bits, self._wanted.gptq)
                    except CheckpointError as error:
                        place = f"layer {self._layer.index}, {name}.{index}.{fused}"
                        raise CheckpointError(f"{place}: {error}") from error
                    held.put(index, made.dequantize())
                    weights |= {
                        f"{name}.{index}.{part}": rows
                        for part, rows in zip(parts, made.split_rows(len(parts)), strict=True)
                    }
        return weights

    def _grams(
        self, experts: QuantizedExperts, fused: str, size: int, own: range
    ) -> dict[int, Tensor]:
        """X^T X of the inputs of each of some experts; of too few inputs that of unlike columns."""
        device = self._wanted.compute.device
        grams, asked = {index: Gram(size, device) for index in own}, dict.fromkeys(own, 0)

        def see(weight: str, rows: Tensor, counts: Sequence[int]) -> None:
            for index, part in enumerate(rows.split(list(counts)) if weight == fused else ()):
                if index in grams and len(part):
                    grams[index].add(part)
                    asked[index] += len(part)

        experts.seen = see
        try:
            self._layer.observe()
        finally:
            experts.seen = None
        few = {index for index, count in asked.items() if count < LEAST_INPUTS}
        self.seldom_asked += len(few)
        return {
            index: torch.eye(size, device=device) if index in few else gram.matrix()
            for index, gram in grams.items()
        }


def shared_inputs(layer: StreamedLayer) -> list[list[str]]:
    """Names of the linears in the order in which they run, those of the same input together.

    They are observed in a pass of a few sequences.
    """
    with observed(layer.linears, ()) as source_of, closing(layer.outputs()) as outputs:
        next(outputs)
    shared: dict[str, list[str]] = {}
    for name, source in source_of.items():
        shared.setdefault(source, []).append(name)
    return list(shared.values())


def _gram(layer: StreamedLayer, linear: nn.Linear, device: torch.device) -> Tensor:
    """X^T X of all inputs that `linear` gets."""
    gram = Gram(linear.in_features, device)
    handle = linear.register_forward_pre_hook(lambda _, arguments: gram.add(arguments[0]))
    try:
        layer.observe()
    finally:
        handle.remove()
    return gram.matrix()
