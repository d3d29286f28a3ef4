"""Fixtures that several tests of `quant` share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)


def _llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _opt() -> PreTrainedModel:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=96,
            hidden_size=64,
            ffn_dim=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            word_embed_proj_dim=64,
            max_position_embeddings=64,
        )
    )


def _bloom() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4))


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "opt": _opt,
    "bloom": _bloom,
}
LAYER_LISTS = {"llama": "model.layers", "opt": "model.decoder.layers", "bloom": "transformer.h"}


@pytest.fixture
def tiny_model() -> Callable[[str], PreTrainedModel]:
    """Builds a tiny model of a family, its biases and norms random too."""

    def build(family: str) -> PreTrainedModel:
        torch.manual_seed(0)
        model = BUILDERS[family]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        return model.eval()

    return build


@pytest.fixture
def layer_list() -> Callable[[str], str]:
    """Full name of a family's list of decoder layers."""
    return LAYER_LISTS.__getitem__


@pytest.fixture
def meta_layer() -> Callable[[PreTrainedModel, str], torch.nn.Module]:
    """Builds the decoder layer of that full name, as in `model`, on the meta device."""

    def build(model: PreTrainedModel, name: str) -> torch.nn.Module:
        with torch.device("meta"):
            empty = type(model)(model.config)
        return empty.get_submodule(name)

    return build
