"""The `config.json` and `generation_config.json` that a GGUF file's metadata stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quant.checkpoint.gguf.architectures import ARCHITECTURES
from quant.checkpoint.gguf.gemma import CAPS, gemma_entries
from quant.checkpoint.gguf.header import Entries, StoredBlocks
from quant.checkpoint.gguf.rotary import (
    LONG,
    SHORT,
    RotaryTensors,
    check_long_factors,
    rotary_entries,
)
from quant.checkpoint.gguf.tokenizer import end_tokens
from quant.common.errors import SpecError

_TEMPERATURE = "attention.temperature_scale"
"""What the scores of later queries grow by."""

Tensors = Mapping[str, StoredBlocks]
"""The tensors of all parts of a model, by the names in its files."""

_SCALES = ("attention.scale", "attention.clamp_kqv", "embedding_scale", "logit_scale",
           "residual_scale", "attn_logit_softcapping", "final_logit_softcapping",
           "expert_weights_scale")  # fmt: skip
"""Entries that change what a layer computes, and that our families do not know."""

_OF_EXPERTS = ("qwen3moe",)
"""Architectures whose experts are read. Mixtral is a file of `llama`."""

_NOT_GRANITE = ("attention.clamp_kqv", "expert_weights_scale", *CAPS)
_KNOWN_SCALES = {
    *(("granite", key) for key in _SCALES if key not in _NOT_GRANITE),
    *(("gemma2", key) for key in CAPS),
    ("gemma3", "final_logit_softcapping"),
}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
"""`general.sampling.*` by their names in a `generation_config.json`."""


def model_entries(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """Entries of `config.json`; SpecError for missing or wrong ones, experts of other families
    and unknown scales.
    """
    if entries.of_architecture("expert_count") and entries.architecture not in _OF_EXPERTS:
        raise SpecError(
            f"{entries.path}: a mixture of {entries.size('expert_count')} experts of architecture "
            f"{entries.architecture}; of those llmpq reads {', '.join(_OF_EXPERTS)} alone, of "
            "others give the original checkpoint, a folder of safetensors files"
        )
    for key in _SCALES:
        if (entries.architecture, key) not in _KNOWN_SCALES and entries.of_architecture(
            key
        ) not in (None, 0.0, 1.0):
            raise entries.refusal(f"{entries.architecture}.{key}", entries.of_architecture(key),
                                  "left out for a model that llmpq runs")  # fmt: skip
    size = vocabulary(entries, tensors)
    return {
        "model_type": ARCHITECTURES[entries.architecture].model_type,
        "vocab_size": size,
        **_FAMILIES[entries.architecture](entries, tensors, factors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": entries.token("tokenizer.ggml.bos_token_id", size),
        "eos_token_id": entries.token("tokenizer.ggml.eos_token_id", size),
        "pad_token_id": None,  # or some families have one by default, beyond small vocabularies
    }


def generation_entries(entries: Entries, vocabulary_size: int) -> dict[str, Any]:
    """Entries of `generation_config.json`: where answers end, and stated sampling."""
    ends = sorted(end_tokens(entries, entries.tokens(vocabulary_size), vocabulary_size))
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = entries.values.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and math.isfinite(value):
            found[name] = value
    found |= {"do_sample": True} if found.get("temperature") else {}
    return found | ({"eos_token_id": ends} if ends else {})


def vocabulary(entries: Entries, tensors: Tensors) -> int:
    if "token_embd.weight" not in tensors:
        raise SpecError(
            f"{entries.path} has no token_embd.weight: it is no whole model; download it again"
        )
    return tensors["token_embd.weight"].shape[0]


def _gated(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    del tensors
    rotated, head_dim = _rotated(entries)
    if rotated != head_dim:
        raise entries.refusal(
            f"{entries.architecture}.rope.dimension_count", rotated, f"{head_dim}, all of a head"
        )
    check_long_factors(entries, factors)
    return _sizes(entries, head_dim) | rotary_entries(entries, head_dim, factors)


def _rotated(entries: Entries) -> tuple[int, int]:
    """Rotated elements of a head, and all of it."""
    heads, hidden = entries.size("attention.head_count"), entries.size("embedding_length")
    head_dim = entries.size("attention.key_length", max(hidden // heads, 1))
    values = entries.size("attention.value_length", head_dim)
    if values != head_dim:
        raise SpecError(
            f"{entries.path}: heads of {head_dim} elements (attention.key_length) with values of "
            f"{values}; llmpq runs models where the two are equal"
        )
    return entries.size("rope.dimension_count", head_dim), head_dim


def _sizes(entries: Entries, head_dim: int) -> dict[str, Any]:
    heads, hidden = entries.size("attention.head_count"), entries.size("embedding_length")
    return {
        "hidden_size": hidden,
        "intermediate_size": entries.size("feed_forward_length"),
        "num_hidden_layers": entries.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": entries.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": entries.size("context_length"),
        "rms_norm_eps": entries.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
    }


def _llama(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = _biased(entries, tensors, factors)
    if entries.of_architecture("attention.sliding_window"):
        found |= {
            "model_type": "mistral",
            "sliding_window": entries.size("attention.sliding_window"),
        }
        del found["attention_bias"], found["mlp_bias"]
    return found


def _qwen2(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = _gated(entries, tensors, factors)
    if found["head_dim"] * found["num_attention_heads"] == found["hidden_size"]:
        del found["head_dim"]  # transformers' Qwen2 has no such entry
    return found


def _qwen3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in tensors
    return _gated(entries, tensors, factors) | {"attention_bias": bias}


def _qwen3_moe(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """llama.cpp has experts in every layer, and weights that add up to one, in its code alone."""
    return _qwen3(entries, tensors, factors) | {
        "num_experts": entries.size("expert_count"),
        "num_experts_per_tok": entries.size("expert_used_count"),
        "moe_intermediate_size": entries.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _biased(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = _gated(entries, tensors, factors)
    found["attention_bias"] = "blk.0.attn_q.bias" in tensors
    found["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    return found


def _smollm3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """llama.cpp has the interval of layers without rotary positions in its code alone."""
    return _biased(entries, tensors, factors) | {"no_rope_layer_interval": 4}


def _granite(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = _biased(entries, tensors, factors)
    return found | {
        "embedding_multiplier": entries.number("embedding_scale", 1.0),
        "residual_multiplier": entries.number("residual_scale", 1.0),
        "attention_multiplier": entries.number("attention.scale", found["head_dim"] ** -0.5),
        "logits_scaling": entries.number("logit_scale", 1.0),
    }


def _mistral3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """Ministral 3, or Mistral where no temperature grows with the position."""
    found, beta = _gated(entries, tensors, factors), entries.number(_TEMPERATURE, 0.0)
    if not beta:
        return found | {"model_type": "mistral", "sliding_window": None}
    scaling = found.get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        key = f"{entries.architecture}.{_TEMPERATURE}"
        raise entries.refusal(key, beta, "left out where rope.scaling.type is not yarn")
    multiplier = entries.number("rope.scaling.yarn_log_multiplier", 0.0)
    scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    return found | {"rope_scaling": scaling | {"llama_4_scaling_beta": beta}}


def _phi3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    del tensors
    rotated, head_dim = _rotated(entries)
    found = _sizes(entries, head_dim) | {"partial_rotary_factor": rotated / head_dim}
    if head_dim * found["num_attention_heads"] == found["hidden_size"]:
        del found["head_dim"]  # transformers' Phi-3 has no such entry
    window = entries.of_architecture("attention.sliding_window")
    found |= {"sliding_window": entries.size("attention.sliding_window")} if window else {}
    missing = {LONG, SHORT} - factors.keys()
    if len(missing) == 2:
        return found | rotary_entries(entries, rotated, factors)
    if missing:
        raise SpecError(f"{entries.path} has no {missing.pop()}; download the file again")
    length = entries.size("rope.scaling.original_context_length")
    scaling = {
        "rope_type": "longrope",
        "short_factor": factors[SHORT].tolist(),
        "long_factor": factors[LONG].tolist(),
    }
    theta = entries.number("rope.freq_base", 10_000.0)
    return found | {
        "original_max_position_embeddings": length,
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def _glm4(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    sections = entries.of_architecture("rope.dimension_sections")
    if sections is not None:  # of images, for which the converter reorders rows
        raise entries.refusal("glm4.rope.dimension_sections", sections, "left out")
    rotated, head_dim = _rotated(entries)
    check_long_factors(entries, factors)
    return {
        **_sizes(entries, head_dim),
        **rotary_entries(entries, rotated, factors),
        "partial_rotary_factor": rotated / head_dim,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
    }


def _olmo2(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    window = entries.of_architecture("attention.sliding_window")
    if window:
        needed = "left out: of OLMo 3 give the original checkpoint, a folder of safetensors files"
        raise entries.refusal("olmo2.attention.sliding_window", window, needed)
    bias = "blk.0.attn_q.bias" in tensors
    return _gated(entries, tensors, factors) | {"attention_bias": bias}


def _bloom(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    del tensors, factors
    hidden = entries.size("embedding_length")
    if entries.size("feed_forward_length", 4 * hidden) != 4 * hidden:
        width = entries.size("feed_forward_length")
        raise entries.refusal("bloom.feed_forward_length", width, f"{4 * hidden}, as in BLOOM")
    return {
        "hidden_size": hidden,
        "n_layer": entries.size("block_count"),
        "n_head": entries.size("attention.head_count"),
        "seq_length": entries.size("context_length"),
        "layer_norm_epsilon": entries.number("attention.layer_norm_epsilon"),
    }


def _gpt_neox(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    heads, hidden = entries.size("attention.head_count"), entries.size("embedding_length")
    head_dim = max(hidden // heads, 1)
    rotated = entries.size("rope.dimension_count", head_dim)
    rotary = rotary_entries(entries, rotated, factors)
    found = {
        "hidden_size": hidden,
        "intermediate_size": entries.size("feed_forward_length"),
        "num_hidden_layers": entries.size("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": entries.size("context_length"),
        "layer_norm_eps": entries.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": entries.flag("gptneox.use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in tensors,
        "hidden_act": "gelu",
        "rotary_emb_base": rotary["rope_theta"],
        "rotary_pct": rotated / head_dim,
    }
    return found | ({"rope_scaling": rotary["rope_scaling"]} if "rope_scaling" in rotary else {})


def _gemma(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    return gemma_entries(entries, _gated(entries, tensors, factors))


_Family = Callable[[Entries, Tensors, RotaryTensors], dict[str, Any]]
_FAMILIES: Mapping[str, _Family] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "granite": _granite,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "bloom": _bloom,
    "gptneox": _gpt_neox,
}
