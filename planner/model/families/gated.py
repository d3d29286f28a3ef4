"""Code for LLaMA-like families: rotary positions, a gated MLP, RMS norms, grouped heads."""

from __future__ import annotations

from planner.model.config_file import ConfigFile
from planner.model.families.family import Architecture
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
