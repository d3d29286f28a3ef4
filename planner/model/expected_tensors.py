"""The tensors that a checkpoint must hold: names in transformers and shapes."""

from __future__ import annotations

from planner.model.families.table import FAMILIES
from planner.model.shape import ModelShape

Shapes = dict[str, tuple[int, ...]]


def layer_tensors(shape: ModelShape) -> Shapes:
    """The shapes of the tensors of one decoder layer, by their names within it."""
    names = FAMILIES[shape.model_type].architecture
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
    """The shapes of all tensors outside the layers, by full names, without the LM head."""
    names, hidden = FAMILIES[shape.model_type].architecture, shape.hidden_size
    embedding = names.embedding_path
    found: Shapes = {f"{embedding}.weight": (shape.vocab_size, shape.word_embedding_size)}
    if shape.position_rows:
        found[f"{names.decoder}.embed_positions.weight"] = (shape.position_rows, hidden)
    if shape.word_embedding_size != hidden:
        found[f"{names.decoder}.project_in.weight"] = (hidden, shape.word_embedding_size)
        found[f"{names.decoder}.project_out.weight"] = (shape.word_embedding_size, hidden)
    if shape.embedding_norm:
        found |= _norm(f"{embedding}_layernorm", shape)
    if shape.final_norm:
        found |= _norm(f"{names.decoder}.{names.final[0]}", shape)
    return found


def _norm(name: str, shape: ModelShape) -> Shapes:
    """The weight of a norm, and its bias where it has one."""
    count = shape.norm_parameters // shape.hidden_size
    return {f"{name}.{part}": (shape.hidden_size,) for part in ("weight", "bias")[:count]}
