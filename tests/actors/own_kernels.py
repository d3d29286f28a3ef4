"""Stages on a CPU with the layers and the attention of GPUs, run by the emulator."""

from __future__ import annotations

import ctypes

import pytest
import torch
from transformers import PretrainedConfig

from actors.attention import cuda
from actors.stage.layers import cuda_layer
from planner.model.families import has_own_layers
from quant.backends.cuda.driver import Argument, Kernels
from tests.actors.configs import EVERY_CONFIG
from tests.cuda_emulation import emulated

WITH_OWN_LAYERS = tuple(
    name
    for name, config in EVERY_CONFIG.items()
    if name != "opt-post-norm" and has_own_layers(config.model_type)
)


def range_attention(
    head_dim: int, dtype: torch.dtype, coded: bool, _: object = None, blocks: int = 1
) -> cuda.RangeAttention:
    """Attention for `blocks` that a GPU asks for: 1 splits no range, 1000 every one."""
    is_bfloat16 = int(dtype == torch.bfloat16)
    kernels = emulated(
        cuda.SOURCE, cuda.KERNELS, BFLOAT16=is_bfloat16, HEAD_DIM=head_dim, CODED=int(coded)
    )
    return cuda.RangeAttention(kernels, blocks)


def layer_kernels(
    width: int, head_dim: int, dtype: torch.dtype, coded: bool, _: object = None
) -> cuda_layer.LayerKernels:
    kernels = emulated(
        cuda_layer.SOURCE,
        cuda_layer.KERNELS,
        BFLOAT16=int(dtype == torch.bfloat16),
        HIDDEN_SIZE=width,
        HEAD_DIM=head_dim,
        CODED=int(coded),
    )
    return cuda_layer.LayerKernels(kernels)


def use_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stages of this process compute by emulated kernels from now on."""
    for user in ("attention.ragged", "stage.layers.own_layers"):
        monkeypatch.setattr(f"actors.{user}.range_attention", range_attention)
    monkeypatch.setattr("actors.stage.layers.own_layers.layer_kernels", layer_kernels)
    monkeypatch.setattr("actors.stage.stage.warm_up", lambda _: None)  # not used then


class Unstarted(Kernels):
    """Kernels on tensors without memory."""

    def launch(self, name: str, blocks: int, *arguments: Argument) -> None:
        pass


def pretend_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have layers and attention on tensors without memory be those of a GPU from now on."""
    kernels = Unstarted(ctypes.CDLL(None), {}, torch.device("meta"))
    layers, attention = cuda_layer.LayerKernels(kernels), cuda.RangeAttention(kernels, 320)
    monkeypatch.setattr("actors.stage.layers.own_layers.layer_kernels", lambda *_: layers)
    monkeypatch.setattr("actors.stage.layers.own_layers.self_test", lambda *_: None)
    for user in ("attention.ragged", "stage.layers.own_layers"):
        monkeypatch.setattr(f"actors.{user}.range_attention", lambda *_: attention)


def with_wide_heads(name: str) -> PretrainedConfig:
    """The configuration with heads of 16 channels, for which the kernels can be compiled."""
    values = EVERY_CONFIG[name].to_dict()
    heads = "n_head" if values["model_type"] == "bloom" else "num_attention_heads"
    values[heads] = 3
    values.pop("head_dim", None)
    if values.get("num_key_value_heads"):
        values["num_key_value_heads"] = 3 if "qwen2" in name else 1
    if "qwen3" in name or "ministral" in name:  # whose default is none of these
        values["head_dim"] = 16
    return type(EVERY_CONFIG[name]).from_dict(values)
