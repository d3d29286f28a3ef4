"""Names and sizes of the tensors that a model of a shape has."""

from __future__ import annotations

from planner.model.families import FAMILIES
from planner.model.family import Architecture
from planner.model.shape import ModelShape

Shapes = dict[str, tuple[int, ...]]


def layer_tensors(kind: ModelShape) -> Shapes:
    """The tensors of a layer of this kind, experts as transformers has them: in one."""
    names = _names(kind)
    modules = (*names.attention, *names.mlp)
    output = len(names.attention) - 1
    has_bias = [kind.qkv_bias] * output + [kind.output_bias] + [kind.mlp_bias] * len(names.mlp)
    found: Shapes = {}
    for name, linear, bias in zip(modules, kind.layer_linears, has_bias, strict=True):
        found[f"{name}.weight"] = (linear.out_features, linear.in_features)
        if bias:
            found[f"{name}.bias"] = (linear.out_features,)
    for name in names.norms:
        found |= _norm(name, kind)
    if kind.qk_norm and kind.delta is None:
        normed = ("q_norm",) if kind.reads_earlier_keys else ("q_norm", "k_norm")
        found |= {f"self_attn.{name}.weight": (kind.head_dim,) for name in normed}
    if kind.qk_norm_width:
        widths = {"q_norm": kind.query_width, "k_norm": kind.kv_width}
        found |= {f"self_attn.{name}.weight": (width,) for name, width in widths.items()}
    if names.layer_factor is not None:
        found[names.layer_factor] = (1,)
    if kind.per_layer_width:
        gate, projection = kind.extra_linears
        found["per_layer_input_gate.weight"] = (gate.out_features, gate.in_features)
        found["per_layer_projection.weight"] = (projection.out_features, projection.in_features)
        found |= _norm("post_per_layer_input_norm", kind)
    if kind.sinks:
        found["self_attn.sinks"] = (kind.heads,)
    found |= _latent_tensors(kind)
    return found | _mixer_tensors(kind) | _router_tensors(kind) | fused_experts(kind)


def _names(kind: ModelShape) -> Architecture:
    return FAMILIES[kind.model_type].architecture.of_kind(kind.kind)


def _latent_tensors(kind: ModelShape) -> Shapes:
    if kind.latent is None:
        return {}
    expansion, rank = kind.latent.expansion(kind.heads), kind.latent.query_rank
    return {
        **({"self_attn.q_a_layernorm.weight": (rank,)} if rank else {}),
        "self_attn.kv_a_layernorm.weight": (kind.latent.rank,),
        "self_attn.kv_b_proj.weight": (expansion.out_features, expansion.in_features),
    }


def _mixer_tensors(kind: ModelShape) -> Shapes:
    if kind.delta is None:
        return {}
    module, delta = _names(kind).attention[0].rpartition(".")[0], kind.delta
    heads = (delta.value_heads,)
    return {
        f"{module}.conv1d.weight": (delta.conv_channels, 1, delta.conv_width),
        f"{module}.A_log": heads,
        f"{module}.dt_bias": heads,
        f"{module}.norm.weight": (delta.value_dim,),
    }


def _router_tensors(kind: ModelShape) -> Shapes:
    names, experts = _names(kind), kind.experts
    if experts is None:
        return {}
    found: Shapes = {f"{names.router}.weight": (experts.count, kind.hidden_size)}
    if experts.has_biases:
        found[f"{names.router}.bias"] = (experts.count,)
    if experts.router_bias:
        found[f"{names.router}.e_score_correction_bias"] = (experts.count,)
    if experts.router_scales:
        module = str(names.router).rpartition(".")[0]
        found[f"{module}.scale"] = (kind.hidden_size,)
        found[f"{module}.per_expert_scale"] = (experts.count,)
    if experts.shared_gate:
        found[f"{names.shared_gate}.weight"] = (1, kind.hidden_size)
    return found


def fused_experts(kind: ModelShape) -> Shapes:
    """Tensors of all experts of a layer in one; none where it has none."""
    names, found, experts = _names(kind), Shapes(), kind.experts
    if experts is None:
        return found
    parts = ("gate_up_proj", "down_proj")
    for part, linear in zip(parts, kind.expert_linears, strict=True):
        size = (linear.out_features, linear.in_features)
        stored = size[::-1] if names.experts_by_inputs else size
        found[f"{names.experts}.{part}"] = (experts.count, *stored)
        if experts.has_biases:
            found[f"{names.experts}.{part}_bias"] = (experts.count, linear.out_features)
    return found


def separate_experts(kind: ModelShape, fuses_gate: bool = False) -> list[Shapes]:
    """Tensors of each expert, as older checkpoints have them; `fuses_gate`: gate and up in one."""
    assert kind.experts is not None
    inner, outer, name = kind.experts.width, kind.hidden_size, _names(kind).experts
    sizes = {"gate_proj": (inner, outer), "up_proj": (inner, outer), "down_proj": (outer, inner)}
    if fuses_gate:
        sizes = {"gate_up_proj": (2 * inner, outer), "down_proj": (outer, inner)}
    return [
        {f"{name}.{index}.{part}.weight": size for part, size in sizes.items()}
        for index in range(kind.experts.count)
    ]


def end_tensors(shape: ModelShape) -> Shapes:
    names, hidden = FAMILIES[shape.model_type].architecture, shape.hidden_size
    embedding = names.embedding_path
    found: Shapes = {f"{embedding}.weight": (shape.vocab_size, shape.word_embedding_size)}
    if shape.position_rows:
        found[f"{names.decoder}.embed_positions.weight"] = (shape.position_rows, hidden)
    if shape.per_layer_width:
        width = shape.layers * shape.per_layer_width
        found[f"{names.decoder}.embed_tokens_per_layer.weight"] = (shape.vocab_size, width)
        found[f"{names.decoder}.per_layer_model_projection.weight"] = (width, hidden)
        found[f"{names.decoder}.per_layer_projection_norm.weight"] = (shape.per_layer_width,)
    if shape.word_embedding_size != hidden:
        found[f"{names.decoder}.project_in.weight"] = (hidden, shape.word_embedding_size)
        found[f"{names.decoder}.project_out.weight"] = (shape.word_embedding_size, hidden)
    if shape.embedding_norm:
        found |= _norm(f"{embedding}_layernorm", shape)
    if shape.final_norm:
        found |= _norm(f"{names.decoder}.{names.final[0]}", shape)
    return found


def _norm(name: str, shape: ModelShape) -> Shapes:
    count = shape.norm_parameters // shape.hidden_size
    return {f"{name}.{part}": (shape.hidden_size,) for part in ("weight", "bias")[:count]}
