"""Qwen's models with layers of a gated delta rule: entries of `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quant.checkpoint.gguf.expert_models import SHARED_WIDTH, experts_beside_dense
from quant.checkpoint.gguf.header import Entries
from quant.checkpoint.gguf.rotary import RotaryTensors
from quant.checkpoint.gguf.sizes import Tensors, has_bias, partly_rotated


def _delta(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    values, width = entries.size("ssm.time_step_rank"), entries.size("ssm.inner_size")
    if width % values:
        key = f"{entries.architecture}.ssm.inner_size"
        raise entries.refusal(key, width, f"a multiple of {values} (ssm.time_step_rank)")
    return {
        **partly_rotated(entries, factors),
        "linear_conv_kernel_dim": entries.size("ssm.conv_kernel"),
        "linear_num_key_heads": entries.size("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": entries.size("ssm.state_size"),
        "linear_value_head_dim": width // values,
        "full_attention_interval": entries.size("full_attention_interval", 4),
        "attention_bias": has_bias(tensors),
    }


def _of_experts(entries: Entries, tensors: Tensors, factors: RotaryTensors) -> dict[str, Any]:
    return {
        **_delta(entries, tensors, factors),
        **experts_beside_dense(entries),
        "shared_expert_intermediate_size": entries.size(SHARED_WIDTH),
        "norm_topk_prob": True,
    }


DELTA_MODELS: Mapping[str, Callable[[Entries, Tensors, RotaryTensors], dict[str, Any]]] = {
    "qwen3next": _of_experts,
    "qwen35": _delta,
    "qwen35moe": _of_experts,
}
"""By `general.architecture`."""
