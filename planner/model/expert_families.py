"""Families whose layers all have experts: Mixtral, OLMoE, Granite's and gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.model.config_file import ConfigFile, is_number
from planner.model.family import (
    FULL,
    GATED,
    SLIDING,
    Family,
    expert_keys,
    experts_of,
    gated_shape,
    layer_types,
    mixed_shape,
    refuse_nulls,
    window_of,
)
from planner.model.gated_families import GRANITE, granite_shape
from planner.model.shape import ModelShape

_HEAD_DIM = 64
"""The default of transformers for gpt-oss."""

_LARGEST_CLIP = 1e6
_COUNT = "num_local_experts"


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


def _mixtral(config: ConfigFile) -> ModelShape:
    return gated_shape(
        config,
        sliding_window=window_of(config),
        experts=experts_of(config, "intermediate_size", (_COUNT, "num_experts")),
    )


def _olmoe(config: ConfigFile) -> ModelShape:
    bias, heads = config.flag("attention_bias", False), config.size("num_attention_heads")
    clip = config.values.get("clip_qkv")
    if clip is not None and not (type(clip) is float and is_number(clip, 0, _LARGEST_CLIP)):
        raise config.refusal("clip_qkv", clip, "a number above 0 with a decimal point, or null")
    shape = gated_shape(
        config,
        kv_heads=config.size("num_key_value_heads", default=heads),
        qkv_bias=bias,
        output_bias=bias,
        experts=experts_of(config, "intermediate_size"),
    )
    if shape.query_width != shape.hidden_size:
        usual = shape.hidden_size // heads
        raise config.refusal("head_dim", shape.head_dim, f"{usual}, hidden_size over heads")
    return replace(shape, qk_norm_width=shape.query_width + shape.kv_width)


def _granitemoe(config: ConfigFile) -> ModelShape:
    return granite_shape(config, experts=experts_of(config, "intermediate_size", (_COUNT,)))


def _granitemoeshared(config: ConfigFile) -> ModelShape:
    shared = config.size("shared_intermediate_size")
    experts = experts_of(config, "intermediate_size", (_COUNT,), shared_width=shared)
    return granite_shape(config, experts=experts, fused_mlp=True)


_EXPERTS: dict[str, Any] = {
    "mlp": (),
    "experts": "mlp.experts",
    "router": "mlp.gate",
    "activation": "mlp.experts.act_fn",
}
_GRANITE = replace(
    GRANITE,
    mlp=(),
    experts="block_sparse_moe.experts",
    router="block_sparse_moe.router",
    activation="block_sparse_moe.experts.act_fn",
)

EXPERT_FAMILIES: Mapping[str, Family] = {
    "gpt_oss": Family(
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
    ),
    "granitemoe": Family(_granitemoe, _GRANITE, expert_keys(), attention_bias="attention_bias"),
    "granitemoeshared": Family(
        _granitemoeshared,
        replace(_GRANITE, mlp=("shared_mlp.input_linear", "shared_mlp.output_linear")),
        expert_keys(),
        attention_bias="attention_bias",
    ),
    "mixtral": Family(
        _mixtral, replace(GATED, **_EXPERTS), expert_keys(decimals=("router_jitter_noise",))
    ),
    "olmoe": Family(
        _olmoe,
        replace(GATED, **_EXPERTS),
        expert_keys("norm_topk_prob"),
        attention_bias="attention_bias",
    ),
}
