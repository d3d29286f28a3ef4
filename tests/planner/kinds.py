"""A model whose layers are of three kinds, as large as its tests need it to be; a few experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn.functional import silu

from planner.model.finding import shape_from_config
from planner.model.layer_parts import Experts
from planner.model.shape import ModelShape
from quant.experts import ExpertWeights, PlainWeight, QuantizedExperts
from quant.linear import LayerForm
from quant.scheme import Processor
from tests.planner.model.mixed_configs import MIXED

EXPERT, DELTA, FULL = 0, 1, 2


def three_kinds(pattern: tuple[int, ...], joined: tuple[int, ...] = ()) -> ModelShape:
    """Layers of Qwen3-Next's sizes: attention with 64 experts, a mixer, attention with one MLP."""
    large = {"hidden_size": 2048, "head_dim": 256, "num_attention_heads": 16}
    mixer = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    config = MIXED["qwen3_5_text"] | large | mixer | heads | {"intermediate_size": 8192}
    config |= {"num_hidden_layers": len(pattern), "vocab_size": 150_000}
    delta, full = shape_from_config("mixed", config | {"max_position_embeddings": 4096}).kinds
    experts = replace(full, kind="experts", experts=Experts(64, 4, 4096))
    return replace(full, kind="", kinds=(experts, delta, full), pattern=pattern, joined=joined)


def tiny_experts(experts: Experts, hidden_size: int) -> QuantizedExperts:
    """Random experts in float32, as stages have them."""
    weights = []
    for linear in experts.linears(hidden_size):
        weights.append(ExpertWeights(linear, experts.count))
        for _ in range(experts.count):
            plain = PlainWeight(torch.rand(linear.out_features, linear.in_features))
            weights[-1].add(plain, torch.float32)

    def gate(grown: torch.Tensor) -> torch.Tensor:
        gate, up = grown.chunk(2, dim=-1)
        return silu(gate) * up

    form = LayerForm(16, Processor(), torch.float32, torch.device("cpu"))
    return QuantizedExperts(*weights, gate, form)
