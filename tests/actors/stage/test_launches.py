"""Kernels that a layer starts, counted as they are dispatched, against those that plans count."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from actors.attention.kv_cache import CacheForm, CacheShape, KVCache
from actors.attention.ragged import RaggedContext
from actors.messages import MicroBatch
from actors.stage.model_config import with_layers
from actors.stage.partial_model import empty_model, keep_stage
from actors.stage.stage import kv_shape, run_decoder
from planner.costs.roofline import layer_launches
from planner.model.finding import shape_from_config
from tests.actors.models import CONFIGS

META = torch.device("meta")
VIEWS = {
    *("chunk", "detach", "dropout", "empty", "empty_like", "expand", "flatten", "permute"),
    *("reshape", "select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unflatten"),
    *("unsqueeze", "view", "_unsafe_view", "as_strided", "alias", "split_with_sizes"),
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


def started(name: str, layers: int, kv_bits: int) -> int:
    """Those of a decode step of unlike requests, as a GPU makes it, on tensors without memory."""
    config = with_layers(CONFIGS[name], layers)
    model = empty_model(config)
    keep_stage(model, range(layers), is_first=False, is_last=False, has_head=False)
    model.to_empty(device=META).half()
    form = CacheForm(torch.float16, META, kv_bits)
    cache = KVCache(range(layers), CacheShape(100, *kv_shape(config)), form)
    lengths, begins = np.array([9, 7, 5, 9]), np.array([0, 20, 33, 60])
    batch = MicroBatch(np.arange(4), lengths - 1, np.ones(4, np.int64), begins)
    hidden = torch.empty(4, config.hidden_size, dtype=torch.float16, device=META)
    with torch.inference_mode(), Kernels() as kernels:
        run_decoder(model, RaggedContext.of(cache, batch), hidden)
    return kernels.started.total()


@pytest.mark.parametrize("kv_bits", [16, 8])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "opt", "bloom"])
def test_a_layer_starts_as_many_kernels_as_plans_count(name: str, kv_bits: int) -> None:
    counted = started(name, 2, kv_bits) - started(name, 1, kv_bits)
    shape = shape_from_config(name, json.loads(CONFIGS[name].to_json_string()))
    assert abs(counted - layer_launches(shape, kv_bits)) <= 2
