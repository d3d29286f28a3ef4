"""Tiny configurations of families whose layers have experts or are of several kinds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4Config, Mistral4ForCausalLM

_SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_OLMOE = {"num_experts": 6, "num_experts_per_tok": 2, "attention_bias": True}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 40}
_MIXER = {
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LATENT = {
    **{"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 24},
    **{"kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2},
}
MIXED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"model_type": "qwen3_moe", "intermediate_size": 96} | _SIZES | _EXPERTS,
    "qwen3_moe-dense": {
        **{"model_type": "qwen3_moe", "intermediate_size": 96} | _SIZES | _EXPERTS,
        **{"decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
        "use_sliding_window": True,
    },
    "qwen3_next": {"model_type": "qwen3_next", "intermediate_size": 96} | _SIZES | _SHARED | _MIXER,
    "qwen3_next-dense": {
        **{"model_type": "qwen3_next", "intermediate_size": 96} | _SIZES | _SHARED | _MIXER,
        **{"full_attention_interval": 2, "mlp_only_layers": [0, 1], "attention_bias": True},
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", "intermediate_size": 96} | _SIZES | _MIXER,
    "qwen3_5_text-tied": {
        **{"model_type": "qwen3_5_text", "intermediate_size": 96} | _SIZES | _MIXER,
        **{"tie_word_embeddings": True, "mamba_ssm_dtype": "float32"},
        "layer_types": ["full_attention", *["linear_attention"] * 4, "full_attention"],
    },
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text"} | _SIZES | _SHARED | _MIXER,
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_SIZES,
        **{"intermediate_size": 96, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        **{"n_shared_experts": 2, "first_k_dense_replace": 2},
    },
    "qwen2_moe": {
        **{"model_type": "qwen2_moe", "intermediate_size": 96} | _SIZES | _SHARED,
        **{"decoder_sparse_step": 2, "mlp_only_layers": [3]},
    },
    "mixtral": {"model_type": "mixtral", "intermediate_size": 24} | _SIZES | _LOCAL_EXPERTS,
    "olmoe": {"model_type": "olmoe", "intermediate_size": 24} | _SIZES | _OLMOE,
    "granitemoe": {"model_type": "granitemoe", "intermediate_size": 24} | _SIZES | _LOCAL_EXPERTS,
    "granitemoeshared": {
        **{"model_type": "granitemoeshared", "intermediate_size": 24} | _SIZES | _LOCAL_EXPERTS,
        "shared_intermediate_size": 40,
    },
    "granitemoehybrid": {
        **{"model_type": "granitemoehybrid", "num_local_experts": 0} | _SIZES,
        **{"shared_intermediate_size": 96, "layer_types": ["attention"] * 6},
        **{"mamba_n_heads": 8, "mamba_d_head": 16, "position_embedding_type": "rope"},
    },
    "deepseek_v2": {
        **{"model_type": "deepseek_v2"} | _SIZES | _LATENT,
        **{"q_lora_rank": None, "first_k_dense_replace": 1, "topk_method": "greedy"},
    },
    "deepseek_v3": {
        **{"model_type": "deepseek_v3"} | _SIZES | _LATENT,
        **{"q_lora_rank": 28, "first_k_dense_replace": 2, "n_group": 3, "topk_group": 2},
    },
    "glm4_moe_lite": {
        **{"model_type": "glm4_moe_lite"} | _SIZES | _LATENT,
        **{"q_lora_rank": 28, "mlp_layer_types": ["dense", "sparse"] * 3},
    },
    "mistral4": {
        **{"model_type": "mistral4"} | _SIZES | _LATENT,
        **{"q_lora_rank": 28, "first_k_dense_replace": 1},
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_SIZES,
        **{"intermediate_size": 40, "head_dim": 16, "sliding_window": 8},
        **{"num_local_experts": 5, "num_experts_per_tok": 2},
    },
}


def library_model(values: dict[str, Any]) -> Any:
    """The model that transformers builds of a `config.json`, on the meta device."""
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    others = {key: value for key, value in values.items() if key not in ("model_type", "names")}
    with torch.device("meta"):
        config = AutoConfig.for_model(values["model_type"], **others)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
