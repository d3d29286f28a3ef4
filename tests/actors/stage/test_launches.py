"""Kernels that a layer starts, counted as they are dispatched, against those that plans count."""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.attention.cuda import RangeAttention
from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import RaggedContext
from actors.messages import MicroBatch
from actors.stage import own_layers
from actors.stage.cuda_layer import LayerKernels
from actors.stage.model_config import with_layers
from actors.stage.partial_model import empty_model, keep_stage
from actors.stage.stage import kv_shape, run_decoder
from planner.costs.roofline import layer_launches
from planner.model.finding import shape_from_config
from quant.backends.cuda_driver import Argument
from quant.backends.cuda_driver import Kernels as OwnKernels
from tests.actors.models import CONFIGS

META = torch.device("meta")
VIEWS = {
    *("chunk", "detach", "dropout", "empty", "empty_like", "expand", "flatten", "new_empty"),
    *("permute", "reshape", "select", "slice", "split", "squeeze", "t", "transpose", "unbind"),
    *("unflatten", "unsqueeze", "view", "_unsafe_view", "as_strided", "alias", "split_with_sizes"),
}
"""Operations that start no kernel: views, memory that is not filled, dropout of no training."""


class Kernels(TorchDispatchMode):
    """Counts operations that start a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in VIEWS:
            self.started[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted(OwnKernels):
    """Kernels of our own that are counted where they would be launched."""

    mode: Kernels

    def launch(self, name: str, blocks: int, *arguments: Argument) -> None:
        self.mode.started[name] += 1


def use_counted_kernels(monkeypatch: pytest.MonkeyPatch, mode: Kernels) -> None:
    """Have layers and attention on tensors without memory be those of a GPU from now on."""
    kernels = Counted(ctypes.CDLL(None), {}, META, mode)
    layers, attention = LayerKernels(kernels), RangeAttention(kernels, 320)
    monkeypatch.setattr(own_layers, "layer_kernels", lambda *_: layers)
    monkeypatch.setattr(own_layers, "self_test", lambda *_: None)
    monkeypatch.setattr("actors.attention.ragged.range_attention", lambda *_: attention)


def started(name: str, layers: int, kv_bits: int, mode: Kernels) -> Counter[str]:
    """Those of a decode step of unlike requests, as a GPU makes it, on tensors without memory."""
    config = with_layers(CONFIGS[name], layers)
    model = empty_model(config)
    keep_stage(model, range(layers), is_first=False, is_last=False, has_head=False)
    model.to_empty(device=META).half()
    form = CacheForm(torch.float16, META, kv_bits)
    cache = KVCache(range(layers), CacheShape(100, *kv_shape(config)), form)
    own_layers.put_own_layers(model, range(layers), cache, torch.float16)
    lengths, begins = np.array([9, 7, 5, 9]), np.array([0, 20, 33, 60])
    batch = MicroBatch(np.arange(4), lengths - 1, np.ones(4, np.int64), begins)
    hidden = torch.empty(4, config.hidden_size, dtype=torch.float16, device=META)
    mode.started.clear()
    with torch.inference_mode(), mode:
        run_decoder(model, RaggedContext.of(cache, batch), hidden)
    return Counter(mode.started)


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "opt", "bloom"])
def test_a_layer_starts_as_many_kernels_as_plans_count(
    monkeypatch: pytest.MonkeyPatch, name: str, own: bool, kv_bits: int
) -> None:
    mode = Kernels()
    if own:
        use_counted_kernels(monkeypatch, mode)
    counted = started(name, 2, kv_bits, mode)
    counted.subtract(started(name, 1, kv_bits, mode))
    shape = shape_from_config(name, json.loads(CONFIGS[name].to_json_string()))
    assert abs(counted.total() - layer_launches(shape, kv_bits, own)) <= (1 if own else 2)
    if own:
        assert counted.total() <= 12, +counted
