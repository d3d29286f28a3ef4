"""Measuring the importance of a stage's layers, before its weights are packed.

A short text passes through the plain layers, one of which is in memory at a time; a stage takes
the hidden states that the stage before has computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from actors.sample_text import PASSAGES, SEED, SEQUENCE_TOKENS, sample_sequences
from actors.stage.spec import StageSpec
from planner.model.finding import model_shape
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.loading.emulated_kernels import Compute, LayerScheme
from quant.rounding.importance import LargestKeys, LayerImportance, LinearInputs
from quant.scheme import Processor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from actors.stage.layer_stream import StreamedLayer


def random_token_ids(config: PretrainedConfig, sequences: int, length: int) -> Tensor:
    """Random ids `[sequences, length]` of the model's vocabulary, without those that begin, end or
    pad; shorter sequences where it has fewer positions.

    They depend on nothing but the model. Their logarithms are uniform, as tokenizers give low ids
    to frequent tokens: at 3 bit that loses 6 % less than uniform ids.
    """
    special: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = getattr(config, name, None)
        special |= {given} if isinstance(given, int) else set(given or ())
    usual = torch.tensor([i for i in range(config.vocab_size) if i not in special])
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    draws = torch.Generator().manual_seed(SEED)
    uniform = torch.rand(sequences, length, generator=draws, dtype=torch.float64)
    places = (uniform * math.log(len(usual))).exp().long()
    return usual[places.clamp(max=len(usual) - 1)]


def sample_token_ids(folder: Path, config: PretrainedConfig, sequences: int) -> Tensor:
    """Ids `[sequences, SEQUENCE_TOKENS]` of the sample text by the tokenizer in `folder`; random
    ones where it has none, or knows too little of the text.
    """
    usual = random_token_ids(config, sequences, SEQUENCE_TOKENS)
    token_ids = _text_ids(folder, config)[: usual.numel()]
    if len(token_ids) < usual.numel() or max(token_ids) >= config.vocab_size:
        return usual
    return torch.tensor(token_ids).view_as(usual)


def _text_ids(folder: Path, config: PretrainedConfig) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        passages = tokenizer(list(PASSAGES), add_special_tokens=False)["input_ids"]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # such as a Rust panic; the driver's tokenizer reports it
        return []
    return [token for own in passages for token in own if token != tokenizer.unk_token_id]


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
    source = Checkpoint(checkpoint, spec.adapter)
    return measure_layers(source, compute, spec.layers, schemes, hidden)


def measure_layers(
    checkpoint: Checkpoint | Path,
    compute: Compute,
    layers: range,
    schemes: Sequence[LayerScheme],
    hidden: Tensor | None = None,
) -> tuple[Tensor, list[LayerImportance]]:
    """As `measure_stage`, for any `layers`; `schemes`, one a layer, are those of a checkpoint that
    is quantized already, and count for no other.
    """
    from actors.stage.layer_stream import LayerStream

    checkpoint = Checkpoint.of(checkpoint)
    stored = not checkpoint.is_original
    dtype = compute.dtype
    own = compute if stored else compute.in_type(_fast_dtype(dtype, compute.processor))
    stream = LayerStream(checkpoint, own)
    if hidden is None:
        sequences = sample_sequences(model_shape(str(checkpoint.folder)))
        token_ids = sample_token_ids(checkpoint.folder, stream.config, sequences)
        hidden = stream.embed(token_ids, LayerScheme(dtype=dtype))
    hidden = hidden.to(own.dtype)
    found = []
    with stream.reading_ahead(layers):
        for index, scheme in zip(layers, schemes, strict=True):
            layer = stream.layer(index, hidden, scheme if stored else None)
            found.append(measure_layer(layer))
            del layer  # before the next one is loaded
    if found and layers.stop == stream.layers:
        found[-1] = found[-1].with_head(stream.head_inputs(hidden))
    return hidden, found


def measure_layer(layer: StreamedLayer) -> LayerImportance:
    """Send all sequences through the layer and on, and return its importance."""
    inputs, keys = LinearInputs(), LargestKeys()
    with inputs.watching(layer.linears, layer.experts):
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
