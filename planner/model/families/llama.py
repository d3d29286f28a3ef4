"""LLaMA 1 to 3, and models of other names that say they are of its type."""

from __future__ import annotations

from dataclasses import replace

from planner.model.config_file import ConfigFile
from planner.model.families.family import ConfigKeys, Family, UnusedEntries
from planner.model.families.gated import GATED_ARCHITECTURE, gated_shape
from planner.model.shape import ModelShape


def _shape(config: ConfigFile) -> ModelShape:
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
    read_shape=_shape,
    architecture=GATED_ARCHITECTURE,
    keys=ConfigKeys(unused=UnusedEntries(counts=("pretraining_tp",), may_be_null=True)),
    attention_bias="attention_bias",
    mlp_bias="mlp_bias",
)
