"""The model families a stage can run, and what of each belongs to the first and to the last stage.

A stage keeps transformers' own forward pass and replaces what it does not own by pass-throughs.
That was held token for token against `generate` for the families listed here and for no other,
hence the list: some architectures lose information at a cut without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from actors.attention.masks import Scoring
from actors.attention.ragged import (
    RAGGED_ATTENTION,
    NewTokens,
    RaggedContext,
    attend,
    register,
)
from planner.model.families.family import Architecture
from planner.model.families.table import FAMILIES, supported_model_types
from quant.common.errors import SpecError


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The modules of `config`'s model type; SpecError for a family that is not supported."""
    found = FAMILIES.get(config.model_type)
    if found is None:
        raise SpecError(
            f"model type {config.model_type!r} cannot run in stages; supported: "
            f"{', '.join(supported_model_types())}"
        )
    return found.architecture


class PassThrough(nn.Module):
    """Stands for a module that lives on another stage: returns its first input."""

    def __init__(self, returns_tuple: bool = False) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, None]:
        """Return `x`, in a pair if the replaced module did so."""
        return (x, None) if self.returns_tuple else x


class NoPositions(nn.Module):
    """Stands for position embeddings that were added on the first stage: a zero of no dimension."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return the neutral element of the addition that follows."""
        return torch.zeros(())


class ContextAsCache:
    """Carries the ragged context down a forward pass that hands on nothing but its cache (BLOOM).

    It answers the questions about lengths that the model asks of a cache so that the alibi and mask
    tensors, which the ragged attention makes itself, stay one element large.
    """

    is_compileable = False

    def __init__(self, context: RaggedContext) -> None:
        self.context = context

    def get_seq_length(self, *_: Any) -> int:
        """No past, as far as the model is concerned."""
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        """One key at offset zero."""
        return 1, 0


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal model of `config` with every weight on the meta device (no memory)."""
    register()
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    model.config._attn_implementation = RAGGED_ATTENTION
    model.eval()
    return model


def keep_stage(
    model: PreTrainedModel, layers: range, is_first: bool, is_last: bool, has_head: bool
) -> None:
    """Replace what a stage of `layers` does not own; global layer indices stay."""
    architecture = architecture_of(model.config)
    decoder = model.get_decoder()
    stack = getattr(decoder, architecture.layers)
    for index in range(len(stack)):
        if index not in layers:
            stack[index] = PassThrough(architecture.layer_returns_tuple)
    if not is_first:
        for name in architecture.embedding:
            if getattr(decoder, name) is not None:
                setattr(decoder, name, NoPositions() if "positions" in name else PassThrough())
    if not is_last:
        for name in architecture.final:
            if getattr(decoder, name) is not None:
                setattr(decoder, name, PassThrough())
    if not has_head:
        model.set_output_embeddings(PassThrough())
    _restore_buffers(decoder)
    replace_attention = _ATTENTION_REPLACEMENTS.get(model.config.model_type)
    if replace_attention is not None:
        replace_attention(model, [stack[index] for index in layers])


def _restore_buffers(decoder: nn.Module) -> None:
    """Rotary frequencies are computed, not stored: make them anew off the meta device."""
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is not None:
        decoder.rotary_emb = type(rotary)(config=rotary.config)


def _replace_bloom_attention(model: PreTrainedModel, blocks: list[nn.Module]) -> None:
    """Give BLOOM's attention, which knows no attention interface, a ragged forward."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    heads = model.config.n_head
    slopes = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    for block in blocks:
        attention: Any = block.self_attention
        attention.alibi_slopes = slopes
        attention.forward = MethodType(_bloom_attention, attention)


def _bloom_attention(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    layer_past: ContextAsCache,
    **_: Any,
) -> tuple[Tensor, None]:
    """BLOOM's attention on the flattened batch, `hidden_states`: `[1, tokens, hidden_size]`."""
    projected = self._reshape(self.query_key_value(hidden_states))
    new = NewTokens(*(x[0].transpose(0, 1) for x in projected))
    slopes = self.alibi_slopes.to(hidden_states.device)
    scoring = Scoring(self.inv_norm_factor, alibi_slopes=slopes)
    out = attend(layer_past.context, self.layer_idx, new, scoring)
    return self.dense(out.flatten(1)[None]) + residual, None


_ATTENTION_REPLACEMENTS: Mapping[str, Callable[[PreTrainedModel, list[nn.Module]], None]] = {
    "bloom": _replace_bloom_attention,
}
"""By `model_type`, for families whose layers do not call transformers' attention interface."""
