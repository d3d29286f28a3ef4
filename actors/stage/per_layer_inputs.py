"""What each layer adds for a token (per-layer embeddings of Gemma 4): made where the embedding of
tokens is, and carried behind the hidden states from stage to stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig


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
