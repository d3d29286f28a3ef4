"""Qwen2, Qwen2.5 and Qwen3: LLaMA with biases (2) or norms of queries and keys (3)."""

from __future__ import annotations

from dataclasses import replace

from planner.model.config_file import ConfigFile
from planner.model.families.family import Family
from planner.model.families.gated import GATED_ARCHITECTURE, gated_shape, sliding_window
from planner.model.shape import MAX_LAYERS, ModelShape

_QWEN3_HEAD_DIM = 128
"""The default of transformers."""


def _qwen2_shape(config: ConfigFile) -> ModelShape:
    return replace(
        gated_shape(config, _kv_heads(config)), qkv_bias=True, sliding_window=_window(config)
    )


def _qwen3_shape(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", False)
    return replace(
        gated_shape(config, _kv_heads(config), _QWEN3_HEAD_DIM),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        sliding_window=_window(config),
    )


def _kv_heads(config: ConfigFile) -> int | None:
    """The number of attention heads where key/value heads are null; else None: the file has it."""
    is_null = (
        "num_key_value_heads" in config.values and config.values["num_key_value_heads"] is None
    )
    return config.size("num_attention_heads") if is_null else None


def _window(config: ConfigFile) -> int | None:
    """The window where every layer has it; with full layers among them, plan for full attention."""
    config.integer("sliding_window", default=0)
    if config.values.get("max_window_layers", 0) is None:
        raise config.refusal("max_window_layers", None, "a whole number")
    first_sliding = config.integer(
        "max_window_layers", default=config.size("num_hidden_layers", most=MAX_LAYERS)
    )
    is_used = config.flag("use_sliding_window", False)
    window = sliding_window(config) if is_used else None
    return window if first_sliding == 0 else None


QWEN2 = Family(model_type="qwen2", read_shape=_qwen2_shape, architecture=GATED_ARCHITECTURE)
QWEN3 = Family(
    model_type="qwen3",
    read_shape=_qwen3_shape,
    architecture=GATED_ARCHITECTURE,
    attention_bias="attention_bias",
)
