"""llama.cpp's architectures that are families of ours: names, and what its converter moves: queries
and keys of `llama` and of what it converts in the same way, whose rotary positions turn neighbours
there and halves here; fused queries, keys and values; the parts of a delta rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from quant.checkpoint.gguf.names import GgufArchitecture
from quant.checkpoint.gguf.orders import Change, RowOrder

_NOTHING: Mapping[str, Any] = MappingProxyType({})

_GATED_ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_GATED_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}

_FUSED_MLP_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


_EXPERTS = {
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
}
_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_ONE_GATE: dict[str, Change] = {"ffn_gate_inp_shexp": "one row"}
_CHOSEN_EXPERTS = {
    **_ROUTER,
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
"""Of models whose routers choose by scores with a bias."""
_DELTA_LAYER = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_CHANGES: dict[str, Change] = {
    "ssm_a": "decay",
    "ssm_conv1d": "one channel",
    "ssm_norm": "none",
}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WHOLE_NORMS = {
    **{name: own for name, own in _GATED_LAYER.items() if "norm" not in own},
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of OLMo 2 and 3, without norms before attention and MLP."""


def _gated(model_type: str, layer: Mapping[str, str] = _NOTHING, **own: Any) -> GgufArchitecture:
    names = _GATED_LAYER | dict(layer)
    return GgufArchitecture(model_type, "model.layers", _GATED_ENDS, names, **own)


def _like_llama(
    model_type: str, layer: Mapping[str, str] = _NOTHING, **own: Any
) -> GgufArchitecture:
    orders = {"attn_q": "rotary", "attn_k": "rotary"}
    return _gated(model_type, layer, orders=orders, **own)


def _qwen35(model_type: str, layer: Mapping[str, str] = _NOTHING, **own: Any) -> GgufArchitecture:
    """Of layers of attention and of a delta rule, whose value heads are tiled."""
    separate = {
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
    }
    orders: dict[str, RowOrder] = {"attn_gate": "tiled heads"}
    orders |= {name: "tiled behind keys" for name in ("attn_qkv", "ssm_conv1d")}
    orders |= {name: "tiled numbers" for name in ("ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt")}
    changes: dict[str, Change] = {**_DELTA_CHANGES, **_ONE_GATE, "ssm_out": "tiled columns"}
    return _gated(
        model_type,
        _DELTA_LAYER | separate | dict(layer),
        orders=orders,
        changes=changes,
        norms_plus_one=True,
        **own,
    )


def _gemma(model_type: str) -> GgufArchitecture:
    return _gated(model_type, _FOUR_NORMS, norms_plus_one=True)


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": _like_llama("llama", _ROUTER, experts=_EXPERTS),
    "smollm3": _like_llama("smollm3"),
    "granite": _like_llama("granite"),
    "granitemoe": _like_llama(
        "granitemoe",
        {
            "ffn_gate_inp": "block_sparse_moe.router",
            "ffn_down_shexp": "shared_mlp.output_linear",
        },
        experts=_EXPERTS,
        experts_module="block_sparse_moe.experts",
        joined={"shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")},
    ),
    "mistral3": _like_llama("ministral3"),
    "phi3": GgufArchitecture(
        "phi3",
        "model.layers",
        _GATED_ENDS,
        {
            **_FUSED_MLP_LAYER,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_norm": "post_attention_layernorm",
        },
    ),
    "glm4": GgufArchitecture(
        "glm4",
        "model.layers",
        _GATED_ENDS,
        {
            **_FUSED_MLP_LAYER,
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "olmo2": GgufArchitecture("olmo2", "model.layers", _GATED_ENDS, _WHOLE_NORMS),
    "olmoe": _gated("olmoe", _ROUTER, experts=_EXPERTS),
    "gemma2": _gemma("gemma2"),
    "gemma3": _gemma("gemma3_text"),
    "gemma4": GgufArchitecture(
        "gemma4_text",
        "model.layers",
        {
            **_GATED_ENDS,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        {
            **_GATED_LAYER,
            **_FOUR_NORMS,
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        experts=_EXPERTS,
        experts_module="experts",
    ),
    "qwen2": _gated("qwen2"),
    "qwen2moe": _gated("qwen2_moe", _ROUTER | _SHARED_EXPERT, experts=_EXPERTS, changes=_ONE_GATE),
    "qwen3": _gated("qwen3"),
    "qwen3moe": _gated("qwen3_moe", _ROUTER, experts=_EXPERTS),
    "qwen3next": _gated(
        "qwen3_next",
        {
            **_DELTA_LAYER,
            **_ROUTER,
            **_SHARED_EXPERT,
            "ssm_ba": "linear_attn.in_proj_ba",
            "ssm_in": "linear_attn.in_proj_qkvz",  # of older files, as it was
        },
        orders={"linear_attn.in_proj_qkvz.weight": "by key head"},
        changes=_DELTA_CHANGES | _ONE_GATE,
        norms_plus_one=True,
        experts=_EXPERTS,
        joined={"linear_attn.in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight")},
    ),
    "qwen35": _qwen35("qwen3_5_text"),
    "qwen35moe": _qwen35("qwen3_5_moe_text", _ROUTER | _SHARED_EXPERT, experts=_EXPERTS),
    "glm4moe": _gated(
        "glm4_moe",
        {**_CHOSEN_EXPERTS, "post_attention_norm": "post_attention_layernorm"},
        experts=_EXPERTS,
    ),
    "deepseek2": _gated(
        "deepseek_v3",
        {
            **_CHOSEN_EXPERTS,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",  # of older files, as it was
        },
        orders={"self_attn.kv_b_proj.weight": "keys and values"},
        experts=_EXPERTS,
        joined={"self_attn.kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight")},
    ),
    "gpt-oss": _gated(
        "gpt_oss",
        {
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        orders={"mlp.experts.gate_up_proj_bias": "interleaved"},
        experts=_EXPERTS,
        joined={"mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias")},
    ),
    "bloom": GgufArchitecture(
        "bloom",
        "transformer.h",
        {
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            **_FUSED_LAYER,
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
        },
        orders={"attn_qkv": "fused"},
    ),
    "gptneox": GgufArchitecture(
        "gpt_neox",
        "gpt_neox.layers",
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
        },
        {
            **_FUSED_LAYER,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
        },
        orders={"attn_qkv": "fused"},
    ),
}
"""The architectures by `general.architecture`. Mistral's models and SmolLM2 are files of `llama`.
llama.cpp has no OPT."""
