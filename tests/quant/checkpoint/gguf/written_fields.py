"""Fields of GGUF files as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
from transformers import PretrainedConfig


def fields_of(config: PretrainedConfig, architecture: str) -> dict[str, Any]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    found: dict[str, Any] = {
        "context_length": getattr(config, "max_position_embeddings", 2048),
        "embedding_length": hidden,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", 4 * hidden),
        "attention.head_count": heads,
    }
    if architecture in ("bloom", "gptneox"):
        eps = getattr(config, "layer_norm_epsilon", None) or config.layer_norm_eps
        found["attention.layer_norm_epsilon"] = eps
    else:
        found["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
        found["attention.head_count_kv"] = config.num_key_value_heads
        rotary = config.rope_parameters
        rotary = rotary.get("full_attention", rotary)
        found["rope.freq_base"] = rotary["rope_theta"]
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        share = rotary.get("partial_rotary_factor", 1.0)
        found["rope.dimension_count"] = int(share * head_dim)
        found["attention.key_length"] = found["attention.value_length"] = head_dim
        found |= _of_rotary_lengths(config, rotary)
    found |= _of_gemma4(config) if architecture == "gemma4" else _of_windows(config)
    if architecture in ("gemma2", "gemma3"):
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            found[key] = getattr(config, key)
    found |= _of_experts(config)
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        found |= _of_delta(config)
    if architecture == "deepseek2":
        found |= _of_latents(config)
    if config.model_type.startswith("granite"):
        found["attention.scale"] = config.attention_multiplier
        found["embedding_scale"] = config.embedding_multiplier
        found["residual_scale"] = config.residual_multiplier
        found["logit_scale"] = config.logits_scaling
    if architecture == "gptneox":
        share = config.rope_parameters["partial_rotary_factor"]
        found["rope.dimension_count"] = int(share * (hidden // heads))
        found["use_parallel_residual"] = config.use_parallel_residual
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _of_rotary_lengths(config: PretrainedConfig, rotary: Mapping[str, Any]) -> dict[str, Any]:
    """How positions beyond those of training turn; `rotary` are those of layers that see all."""
    kind, found = config.model_type, dict[str, Any]()
    if kind.startswith(("gemma2", "gemma3")) and rotary["rope_type"] == "linear":
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": rotary["factor"]}
    if rotary["rope_type"] == "yarn":
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rotary["factor"]}
        found["rope.scaling.original_context_length"] = rotary["original_max_position_embeddings"]
    if kind == "gpt_oss":
        found["rope.scaling.yarn_beta_fast"] = rotary["beta_fast"]
        found["rope.scaling.yarn_beta_slow"] = rotary["beta_slow"]
    if kind == "ministral3":
        found["attention.temperature_scale"] = rotary["llama_4_scaling_beta"]
        found["rope.scaling.yarn_log_multiplier"] = rotary["mscale_all_dim"]
    if kind == "phi3":
        found["rope.scaling.original_context_length"] = config.original_max_position_embeddings
    return found


def _of_windows(config: PretrainedConfig) -> dict[str, Any]:
    kind = config.model_type
    found: dict[str, Any] = {}
    if kind.startswith("gemma") or kind in ("gpt_oss", "olmo3"):
        found["attention.sliding_window"] = config.sliding_window
    if kind.startswith("gemma3") or kind == "olmo3":
        sliding = [each == "sliding_attention" for each in config.layer_types]
        found["attention.sliding_window_pattern"] = sliding
    if kind == "phi3":
        found["attention.sliding_window"] = config.sliding_window or 0
    if kind == "mistral" and config.sliding_window:
        found["attention.sliding_window"] = config.sliding_window
    return found


def _of_experts(config: PretrainedConfig) -> dict[str, Any]:
    """What `TextModel.set_gguf_parameters` and those of families with experts write."""
    keys = {
        "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
        "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": (
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
        ),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "expert_shared_count": ("n_shared_experts",),
        "leading_dense_block_count": ("first_k_dense_replace",),
    }
    values = {
        key: next((v for name in names if (v := getattr(config, name, None)) is not None), None)
        for key, names in keys.items()
    }
    found = {key: value for key, value in values.items() if value is not None}
    if config.model_type == "glm4_moe":
        found["expert_gating_func"] = int(gguf.ExpertGatingFuncType.SIGMOID)
        found["expert_weights_scale"] = config.routed_scaling_factor
        found["expert_weights_norm"] = config.norm_topk_prob
    if config.model_type == "gpt_oss":
        found["expert_feed_forward_length"] = config.intermediate_size
    return found


def _of_latents(config: PretrainedConfig) -> dict[str, Any]:
    """What `DeepseekV2Model.set_gguf_parameters` writes: heads as of their latents, too."""
    rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
    is_v2, rotary = config.model_type == "deepseek_v2", config.rope_parameters
    gate = gguf.ExpertGatingFuncType.SOFTMAX if is_v2 else gguf.ExpertGatingFuncType.SIGMOID
    layers = getattr(config, "mlp_layer_types", None)
    dense = config.first_k_dense_replace if layers is None else layers.index("sparse")
    found = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "attention.q_lora_rank": config.q_lora_rank,
        "attention.key_length": rank + turned,
        "attention.value_length": rank,
        "attention.key_length_mla": config.qk_nope_head_dim + turned,
        "attention.value_length_mla": config.v_head_dim,
        "rope.dimension_count": turned,
        "leading_dense_block_count": dense,
        "expert_weights_scale": config.routed_scaling_factor,
        "expert_weights_norm": config.norm_topk_prob or None,
        "expert_gating_func": int(gate),
    }
    if "mscale_all_dim" in rotary:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * rotary["mscale_all_dim"]
    return found


def _of_gemma4(config: PretrainedConfig) -> dict[str, Any]:
    """What `Gemma4Model.set_gguf_parameters` writes."""
    sliding = [each == "sliding_attention" for each in config.layer_types]
    own = [config.per_layer_config[index] for index in range(len(sliding))]
    head = own[sliding.index(False)].head_dim
    heads = [each.num_key_value_heads for each in own]
    first = len(sliding) - config.num_kv_shared_layers
    wide = 1 + config.use_double_wide_mlp
    widths = [config.intermediate_size * (1 if i < first else wide) for i in range(len(sliding))]
    return {
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": sliding,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": heads if len({*heads}) > 1 else heads[0],
        "feed_forward_length": widths if len({*widths}) > 1 else widths[0],
        "rope.dimension_count": head,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _of_delta(config: PretrainedConfig) -> dict[str, Any]:
    """What `Qwen3NextModel.set_gguf_parameters` writes."""
    values = config.linear_num_value_heads
    return {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": values,
        "ssm.inner_size": config.linear_value_head_dim * values,
        "full_attention_interval": 1 + config.layer_types.index("full_attention"),
    }
