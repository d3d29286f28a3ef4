"""A checkpoint with the bits of a plan, calibrated with GPTQ, one decoder layer at a time.

Linears are quantized in the order in which a layer runs them, each on inputs that come from those
before it as they are quantized, in this layer and in earlier ones. Beside the layer, memory holds
the hidden states of the calibration text and, for the linear at hand, its X^T X of inputs x inputs
in float32 (three times while it is inverted).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from actors.stage.layer_stream import LayerStream, StreamedLayer, stream_layers
from actors.stage.partial_model import architecture_of
from llmpq.quality.perplexity import ReportProgress
from planner.model.finding import model_shape
from quant.checkpoint.model_folder import check_target, copy_settings, new_folder
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError, InputError, SpecError
from quant.loading.emulated_kernels import Compute
from quant.rounding.gptq import gptq
from quant.rounding.gptq_format import GptqLayout, GptqWeight, GptqWriter
from quant.rounding.indicators import Gram
from quant.scheme import FULL_BITS, GptqOptions


@dataclass(frozen=True, eq=False)
class Quantization:
    """Options of quantizing a checkpoint: `bitwidths`, one a layer, calibrated on a text.

    `token_ids` `[sequences, length]`: the calibration text, without padding.
    """

    bitwidths: Sequence[int]
    token_ids: Tensor
    compute: Compute
    gptq: GptqOptions


def quantize_checkpoint(
    source: Path,
    target: Path,
    wanted: Quantization,
    overwrite: bool = False,
    progress: ReportProgress | None = None,
) -> int:
    """Quantize the checkpoint in `source` into the folder `target`, which appears when complete.

    Returns the bytes of its tensors. Raises `InputError` if `target` exists (unless `overwrite`) or
    cannot be written, `SpecError` for bits or text that cannot be used, `CheckpointError` for
    unusable weights.
    """
    check_target(source, target, overwrite)
    checkpoint = Checkpoint(source)
    if checkpoint.gptq is not None:
        raise SpecError(f"{source} is quantized already; give the original 16-bit checkpoint")
    shape = model_shape(str(source))
    if not shape.linears_are_alike:
        raise SpecError(
            f"{source}: layers of a {shape.model_type} model differ or have experts, which are not "
            "calibrated; run it as it is: its weights are quantized while they are loaded"
        )
    stream = LayerStream(source, wanted.compute)
    bitwidths = wanted.bitwidths
    if len(bitwidths) != stream.layers:
        raise SpecError(f"{len(bitwidths)} bitwidths for {stream.layers} layers; give one a layer")
    heads = architecture_of(stream.config).head_names
    layout = GptqLayout(stream.layers_name, bitwidths, stream.linear_shapes(), heads)
    try:
        with new_folder(target, replace=overwrite) as folder:
            copy_settings(checkpoint.folder, folder)
            writer = GptqWriter(folder, checkpoint, layout, wanted.gptq)
            for layer in stream_layers(stream, wanted.token_ids):
                writer.write_layer(layer.index, _quantize_layer(layer, wanted))
                layer.advance()
                if progress is not None:
                    progress(layer.index + 1, stream.layers)
            writer.finish()
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"cannot write {target} ({error}); choose a folder that can be written, with space "
            "for the weights"
        ) from error
    return writer.total_bytes


def _quantize_layer(layer: StreamedLayer, wanted: Quantization) -> dict[str, GptqWeight]:
    """Weights of the layer's linears, which hold the rounded ones afterwards."""
    bits = wanted.bitwidths[layer.index]
    weights: dict[str, GptqWeight] = {}
    if bits == FULL_BITS:
        return weights
    linears = layer.linears
    for names in shared_inputs(layer):
        gram = _gram(layer, linears[names[0]], wanted.compute.device)
        for name in names:
            try:
                weights[name] = gptq(linears[name].weight.detach(), gram, bits, wanted.gptq)
            except CheckpointError as error:
                raise CheckpointError(f"layer {layer.index}, {name}: {error}") from error
            rounded = weights[name].dequantize()
            with torch.no_grad():
                linears[name].weight.copy_(rounded)
    return weights


def shared_inputs(layer: StreamedLayer) -> list[list[str]]:
    """Names of the linears in the order in which they run, those of the same input together.

    They are observed in a pass of a few sequences.
    """
    names: list[list[str]] = []
    inputs: list[Tensor] = []  # kept, so that no two of them have the same place in memory

    def watch(name: str, linear: nn.Linear) -> torch.utils.hooks.RemovableHandle:
        def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            for same, known in zip(names, inputs, strict=True):
                if known is arguments[0]:
                    same.append(name)
                    return
            names.append([name])
            inputs.append(arguments[0])

        return linear.register_forward_pre_hook(note)

    handles = [watch(name, linear) for name, linear in layer.linears.items()]
    try:
        with closing(layer.outputs()) as outputs:
            next(outputs)
    finally:
        for handle in handles:
            handle.remove()
    return names


def _gram(layer: StreamedLayer, linear: nn.Linear, device: torch.device) -> Tensor:
    """X^T X of all inputs that `linear` gets."""
    gram = Gram(linear.in_features, device)
    handle = linear.register_forward_pre_hook(lambda _, arguments: gram.add(arguments[0]))
    try:
        layer.observe()
    finally:
        handle.remove()
    return gram.matrix()
