"""Stages of models with experts whose weights are packed, or stored as codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from actors.stage.partial_model import architecture_of
from planner.costs.stored_bytes import layer_weight_bytes
from planner.model.finding import model_shape
from planner.model.weight_check import check_weights
from quant.backends.kernel_classes import BACKENDS
from quant.backends.table import fallback_rule
from quant.loading.loader import module_nbytes
from quant.rounding.ways import Rounding
from quant.scheme import Processor
from tests.actors.configs import EVERY_CONFIG, LATENT_CONFIGS, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of

LENGTHS = (5, 11, 1, 8)
NEW_TOKENS = 7
PLAIN = Processor(instruction_sets=frozenset())
"""A CPU whose kernels round no activations."""


def represent(model: Any, bits: int) -> None:
    """Give `model` the weights that its packed ones stand for."""
    kernel = BACKENDS[fallback_rule(bits).name]
    linears = architecture_of(model.config).linears

    def meant(weight: Tensor, name: str) -> Tensor:
        return kernel.represent(weight.contiguous(), Rounding.of_tensor("weighted", name))

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.split(".", 3)[-1] in linears:
            module.weight.copy_(meant(module.weight, f"{name}.weight"))
        if name.endswith(".experts"):
            for part in ("gate_up_proj", "down_proj"):
                for index, weight in enumerate(getattr(module, part)):
                    own = weight.t() if module.is_transposed else weight
                    own.copy_(meant(own, f"{name}.{index}.{part}"))


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("qwen3_moe", 4),
        pytest.param("qwen3_moe", 3, marks=pytest.mark.rare),
        pytest.param("qwen3_moe", 8, marks=pytest.mark.rare),
        pytest.param("gpt_oss", 4, marks=pytest.mark.rare),
    ],
)
@torch.no_grad()
def test_tokens_of_packed_experts_are_those_of_what_they_stand_for(
    name: str, bits: int, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, EVERY_CONFIG[name])
    represent(model, bits)
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    stages = stages_of(
        tmp_path, (0, 2, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS, bits, processor=PLAIN
    )
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected


def test_experts_that_are_stored_in_four_bits_are_decoded(tmp_path: Path) -> None:
    """gpt-oss as it is published: MXFP4 blocks and scales in place of experts' weights."""
    config = EVERY_CONFIG["gpt_oss"].to_dict() | {"hidden_size": 64}
    model = save_tiny(tmp_path, type(EVERY_CONFIG["gpt_oss"]).from_dict(config))
    file, draw = tmp_path / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = load_file(file)
    for index, layer in enumerate(model.model.layers):
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{index}.mlp.experts.{part}"
            experts, columns, rows = tensors.pop(name).shape
            size = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*size, 16), dtype=torch.uint8, generator=draw)
            scales = torch.randint(119, 125, size, dtype=torch.uint8, generator=draw)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            weight = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
            setattr(layer.mlp.experts, part, nn.Parameter(weight.float(), False))
    save_file(tensors, file)
    settings = tmp_path / "config.json"
    stored = json.loads(settings.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    settings.write_text(json.dumps(stored))
    assert check_weights(tmp_path, model_shape(tmp_path)) is None
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    stages = stages_of(tmp_path, (0, 2, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS)
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected


def test_a_layer_that_predicts_further_ahead_is_not_run(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, EVERY_CONFIG["glm4_moe"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    last, more = (f"model.layers.{index}." for index in (LAYERS - 1, LAYERS))
    for name in [name for name in tensors if name.startswith(last)]:
        tensors[name.replace(last, more)] = torch.full_like(tensors[name], torch.nan)
    tensors[f"{more}eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, file)
    assert check_weights(tmp_path, model_shape(tmp_path)) is None
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    stages = stages_of(tmp_path, (0, 2, LAYERS), len(prompts), max(LENGTHS) + NEW_TOKENS)
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected


@pytest.mark.parametrize(
    "name",
    [
        *("gpt_oss", "deepseek_v3"),
        *(
            pytest.param(name, marks=pytest.mark.rare)
            for name in ("qwen3_moe", "glm4_moe", *LATENT_CONFIGS)
            if name != "deepseek_v3"
        ),
    ],
)
def test_stages_with_experts_hold_the_bytes_of_their_plan(name: str, tmp_path: Path) -> None:
    """In every kind of layer, at every bitwidth."""
    config = EVERY_CONFIG[name].to_dict() | {"hidden_size": 64}
    save_tiny(tmp_path, type(EVERY_CONFIG[name]).from_dict(config))
    device = SimpleNamespace(processor=Processor(instruction_sets=frozenset()))
    shape = model_shape(tmp_path)
    for bits in (16, 8, 4, 3):
        stage = stages_of(tmp_path, (0, LAYERS), 1, 8, bits, "bfloat16", device.processor)[0]
        for index in range(LAYERS):
            found = module_nbytes(stage._model.model.layers[index])
            assert found == layer_weight_bytes(shape.layer(index), bits, device, "bfloat16")
