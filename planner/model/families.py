"""The model families: how each reads its shape, and how transformers calls its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.model.family import (
    Architecture,
    ConfigFile,
    ConfigKeys,
    Family,
    RotaryKeys,
    UnusedEntries,
)
from planner.model.shape import MAX_LAYERS, ModelShape

GATED_ARCHITECTURE = Architecture(
    decoder="model",
    embedding=("embed_tokens",),
    final=("norm",),
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    norms=("input_layernorm", "post_attention_layernorm"),
)


def gated_shape(
    config: ConfigFile, kv_heads: int | None = None, default_head_dim: int | None = None
) -> ModelShape:
    """The shape without biases, window and norms of queries and keys.

    `kv_heads`: None where the configuration has to say it. `default_head_dim`: size of a head
    where the configuration has none; None: hidden size over heads.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    is_given = config.values.get("head_dim") is not None
    if default_head_dim is not None and "head_dim" in config.values and not is_given:
        raise config.refusal("head_dim", None, "a whole number, or left out")
    head_dim = config.size("head_dim") if is_given else default_head_dim
    return ModelShape(
        name=config.name,
        model_type=str(config.values["model_type"]),
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads or config.size("num_key_value_heads"),
        head_dim=head_dim or config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
        word_embedding_size=hidden,
        gated_mlp=True,
        norm_parameters=hidden,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


def sliding_window(config: ConfigFile) -> int | None:
    """Tokens that attention looks back; None for all of them."""
    return None if config.values.get("sliding_window") is None else config.size("sliding_window")


_TRAINED_LENGTH = 2048
"""ALiBi has no table of positions; BLOOM was trained on 2,048 tokens."""

_ACTIVATION_BUFFERS = 2
"""The library writes GELU out in terms of which two more are of the MLP's width."""


def _bloom_shape(config: ConfigFile) -> ModelShape:
    hidden = config.size("n_embed", "hidden_size")
    heads = config.size("n_head", "num_attention_heads")
    return ModelShape(
        name=config.name,
        model_type="bloom",
        layers=config.size("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("seq_length", default=_TRAINED_LENGTH),
        word_embedding_size=hidden,
        fused_qkv=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_parameters=2 * hidden,
        embedding_norm=True,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        alibi=True,
        activation_buffers=_ACTIVATION_BUFFERS,
    )


BLOOM = Family(
    model_type="bloom",
    read_shape=_bloom_shape,
    architecture=Architecture(
        decoder="transformer",
        layers="h",
        embedding=("word_embeddings", "word_embeddings_layernorm"),
        final=("ln_f",),
        attention=("self_attention.query_key_value", "self_attention.dense"),
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norms=("input_layernorm", "post_attention_layernorm"),
        layer_returns_tuple=True,
        context_as_cache=True,
    ),
    keys=ConfigKeys(
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
)


def _gpt_neox_shape(config: ConfigFile) -> ModelShape:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    bias = config.flag("attention_bias", True)
    return ModelShape(
        name=config.name,
        model_type="gpt_neox",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=config.size("intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=config.size("max_position_embeddings"),
        word_embedding_size=hidden,
        fused_qkv=True,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        norm_parameters=2 * hidden,
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


GPT_NEOX = Family(
    model_type="gpt_neox",
    read_shape=_gpt_neox_shape,
    architecture=Architecture(
        decoder="gpt_neox",
        embedding=("embed_in",),
        final=("final_layer_norm",),
        attention=("attention.query_key_value", "attention.dense"),
        mlp=("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        norms=("input_layernorm", "post_attention_layernorm"),
        head_names=("lm_head", "embed_out"),
    ),
    keys=ConfigKeys(
        norm_eps="layer_norm_eps",
        rotary=RotaryKeys(theta="rotary_emb_base", share="rotary_pct", default_share=0.25),
        has_padding_row=False,
        unused=UnusedEntries(
            flags=("use_cache", "is_decoder", "use_parallel_residual"),
            shares=("attention_dropout", "hidden_dropout", "classifier_dropout"),
        ),
    ),
    attention_bias="attention_bias",
)


def _llama_shape(config: ConfigFile) -> ModelShape:
    heads = config.size("num_attention_heads")
    config.per_head(config.size("hidden_size"), heads)
    bias = config.flag("attention_bias", False)
    return replace(
        gated_shape(config, config.size("num_key_value_heads", default=heads)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
    )


LLAMA = Family(
    model_type="llama",
    read_shape=_llama_shape,
    architecture=GATED_ARCHITECTURE,
    keys=ConfigKeys(unused=UnusedEntries(counts=("pretraining_tp",), may_be_null=True)),
    attention_bias="attention_bias",
    mlp_bias="mlp_bias",
)


def _mistral_shape(config: ConfigFile) -> ModelShape:
    return replace(gated_shape(config), sliding_window=sliding_window(config))


MISTRAL = Family(model_type="mistral", read_shape=_mistral_shape, architecture=GATED_ARCHITECTURE)


def _opt_shape(config: ConfigFile) -> ModelShape:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    norm_first = config.flag("do_layer_norm_before", True)
    removed = config.flag("_remove_final_layer_norm", False)
    bias = config.flag("enable_bias", True)
    positions = config.size("max_position_embeddings")
    return ModelShape(
        name=config.name,
        model_type="opt",
        layers=config.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=config.size("ffn_dim"),
        heads=heads,
        kv_heads=heads,
        head_dim=config.per_head(hidden, heads),
        vocab_size=config.size("vocab_size"),
        max_positions=positions,
        position_rows=positions + 2,  # the library keeps two rows for padding
        word_embedding_size=config.size("word_embed_proj_dim", default=hidden),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm_parameters=2 * hidden * config.flag("layer_norm_elementwise_affine", True),
        final_norm=norm_first and not removed,
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )


OPT = Family(
    model_type="opt",
    read_shape=_opt_shape,
    architecture=Architecture(
        decoder="model.decoder",
        embedding=("embed_tokens", "embed_positions", "project_in"),
        final=("final_layer_norm", "project_out"),
        attention=(
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.out_proj",
        ),
        mlp=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
    ),
    keys=ConfigKeys(
        activation="activation_function",
        norm_eps=None,
        rotary=None,
        unused=UnusedEntries(
            shares=("attention_dropout", "dropout", "layerdrop"), deviation="init_std"
        ),
    ),
    attention_bias="enable_bias",
    mlp_bias="enable_bias",
)


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


FAMILIES: Mapping[str, Family] = {
    family.model_type: family for family in (BLOOM, GPT_NEOX, LLAMA, MISTRAL, OPT, QWEN2, QWEN3)
}
"""The families by `model_type`. Stages cut the forward pass of transformers between layers. Tests
compare their tokens with those of `generate` for each of these families: others may lose
information at a cut without any error."""


def supported_model_types() -> tuple[str, ...]:
    """The `model_type`s that can be planned and run."""
    return tuple(sorted(FAMILIES))
