"""Shapes of layers that differ, against the parameters that transformers builds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.model.families import FAMILIES
from planner.model.family import mixed_shape
from planner.model.finding import shape_from_config
from planner.model.shape import ModelShape
from planner.model.tensor_parallel import possible_degrees
from quant.common.errors import SpecError
from tests.planner.model.mixed_configs import MIXED, library_model

KINDS = {
    "qwen3_moe": ((6,), ("",)),
    "qwen3_moe-dense": ((4, 2), ("dense", "")),
    "qwen3_next": ((5, 1), ("linear_attention", "full_attention")),
    "qwen3_next-dense": (
        (1, 1, 2, 2),
        (
            *("linear_attention, dense", "full_attention, dense"),
            *("linear_attention", "full_attention"),
        ),
    ),
    "qwen3_5_text": ((5, 1), ("linear_attention", "full_attention")),
    "qwen3_5_text-tied": ((2, 4), ("full_attention", "linear_attention")),
    "qwen3_5_moe_text": ((5, 1), ("linear_attention", "full_attention")),
    "glm4_moe": ((2, 4), ("dense", "")),
    "qwen2_moe": ((4, 2), ("dense", "")),
    **{
        name: ((6,), ("",))
        for name in ("mixtral", "olmoe", "granitemoe", "granitemoeshared", "granitemoehybrid")
    },
    "deepseek_v2": ((1, 5), ("direct queries, dense", "direct queries")),
    "deepseek_v3": ((2, 4), ("dense", "")),
    "glm4_moe_lite": ((3, 3), ("dense", "")),
    "mistral4": ((1, 5), ("dense", "")),
    "gpt_oss": ((3, 3), ("sliding_attention", "full_attention")),
}


@pytest.mark.parametrize("name", MIXED)
def test_each_layer_has_the_parameters_of_the_library(name: str) -> None:
    shape, model = shape_from_config(name, MIXED[name]), library_model(MIXED[name])
    layers = model.base_model.layers
    counts = tuple(
        sum(weight.numel() for weight in layer.state_dict().values()) for layer in layers
    )
    assert shape.total_parameters == sum(each.numel() for each in own_tensors(model))
    assert shape.parameters_by_layer == counts
    assert (shape.kind_counts, tuple(kind.kind for kind in shape.kind_shapes)) == KINDS[name]
    for index, layer in enumerate(layers):
        check_linears(shape, index, dict(layer.named_modules()))


def own_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters, and the biases of routers' choices, which are buffers."""
    biases = [each for name, each in model.named_buffers() if name.endswith("correction_bias")]
    return [*model.parameters(), *biases]


def check_linears(shape: ModelShape, index: int, modules: dict[str, Any]) -> None:
    """Hold names and sizes of a layer's linears, and of its experts, against its modules."""
    kind = shape.layer(index)
    names = FAMILIES[shape.model_type].architecture.of_kind(kind.kind)
    linears = dict(zip((*names.attention, *names.mlp), kind.layer_linears, strict=True))
    found = {
        name: (module.in_features, module.out_features)
        for name, module in modules.items()
        if isinstance(module, torch.nn.Linear)
    }
    others = {names.shared_gate: (kind.hidden_size, 1)} if names.shared_gate else {}
    if kind.latent is not None:
        expansion = kind.latent.expansion(kind.heads)
        others["self_attn.kv_b_proj"] = expansion.in_features, expansion.out_features
    assert found == others | {
        name: (linear.in_features, linear.out_features) for name, linear in linears.items()
    }
    assert names.activation in modules or shape.model_type == "gpt_oss"
    assert (kind.experts is None) == (names.experts is None) == (names.router is None)
    if names.experts is not None and names.router is not None and kind.experts is not None:
        router, experts = modules[names.router], modules[names.experts]
        assert router.weight.shape == (kind.experts.count, kind.hidden_size)
        sizes = [weight[0].numel() for weight in (experts.gate_up_proj, experts.down_proj)]
        assert sizes == [linear.parameters for linear in kind.expert_linears]


def test_widest_layers_speak_for_the_model() -> None:
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    shape = shape_from_config("m", MIXED["gpt_oss"] | {"rope_parameters": rope})
    assert (shape.sliding_window, shape.kind) == (None, "")
    assert [kind.sliding_window for kind in shape.kind_shapes] == [8, None]
    assert shape_from_config("m", MIXED["qwen3_next"]).kv_width == 64
    assert {kind.max_positions for kind in (shape, *shape.kinds)} == {4096 * 32}
    assert possible_degrees(shape) == (1, 2, 4)


def test_equal_layers_make_a_plain_shape() -> None:
    plain = shape_from_config("m", MIXED["qwen3_moe"])
    assert mixed_shape([plain] * 6) == plain
    assert (plain.kinds, plain.pattern) == ((), ())
    other = replace(plain, kind="other", sliding_window=4)
    mixed = mixed_shape([other, plain, other, plain, plain, plain], joined=(2,))
    assert (mixed.pattern, mixed.joined) == ((0, 1, 0, 1, 1, 1), (2,))
    assert mixed.kinds == (other, plain)


def _grown(**others: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": rope | {"llama_4_scaling_beta": 0.1} | others}


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        ("qwen3_moe", {"num_experts": 0}, r"num_experts is 0; it must be 1 to"),
        ("qwen3_moe", {"num_experts": None}, r"num_experts is None; it must be a whole number"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, r"num_experts_per_tok is 7.*at most 6 \(num_e"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, r"moe_intermediate_size is 0"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, r"decoder_sparse_step is 0"),
        ("qwen3_moe", {"mlp_only_layers": ["1"]}, r"mlp_only_layers is \['1'\].*numbers of layers"),
        ("gpt_oss", {"num_local_experts": -1}, r"num_local_experts is -1"),
        ("gpt_oss", {"num_experts_per_tok": 6}, r"at most 5 \(num_local_experts\)"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 5}, r"a list of 5.*a list of 6 \(num_hid"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 6}, r"layer_types\[0\] is 'linear_att"),
        ("qwen3_5_text", {"layer_types": "full_attention"}, r"layer_types is 'full_attention'"),
        ("qwen3_5_text", {"layer_types": ["mamba"] * 6}, r"layer_types\[0\] is 'mamba'.*one of"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 6}, r"full_attention is among"),
        ("qwen3_5_text", {"layer_types": [[]] * 6}, r"layer_types\[0\] is \[\]"),
        ("qwen3_5_text", {"full_attention_interval": 0}, r"full_attention_interval is 0"),
        ("qwen3_5_text", {"full_attention_interval": 7}, r"full_attention is among"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, r"linear_num_value_heads is 3.*multiple o"),
        ("qwen3_5_text", {"linear_num_key_heads": 0}, r"linear_num_key_heads is 0"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": None}, r"linear_conv_kernel_dim is missing"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "int8"}, r"mamba_ssm_dtype is 'int8'.*one of float32"),
        ("qwen3_5_text", {"mamba_ssm_dtype": [1]}, r"mamba_ssm_dtype is \[1\]"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, r"output_gate_type is 'sigmoid'.* swish"),
        ("qwen3_next", {"output_gate_type": ["swish"]}, r"output_gate_type is \['swish'\]"),
        ("qwen3_5_moe_text", {"attn_output_gate": False}, r"attn_output_gate is False"),
        ("mixtral", {"num_experts_per_tok": 7}, r"at most 6 \(num_local_experts\)"),
        ("olmoe", {"head_dim": 32}, r"head_dim is 32.* 16, hidden_size over heads"),
        ("qwen2_moe", {"use_sliding_window": True}, r"use_sliding_window is True.* qwen2_moe"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 6}, r"layer_types\[0\] is 'mamba'"),
        ("granitemoehybrid", {"position_embedding_type": "nope"}, r"position_embedding_type is"),
        ("qwen3_5_moe_text", {"shared_expert_intermediate_size": 0}, r"shared_expert.* is 0"),
        ("qwen3_next", {"partial_rotary_factor": 2.0}, r"partial_rotary_factor is 2.0"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, r"topk_method is 'noaux_tc'.*greedy or gr"),
        ("deepseek_v2", {"norm_topk_prob": True}, r"norm_topk_prob is True.*False for deepseek"),
        ("deepseek_v2", {"q_lora_rank": 0}, r"q_lora_rank is 0"),
        ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func is 'softmax'.*'sigmoid' for"),
        ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads is 2.*4 \(num_attention"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim is 7.*an even number"),
        ("deepseek_v3", {"kv_lora_rank": None}, r"kv_lora_rank is missing"),
        ("deepseek_v3", {"n_group": 4}, r"n_group is 4.*whole groups of two or more"),
        ("mistral4", _grown(llama_4_scaling_beta=None), r"llama_4_scaling_beta is None.*above 0"),
        ("mistral4", _grown(partial_rotary_factor=0.9), r"factor is 0\.9.*0\.4, qk_rope_head_dim"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"] * 5}, r"mlp_layer_types is .*6 \(num_hid"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "hqq"}}, r".*method hqq.*16-bit"),
    ],
)
def test_what_is_wrong_is_named(name: str, entries: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf"^config\.json of m: .*{message}"):
        shape_from_config("m", MIXED[name] | entries)


def test_a_gate_is_taken_by_either_name() -> None:
    plain = shape_from_config("m", MIXED["qwen3_5_text"])
    gate = {"output_gate_type": "swish", "attn_output_gate": True}
    assert shape_from_config("m", MIXED["qwen3_5_text"] | gate) == plain


def test_a_missing_number_of_experts_is_named() -> None:
    values = {key: value for key, value in MIXED["qwen3_moe"].items() if key != "num_experts"}
    with pytest.raises(SpecError, match="num_experts or num_local_experts is missing"):
        shape_from_config("m", values)


def test_unknown_experts_are_refused_by_name() -> None:
    for values in ({"model_type": "jetmoe"}, {"model_type": "llama", "num_experts": 4}):
        with pytest.raises(
            SpecError, match=r"of which llmpq runs .*gpt_oss, .*qwen3_moe.*dense one"
        ):
            shape_from_config("m", values)


def test_quantized_layers_of_every_kind_have_their_groups() -> None:
    values = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    for name in ("qwen3_moe", "qwen3_5_text"):
        shape = shape_from_config("m", MIXED[name] | {"quantization_config": values})
        for kind in shape.kind_shapes:
            linears = (*kind.layer_linears, *kind.expert_linears)
            assert {linear.stored_group for linear in linears} == {8}
