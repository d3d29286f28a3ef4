"""gpt-oss: experts with biases, and attention with sinks in windows at every other layer."""

from __future__ import annotations

from dataclasses import replace

from planner.model.config_file import ConfigFile
from planner.model.expert_entries import expert_keys, experts_of, refuse_nulls
from planner.model.family import (
    FULL,
    GATED,
    SLIDING,
    Family,
    gated_shape,
    layer_types,
    mixed_shape,
    window_of,
)
from planner.model.shape import ModelShape

_HEAD_DIM = 64
"""The default of transformers."""


def _gpt_oss(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", True)
    refuse_nulls(config, "num_key_value_heads")
    kv_heads = config.size("num_key_value_heads", default=config.size("num_attention_heads"))
    full = gated_shape(
        config,
        _HEAD_DIM,
        kind=FULL,
        kv_heads=kv_heads,
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
        experts=experts_of(config, "intermediate_size", has_biases=True),
    )
    sliding = replace(full, kind=SLIDING, sliding_window=window_of(config))
    types = layer_types(config, (FULL, SLIDING), lambda layer: FULL if layer % 2 else SLIDING)
    return mixed_shape([sliding if kind == SLIDING else full for kind in types])


GPT_OSS = Family(
    _gpt_oss,
    replace(
        GATED,
        mlp=(),
        experts="mlp.experts",
        router="mlp.router",
        experts_by_inputs=True,
    ),
    expert_keys(decimals=("swiglu_alpha", "swiglu_limit")),
    attention_bias="attention_bias",
)
