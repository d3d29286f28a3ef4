"""Tiny configurations of every supported architecture."""

from __future__ import annotations

from typing import Any

from transformers import (
    BloomConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Gemma4UnifiedTextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)

LAYERS = 5
VOCABULARY = 199
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ROPE = _COMMON | {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
}
_OPT = _COMMON | {
    "hidden_size": 48,
    "ffn_dim": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 48,
}
_GEMMA4 = _ROPE | {
    "head_dim": 12,
    "global_head_dim": 20,
    "sliding_window": 6,
    "layer_types": [
        f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")
    ],
}
_SAME_KEYS = {
    "num_key_value_heads": 3,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
}
"""Layers that see all tokens have values that are their keys."""
_KINDS = ("linear", "full", "linear", "linear", "full")
_DELTA = _ROPE | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [f"{kind}_attention" for kind in _KINDS],
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
    "norm_topk_prob": True,
}
_LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GRANITE = {
    "num_key_value_heads": 2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 5.0,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 24}
"""Sizes of layers that no model here has, which fit its hidden size."""

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_ROPE, num_key_value_heads=2),
    "llama-tied": LlamaConfig(**_ROPE, num_key_value_heads=6, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_ROPE, num_key_value_heads=3),
    "qwen2-sliding": Qwen2Config(
        **_ROPE,
        num_key_value_heads=3,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=2,
    ),
    "qwen3": Qwen3Config(**_ROPE, num_key_value_heads=2, head_dim=16),
    "mistral": MistralConfig(**_ROPE, num_key_value_heads=2, sliding_window=None),
    "mistral-sliding": MistralConfig(**_ROPE, num_key_value_heads=2, sliding_window=7),
    "gpt_neox": GPTNeoXConfig(**_ROPE),
    "gpt_neox-serial": GPTNeoXConfig(**_ROPE, use_parallel_residual=False),
    "opt": OPTConfig(**_OPT),
    "opt-post-norm": OPTConfig(**_OPT | {"word_embed_proj_dim": 24}, do_layer_norm_before=False),
    "bloom": BloomConfig(**_COMMON, hidden_size=48, n_layer=LAYERS, n_head=6),
}

MORE_CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **_ROPE | {"num_attention_heads": 4},
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
    "gpt_oss": GptOssConfig(
        **_ROPE | {"num_attention_heads": 4, "intermediate_size": 32},
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=7,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "smollm3": SmolLM3Config(
        **_ROPE,
        num_key_value_heads=2,
        no_rope_layers=[1, 0, 1, 0, 1],
        tie_word_embeddings=False,
        mlp_bias=True,
    ),
    "granite": GraniteConfig(**_ROPE, **_GRANITE),
    "granitemoe": GraniteMoeConfig(**_ROPE, **_GRANITE, **_LOCAL_EXPERTS),
    "granitemoeshared": GraniteMoeSharedConfig(
        **_ROPE, **_GRANITE, **_LOCAL_EXPERTS, shared_intermediate_size=32
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **_ROPE,
        **_GRANITE,
        **_MAMBA,
        num_local_experts=0,
        shared_intermediate_size=80,
        position_embedding_type="rope",
        layer_types=["attention"] * LAYERS,
    ),
    "mixtral": MixtralConfig(**_ROPE, num_key_value_heads=2, sliding_window=7, **_LOCAL_EXPERTS),
    "olmoe": OlmoeConfig(
        **_ROPE | {"intermediate_size": 32},
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=3,
        clip_qkv=0.7,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **_ROPE,
        **_EXPERTS | {"norm_topk_prob": False},
        num_key_value_heads=2,
        mlp_only_layers=[2],
    ),
    "phi3": Phi3Config(**_ROPE, num_key_value_heads=3, partial_rotary_factor=0.5, sliding_window=9),
    "glm": GlmConfig(**_ROPE, num_key_value_heads=3, head_dim=16),
    "glm4": Glm4Config(**_ROPE, num_key_value_heads=2, head_dim=12, attention_bias=False),
    "glm4_moe": Glm4MoeConfig(
        **_ROPE | {"num_attention_heads": 4},
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        first_k_dense_replace=2,
    ),
    "olmo2": Olmo2Config(**_ROPE, num_key_value_heads=2),
    "olmo3": Olmo3Config(
        **_ROPE,
        num_key_value_heads=3,
        sliding_window=6,
        rope_theta=9000.0,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ),
    "gemma2": Gemma2Config(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=12,
        sliding_window=7,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=0.05,
        final_logit_softcapping=2.0,
    ),
    "gemma3": Gemma3TextConfig(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=6,
        sliding_window_pattern=3,
        query_pre_attn_scalar=20,
        rope_scaling={"rope_type": "linear", "factor": 4.0},
    ),
    "gemma4": Gemma4TextConfig(
        **_GEMMA4, **_SAME_KEYS, final_logit_softcapping=2.0, hidden_size_per_layer_input=0
    ),
    "gemma4_unified": Gemma4UnifiedTextConfig(**_GEMMA4, **_SAME_KEYS),
    "gemma4-experts": Gemma4TextConfig(
        **_GEMMA4,
        num_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "ministral": MinistralConfig(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["full_attention", "sliding_attention"] * 2 + ["sliding_attention"],
    ),
    "ministral3": Ministral3Config(
        **_ROPE,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    ),
}
"""Families of whose parts those above have most, so that fewer tests go through them."""

SHARED_CONFIGS: dict[str, PretrainedConfig] = {
    "gemma4-shared": Gemma4TextConfig(
        **_GEMMA4
        | {"layer_types": [f"{kind}_attention" for kind in ("sliding",) * 3 + ("full",) * 2]},
        num_key_value_heads=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        num_kv_shared_layers=1,
        use_double_wide_mlp=True,
    ),
}
"""Of layers that read the keys and values of earlier ones."""

_LATENT = _ROPE | {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

LATENT_CONFIGS: dict[str, PretrainedConfig] = {
    "deepseek_v2": DeepseekV2Config(
        **_LATENT,
        q_lora_rank=None,
        n_shared_experts=2,
        first_k_dense_replace=1,
        rope_parameters=_YARN,
    ),
    "deepseek_v3": DeepseekV3Config(
        **_LATENT,
        q_lora_rank=24,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=2,
        rope_parameters=_YARN,
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **_LATENT,
        q_lora_rank=24,
        rope_interleave=False,
        mlp_layer_types=["dense", "sparse", "dense", "sparse", "sparse"],
    ),
    "mistral4": Mistral4Config(
        **_LATENT,
        q_lora_rank=24,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters={
            **_YARN,
            **{"original_max_position_embeddings": 6, "llama_4_scaling_beta": 0.5},
        },
    ),
}
"""Of layers that hold latents in place of keys and values."""

EVERY_CONFIG = CONFIGS | MORE_CONFIGS | LATENT_CONFIGS

STATE_CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_next": Qwen3NextConfig(**_DELTA, **_EXPERTS, mlp_only_layers=[0, 3]),
    "qwen3_5": Qwen3_5TextConfig(**_DELTA),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_DELTA, **_EXPERTS),
}
"""Families with layers whose requests have a constant state in place of keys and values."""
