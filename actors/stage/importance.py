"""Measuring the importance of a stage's layers, before its weights are packed.

A few dozen random token ids pass through the plain layers, one of which is in memory at a time; a
stage takes the hidden states that the stage before has computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from actors.stage.layer_stream import LayerStream, StreamedLayer
from actors.stage.spec import StageSpec
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.importance.running import LargestKeys, LinearInputs
from quant.importance.statistics import LayerImportance
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.scheme import Processor

RANDOM_TOKENS = 64
"""Ids in one sequence. Of a real model, the statistics of so many round as well as those of a text
(`docs/quantization.md`)."""

_SEED = 0
SEEN = f"{RANDOM_TOKENS} random ids, seed {_SEED}"
"""What passes through a model whose importance no file tells."""


def random_token_ids(config: PretrainedConfig) -> Tensor:
    """Random ids `[1, tokens]` of the model's vocabulary, without those that begin, end or pad.

    They depend on nothing but the model. There are fewer where it has fewer positions.
    """
    special: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = getattr(config, name, None)
        special |= {given} if isinstance(given, int) else set(given or ())
    usual = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    tokens = min(RANDOM_TOKENS, getattr(config, "max_position_embeddings", None) or RANDOM_TOKENS)
    draws = torch.Generator().manual_seed(_SEED)
    return usual[torch.randint(len(usual), (1, tokens), generator=draws)]


def measure_stage(
    spec: StageSpec,
    checkpoint: Path,
    device: torch.device,
    processor: Processor,
    hidden: Tensor | None,
) -> tuple[Tensor, list[LayerImportance]]:
    """Hidden states after the stage's layers, on the host, and the importance of each of them.

    `hidden` `[sequences, length, hidden_size]` come from the stage before, None on the first one.
    Layers that are quantized already are computed as they are stored. CheckpointError for unusable
    weights and for values that are not finite.
    """
    compute = Compute(device, getattr(torch, spec.dtype), processor)
    schemes = [LayerScheme(bits, spec.backends.get(bits)) for bits in spec.bitwidths]
    return measure_layers(checkpoint, compute, spec.layers, schemes, hidden)


def measure_layers(
    checkpoint: Path,
    compute: Compute,
    layers: range,
    schemes: Sequence[LayerScheme],
    hidden: Tensor | None = None,
) -> tuple[Tensor, list[LayerImportance]]:
    """As `measure_stage`, for any `layers`; `schemes`, one a layer, are those of a checkpoint that
    is quantized already, and count for no other.
    """
    stored = Checkpoint(checkpoint).gptq is not None
    dtype = compute.dtype
    own = compute if stored else compute.in_type(_fast_dtype(dtype, compute.processor))
    stream = LayerStream(checkpoint, own)
    if hidden is None:
        hidden = stream.embed(random_token_ids(stream.config), dtype)
    hidden = hidden.to(own.dtype)
    found = []
    for index, scheme in zip(layers, schemes, strict=True):
        layer = stream.layer(index, hidden, scheme if stored else None)
        found.append(measure_layer(layer))
        del layer  # before the next one is loaded
    return hidden, found


def measure_layer(layer: StreamedLayer) -> LayerImportance:
    """Send all sequences through the layer and on, and return its importance."""
    inputs, keys = LinearInputs(), LargestKeys()
    with inputs.watching(layer.linears):
        layer.advance(keys.see)
    try:
        return LayerImportance(inputs.results(), keys.result())
    except CheckpointError as error:
        raise CheckpointError(f"layer {layer.index}: {error}") from error


def _fast_dtype(dtype: torch.dtype, processor: Processor) -> torch.dtype:
    """A type that the processor multiplies fast: a CPU without units for 16 bit emulates them."""
    if not processor.is_cpu:
        return dtype
    has_units = dtype == torch.bfloat16 and "avx512_bf16" in processor.instruction_sets
    return dtype if has_units else torch.float32


def as_tuple(parts: Mapping[int, list[LayerImportance]]) -> tuple[LayerImportance, ...]:
    """The layers of all stages in their order; `parts` are by stage."""
    return tuple(layer for stage in sorted(parts) for layer in parts[stage])
