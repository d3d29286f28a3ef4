"""GPT-NeoX: rotary positions on a part of each head, and fused queries, keys and values."""

from __future__ import annotations

from planner.model.config_file import ConfigFile
from planner.model.families.family import (
    Architecture,
    ConfigKeys,
    Family,
    RotaryKeys,
    UnusedEntries,
)
from planner.model.shape import MAX_LAYERS, ModelShape


def _shape(config: ConfigFile) -> ModelShape:
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
    read_shape=_shape,
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
