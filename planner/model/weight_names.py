"""The tensors that a checkpoint of each family must hold, by transformers' names, with shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.model.shape import ModelShape


@dataclass(frozen=True)
class WeightNames:
    """How a family calls its modules.

    `decoder`: the full name of what holds embedding and layers; `stack`: its list of layers.
    In a layer: `attention` (queries, keys and values, or the three fused, then the output), `mlp`
    and the two `norms`. `heads`: names under which an LM head is stored.
    """

    decoder: str
    embedding: str
    final_norm: str
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    norms: tuple[str, str]
    stack: str = "layers"
    heads: tuple[str, ...] = ("lm_head",)

    @property
    def layers(self) -> str:
        """Full name of the list of layers."""
        return f"{self.decoder}.{self.stack}"

    @property
    def base(self) -> str:
        """The base model's prefix, which checkpoints may lack."""
        return self.decoder.partition(".")[0]

    @property
    def embedding_weight(self) -> str:
        """Full name of the token embedding."""
        return f"{self.decoder}.{self.embedding}.weight"


_NORMS = ("input_layernorm", "post_attention_layernorm")
_LLAMA = WeightNames(
    decoder="model",
    embedding="embed_tokens",
    final_norm="norm",
    attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    norms=_NORMS,
)
_FUSED_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

WEIGHT_NAMES: Mapping[str, WeightNames] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "opt": WeightNames(
        decoder="model.decoder",
        embedding="embed_tokens",
        final_norm="final_layer_norm",
        attention=(
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.out_proj",
        ),
        mlp=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
    ),
    "gpt_neox": WeightNames(
        decoder="gpt_neox",
        embedding="embed_in",
        final_norm="final_layer_norm",
        attention=("attention.query_key_value", "attention.dense"),
        mlp=_FUSED_MLP,
        norms=_NORMS,
        heads=("lm_head", "embed_out"),
    ),
    "bloom": WeightNames(
        decoder="transformer",
        embedding="word_embeddings",
        final_norm="ln_f",
        attention=("self_attention.query_key_value", "self_attention.dense"),
        mlp=_FUSED_MLP,
        norms=_NORMS,
        stack="h",
    ),
}

Shapes = dict[str, tuple[int, ...]]


def layer_tensors(shape: ModelShape) -> Shapes:
    """Shapes of the tensors of one decoder layer, by their names within it."""
    names = WEIGHT_NAMES[shape.model_type]
    modules = (*names.attention, *names.mlp)
    output = len(names.attention) - 1
    has_bias = [shape.qkv_bias] * output + [shape.output_bias] + [shape.mlp_bias] * len(names.mlp)
    found: Shapes = {}
    for name, linear, bias in zip(modules, shape.layer_linears(), has_bias, strict=True):
        found[f"{name}.weight"] = (linear.out_features, linear.in_features)
        if bias:
            found[f"{name}.bias"] = (linear.out_features,)
    for name in names.norms:
        found |= _norm(name, shape)
    if shape.qk_norm:
        found |= {f"self_attn.{name}.weight": (shape.head_dim,) for name in ("q_norm", "k_norm")}
    return found


def end_tensors(shape: ModelShape) -> Shapes:
    """Shapes of all tensors outside the layers, by full names, without the LM head."""
    names, hidden = WEIGHT_NAMES[shape.model_type], shape.hidden_size
    found: Shapes = {names.embedding_weight: (shape.vocab_size, shape.word_embedding_size)}
    if shape.position_rows:
        found[f"{names.decoder}.embed_positions.weight"] = (shape.position_rows, hidden)
    if shape.word_embedding_size != hidden:
        found[f"{names.decoder}.project_in.weight"] = (hidden, shape.word_embedding_size)
        found[f"{names.decoder}.project_out.weight"] = (shape.word_embedding_size, hidden)
    if shape.embedding_norm:
        found |= _norm(f"{names.embedding_weight.removesuffix('.weight')}_layernorm", shape)
    if shape.final_norm:
        found |= _norm(f"{names.decoder}.{names.final_norm}", shape)
    return found


def _norm(name: str, shape: ModelShape) -> Shapes:
    """Weight of a norm, and its bias where it has one."""
    count = shape.norm_parameters // shape.hidden_size
    return {f"{name}.{part}": (shape.hidden_size,) for part in ("weight", "bias")[:count]}
