"""Checkpoints whose layers differ or have experts, whole and spoiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from planner.model.finding import shape_from_config
from planner.model.tensor_shapes import layer_tensors, separate_experts
from planner.model.weight_check import check_weights
from quant.common.errors import CheckpointError
from tests.planner.model.mixed_configs import MIXED, library_model

Tensors = dict[str, np.ndarray[Any, Any]]


def tensors_of(name: str, separate: bool) -> Tensors:
    """Zeros of the sizes of transformers' model, experts in one or `separate`."""
    shape, found = shape_from_config(name, MIXED[name]), Tensors()
    state = library_model(MIXED[name]).state_dict()
    for key, value in state.items():
        if key != "lm_head.weight" or not shape.tied_embeddings:
            found[key] = np.zeros(tuple(value.shape), np.float16)
    if separate:
        for index in range(shape.layers):
            if shape.layer(index).experts is None:
                continue
            for part in ("gate_up_proj", "down_proj"):
                del found[f"model.layers.{index}.mlp.experts.{part}"]
            for tensors in separate_experts(shape.layer(index)):
                for key, size in tensors.items():
                    found[f"model.layers.{index}.{key}"] = np.zeros(size, np.float16)
    return found


def check(folder: Path, name: str, tensors: Tensors) -> str | None:
    save_file(tensors, folder / "model.safetensors")
    return check_weights(folder, shape_from_config(name, MIXED[name]))


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_a_layer_are_those_of_transformers(name: str) -> None:
    shape = shape_from_config(name, MIXED[name])
    for index, layer in enumerate(library_model(MIXED[name]).base_model.layers):
        stored = {key: tuple(value.shape) for key, value in layer.state_dict().items()}
        assert layer_tensors(shape.layer(index)) == stored


@pytest.mark.parametrize("name", MIXED)
def test_whole_checkpoints_are_taken(name: str, tmp_path: Path) -> None:
    tensors = tensors_of(name, separate=False)
    tensors |= {f"mtp.{part}": np.zeros(3, np.float16) for part in ("fc.weight", "norm.weight")}
    assert check(tmp_path, name, tensors) is None
    if MIXED[name]["model_type"] in ("qwen2_moe", "qwen3_moe", "qwen3_next", "glm4_moe", "olmoe"):
        assert check(tmp_path, name, tensors_of(name, separate=True)) is None


_EXPERT = "model.layers.2.mlp.experts"
_MIXER = "model.layers.1.linear_attn"


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[new] = tensors.pop(old)

    return change


def drop(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("name", "separate", "change", "message"),
    [
        (
            "qwen3_moe",
            True,
            drop(f"{_EXPERT}.4.up_proj.weight"),
            rf"no tensor {_EXPERT}\.4\.up_proj\.weight.*\(5 of 6 experts of this layer",
        ),
        (
            "qwen3_moe",
            False,
            drop(f"{_EXPERT}.gate_up_proj"),
            rf"no tensor {_EXPERT}\.gate_up_proj among",
        ),
        (
            "qwen3_moe",
            False,
            drop(f"{_EXPERT}.gate_up_proj", f"{_EXPERT}.down_proj"),
            rf"no tensor {_EXPERT}\.0\.gate_proj\.weight.*\(0 of 6 experts",
        ),
        (
            "qwen3_next",
            True,
            rename(f"{_EXPERT}.0.up_proj.weight", f"{_EXPERT}.6.up_proj.weight"),
            r"experts\.0\.up_proj",
        ),
        ("qwen3_next", False, drop("model.layers.2.mlp.gate.weight"), r"mlp\.gate\.weight"),
        ("qwen3_5_text", False, drop(f"{_MIXER}.A_log"), rf"no tensor {_MIXER}\.A_log"),
        ("qwen3_5_moe_text", False, drop(f"{_MIXER}.conv1d.weight"), rf"{_MIXER}\.conv1d\.weight"),
        ("gpt_oss", False, drop("model.layers.0.self_attn.sinks"), r"layers\.0\.self_attn\.sinks"),
        ("gpt_oss", False, drop(f"{_EXPERT}.down_proj_bias"), rf"{_EXPERT}\.down_proj_bias"),
    ],
)
def test_what_is_missing_is_named(
    name: str, separate: bool, change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    tensors = tensors_of(name, separate)
    change(tensors)
    with pytest.raises(CheckpointError, match=message):
        check(tmp_path, name, tensors)


def test_more_experts_than_the_configuration_has_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3_moe", separate=True)
    tensors[f"{_EXPERT}.6.up_proj.weight"] = np.zeros((24, 64), np.float16)
    message = r"takes model\.layers\.\*\.mlp\.experts\.\*\.up_proj\.weight of its weights"
    with pytest.raises(CheckpointError, match=message):
        check(tmp_path, "qwen3_moe", tensors)
    fused = tensors_of("qwen3_moe", separate=False)
    fused[f"{_EXPERT}.down_proj"] = np.zeros((7, 64, 24), np.float16)
    with pytest.raises(CheckpointError, match=r"is \[7, 64, 24\] but .* asks for \[6, 64, 24\]"):
        check(tmp_path, "qwen3_moe", fused)


def test_layers_that_predict_further_ahead_are_left_out(tmp_path: Path) -> None:
    """As GLM-4.5 is published: one more layer, known by a linear that no other has."""
    tensors = tensors_of("glm4_moe", separate=False)
    last, more = (f"model.layers.{index}." for index in (5, 6))
    tensors |= {name.replace(last, more): each for name, each in tensors.items() if last in name}
    with pytest.raises(CheckpointError, match=r"says 6 layers .* but the weights have 7"):
        check(tmp_path, "glm4_moe", tensors)
    for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "shared_head.head"):
        tensors[f"{more}{name}.weight"] = np.zeros(64, np.float16)
    assert check(tmp_path, "glm4_moe", tensors) is None
    del tensors[f"{last}input_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.5\.input_layernorm"):
        check(tmp_path, "glm4_moe", tensors)
