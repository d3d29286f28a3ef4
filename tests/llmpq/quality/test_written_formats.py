"""The formats that quantized checkpoints are written in: the same codes in each, as our reader and
the formats' own libraries take them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import match_name
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from llmpq.quality.quantize import quantize_checkpoint
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from quant.scheme import GptqOptions
from tests.actors.configs import EVERY_CONFIG
from tests.actors.models import save_tiny
from tests.llmpq.quality.test_quantize import _ROPE, calibrated

BITS, AWQ_BITS = (3, 16, 4, 8), (4, 16, 4, 4)
CONFIG = LlamaConfig(**_ROPE | {"num_hidden_layers": len(BITS)}, num_key_value_heads=2)


def write(
    folder: Path, method: str, bits: tuple[int, ...] = BITS, symmetric: bool = False, **more: Any
) -> Checkpoint:
    """Quantize `model` in `folder`, in float32, into the folder `method` beside it."""
    wanted = replace(calibrated(bits), method=method, gptq=GptqOptions(symmetric), **more)
    quantize_checkpoint(folder / "model", folder / method, wanted)
    return Checkpoint(folder / method)


def settings(made: Checkpoint) -> dict[str, Any]:
    found = json.loads((made.folder / "config.json").read_text())["quantization_config"]
    assert isinstance(found, dict)
    return found


def linears(model: Any) -> dict[str, nn.Linear]:
    found = model.model.layers.named_modules(prefix="model.layers")
    return {name: module for name, module in found if isinstance(module, nn.Linear)}


def assert_same(model: Any, made: Checkpoint, other: Checkpoint) -> None:
    for name, module in linears(model).items():
        assert torch.equal(made.read(f"{name}.weight"), other.read(f"{name}.weight"))
        size = (module.out_features, module.in_features)
        if made.coded(name) is not None:
            codes = [each.read_codes(name, size).codes for each in (made, other)]
            assert torch.equal(*codes)
    rest = [name for name in other.names() if other.coded(name.removesuffix(".weight")) is None]
    assert all(torch.equal(made.read(name), other.read(name)) for name in rest)


def by_library(made: Checkpoint, name: str) -> Tensor:
    """A weight as compressed-tensors decompresses it, by the group whose target it is."""
    scheme = QuantizationScheme.model_validate(group_of(made, name))
    packer: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    parts = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    files = {part: stored(made, f"{name}.{part}") for part in parts}
    found = {part: tensor for part, tensor in files.items() if tensor is not None}
    weight: Tensor = packer.decompress(
        found | {"weight_scale": found["weight_scale"].float()}, scheme
    )["weight"]
    return weight


def group_of(made: Checkpoint, name: str) -> dict[str, Any]:
    groups = settings(made)["config_groups"].values()
    (found,) = (
        group for group in groups if any(match_name(name, target) for target in group["targets"])
    )
    assert isinstance(found, dict)
    return found


def stored(made: Checkpoint, name: str) -> Tensor | None:
    index = json.loads((made.folder / "model.safetensors.index.json").read_text())["weight_map"]
    return load_file(made.folder / index[name])[name] if name in index else None


def test_compressed_tensors_as_its_library_reads_it(tmp_path: Path) -> None:
    """Bits of every layer, with zeros, and groups of 64 and 32 columns."""
    model = save_tiny(tmp_path / "model", CONFIG)
    other, made = (write(tmp_path, method) for method in ("gptq", "compressed-tensors"))
    assert_same(model, made, other)
    for name in linears(model):
        if made.coded(name) is not None:
            assert torch.equal(by_library(made, name), other.read(f"{name}.weight")), name
    found = settings(made)
    kinds = [(each["num_bits"], each["group_size"]) for each in weights_of(found)]
    assert kinds == [(bits, group) for bits in (3, 4, 8) for group in (32, 64)]
    assert found["ignore"][0] == "lm_head"
    assert any(r"\.(?:1)\.(?:" in name for name in found["ignore"])


def weights_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["weights"] for group in found["config_groups"].values()]


def test_transformers_loads_symmetric_codes(tmp_path: Path) -> None:
    """With zeros it does not (5.23): the library does not say how many of them it has packed."""
    model = save_tiny(tmp_path / "model", CONFIG)
    made = write(tmp_path, "compressed-tensors", symmetric=True)
    loaded = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    token_ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        for name, module in linears(model).items():
            module.weight.copy_(made.read(f"{name}.weight"))
        assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)


def awq_weight(made: Checkpoint, name: str) -> Tensor:
    """What AutoAWQ's kernels compute with: nibbles in its order, in float32."""
    shifts = torch.tensor([0, 16, 4, 20, 8, 24, 12, 28])
    words, zeros, scales = (
        stored(made, f"{name}.{each}") for each in ("qweight", "qzeros", "scales")
    )
    assert words is not None
    assert zeros is not None
    assert scales is not None
    codes, zeros = ((each.unsqueeze(-1) >> shifts & 15).flatten(1) for each in (words, zeros))
    size = settings(made)["group_size"]
    zeros, scales = (each.repeat_interleave(size, 0) for each in (zeros, scales.float()))
    return ((codes - zeros).float() * scales).t()


def test_awq_holds_the_same_codes(tmp_path: Path) -> None:
    """Of linears of 64 and 96 inputs, in groups of 32 that both have."""
    model = save_tiny(tmp_path / "model", CONFIG)
    other, made = (write(tmp_path, method, AWQ_BITS) for method in ("gptq", "awq"))
    assert_same(model, made, other)
    name = "model.layers.2.mlp.down_proj"
    assert torch.equal(awq_weight(made, name), other.read(f"{name}.weight"))
    found = settings(made)
    assert found["group_size"] == 32
    left_out = found["modules_to_not_convert"]
    assert left_out[0] == "lm_head"
    assert {each.rpartition(".self_attn")[0] or each for each in left_out[1:]} >= {"model.layers.1"}
    assert not any("layers.2" in each or "norm" in each for each in left_out)


def test_experts_are_targets_and_routers_are_not(tmp_path: Path) -> None:
    config = EVERY_CONFIG["qwen3_moe"]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96}
    save_tiny(tmp_path / "model", type(config).from_dict(config.to_dict() | sizes))
    bits, experts = (4, 16, 4, 8, 4), (4, 4, 3, 16, 4)
    made = write(tmp_path, "compressed-tensors", bits, expert_bitwidths=experts)
    groups = settings(made)["config_groups"].values()
    ignored = settings(made)["ignore"]
    for name in made.names():
        module = name.removesuffix(".weight")
        coded = made.coded(module)
        targets = [
            group["weights"]["num_bits"]
            for group in groups
            if any(match_name(module, target) for target in group["targets"])
        ]
        assert targets == ([] if coded is None else [coded.linear.bits]), name
        is_linear = name.endswith("weight") and made.read(name).dim() == 2
        if is_linear and "layers" in name:
            assert (coded is None) == any(match_name(module, each) for each in ignored), name


def test_refusals(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", CONFIG)
    with pytest.raises(
        SpecError, match=r"awq holds 4 and 16 bit, .* have 3 and 8; .*--format gptq"
    ):
        write(tmp_path, "awq")
    save_tiny(
        tmp_path / "model",
        LlamaConfig(**_ROPE | {"intermediate_size": 80, "num_hidden_layers": len(BITS)}),
    )
    with pytest.raises(SpecError, match=r"awq has one group size .* none of 128, 64, 32 .*64, 80"):
        write(tmp_path, "awq", AWQ_BITS)
    assert not (tmp_path / "awq").exists()
