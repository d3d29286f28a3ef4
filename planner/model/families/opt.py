"""OPT: learned positions, a plain MLP, and projections around a narrower embedding (350m)."""

from __future__ import annotations

from planner.model.config_file import ConfigFile
from planner.model.families.family import Architecture, ConfigKeys, Family, UnusedEntries
from planner.model.shape import MAX_LAYERS, ModelShape


def _shape(config: ConfigFile) -> ModelShape:
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
    read_shape=_shape,
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
