"""Gemma's entries of `config.json` that llama.cpp has in its code, or under names of their own."""

from __future__ import annotations

from typing import Any

from quant.checkpoint.gguf.header import Entries

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_PATTERN = "attention.sliding_window_pattern"
_LOCAL_BASE = 10_000.0
_GLOBAL_BASE = 1_000_000.0
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
