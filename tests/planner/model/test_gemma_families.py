"""Shapes of Gemma's models: the library's parameters, layers of two kinds, refused entries."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planner.model.finding import shape_from_config
from planner.model.tensor_parallel import possible_degrees
from quant.common.errors import SpecError

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 100,
    "sliding_window": 16,
}
GEMMA_3_4B = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}
"""Entries of the published file that count for text; all others are transformers' defaults."""


def built(model_type: str, values: dict[str, Any]) -> Any:
    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_parameters_are_those_of_the_library(model_type: str) -> None:
    values = {**TINY, "sliding_window_pattern": 2} if model_type == "gemma3_text" else TINY
    model = built(model_type, values)
    shape = shape_from_config("m", {"model_type": model_type, **values})
    assert shape.total_parameters == model.num_parameters()
    layers = model.get_decoder().layers
    assert shape.parameters_by_layer == tuple(
        sum(weight.numel() for weight in layer.parameters()) for layer in layers
    )
    windows = tuple(shape.layer(index).sliding_window for index in range(5))
    assert (
        windows
        == tuple(layer.self_attn.sliding_window for layer in layers)
        == (16, None) * 2 + (16,)
    )


def test_a_published_file_is_completed_by_the_librarys_defaults() -> None:
    shape = shape_from_config("gemma-3-4b", GEMMA_3_4B)
    text = GEMMA_3_4B["text_config"]
    assert isinstance(text, dict)
    model = built("gemma3_text", {k: v for k, v in text.items() if k != "model_type"})
    assert shape.total_parameters == model.num_parameters()
    assert shape.max_positions == 131_072
    assert shape.kind_counts == (29, 5)
    assert [kind.sliding_window for kind in shape.kind_shapes] == [1024, None]


TINY_4 = TINY | {"global_head_dim": 32, "vocab_size_per_layer_input": 100}
DENSE = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}
EXPERTS = {
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
SHARED = {
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
}


@pytest.mark.parametrize(
    ("values", "kinds", "joined"),
    [
        (
            DENSE | {"num_global_key_value_heads": 1},
            ("sliding_attention", "full_attention, keys alone"),
            (),
        ),
        (EXPERTS, ("sliding_attention, experts", "full_attention, experts"), ()),
        (
            SHARED,
            (
                *("sliding_attention", "full_attention"),
                *(
                    "sliding_attention, reading earlier keys",
                    "full_attention, reading earlier keys",
                ),
            ),
            (3, 4, 5, 6),
        ),
    ],
)
def test_gemma_4_from_published_files_and_from_saved_ones(
    values: dict[str, Any], kinds: tuple[str, ...], joined: tuple[int, ...]
) -> None:
    """Saved ones tell of each layer what published ones tell of a type."""
    model = built("gemma4_text", TINY_4 | values)
    saved: dict[str, Any] = json.loads(model.config.to_json_string())
    assert "global_head_dim" not in saved
    for given in ({"model_type": "gemma4_text"} | TINY_4 | values, saved):
        shape = shape_from_config("m", given)
        assert shape.total_parameters == model.num_parameters()
        layers = model.get_decoder().layers
        assert shape.parameters_by_layer == tuple(
            sum(weight.numel() for weight in layer.parameters()) for layer in layers
        )
        assert tuple(kind.kind for kind in shape.kind_shapes) == kinds
        assert shape.joined == joined
        held = [kind.kv_width for kind in map(shape.layer, range(shape.layers))]
        attention = [layer.self_attn for layer in layers]
        assert held == [
            0 if each.is_kv_shared_layer else each.k_proj.out_features for each in attention
        ]
        assert possible_degrees(shape) == (1, 2, 4)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"enable_moe_block": True}, "num_experts is missing"),
        (EXPERTS | {"top_k_experts": 7}, "top_k_experts is 7; it must be at most 6"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers is 5; it must be such that"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1"),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input is 99; it must be vocab"),
        ({"per_layer_config": [1]}, r"per_layer_config is \[1\]"),
        ({"per_layer_config": {"9": {}}}, "per_layer_config is"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, r"per_layer_config.1 is \{'sliding"),
        ({"per_layer_config": {"1": {"head_dim": "a"}}}, "per_layer_config.1.head_dim is 'a'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            r"rope_parameters.full_attention.rope_type is 'longrope'",
        ),
    ],
)
def test_wrong_entries_of_gemma_4_are_refused_by_name(
    entries: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        shape_from_config("m", {"model_type": "gemma4_text"} | TINY_4 | entries)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"layer_types": ["full_attention"] * 4}, "layer_types is a list of 4; it must be a list"),
        (
            {"layer_types": ["full_attention"] * 4 + ["chunked_attention"]},
            r"layer_types\[4\] is 'chunked_attention'; it must be one of full_attention, sliding",
        ),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"query_pre_attn_scalar": "256"}, "query_pre_attn_scalar is '256'"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"hidden_activation": "gelu2"}, "hidden_activation is 'gelu2'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
            r"rope_parameters.full_attention.rope_type is 'longrope'",
        ),
    ],
)
def test_wrong_entries_are_refused_by_name(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        shape_from_config("m", {"model_type": "gemma3_text", **TINY, **entries})
    with pytest.raises(SpecError, match="text_config"):
        shape_from_config("m", {"model_type": "gemma3", "text_config": {**TINY, **entries}})
