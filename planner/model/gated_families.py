"""Families whose layers are much like LLaMA's: with layers that do not rotate, with multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.model.config_file import ConfigFile, is_number
from planner.model.family import (
    FULL,
    GATED,
    LONG_TYPES,
    SLIDING,
    STATIC_BY_TYPE,
    ConfigKeys,
    Family,
    RotaryKeys,
    UnusedEntries,
    full_every,
    gated_shape,
    kv_heads_or_all,
    layer_types,
    multiplier,
    refuse_nulls,
    window_if_used,
    window_of,
    windowed_shape,
)
from planner.model.shape import MAX_LAYERS, ModelShape

_HEAD_DIM = 128
"""The default of transformers for GLM and Ministral 3."""

_WINDOW = 4096
"""That of transformers for OLMo 3 and Ministral."""

_LARGEST_GROWTH = 1e9
_TYPES = (FULL, SLIDING)

_HYBRID_EXPERTS = 8
"""The default of transformers."""

_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
}
"""Sizes and the defaults of transformers."""

_ATTENDS = ("attention", FULL)
"""How files of Granite 4 call layers of attention."""

_NOPE_INTERVAL = 4
"""Every so many layers one does not rotate, where a SmolLM3 file does not list them."""


def _smollm3(config: ConfigFile) -> ModelShape:
    rotates, window = _rotating_layers(config), window_if_used(config)
    shape = gated_shape(
        config,
        default_bias=False,
        kv_heads=kv_heads_or_all(config),
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
    types = layer_types(config, _TYPES, lambda layer: FULL if rotates[layer] else SLIDING)
    return windowed_shape(shape, types, window)


def _rotating_layers(config: ConfigFile) -> list[int]:
    """For each layer 1, or 0 where it has no rotary positions."""
    layers = config.size("num_hidden_layers", most=MAX_LAYERS)
    key, interval = "no_rope_layers", "no_rope_layer_interval"
    refuse_nulls(config, interval)
    every = config.size(interval, default=_NOPE_INTERVAL)
    listed = config.values.get(key)
    if listed is None:
        return [int((layer + 1) % every != 0) for layer in range(layers)]
    is_list = isinstance(listed, list) and all(type(each) is int for each in listed)
    if not (is_list and len(listed) == layers and {*listed} <= {0, 1}):
        needed = f"{layers} numbers, 1 where a layer has rotary positions and 0 where not"
        raise config.refusal(key, listed, needed)
    return [*listed]


def granite_shape(config: ConfigFile, **own: Any) -> ModelShape:
    """The shape of a model with Granite's multipliers; `own`: what a family of these has."""
    for key in (*_GRANITE_MULTIPLIERS, "logits_scaling"):
        multiplier(config, key)
    kv_heads = kv_heads_or_all(config, may_lack=True)
    return gated_shape(config, default_bias=False, kv_heads=kv_heads, **own)


def _granite(config: ConfigFile) -> ModelShape:
    return granite_shape(config, mlp_bias=config.flag("mlp_bias", False))


def _granitemoehybrid(config: ConfigFile) -> ModelShape:
    """Granite 4 without Mamba's layers and without experts."""
    refuse_nulls(config, "num_local_experts")
    count = config.integer("num_local_experts", default=_HYBRID_EXPERTS)
    if count:
        raise config.refusal("num_local_experts", count, "0 for a granitemoehybrid model")
    if config.values.get("layer_types") is None:
        raise config.refusal("layer_types", None, f"a list of {_ATTENDS[0]} for each layer")
    _check_mamba(config)
    width = config.size("shared_intermediate_size")
    return granite_shape(config, intermediate_size=width, fused_mlp=True)


def _check_mamba(config: ConfigFile) -> None:
    """Check the entries of layers that are not there, without which transformers builds none."""
    refuse_nulls(config, *_MAMBA)
    sizes = {key: config.size(key, default=usual) for key, usual in _MAMBA.items()}
    width, heads = sizes["mamba_expand"] * config.size("hidden_size"), sizes["mamba_n_heads"]
    head = config.values.get("mamba_d_head", "auto")
    if width % heads or head not in ("auto", width // heads) or type(head) not in (int, str):
        needed = f"auto, with mamba_n_heads such that they divide {width} (mamba_expand) evenly"
        raise config.refusal("mamba_d_head", head, needed)
    limit = config.values.get("time_step_limit")
    if limit is not None and not (isinstance(limit, list) and len(limit) == 2):
        raise config.refusal("time_step_limit", limit, "two numbers, or left out")
    kind = config.values.get("position_embedding_type")
    if kind != "rope":
        raise config.refusal("position_embedding_type", kind, "rope for a granitemoehybrid model")


def _phi3(config: ConfigFile) -> ModelShape:
    config.per_head(config.size("hidden_size"), config.size("num_attention_heads"))
    trained = "original_max_position_embeddings"
    refuse_nulls(config, trained)
    config.size(trained, default=1)
    return gated_shape(
        config,
        kv_heads=kv_heads_or_all(config, may_lack=True),
        fused_qkv=True,
        fused_mlp=True,
        sliding_window=window_of(config),
    )


def _glm(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", True)
    return gated_shape(config, _HEAD_DIM, qkv_bias=bias, fused_mlp=True)


def _glm4(config: ConfigFile) -> ModelShape:
    return replace(_glm(config), layer_norms=4)


def _olmo2(config: ConfigFile) -> ModelShape:
    kv_heads = kv_heads_or_all(config, may_lack=True)
    shape = gated_shape(config, default_bias=False, kv_heads=kv_heads)
    return replace(shape, qk_norm_width=shape.query_width + shape.kv_width)


def _olmo3(config: ConfigFile) -> ModelShape:
    window = _usual_window(config)
    types = layer_types(config, _TYPES, full_every(4, SLIDING))
    return windowed_shape(_olmo2(config), types, window)


def _usual_window(config: ConfigFile) -> int | None:
    """The window, or that of transformers where the entry is left out."""
    return window_of(config) if "sliding_window" in config.values else _WINDOW


def _ministral(config: ConfigFile) -> ModelShape:
    config.size("head_dim")
    window = _usual_window(config)
    types = layer_types(config, _TYPES, lambda _: SLIDING)
    return windowed_shape(gated_shape(config), types, window)


def _ministral3(config: ConfigFile) -> ModelShape:
    growing_scores(config)
    return gated_shape(config, _HEAD_DIM, sliding_window=window_of(config))


def growing_scores(config: ConfigFile) -> tuple[str, Mapping[str, Any]]:
    """Check and return what later queries grow by, with its key; none without rotary entries."""
    key = next((k for k in ("rope_scaling", "rope_parameters") if config.values.get(k)), "")
    entries = config.values.get(key)
    if not isinstance(entries, Mapping):
        return key, {}
    for name in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if not is_number(entries.get(name), 0, _LARGEST_GROWTH):
            raise config.refusal(f"{key}.{name}", entries.get(name), "a number above 0")
    return key, entries


_GRANITE_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier")

GRANITE = replace(GATED, input_multiplier="embedding_multiplier", logits_divisor="logits_scaling")
_FUSED_MLP = replace(
    GATED, mlp=("mlp.gate_up_proj", "mlp.down_proj"), activation="mlp.activation_fn"
)
_GLM = replace(_FUSED_MLP, turns_neighbours=True)
_HALF_ROTATES = ConfigKeys(rotary=RotaryKeys(default_share=0.5))
_POST_NORMS = replace(GATED, norms=("post_attention_layernorm", "post_feedforward_layernorm"))

GATED_FAMILIES: Mapping[str, Family] = {
    "granite": Family(_granite, GRANITE, mlp_bias="mlp_bias", own_layers=True),
    "granitemoehybrid": Family(
        _granitemoehybrid,
        replace(
            GRANITE,
            mlp=("shared_mlp.input_linear", "shared_mlp.output_linear"),
            activation="shared_mlp.activation",
        ),
        ConfigKeys(
            layer_types=_ATTENDS,
            unused=UnusedEntries(
                flags=("use_cache", "output_router_logits", "mamba_conv_bias", "mamba_proj_bias"),
                decimals=("router_aux_loss_coef",),
                counts=("intermediate_size", "num_experts_per_tok"),
            ),
        ),
    ),
    "glm": Family(_glm, _GLM, _HALF_ROTATES),
    "glm4": Family(
        _glm4,
        replace(_GLM, norms=(*GATED.norms, "post_self_attn_layernorm", "post_mlp_layernorm")),
        _HALF_ROTATES,
    ),
    "ministral": Family(_ministral, GATED, attention_bias=None, own_layers=True),
    "ministral3": Family(
        _ministral3, replace(GATED, growing_queries=True), attention_bias=None, own_layers=True
    ),
    "olmo2": Family(_olmo2, _POST_NORMS),
    "olmo3": Family(_olmo3, _POST_NORMS, ConfigKeys(rotary=STATIC_BY_TYPE)),
    "phi3": Family(
        _phi3,
        replace(
            _FUSED_MLP, attention=("self_attn.qkv_proj", "self_attn.o_proj"), qkv_in_blocks=True
        ),
        ConfigKeys(
            rotary=RotaryKeys(default_share=1.0, types=("default", *LONG_TYPES)),
            unused=UnusedEntries(shares=("attention_dropout", "resid_pdrop", "embd_pdrop")),
        ),
        attention_bias=None,
        own_layers=True,
    ),
    "smollm3": Family(_smollm3, GATED, mlp_bias="mlp_bias", own_layers=True),
}
