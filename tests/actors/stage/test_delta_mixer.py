"""Stages of models with constant states: what they hold, in which types; weights of few bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from actors.stage.stage import Stage
from planner.cluster.spec import ClusterSpec
from planner.costs.stored_bytes import layer_weight_bytes
from planner.model.finding import model_shape
from quant.checkpoint.reader import Checkpoint
from quant.devices import local_processor
from quant.linear import QuantizedLinear
from quant.loading.cache_settings import CacheSettings
from quant.loading.loader import module_nbytes
from tests.actors.configs import LAYERS, STATE_CONFIGS
from tests.actors.models import generate, random_prompts, save_tiny, specs_of

CPU = torch.device("cpu")
SLOTS, LONGEST = 3, 30


@pytest.mark.parametrize("name", STATE_CONFIGS)
def test_stages_hold_the_planned_bytes(name: str, tmp_path: Path) -> None:
    """And decays in float32, as they are stored."""
    save_tiny(tmp_path, STATE_CONFIGS[name])
    (spec,) = specs_of((0, LAYERS), SLOTS, LONGEST, dtype="bfloat16")
    stage = Stage(spec, tmp_path, CPU, local_processor(CPU))
    shape = model_shape(tmp_path)
    held = sum(
        SLOTS * kind.state_bytes(2) + 2 * SLOTS * LONGEST * kind.kv_width * 2
        for kind in map(shape.layer, range(LAYERS))
    )
    assert stage.stats().kv_cache_bytes == held
    stored = Checkpoint(tmp_path)
    device = ClusterSpec.from_counts(["T4"], [1]).devices[0]  # where bytes at 16 bits are the same
    for index, layer in enumerate(stage._model.get_decoder().layers):
        found = module_nbytes(layer)
        assert found == layer_weight_bytes(shape.layer(index), 16, device, "bfloat16")
        for decay in ("A_log", "dt_bias") if shape.layer(index).delta else ():
            exact = stored.read(f"model.layers.{index}.linear_attn.{decay}")
            assert torch.equal(getattr(layer.linear_attn, decay), exact)


@pytest.mark.parametrize("bits", [4, *(pytest.param(b, marks=pytest.mark.rare) for b in (8, 3))])
def test_weights_of_few_bits_come_back_from_the_cache(bits: int, tmp_path: Path) -> None:
    """All linears have them, those of the mixer too."""
    for name in STATE_CONFIGS:
        folder = tmp_path / name
        config = STATE_CONFIGS[name].to_dict() | {"hidden_size": 64}
        save_tiny(folder, type(STATE_CONFIGS[name]).from_dict(config))
        (spec,) = specs_of((0, LAYERS), SLOTS, LONGEST, bits, dtype="bfloat16")
        answers = []
        for _ in range(2):
            cache = CacheSettings(str(tmp_path / "cache"))
            stage = Stage(replace(spec), folder, CPU, local_processor(CPU), cache)
            layers = stage._model.get_decoder().layers
            mixer = layers[0].linear_attn
            assert not any(isinstance(each, nn.Linear) for each in mixer.modules())
            assert any(isinstance(each, QuantizedLinear) for each in mixer.modules())
            assert mixer.A_log.dtype == torch.float32
            answers.append(generate([stage], random_prompts((9, 4, 17)), 8, 2, 3))
        assert answers[0] == answers[1]
