"""Gemma's entries of `config.json` that llama.cpp has in its code, or under names of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from quant.checkpoint.gguf.header import Entries
from quant.checkpoint.gguf.rotary import FACTORS, RotaryTensors
from quant.checkpoint.gguf.sizes import Tensors, has_bias, layers_of

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_PATTERN = "attention.sliding_window_pattern"
_LOCAL_BASE = 10_000.0
_GLOBAL_BASE = 1_000_000.0
_SHARED = "attention.shared_kv_layers"
_PER_LAYER = "embedding_length_per_layer_input"
_STILL = 1e29
"""A factor of frequencies beyond which elements do not turn: llama.cpp has 1e30."""

_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores alone are scaled by the hidden size over the heads."""


def window_types(entries: Entries, layers: int) -> list[str]:
    """The type of each layer, by a list that says of each whether it attends to a window."""
    pattern = entries.of_architecture(_PATTERN)
    if not isinstance(pattern, list) or len(pattern) != layers:
        key = f"{entries.architecture}.{_PATTERN}"
        raise entries.refusal(key, pattern, f"a list of {layers} flags, one for each layer")
    return [("full_attention", "sliding_attention")[bool(each)] for each in pattern]


def gemma_entries(entries: Entries, gated: dict[str, Any]) -> dict[str, Any]:
    """The entries of a model whose sizes and rotary positions `gated` has."""
    name, found = entries.architecture, dict(gated)
    del found["hidden_act"]
    is_largest = found["num_hidden_layers"] == _SCALED_BY_WIDTH[name]
    width = found["hidden_size"] // found["num_attention_heads"]
    found |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if is_largest else found["head_dim"],
        "sliding_window": entries.size("attention.sliding_window"),
    }
    for key in CAPS:
        value = entries.number(key, 0.0)
        found[key] = value or None
    pattern = entries.of_architecture(_PATTERN)
    if name == "gemma2":
        return found
    if isinstance(pattern, list):
        found["layer_types"] = window_types(entries, found["num_hidden_layers"])
    elif pattern is not None:
        found["sliding_window_pattern"] = entries.size(_PATTERN)
    return found | {
        "rope_theta": entries.number("rope.freq_base", _GLOBAL_BASE),
        "rope_local_base_freq": entries.number("rope.freq_base_swa", _LOCAL_BASE),
    }


def gemma4_entries(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    layers = layers_of(entries)
    types = window_types(entries, layers)
    kv_heads = _by_layer(entries, "attention.head_count_kv", layers)
    widths = _by_layer(entries, "feed_forward_length", layers)
    full = types.index("full_attention") if "full_attention" in types else 0
    sliding = types.index("sliding_attention") if "sliding_attention" in types else 0
    shared, ahead = (_or_none(entries, key) for key in (_SHARED, _PER_LAYER))
    turned = factors.get(FACTORS)
    share = 1.0 if turned is None else float(np.mean(turned < _STILL))
    found = {
        "hidden_size": entries.size("embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_hidden_layers": layers,
        "num_attention_heads": entries.size("attention.head_count"),
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[full],
        "head_dim": entries.size("attention.key_length_swa"),
        "global_head_dim": entries.size("attention.key_length"),
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in tensors,
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": ahead,
        "layer_types": types,
        "sliding_window": entries.size("attention.sliding_window"),
        "max_position_embeddings": entries.size("context_length"),
        "rms_norm_eps": entries.number("attention.layer_norm_rms_epsilon"),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": entries.number("final_logit_softcapping", 0.0) or None,
        "attention_bias": has_bias(tensors),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": share,
                "rope_theta": entries.number("rope.freq_base", _GLOBAL_BASE),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": entries.number("rope.freq_base_swa", _LOCAL_BASE),
            },
        },
    }
    if ahead:
        found["vocab_size_per_layer_input"] = tensors["token_embd.weight"].shape[0]
    if entries.of_architecture("expert_count"):
        found |= {
            "enable_moe_block": True,
            "num_experts": entries.size("expert_count"),
            "top_k_experts": entries.size("expert_used_count"),
            "moe_intermediate_size": entries.size("expert_feed_forward_length"),
        }
    return found


def _or_none(entries: Entries, key: str) -> int:
    """A number that may be left out, or 0."""
    return entries.size(key) if entries.of_architecture(key) else 0


def _by_layer(entries: Entries, key: str, layers: int) -> list[int]:
    """A size of each layer, of which the file has one for all or a list."""
    value = entries.of_architecture(key)
    if not isinstance(value, list):
        return [entries.size(key)] * layers
    if len(value) != layers or not all(type(each) is int and each > 0 for each in value):
        needed = f"{layers} whole numbers, one for each layer"
        raise entries.refusal(f"{entries.architecture}.{key}", value, needed)
    return value
