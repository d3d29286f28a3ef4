"""The model families: how each reads its shape, and how transformers calls its modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.model.config_file import ConfigFile
from planner.model.expert_families import EXPERT_FAMILIES
from planner.model.family import (
    FULL,
    GATED,
    SLIDING,
    Architecture,
    ConfigKeys,
    Family,
    RotaryKeys,
    UnusedEntries,
    gated_shape,
    kv_heads_or_all,
    layer_types,
    plain_shape,
    window_if_used,
    window_of,
    windowed_shape,
)
from planner.model.gated_families import GATED_FAMILIES
from planner.model.gemma_families import GEMMA_FAMILIES
from planner.model.qwen_families import QWEN_FAMILIES
from planner.model.shape import MAX_LAYERS, ModelShape
from quant.checkpoint.text_part import WRAPPERS

_TRAINED_LENGTH = 2048
"""ALiBi has no table of positions; BLOOM was trained on 2,048 tokens."""

_ACTIVATION_BUFFERS = 2
"""The library writes BLOOM's GELU out in terms of which two more are of the MLP's width."""

_QWEN3_HEAD_DIM, _QWEN_FULL_LAYERS = 128, 28
"""The defaults of transformers."""


def _llama(config: ConfigFile) -> ModelShape:
    config.per_head(config.size("hidden_size"), config.size("num_attention_heads"))
    kv_heads, mlp_bias = kv_heads_or_all(config, may_lack=True), config.flag("mlp_bias", False)
    return gated_shape(config, default_bias=False, kv_heads=kv_heads, mlp_bias=mlp_bias)


def _qwen2(config: ConfigFile) -> ModelShape:
    return _with_qwen_windows(config, kv_heads=kv_heads_or_all(config), qkv_bias=True)


def _qwen3(config: ConfigFile) -> ModelShape:
    return _with_qwen_windows(
        config, _QWEN3_HEAD_DIM, False, kv_heads=kv_heads_or_all(config), qk_norm=True
    )


def _with_qwen_windows(config: ConfigFile, *defaults: Any, **own: Any) -> ModelShape:
    """The shape, as of `gated_shape`, of two kinds of layers where the last attend to a window."""
    if config.values.get("max_window_layers", 0) is None:
        raise config.refusal("max_window_layers", None, "a whole number")
    first_sliding = config.integer("max_window_layers", default=_QWEN_FULL_LAYERS)
    window = window_if_used(config)
    types = layer_types(
        config, (FULL, SLIDING), lambda layer: FULL if layer < first_sliding else SLIDING
    )
    return windowed_shape(gated_shape(config, *defaults, **own), types, window)


def _bloom(config: ConfigFile) -> ModelShape:
    hidden = config.size("n_embed", "hidden_size")
    return plain_shape(
        config,
        layers=config.size("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=config.size("n_head", "num_attention_heads"),
        max_positions=config.size("seq_length", default=_TRAINED_LENGTH),
        fused_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        embedding_norm=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        alibi=True,
        activation_buffers=_ACTIVATION_BUFFERS,
    )


def _gpt_neox(config: ConfigFile) -> ModelShape:
    bias = config.flag("attention_bias", True)
    return plain_shape(config, fused_qkv=True, qkv_bias=bias, output_bias=bias, mlp_bias=True)


def _opt(config: ConfigFile) -> ModelShape:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    norm_first = config.flag("do_layer_norm_before", True)
    removed = config.flag("_remove_final_layer_norm", False)
    bias = config.flag("enable_bias", True)
    positions = config.size("max_position_embeddings")
    return plain_shape(
        config,
        intermediate_size=config.size("ffn_dim"),
        heads=heads,
        position_rows=positions + 2,  # the library keeps two rows for padding
        word_embedding_size=config.size("word_embed_proj_dim", default=hidden),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_parameters=2 * hidden * config.flag("layer_norm_elementwise_affine", True),
        final_norm=norm_first and not removed,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


FAMILIES: Mapping[str, Family] = {
    **EXPERT_FAMILIES,
    **GATED_FAMILIES,
    **GEMMA_FAMILIES,
    "bloom": Family(
        _bloom,
        # `actors.stage.partial_model` replaces its attention, which calls no attention interface.
        Architecture(
            decoder="transformer",
            layers="h",
            embedding=("word_embeddings", "word_embeddings_layernorm"),
            final=("ln_f",),
            attention=("self_attention.query_key_value", "self_attention.dense"),
            mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            norms=("input_layernorm", "post_attention_layernorm"),
            activation="mlp.gelu_impl",
            layer_returns_tuple=True,
            context_as_cache=True,
        ),
        ConfigKeys(
            activation=None,
            norm_eps="layer_norm_epsilon",
            rotary=None,
            has_padding_row=False,
            unused=UnusedEntries(
                flags=("use_cache", "apply_residual_connection_post_layernorm", "slow_but_exact"),
                shares=("attention_dropout", "hidden_dropout"),
                counts=("pretraining_tp",),
            ),
        ),
        attention_bias=None,
        own_layers=True,
    ),
    "gpt_neox": Family(
        _gpt_neox,
        Architecture(
            decoder="gpt_neox",
            embedding=("embed_in",),
            final=("final_layer_norm",),
            attention=("attention.query_key_value", "attention.dense"),
            mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
            norms=("input_layernorm", "post_attention_layernorm"),
            activation="mlp.act",
            head_names=("lm_head", "embed_out"),
        ),
        ConfigKeys(
            norm_eps="layer_norm_eps",
            rotary=RotaryKeys(theta="rotary_emb_base", share="rotary_pct", default_share=0.25),
            has_padding_row=False,
            unused=UnusedEntries(
                flags=("use_cache", "is_decoder", "use_parallel_residual"),
                shares=("attention_dropout", "hidden_dropout", "classifier_dropout"),
            ),
        ),
        own_layers=True,
    ),
    "llama": Family(
        _llama,
        GATED,
        ConfigKeys(unused=UnusedEntries(counts=("pretraining_tp",), may_be_null=True)),
        mlp_bias="mlp_bias",
        own_layers=True,
    ),
    "mistral": Family(
        lambda config: gated_shape(config, sliding_window=window_of(config)),
        GATED,
        attention_bias=None,
        own_layers=True,
    ),
    "opt": Family(
        _opt,
        Architecture(
            decoder="model.decoder",
            embedding=("embed_tokens", "embed_positions", "project_in"),
            final=("final_layer_norm", "project_out"),
            attention=(*GATED.attention[:3], "self_attn.out_proj"),
            mlp=("fc1", "fc2"),
            norms=("self_attn_layer_norm", "final_layer_norm"),
            activation="activation_fn",
        ),
        ConfigKeys(
            activation="activation_function",
            norm_eps=None,
            rotary=None,
            unused=UnusedEntries(
                shares=("attention_dropout", "dropout", "layerdrop"), deviation="init_std"
            ),
        ),
        attention_bias="enable_bias",
        mlp_bias="enable_bias",
        own_layers=True,
    ),
    "qwen2": Family(_qwen2, GATED, attention_bias=None, own_layers=True),
    "qwen3": Family(_qwen3, GATED, own_layers=True),
    **QWEN_FAMILIES,
}
"""The families by `model_type`. Stages cut the forward pass of transformers between layers. Tests
compare their tokens with those of `generate` for each of these families: others may lose
information at a cut without any error."""


def has_own_layers(model_type: str) -> bool:
    """Whether kernels of ours compute layers of this type (`actors.stage.layers`)."""
    return FAMILIES[model_type].own_layers


def layer_factors(model_type: str) -> int:
    """How many numbers a layer of this type has that multiply what comes out of it."""
    return int(FAMILIES[model_type].architecture.layer_factor is not None)


def supported_model_types() -> tuple[str, ...]:
    return tuple(sorted(FAMILIES))


def expert_model_types() -> tuple[str, ...]:
    """Those whose layers may have experts."""
    return tuple(sorted(n for n, each in FAMILIES.items() if each.architecture.experts is not None))


def wrapper_types() -> tuple[str, ...]:
    """The types of models whose text part is of one of the families."""
    known = FAMILIES.keys()
    return tuple(sorted(n for n, each in WRAPPERS.items() if known & {*each.text_types}))
