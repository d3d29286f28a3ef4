"""The GPT models of ORCA's and ExeGPT's evaluations (table 1 of both), as OPTs of their sizes."""

from __future__ import annotations

from planner.model.finding import model_shape, shape_from_config
from planner.model.shape import ModelShape

GPTS = {
    "13B": (40, 5120, 40),
    "39B": (48, 8192, 64),
    "101B": (80, 10240, 80),
    "175B": (96, 12288, 96),
    "341B": (120, 15360, 120),
}
"""Layers, hidden size and heads."""
VOCABULARY = 50272
"""OPT's; GPT-3 has 50,257 tokens, which engines pad for tensor parallelism as OPT does."""
POSITIONS = 2048


def shape_named(model: str) -> ModelShape:
    """The shape of one of these, whose layers are alike as an OPT's, or of a model by its name."""
    if model not in GPTS:
        return model_shape(model)
    layers, hidden_size, heads = GPTS[model]
    values = {
        "model_type": "opt",
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": POSITIONS,
    }
    return shape_from_config(model, values)
