"""Models with experts: entries of `config.json` that llama.cpp has in its code or renames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quant.checkpoint.gguf.header import Entries
from quant.checkpoint.gguf.rotary import RotaryTensors, check_long_factors, rotary_entries
from quant.checkpoint.gguf.sizes import Tensors, gated, has_bias, partly_rotated, sizes

SHARED_WIDTH = "expert_shared_feed_forward_length"
TEMPERATURE = "attention.temperature_scale"
"""What the scores of later queries grow by."""

_SOFTMAX, _SIGMOID = 1, 2
"""`ExpertGatingFuncType` of llama.cpp."""

_GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups of experts, and of how many a token asks some, of DeepSeek-V2 and V3 by the number of
experts: older files do not say them."""

_LOG_SHARE = 0.1
"""What llama.cpp's converter multiplies `yarn_log_multiplier` by, in `deepseek2` alone."""


def experts(entries: Entries, count_key: str = "num_experts") -> dict[str, Any]:
    """How many experts there are, and how many a token asks."""
    return {
        count_key: entries.size("expert_count"),
        "num_experts_per_tok": entries.size("expert_used_count"),
    }


def experts_beside_dense(entries: Entries) -> dict[str, Any]:
    """Entries of Qwen's families, in whose files every layer has experts."""
    return {
        **experts(entries),
        "moe_intermediate_size": entries.size("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    return {
        **gated(entries, tensors, factors),
        **experts_beside_dense(entries),
        "shared_expert_intermediate_size": entries.size(SHARED_WIDTH),
        "norm_topk_prob": False,
        "qkv_bias": has_bias(tensors),
    }


def _qwen3_moe(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    return {
        **gated(entries, tensors, factors),
        **experts_beside_dense(entries),
        "norm_topk_prob": True,
        "attention_bias": has_bias(tensors),
    }


def _olmoe(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    return {
        **gated(entries, tensors, factors),
        **experts(entries),
        "norm_topk_prob": False,
        "attention_bias": has_bias(tensors),
    }


def _experts_behind_dense(entries: Entries, groups: tuple[int, int], norm: bool) -> dict[str, Any]:
    """Entries of models whose first layers are dense; `groups` and `norm` where a file has none."""
    dense = entries.of_architecture("leading_dense_block_count")
    return {
        **experts(entries, "n_routed_experts"),
        "moe_intermediate_size": entries.size("expert_feed_forward_length"),
        "n_shared_experts": entries.size("expert_shared_count", 1),
        "first_k_dense_replace": entries.size("leading_dense_block_count") if dense else 0,
        "n_group": entries.size("expert_group_count", groups[0]),
        "topk_group": entries.size("expert_group_used_count", groups[1]),
        "routed_scaling_factor": entries.number("expert_weights_scale", 1.0),
        "norm_topk_prob": entries.flag(f"{entries.architecture}.expert_weights_norm", norm),
    }


def _glm4_moe(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    gate = entries.of_architecture("expert_gating_func")
    if gate not in (None, _SIGMOID):
        raise entries.refusal("glm4moe.expert_gating_func", gate, f"{_SIGMOID}, or left out")
    return {
        **partly_rotated(entries, factors),
        **_experts_behind_dense(entries, (1, 1), norm=True),
        "attention_bias": has_bias(tensors),
        "use_qk_norm": any(name.endswith(".attn_q_norm.weight") for name in tensors),
    }


def _gpt_oss(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """Its stretched frequencies are not rounded to whole ones, which llama.cpp always does."""
    found = gated(entries, tensors, factors)
    found["intermediate_size"] = entries.size("expert_feed_forward_length")
    if "rope_scaling" in found:
        found["rope_scaling"]["truncate"] = False
    return {
        **found,
        **experts(entries, "num_local_experts"),
        "sliding_window": entries.size("attention.sliding_window"),
        "attention_bias": has_bias(tensors),
    }


def _deepseek2(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """DeepSeek-V2 where scores are a softmax, else V3; GLM-4.7-Flash, by its pre-tokenizer, is a V3
    under another name.
    """
    check_long_factors(entries, factors)
    if grown := entries.of_architecture(TEMPERATURE):
        raise entries.refusal(f"deepseek2.{TEMPERATURE}", grown, "left out")
    groups = _GROUPS.get(entries.size("expert_count"), (1, 1))
    rotated = entries.size("rope.dimension_count")
    found = {
        **sizes(entries, rotated),
        **_latents(entries, rotated),
        **rotary_entries(entries, rotated, factors),
        **_experts_behind_dense(entries, groups, norm=False),
    }
    multiplier = entries.number("rope.scaling.yarn_log_multiplier", 0.0) / _LOG_SHARE
    if multiplier and "rope_scaling" in found:
        both = dict.fromkeys(("mscale", "mscale_all_dim"), round(multiplier, 6))
        found["rope_scaling"] |= both
    has_biases = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    gate = entries.of_architecture("expert_gating_func") or (_SIGMOID if has_biases else _SOFTMAX)
    if gate == _SOFTMAX:
        method = "greedy" if found["n_group"] == 1 else "group_limited_greedy"
        return found | {"model_type": "deepseek_v2", "topk_method": method}
    if gate != _SIGMOID:
        raise entries.refusal(
            "deepseek2.expert_gating_func", gate, f"{_SOFTMAX} or {_SIGMOID}, or left out"
        )
    found["rope_interleave"] = True
    if "glm" not in (entries.text("tokenizer.ggml.pre") or ""):
        return found
    layers, dense = found["num_hidden_layers"], found.pop("first_k_dense_replace")
    by_layer = ["dense" if layer < dense else "sparse" for layer in range(layers)]
    return found | {"model_type": "glm4_moe_lite", "mlp_layer_types": by_layer}


def _latents(entries: Entries, rotated: int) -> dict[str, Any]:
    """Sizes of latent attention. Newer files have those of heads under names of their own, as keys
    and values are of one head of latents there.
    """
    own = "_mla" if entries.of_architecture("attention.key_length_mla") is not None else ""
    key, width = f"attention.key_length{own}", entries.size(f"attention.key_length{own}")
    if width <= rotated:
        needed = f"more than {rotated} (rope.dimension_count)"
        raise entries.refusal(f"{entries.architecture}.{key}", width, needed)
    has_query_latents = entries.of_architecture("attention.q_lora_rank") is not None
    return {
        "num_key_value_heads": entries.size("attention.head_count"),
        "kv_lora_rank": entries.size("attention.kv_lora_rank"),
        "q_lora_rank": entries.size("attention.q_lora_rank") if has_query_latents else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": width - rotated,
        "v_head_dim": entries.size(f"attention.value_length{own}"),
    }


EXPERT_MODELS: Mapping[str, Callable[[Entries, Tensors, RotaryTensors], dict[str, Any]]] = {
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": _olmoe,
    "deepseek2": _deepseek2,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
}
"""By `general.architecture`. Mixtral is a file of `llama`."""


def _delta(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    values, width = entries.size("ssm.time_step_rank"), entries.size("ssm.inner_size")
    if width % values:
        key = f"{entries.architecture}.ssm.inner_size"
        raise entries.refusal(key, width, f"a multiple of {values} (ssm.time_step_rank)")
    return {
        **partly_rotated(entries, factors),
        "linear_conv_kernel_dim": entries.size("ssm.conv_kernel"),
        "linear_num_key_heads": entries.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": entries.size("ssm.state_size"),
        "linear_value_head_dim": width // values,
        "full_attention_interval": entries.size("full_attention_interval", 4),
        "attention_bias": has_bias(tensors),
    }


def _of_experts(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    return {
        **_delta(entries, tensors, factors),
        **experts_beside_dense(entries),
        "shared_expert_intermediate_size": entries.size(SHARED_WIDTH),
        "norm_topk_prob": True,
    }


DELTA_MODELS: Mapping[str, Callable[[Entries, Tensors, RotaryTensors], dict[str, Any]]] = {
    "qwen3next": _of_experts,
    "qwen35": _delta,
    "qwen35moe": _of_experts,
}
"""By `general.architecture`."""
