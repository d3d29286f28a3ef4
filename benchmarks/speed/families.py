"""Models of every family for `throughput`, some 50 to 240 million random weights each.

    python -m benchmarks.speed.throughput --models qwen3_moe qwen3_5_text --workloads equal mixed

The same command, contestants and rules as for LLaMA and OPT.
Sizes keep what sets a family apart: the pattern of its layers, experts, states, windows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VOCABULARY = 32000
_LINEAR_TO_FULL = ("linear_attention",) * 3 + ("full_attention",)
_SLIDING_TO_FULL = ("sliding_attention",) * 5 + ("full_attention",)
_GROUPED = {"num_key_value_heads": 4, "head_dim": 64}
_DELTA = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "layer_types": _LINEAR_TO_FULL,
}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
_SHARED = {"shared_expert_intermediate_size": 128}
_ROUTED = {
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 16,
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "opt": {"ffn_dim": 4096, "word_embed_proj_dim": 1024, "num_hidden_layers": 11},
    "qwen3": _GROUPED,
    "smollm3": {"num_key_value_heads": 4},
    "granite": {"num_key_value_heads": 4},
    "olmo3": {"sliding_window": 128},
    "phi3": {"num_key_value_heads": 4},
    "glm4": {"num_key_value_heads": 4, "head_dim": 64},
    "ministral3": _GROUPED,
    "gemma3_text": _GROUPED | {"sliding_window": 128, "layer_types": _SLIDING_TO_FULL},
    "gemma4_text": _GROUPED
    | {
        "sliding_window": 128,
        "layer_types": _SLIDING_TO_FULL,
        "global_head_dim": 128,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "gemma2": _GROUPED | {"sliding_window": 128},
    "qwen3_5_text": _GROUPED | _DELTA,
    "qwen3_moe": _GROUPED | _EXPERTS,
    "mixtral": _GROUPED | {"num_local_experts": 8, "intermediate_size": 384},
    "olmoe": {"num_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 128},
    "glm4_moe": _GROUPED | _ROUTED,
    "deepseek_v3": _LATENT | _ROUTED,
    "glm4_moe_lite": _LATENT | _ROUTED,
    "qwen3_next": _GROUPED | _DELTA | _EXPERTS | _SHARED,
    "qwen3_5_moe_text": _GROUPED | _DELTA | _EXPERTS | _SHARED,
    "gpt_oss": _GROUPED
    | {
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 256,
        "sliding_window": 128,
    },
}
"""What sets each family's model apart from that of LLaMA, by `model_type`."""


def configuration(family: str, tiny: bool) -> PretrainedConfig:
    """The configuration of a family's model, of two to six small layers where `tiny`."""
    from transformers import AutoConfig

    own = dict(FAMILIES[family])
    hidden, heads, layers = (128, 4, 2) if tiny else (1024, 16, 12)
    pattern = own.pop("layer_types", None)
    if pattern is not None:
        layers = max(len(pattern), layers)
        own["layer_types"] = list(pattern) * (layers // len(pattern))
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": hidden * 9 // 4,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if tiny:
        small = {"ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden, "num_hidden_layers": layers}
        own |= {key: small[key] for key in own.keys() & small.keys()}
    return AutoConfig.for_model(family, **sizes | own)


def main() -> None:
    """Measure all families, or what other options say."""
    from benchmarks.speed import throughput  # which takes its models from here

    throughput.main(["--models", *FAMILIES, "--results", "families.jsonl", *sys.argv[1:]])


if __name__ == "__main__":
    main()
