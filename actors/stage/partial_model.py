"""The part of a transformers model that a stage runs.

A stage keeps the forward pass of transformers and replaces the modules of other stages by
placeholders. What layers add for a token (per-layer embeddings of Gemma 4) is made where the
embedding of tokens is, and carried behind the hidden states. `planner.model.families` says for each
family which modules belong to the first and to the last stage; modules that do not call
transformers' attention interface, or cannot tell requests apart, have an entry in `_REPLACEMENTS`
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from actors.attention.addresses import Scoring
from actors.attention.delta.mixer import replace_fused_mixer, replace_mixer
from actors.attention.latent import replace_latent
from actors.attention.ragged import (
    RAGGED_ATTENTION,
    NewTokens,
    RaggedContext,
    attend,
    register,
    with_rows,
)
from planner.model.families import FAMILIES, supported_model_types
from planner.model.family import Architecture
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
    """A placeholder for a module of another stage, which returns its first input, in a pair where
    that module did so.
    """

    def __init__(self, returns_tuple: bool = False) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor | tuple[Tensor, None]:
        return (x, None) if self.returns_tuple else x


class NoPositions(nn.Module):
    """A placeholder for position embeddings, which were added on the first stage: gives a zero."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


class ContextAsCache:
    """The ragged context in place of a KV cache, for layers that pass nothing else to attention.

    Its answers about lengths, no past tokens and one key, keep the alibi and mask tensors of the
    model at one element: the ragged attention makes its own.
    """

    is_compileable = False

    def __init__(self, context: RaggedContext) -> None:
        self.context = context

    def get_seq_length(self, *_: Any) -> int:
        return 0

    def get_mask_sizes(self, *_: Any) -> tuple[int, int]:
        return 1, 0


def register_models() -> None:
    """Have transformers give causal models that it has, but leaves out; safe to call again."""
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def empty_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build the causal model of `config` with all weights on the meta device, without memory.

    There are no random numbers, which torch would import parts of its compiler not to make.
    """
    register()
    register_models()
    try:
        model = _built(config, _Counting())
    except RuntimeError:  # what is counted meets what has no numbers
        model = _built(config, nullcontext())
    model.tie_weights()  # left out with random numbers
    model.config._attn_implementation = RAGGED_ATTENTION
    model.eval()
    return model


def _built(config: PretrainedConfig, counting: AbstractContextManager[object]) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights(), counting:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


class _Counting(TorchFunctionMode):
    """Counts on the CPU, as rotary frequencies are made: to compute with them on the meta device
    torch asks its compiler, for which a process imports sympy for a third of a second.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if function is torch.arange and given.get("device") is None:
            return torch.arange(*args, **given | {"device": "cpu"})
        return function(*args, **given)


def numbers_of_layers(config: PretrainedConfig) -> int:
    """Numbers of a token, of all layers of the model of `config`, that go with its hidden states;
    0: a model without.
    """
    width = getattr(config, "hidden_size_per_layer_input", None) or 0
    return int(config.num_hidden_layers * width)


def take_as_given(decoder: Any) -> None:
    """Have transformers' forward take what layers add as it is given, in every stage."""
    decoder.projected = decoder.project_per_layer_inputs
    decoder.project_per_layer_inputs = _given


def _given(_: Tensor, per_layer_inputs: Tensor) -> Tensor:
    return per_layer_inputs


def embedded(decoder: Any, token_ids: Tensor) -> Tensor:
    """Hidden states of tokens, and what each layer adds to them behind: `[tokens, hidden_size +
    numbers]`.
    """
    hidden = decoder.embed_tokens(token_ids)
    added = decoder.projected(hidden, decoder.get_per_layer_inputs(token_ids))
    return torch.cat([hidden, added.flatten(-2)], -1)


def decoded(decoder: nn.Module, inputs: Tensor, is_last: bool, **arguments: Any) -> Tensor:
    """Pass `inputs`, as `embedded` makes them, through `decoder`; hidden states alone behind the
    last stage.
    """
    config: Any = decoder.config
    hidden, added = inputs.split([config.hidden_size, numbers_of_layers(config)], -1)
    arguments["inputs_embeds"] = hidden[None]
    arguments["per_layer_inputs"] = added.unflatten(-1, (config.num_hidden_layers, -1))[None]
    out: Tensor = decoder(**arguments).last_hidden_state[0]
    return out if is_last else torch.cat([out, added], -1)


def run_modules(
    model: PreTrainedModel, context: RaggedContext, inputs: Tensor, **others: object
) -> Tensor:
    """As `actors.stage.stage.run_decoder`, by transformers' forward."""
    arguments: dict[str, object] = {"use_cache": False, **others}
    if architecture_of(model.config).context_as_cache:
        arguments["past_key_values"] = ContextAsCache(context)
    else:
        arguments["ragged"] = context
        arguments["position_ids"] = with_rows(context.where.positions, len(inputs))[None]
    decoder: Any = model.get_decoder()
    if numbers_of_layers(model.config):
        whole = inputs if inputs.is_floating_point() else embedded(decoder, inputs)
        final = getattr(decoder, architecture_of(model.config).final[0])
        return decoded(decoder, whole, not isinstance(final, PassThrough), **arguments)
    arguments["inputs_embeds" if inputs.is_floating_point() else "input_ids"] = inputs[None]
    hidden: Tensor = decoder(**arguments).last_hidden_state[0]
    return hidden


def keep_stage(
    model: PreTrainedModel, layers: range, is_first: bool, is_last: bool, has_head: bool
) -> None:
    """Replace the modules that a stage of `layers` does not own; layers keep their indices."""
    architecture = architecture_of(model.config)
    decoder = model.get_decoder()
    stack = getattr(decoder, architecture.layers)
    for index in range(len(stack)):
        if index not in layers:
            stack[index] = PassThrough(architecture.layer_returns_tuple)
    if not is_first:
        for name in architecture.embedding:
            if getattr(decoder, name, None) is not None:
                setattr(decoder, name, NoPositions() if "positions" in name else PassThrough())
    if not is_last:
        for name in architecture.final:
            if getattr(decoder, name) is not None:
                setattr(decoder, name, PassThrough())
    if not is_first and architecture.input_multiplier is not None:
        setattr(decoder, architecture.input_multiplier, 1.0)
    if numbers_of_layers(model.config):
        take_as_given(decoder)
    if hasattr(decoder, "first_kv_shared_layer_idx"):  # from where on it may drop tokens of prompts
        decoder.first_kv_shared_layer_idx = len(stack)
    if not has_head:
        model.set_output_embeddings(PassThrough())
    _restore_buffers(decoder)
    for index in layers:
        for module in stack[index].modules():
            replace = _REPLACEMENTS.get(type(module).__name__)
            if replace is not None:
                replace(module)


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """What the head makes of `hidden` `[rows, head_width]`, scaled and capped as the model's own
    forward does: `[rows, vocabulary]`, of the vocabulary that a rank holds.
    """
    logits: Tensor = model.get_output_embeddings()(hidden)
    architecture, config = architecture_of(model.config), model.config
    if architecture.logits_divisor is not None:
        logits = logits / getattr(config, architecture.logits_divisor)
    cap = None if architecture.logits_cap is None else getattr(config, architecture.logits_cap)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _restore_buffers(decoder: nn.Module) -> None:
    """Compute what no checkpoint stores, rotary frequencies and factors of embeddings, off the meta
    device.
    """
    for module in decoder.children():
        if hasattr(module, "scalar_embed_scale"):  # Gemma's
            embedding: Any = module
            embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    rotary: Any = getattr(decoder, "rotary_emb", None)
    if rotary is not None:
        rotary = type(rotary)(config=rotary.config)
        if rotary.rope_type in ("dynamic", "longrope"):
            # The frequencies of the one change beyond the model's positions, which no request
            # reaches (`planner.model.config_check.reach`), those of the other are chosen once
            # (`plan_frequencies`); looking at that in each pass would wait for a GPU.
            rotary.rope_type = "default"
        decoder.rotary_emb = rotary


def plan_frequencies(model: PreTrainedModel, longest: int) -> None:
    """Take the rotary frequencies of requests of up to `longest` tokens where a model has others
    for long ones (longrope): then all requests have those, as in vLLM.
    """
    config: Any = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return
    rotary: Any = model.get_decoder().rotary_emb
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, rotary.inv_freq.device, longest)
    rotary.inv_freq.copy_(frequencies)


def _replace_bloom_attention(attention: Any) -> None:
    """Give BLOOM's attention, which does not call the attention interface, a ragged forward."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    slopes = build_alibi_tensor(torch.ones(1, 2), attention.num_heads, torch.float32)[:, 0, 1]
    attention.alibi_slopes = slopes
    attention.forward = MethodType(_bloom_attention, attention)


def _bloom_attention(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    layer_past: ContextAsCache,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention on the flattened batch, `hidden_states`: `[1, tokens, hidden_size]`."""
    projected = self._reshape(self.query_key_value(hidden_states))
    new = NewTokens(*(x[0].transpose(0, 1) for x in projected))
    scoring = Scoring(self.inv_norm_factor, alibi_slopes=self.alibi_slopes)
    out = attend(layer_past.context, self.layer_idx, new, scoring)
    return self.dense(out.flatten(1)[None]) + residual, None


_REPLACEMENTS: Mapping[str, Callable[[nn.Module], None]] = {
    "BloomAttention": _replace_bloom_attention,
    "DeepseekV2Attention": replace_latent,
    "DeepseekV3Attention": replace_latent,
    "Glm4MoeLiteAttention": replace_latent,
    "Mistral4Attention": partial(replace_latent, grows=True),
    "Qwen3NextGatedDeltaNet": replace_fused_mixer,
    "Qwen3_5GatedDeltaNet": replace_mixer,
    "Qwen3_5MoeGatedDeltaNet": replace_mixer,
}
"""Functions that give a module of transformers, by its class, a forward of ours."""
