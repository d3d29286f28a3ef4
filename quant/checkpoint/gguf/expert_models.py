"""Models with experts: entries of `config.json` that llama.cpp has in its code or renames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quant.checkpoint.gguf.header import Entries
from quant.checkpoint.gguf.rotary import RotaryTensors
from quant.checkpoint.gguf.sizes import Tensors, gated, has_bias, partly_rotated

SHARED_WIDTH = "expert_shared_feed_forward_length"
_SIGMOID = 2
"""`ExpertGatingFuncType.SIGMOID` of llama.cpp."""


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


def _glm4_moe(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    gate = entries.of_architecture("expert_gating_func")
    if gate not in (None, _SIGMOID):
        raise entries.refusal("glm4moe.expert_gating_func", gate, f"{_SIGMOID}, or left out")
    dense = entries.of_architecture("leading_dense_block_count")
    return {
        **partly_rotated(entries, factors),
        **experts(entries, "n_routed_experts"),
        "moe_intermediate_size": entries.size("expert_feed_forward_length"),
        "n_shared_experts": entries.size("expert_shared_count", 1),
        "first_k_dense_replace": entries.size("leading_dense_block_count") if dense else 0,
        "n_group": entries.size("expert_group_count", 1),
        "topk_group": entries.size("expert_group_used_count", 1),
        "routed_scaling_factor": entries.number("expert_weights_scale", 1.0),
        "norm_topk_prob": entries.flag("glm4moe.expert_weights_norm", True),
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


EXPERT_MODELS: Mapping[str, Callable[[Entries, Tensors, RotaryTensors], dict[str, Any]]] = {
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": _olmoe,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
}
"""By `general.architecture`. Mixtral is a file of `llama`."""
