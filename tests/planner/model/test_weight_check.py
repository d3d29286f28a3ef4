"""The tensors that a checkpoint must hold, against transformers' own models and spoiled headers."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.stage.partial_model import register_models
from planner.model.families import FAMILIES
from planner.model.finding import shape_from_config
from planner.model.tensor_shapes import end_tensors, layer_tensors
from tests.actors.configs import EVERY_CONFIG, STATE_CONFIGS
from tests.paths import ROOT


@pytest.mark.parametrize("name", EVERY_CONFIG)
def test_tensors_are_those_of_transformers(name: str) -> None:
    register_models()
    config = EVERY_CONFIG[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_from_config(name, json.loads(config.to_json_string()))
    names = FAMILIES[shape.model_type].architecture
    expected = end_tensors(shape) | {
        f"{names.head_names[0]}.weight": (shape.vocab_size, shape.word_embedding_size)
    }
    for index in range(shape.layers):
        own = layer_tensors(shape.layer(index))
        counted = (math.prod(size) for size in own.values() if size != (1,))  # Gemma 4's scalar
        assert shape.parameters_by_layer[index] == sum(counted)
        expected |= {f"{names.layers_path}.{index}.{tensor}": own[tensor] for tensor in own}
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == expected


def test_every_family_has_a_tiny_model() -> None:
    """Tests of stages and of tensors go through `EVERY_CONFIG`: a new family needs an entry."""
    configs = EVERY_CONFIG | STATE_CONFIGS
    assert {config.model_type for config in configs.values()} == {*FAMILIES}


def test_the_readme_names_every_family() -> None:
    """Its table has them by `model_type`, in the first column."""
    rows = re.findall(r"^\| (`[^|]*) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named >= {*FAMILIES}
