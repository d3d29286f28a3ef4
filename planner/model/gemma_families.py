"""Gemma's families: norms before and behind each part of a layer, sliding layers beside full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.model.config_file import ConfigFile, is_number
from planner.model.family import (
    FULL,
    GATED,
    SLIDING,
    ConfigKeys,
    Family,
    RotaryKeys,
    gated_shape,
    layer_types,
    windowed_shape,
)
from planner.model.shape import ModelShape

_LARGEST_CAP = 1e6
_SIZES = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
"""The defaults of transformers: files of Gemma 3 leave out what does not differ from them."""

_SIZES_2 = _SIZES | {"vocab_size": 256_000, "max_position_embeddings": 8192}
_SIZES_3 = _SIZES | {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_SLIDING_PATTERN = 6
_ALTERNATING = 2


def _gemma2(config: ConfigFile) -> ModelShape:
    return _windowed(_with_defaults(config, _SIZES_2), _ALTERNATING)


def _gemma3(config: ConfigFile) -> ModelShape:
    full = _with_defaults(config, _SIZES_3)
    return _windowed(full, full.size("sliding_window_pattern", default=_SLIDING_PATTERN), True)


def _with_defaults(config: ConfigFile, defaults: Mapping[str, Any]) -> ConfigFile:
    return replace(config, values={**defaults, **config.values})


def _windowed(config: ConfigFile, period: int, qk_norm: bool = False) -> ModelShape:
    """Read a shape whose every `period`-th layer attends to all tokens, where no list says it."""
    _check_scores(config)
    config.per_head(config.size("hidden_size"), config.size("num_attention_heads"))
    bias = config.flag("attention_bias", False)
    shape = gated_shape(
        config,
        _SIZES["head_dim"],
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=qk_norm,
        layer_norms=4,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
    types = layer_types(
        config, (FULL, SLIDING), lambda layer: SLIDING if (layer + 1) % period else FULL
    )
    return windowed_shape(shape, types, config.size("sliding_window"))


def _check_scores(config: ConfigFile) -> None:
    """Check what scores and logits are scaled and capped by, and that tokens see earlier ones."""
    config.size("query_pre_attn_scalar")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = config.values.get(key)
        if value is not None and not (type(value) is float and is_number(value, 0, _LARGEST_CAP)):
            raise config.refusal(key, value, "a number above 0 with a decimal point, or null")
    key = "use_bidirectional_attention"
    if config.values.get(key) is not None and config.flag(key, False):
        raise config.refusal(key, True, "false or null for a model that generates text")


_FOUR_NORMS = replace(
    GATED,
    norms=(*GATED.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    logits_cap="final_logit_softcapping",
)
_KEYS = ConfigKeys(activation="hidden_activation")

GEMMA_FAMILIES: Mapping[str, Family] = {
    "gemma2": Family(_gemma2, _FOUR_NORMS, _KEYS, attention_bias="attention_bias"),
    "gemma3_text": Family(
        _gemma3,
        _FOUR_NORMS,
        replace(
            _KEYS, rotary=RotaryKeys(types=("default", "linear", "yarn", "llama3"), by_type=True)
        ),
        attention_bias="attention_bias",
    ),
}
