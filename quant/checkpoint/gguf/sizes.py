"""Sizes in a GGUF file's metadata as entries of a `config.json`, which most families have alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quant.checkpoint.gguf.header import Entries, StoredBlocks
from quant.checkpoint.gguf.names import layer_of
from quant.checkpoint.gguf.rotary import RotaryTensors, check_long_factors, rotary_entries
from quant.common.errors import SpecError

Tensors = Mapping[str, StoredBlocks]
"""The tensors of all parts of a model, by the names in its files."""

AHEAD = "nextn_predict_layers"
"""How many of the layers predict tokens further ahead."""


def gated(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    del tensors
    rotated, head_dim = rotated_of(entries)
    if rotated != head_dim:
        raise entries.refusal(
            f"{entries.architecture}.rope.dimension_count", rotated, f"{head_dim}, all of a head"
        )
    check_long_factors(entries, factors)
    return sizes(entries, head_dim) | rotary_entries(entries, head_dim, factors)


def rotated_of(entries: Entries) -> tuple[int, int]:
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


def layers_of(entries: Entries) -> int:
    """The layers that are run: behind them some files have others, which predict further ahead."""
    ahead = entries.of_architecture(AHEAD)
    return entries.size("block_count") - (entries.size(AHEAD) if ahead else 0)


def sizes(entries: Entries, head_dim: int) -> dict[str, Any]:
    heads, hidden = entries.size("attention.head_count"), entries.size("embedding_length")
    return {
        "hidden_size": hidden,
        "intermediate_size": entries.size(
            "feed_forward_length", entries.of_architecture("expert_feed_forward_length")
        ),
        "num_hidden_layers": layers_of(entries),
        "num_attention_heads": heads,
        "num_key_value_heads": entries.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": entries.size("context_length"),
        "rms_norm_eps": entries.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
    }


def partly_rotated(entries: Entries, factors: RotaryTensors) -> dict[str, Any]:
    """Sizes and rotary positions of a model that turns a share of its heads."""
    rotated, head_dim = rotated_of(entries)
    check_long_factors(entries, factors)
    return {
        **sizes(entries, head_dim),
        **rotary_entries(entries, rotated, factors),
        "partial_rotary_factor": rotated / head_dim,
    }


def has_bias(tensors: Tensors) -> bool:
    """Whether queries have biases, in the first layer of attention."""
    layers = [layer_of(name) or 0 for name in tensors if name.endswith(".attn_q.weight")]
    return f"blk.{min(layers, default=0)}.attn_q.bias" in tensors
