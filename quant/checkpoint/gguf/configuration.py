"""The `config.json` and `generation_config.json` that a GGUF file's metadata stand for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from quant.checkpoint.gguf.architectures import ARCHITECTURES
from quant.checkpoint.gguf.expert_models import (
    DELTA_MODELS,
    EXPERT_MODELS,
    SHARED_WIDTH,
    TEMPERATURE,
    experts,
)
from quant.checkpoint.gguf.gemma import CAPS, gemma4_entries, gemma_entries, window_types
from quant.checkpoint.gguf.header import Entries
from quant.checkpoint.gguf.rotary import (
    LONG,
    SHORT,
    RotaryTensors,
    rotary_entries,
)
from quant.checkpoint.gguf.sizes import (
    Tensors,
    gated,
    has_bias,
    partly_rotated,
    rotated_of,
    sizes,
)
from quant.checkpoint.gguf.tokenizer import end_tokens
from quant.common.errors import SpecError

_SCALES = ("attention.scale", "attention.clamp_kqv", "embedding_scale", "logit_scale",
           "residual_scale", "attn_logit_softcapping", "final_logit_softcapping",
           "expert_weights_scale")  # fmt: skip
"""Entries that change what a layer computes, and that our families do not know."""

_NOT_GRANITE = ("attention.clamp_kqv", "expert_weights_scale", *CAPS)
_GRANITES = ("granite", "granitemoe")
_KNOWN_SCALES = {
    *((name, key) for name in _GRANITES for key in _SCALES if key not in _NOT_GRANITE),
    *(("gemma2", key) for key in CAPS),
    *((name, "final_logit_softcapping") for name in ("gemma3", "gemma4")),
    *((name, "expert_weights_scale") for name in ("deepseek2", "glm4moe")),
}
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
             "penalty_repeat": "repetition_penalty"}  # fmt: skip
"""`general.sampling.*` by their names in a `generation_config.json`."""


def model_entries(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """Entries of `config.json`; SpecError for missing or wrong ones, experts of other families
    and unknown scales.
    """
    of_experts = [name for name, each in ARCHITECTURES.items() if each.experts]
    if entries.of_architecture("expert_count") and entries.architecture not in of_experts:
        raise SpecError(
            f"{entries.path}: a mixture of {entries.size('expert_count')} experts of architecture "
            f"{entries.architecture}; of those llmpq reads {', '.join(of_experts)} alone, of "
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


def _llama(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = _biased(entries, tensors, factors)
    if entries.of_architecture("attention.sliding_window"):
        found |= {
            "model_type": "mistral",
            "sliding_window": entries.size("attention.sliding_window"),
        }
        del found["attention_bias"], found["mlp_bias"]
    if entries.of_architecture("expert_count"):
        found.pop("attention_bias", None), found.pop("mlp_bias", None)
        found = {"sliding_window": None} | found | experts(entries, "num_local_experts")
        found["model_type"] = "mixtral"
    return found


def _qwen2(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = gated(entries, tensors, factors)
    if found["head_dim"] * found["num_attention_heads"] == found["hidden_size"]:
        del found["head_dim"]  # transformers' Qwen2 has no such entry
    return found


def _qwen3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    return gated(entries, tensors, factors) | {"attention_bias": has_bias(tensors)}


def _biased(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = gated(entries, tensors, factors)
    found["attention_bias"] = has_bias(tensors)
    found["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    return found


def _smollm3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """llama.cpp has the interval of layers without rotary positions in its code alone."""
    return _biased(entries, tensors, factors) | {"no_rope_layer_interval": 4}


def _granite(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    found = _biased(entries, tensors, factors)
    if entries.architecture == "granitemoe":
        del found["mlp_bias"]
        found |= experts(entries, "num_local_experts")
        if entries.of_architecture(SHARED_WIDTH):
            found["model_type"] = "granitemoeshared"
            found["shared_intermediate_size"] = entries.size(SHARED_WIDTH)
    return found | {
        "embedding_multiplier": entries.number("embedding_scale", 1.0),
        "residual_multiplier": entries.number("residual_scale", 1.0),
        "attention_multiplier": entries.number("attention.scale", found["head_dim"] ** -0.5),
        "logits_scaling": entries.number("logit_scale", 1.0),
    }


def _mistral3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """Ministral 3, or Mistral where no temperature grows with the position."""
    found, beta = gated(entries, tensors, factors), entries.number(TEMPERATURE, 0.0)
    if not beta:
        return found | {"model_type": "mistral", "sliding_window": None}
    scaling = found.get("rope_scaling", {})
    if scaling.get("rope_type") != "yarn":
        key = f"{entries.architecture}.{TEMPERATURE}"
        raise entries.refusal(key, beta, "left out where rope.scaling.type is not yarn")
    multiplier = entries.number("rope.scaling.yarn_log_multiplier", 0.0)
    scaling |= {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
    return found | {"rope_scaling": scaling | {"llama_4_scaling_beta": beta}}


def _phi3(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    del tensors
    rotated, head_dim = rotated_of(entries)
    found = sizes(entries, head_dim) | {"partial_rotary_factor": rotated / head_dim}
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
    return partly_rotated(entries, factors) | {"attention_bias": has_bias(tensors)}


def _olmo2(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    """OLMo 2, or OLMo 3 where layers attend to a window."""
    found = gated(entries, tensors, factors) | {"attention_bias": has_bias(tensors)}
    if not entries.of_architecture("attention.sliding_window"):
        return found
    found["model_type"] = "olmo3"
    return found | {
        "sliding_window": entries.size("attention.sliding_window"),
        "layer_types": window_types(entries, found["num_hidden_layers"]),
    }


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
    return gemma_entries(entries, gated(entries, tensors, factors))


_Family = Callable[[Entries, Tensors, RotaryTensors], dict[str, Any]]
_FAMILIES: Mapping[str, _Family] = {
    "llama": _llama,
    "smollm3": _smollm3,
    "granite": _granite,
    "granitemoe": _granite,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma4": gemma4_entries,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    **EXPERT_MODELS,
    **DELTA_MODELS,
    "bloom": _bloom,
    "gptneox": _gpt_neox,
}
