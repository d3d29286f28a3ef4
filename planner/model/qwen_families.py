"""Qwen's families with experts, and with layers of a constant state among those of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.model.config_file import ConfigFile
from planner.model.family import (
    ASKING,
    DENSE,
    FULL,
    GATED,
    LINEAR,
    ONE_MLP,
    ConfigKeys,
    Family,
    RotaryKeys,
    expert_keys,
    experts_of,
    full_every,
    gated_shape,
    kv_heads_or_all,
    layer_types,
    mixed_shape,
    refuse_nulls,
    window_if_used,
)
from planner.model.layer_parts import DeltaMixer
from planner.model.shape import MAX_LAYERS, ModelShape

_HEAD_DIM, _FULL_INTERVAL, _ROTARY_SHARE = 256, 4, 0.25
"""The defaults of transformers."""

_ATTENTION_GATE, _STATE_GATE = "attn_output_gate", "output_gate_type"
_SWISH = ("silu", "swish")
"""One function by two names."""

_STATE_DTYPE = "mamba_ssm_dtype"
_STATE_DTYPES = ("float32", "bfloat16", "float16")
"""What a file may suggest for the state, which is kept in float32 in any case."""


def _qwen2_moe(config: ConfigFile) -> ModelShape:
    if config.flag("use_sliding_window", False):
        raise config.refusal("use_sliding_window", True, "false for a qwen2_moe model")
    for key in ("sliding_window", "max_window_layers"):
        config.integer(key, default=0)
    refuse_nulls(config, "max_window_layers")
    plain = gated_shape(
        config, kv_heads=kv_heads_or_all(config), qkv_bias=config.flag("qkv_bias", True)
    )
    sparse, dense = _with_shared_expert(config, plain), replace(plain, kind=DENSE)
    return mixed_shape([sparse if each else dense for each in _asks_experts(config)])


def _qwen3_moe(config: ConfigFile) -> ModelShape:
    plain = gated_shape(
        config, default_bias=False, qk_norm=True, sliding_window=window_if_used(config)
    )
    experts = experts_of(config, "moe_intermediate_size")
    sparse = replace(plain, experts=experts, intermediate_size=experts.width)
    dense = replace(plain, kind=DENSE)
    return mixed_shape([sparse if each else dense for each in _asks_experts(config)])


def _qwen3_next(config: ConfigFile) -> ModelShape:
    dense = _by_type(config, fused=True)
    sparse = {kind: _with_shared_expert(config, shape) for kind, shape in dense.items()}
    dense = {kind: replace(shape, kind=f"{kind}, {DENSE}") for kind, shape in dense.items()}
    layers = zip(_types(config), _asks_experts(config), strict=True)
    return mixed_shape([(sparse if asks else dense)[kind] for kind, asks in layers])


def _qwen3_5(config: ConfigFile) -> ModelShape:
    kinds = _by_type(config, fused=False)
    return mixed_shape([kinds[kind] for kind in _types(config)])


def _qwen3_5_moe(config: ConfigFile) -> ModelShape:
    width = config.size("moe_intermediate_size")
    plain = _by_type(config, fused=False, intermediate_size=width)
    kinds = {kind: _with_shared_expert(config, shape) for kind, shape in plain.items()}
    return mixed_shape([kinds[kind] for kind in _types(config)])


def _with_shared_expert(config: ConfigFile, shape: ModelShape) -> ModelShape:
    width = config.size("shared_expert_intermediate_size")
    experts = experts_of(config, "moe_intermediate_size", shared_width=width, shared_gate=True)
    return replace(shape, experts=experts, intermediate_size=experts.width)


def _by_type(config: ConfigFile, fused: bool, **own: Any) -> Mapping[str, ModelShape]:
    """The shapes of layers of either type, with one MLP."""
    _check_gates(config)
    bias = config.flag("attention_bias", False)
    plain = gated_shape(config, _HEAD_DIM, **own)
    full = replace(
        plain, kind=FULL, qkv_bias=bias, output_bias=bias, qk_norm=True, output_gate=True
    )
    return {FULL: full, LINEAR: replace(plain, kind=LINEAR, delta=_mixer(config, fused))}


def _check_gates(config: ConfigFile) -> None:
    """Refuse gates that transformers ignores: behind attention, and activation of a state."""
    if not config.flag(_ATTENTION_GATE, True):
        raise config.refusal(_ATTENTION_GATE, False, "true, or left out")
    gate, usual = config.values.get(_STATE_GATE), config.values.get("hidden_act", "silu")
    if gate not in (None, usual) and not (gate in _SWISH and usual in _SWISH):
        known = _SWISH if usual in _SWISH else (usual,)
        raise config.refusal(_STATE_GATE, gate, f"{' or '.join(known)} (hidden_act), or left out")


def _mixer(config: ConfigFile, fused: bool) -> DeltaMixer:
    keys, values = (config.size(f"linear_num_{part}_heads") for part in ("key", "value"))
    if values % keys:
        raise config.refusal(
            "linear_num_value_heads", values, f"a multiple of {keys} (linear_num_key_heads)"
        )
    dtype = config.values.get(_STATE_DTYPE)
    if dtype is not None and dtype not in _STATE_DTYPES:
        raise config.refusal(_STATE_DTYPE, dtype, f"one of {', '.join(_STATE_DTYPES)}")
    return DeltaMixer(
        key_heads=keys,
        value_heads=values,
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        conv_width=config.size("linear_conv_kernel_dim"),
        fused=fused,
    )


def _types(config: ConfigFile) -> tuple[str, ...]:
    interval = config.size("full_attention_interval", default=_FULL_INTERVAL)
    types = layer_types(config, (FULL, LINEAR), full_every(interval, LINEAR))
    if FULL not in types:
        raise config.refusal("layer_types", list(types), f"such that {FULL} is among them")
    return types


def _asks_experts(config: ConfigFile) -> list[bool]:
    """Whether each layer has experts, as transformers decides it."""
    refuse_nulls(config, "decoder_sparse_step")
    step = config.size("decoder_sparse_step", default=1)
    dense = config.values.get("mlp_only_layers")
    if dense is not None and not (
        isinstance(dense, list) and all(type(each) is int for each in dense)
    ):
        raise config.refusal("mlp_only_layers", dense, "a list of numbers of layers, or left out")
    layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    return [layer not in (dense or ()) and (layer + 1) % step == 0 for layer in range(layers)]


_SHARED: dict[str, Any] = {
    **ASKING,
    "mlp": tuple(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    "shared_gate": "mlp.shared_expert_gate",
}
_NO_SHARED = {**ONE_MLP, "shared_gate": None}
_SEPARATE = {
    "attention": tuple(
        f"linear_attn.{name}"
        for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    )
}
_FUSED = {
    "attention": tuple(f"linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj"))
}

QWEN_FAMILIES: Mapping[str, Family] = {
    "qwen2_moe": Family(
        _qwen2_moe,
        replace(GATED, **_SHARED, kinds={DENSE: _NO_SHARED}),
        replace(expert_keys("norm_topk_prob"), layer_types=(FULL,)),
        attention_bias="qkv_bias",
    ),
    "qwen3_moe": Family(
        _qwen3_moe,
        replace(GATED, mlp=(), **ASKING, kinds={DENSE: ONE_MLP}),
        expert_keys("norm_topk_prob"),
    ),
    "qwen3_next": Family(
        _qwen3_next,
        replace(
            GATED,
            **_SHARED,
            kinds={
                LINEAR: _FUSED,
                f"{FULL}, {DENSE}": _NO_SHARED,
                f"{LINEAR}, {DENSE}": _FUSED | _NO_SHARED,
            },
        ),
        replace(expert_keys("norm_topk_prob", share=_ROTARY_SHARE), layer_types=(FULL, LINEAR)),
    ),
    "qwen3_5_text": Family(
        _qwen3_5,
        replace(GATED, kinds={LINEAR: _SEPARATE}),
        ConfigKeys(rotary=RotaryKeys(default_share=_ROTARY_SHARE), layer_types=(FULL, LINEAR)),
    ),
    "qwen3_5_moe_text": Family(
        _qwen3_5_moe,
        replace(GATED, **_SHARED, kinds={LINEAR: _SEPARATE}),
        replace(expert_keys(share=_ROTARY_SHARE), layer_types=(FULL, LINEAR)),
    ),
}
