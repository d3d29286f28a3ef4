"""Checkpoints of layers that differ and of experts, written with GPTQ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.stage.layer_stream import LayerStream, stream_layers
from llmpq import Cluster, Workload
from llmpq.model_check import checked_shape
from llmpq.quality.quantize import quantize_checkpoint
from planner.costs.stored_bytes import embedding_bytes, head_bytes, layer_weight_bytes, norm_bytes
from planner.model.finding import model_shape
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError
from quant.loading.emulated_kernels import LayerScheme
from tests.actors.configs import EVERY_CONFIG, STATE_CONFIGS
from tests.actors.models import save_tiny, stages_of
from tests.llmpq.quality.test_quantize import IN_FLOAT32, PLAIN_CPU, calibrated, patch, tokens


class PlannedHere:
    """As much of a planner's device as byte rules ask for."""

    processor = PLAIN_CPU


def by_expert(made: Checkpoint, name: str, module: Any, parts: Sequence[str]) -> Tensor:
    """The weights of all experts `[experts, out, in]` that codes stand for."""
    rows, columns = module.shape[1:]
    found = []
    for index in range(len(module)):
        modules = [f"{name}.{index}.{part}" for part in parts]
        size = rows // len(parts), columns
        found.append(torch.cat([made.read_codes(each, size).dequantize() for each in modules]))
    return torch.stack(found)


@pytest.mark.parametrize("family", ["qwen3_5_moe", pytest.param("gpt_oss", marks=pytest.mark.rare)])
def test_kinds_of_layers_and_experts_are_quantized(family: str, tmp_path: Path) -> None:
    """Experts have bits of their own; rates of heads do not fill words, and stay as they are. What
    stages compute is what transformers does with the weights that the codes stand for.
    """
    config = (EVERY_CONFIG | STATE_CONFIGS)[family]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    sizes |= {"linear_value_head_dim": 16} if family == "qwen3_5_moe" else {}
    model = save_tiny(tmp_path / "model", type(config).from_dict(config.to_dict() | sizes))
    bits, experts = (8, 4, 16, 4, 4), (4, 4, 16, 3, 4)
    wanted = replace(calibrated(bits), expert_bitwidths=experts)
    done = quantize_checkpoint(tmp_path / "model", tmp_path / "made", wanted)
    made = Checkpoint(tmp_path / "made")
    files = (tmp_path / "made").glob("*.safetensors")
    written = (tensor.nbytes for file in files for tensor in load_file(file).values())
    assert done.tensor_bytes == sum(written)
    assert not made.has("model.layers.2.mlp.experts.0.down_proj.qweight")
    patch(model, made, bits)
    apart = ("gate_up_proj",) if family == "gpt_oss" else ("gate_proj", "up_proj")
    with torch.no_grad():
        for name, module in model.named_modules():
            if made.has(f"{name}.0.down_proj.qweight"):
                flipped = family == "gpt_oss"
                for own, parts in (("gate_up_proj", apart), ("down_proj", ("down_proj",))):
                    weight = getattr(module, own)
                    rows = weight.transpose(1, 2) if flipped else weight
                    rows.copy_(by_expert(made, name, rows, parts))
    token_ids = tokens(2, 30)
    stream = LayerStream(tmp_path / "made", IN_FLOAT32)
    schemes = [
        LayerScheme(own, expert_bits=other) for own, other in zip(bits, experts, strict=True)
    ]
    *_, last = stream_layers(stream, token_ids, schemes)
    tail = stream.tail()
    with torch.no_grad():
        expected = model(input_ids=token_ids, use_cache=False).logits
    torch.testing.assert_close(
        tail.logits(tail.normed(last.hidden)), expected, rtol=1e-4, atol=1e-4
    )
    rules = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    of_experts = [rule for name, rule in rules["dynamic"].items() if r"layers\.3\." in name]
    assert {"bits": 3, "group_size": 32} in of_experts
    shape = model_shape(str(tmp_path / "made"))
    assert shape.fingerprint() == model_shape(str(tmp_path / "model")).fingerprint()


def test_stored_experts_are_planned_with_the_bits_that_they_have(tmp_path: Path) -> None:
    """Of a model with dense layers too: bytes of each kind, and of experts that few tokens ask."""
    config = EVERY_CONFIG["qwen3_moe"]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    save_tiny(tmp_path / "model", type(config).from_dict(config.to_dict() | sizes))
    wanted = replace(calibrated((4,) * 5), token_ids=tokens(1, 20))
    done = quantize_checkpoint(tmp_path / "model", tmp_path / "made", wanted)
    assert done.seldom_asked == 4 * 2 * 6, "no expert sees 64 of 20 tokens"
    shape = checked_shape(tmp_path / "made")
    assert shape.stored.bits == 4
    cluster = Cluster.from_counts(["T4"], [1])
    plan = cluster.plan(tmp_path / "made", Workload(2, 8, 4))
    assert {*plan.stages[0].bitwidths} == {4}
    fitted, nearest = (
        stages_of(tmp_path / folder, (0, 5), 1, 24, bits=4, processor=PLAIN_CPU)[0].stats()
        for folder in ("made", "model")
    )
    planned = sum(
        layer_weight_bytes(shape.layer(index), 4, PlannedHere(), "float32") for index in range(5)
    )
    ends = embedding_bytes(shape, "float32") + norm_bytes(shape, "float32")
    ends += 0 if shape.tied_embeddings else head_bytes(shape, "float32")
    assert fitted.weight_bytes == planned + ends
    assert fitted.weight_bytes == pytest.approx(nearest.weight_bytes, rel=0.03)
    path = tmp_path / "made" / "model-00002-of-00006.safetensors"
    kept = {name: t for name, t in load_file(path).items() if "experts.5.up_proj" not in name}
    save_file(kept, path)
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj"):
        checked_shape(tmp_path / "made")
