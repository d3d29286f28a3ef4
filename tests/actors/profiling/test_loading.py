"""Timed loads: a stage's layers, from the checkpoint and from the cache."""

from __future__ import annotations

from typing import Any

import pytest

from actors.profiling.loading import LoadTask, time_loading
from planner.costs.memory import layer_weight_bytes
from planner.model.finding import shape_from_config
from quant.scheme import BITWIDTHS
from tests.actors.models import CONFIGS
from tests.actors.profiling.test_layers import TINY, Here


def test_every_bitwidth_is_loaded_from_where_it_can_come() -> None:
    loads = time_loading(LoadTask(TINY, "bfloat16", BITWIDTHS, threads=1))
    found = {(load.bits, load.origin) for load in loads}
    cached = {(bits, "cache") for bits in BITWIDTHS if bits != 16}
    assert found == {(bits, "checkpoint") for bits in BITWIDTHS} | cached
    shape = shape_from_config("tiny", TINY)
    device: Any = Here()
    for load in loads:
        assert load.seconds > 0
        assert load.checkpoint_bytes == 2 * shape.layer_parameters
        assert load.held_bytes == layer_weight_bytes(shape, load.bits, device, "bfloat16")


def test_what_counts_as_from_the_cache_is_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is written, the checkpoint's layers are not quantized again."""
    filled: list[str] = []
    from quant.loading import loader

    fill = loader._fill_layer
    monkeypatch.setattr(
        loader,
        "_fill_layer",
        lambda load, checkpoint: (filled.append(load.name_prefix), fill(load, checkpoint)),
    )
    time_loading(LoadTask(TINY, "bfloat16", (4,), threads=1))
    layers, turns = 4, 3
    assert len(filled) == layers * (1 + turns + 1)


@pytest.mark.parametrize("name", ["opt", "bloom", "gpt_neox", "qwen2-sliding"])
def test_other_architectures_load(name: str) -> None:
    values = CONFIGS[name].to_dict()
    assert len(time_loading(LoadTask(values, "bfloat16", (8,), threads=1))) == 2
