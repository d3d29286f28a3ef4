"""BLOOM: ALiBi instead of positions, a norm on the embedding, and fused queries, keys and values.

Its attention does not call the attention interface: `actors.stage.partial_model` replaces it.
"""

from __future__ import annotations

from planner.model.config_file import ConfigFile
from planner.model.families.family import Architecture, ConfigKeys, Family, UnusedEntries
from planner.model.shape import MAX_LAYERS, ModelShape

_TRAINED_LENGTH = 2048
"""ALiBi has no table of positions; BLOOM was trained on 2,048 tokens."""

_ACTIVATION_BUFFERS = 2
"""The library writes GELU out in terms of which two more are of the MLP's width."""


def _shape(config: ConfigFile) -> ModelShape:
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
    read_shape=_shape,
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
