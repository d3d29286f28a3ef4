"""Families whose layers are much like LLaMA's: with layers that do not rotate, with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.model.config_file import ConfigFile
from planner.model.family import (
    GATED,
    Family,
    gated_shape,
    kv_heads_or_all,
    multiplier,
    window_of,
)
from planner.model.shape import MAX_LAYERS, ModelShape

_NOPE_INTERVAL = 4
"""Every so many layers one does not rotate, where a SmolLM3 file does not list them."""


def _smollm3(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", False)
    _check_rotating_layers(config)
    is_used = config.flag("use_sliding_window", False)
    config.integer("sliding_window", default=0)
    if is_used and window_of(config) is not None:
        raise config.refusal("use_sliding_window", True, "false: no window of this family is run")
    return gated_shape(
        config,
        kv_heads=kv_heads_or_all(config),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


def _check_rotating_layers(config: ConfigFile) -> None:
    layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    key, interval = "no_rope_layers", "no_rope_layer_interval"
    if config.values.get(interval, 0) is None:
        raise config.refusal(interval, None, "a whole number, or left out")
    config.size(interval, default=_NOPE_INTERVAL)
    listed = config.values.get(key)
    is_list = isinstance(listed, list) and all(type(each) is int for each in listed)
    if listed is not None and not (is_list and len(listed) == layers and {*listed} <= {0, 1}):
        needed = f"{layers} numbers, 1 where a layer has rotary positions and 0 where not"
        raise config.refusal(key, listed, needed)


def _granite(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", False)
    for key in (*_GRANITE_MULTIPLIERS, "logits_scaling"):
        multiplier(config, key)
    heads = config.size("num_attention_heads")
    return gated_shape(
        config,
        kv_heads=config.size("num_key_value_heads", default=heads),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


_GRANITE_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")

GATED_FAMILIES: Mapping[str, Family] = {
    "granite": Family(
        _granite,
        replace(GATED, input_multiplier="embedding_multiplier", logits_divisor="logits_scaling"),
        attention_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "smollm3": Family(_smollm3, GATED, attention_bias="attention_bias", mlp_bias="mlp_bias"),
}
