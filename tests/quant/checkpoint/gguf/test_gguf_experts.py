"""GGUF files of models with experts, which llama.cpp stores in one tensor for each projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig

from llmpq.model_check import checked_shape
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import CheckpointError, LlmpqError, SpecError
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of
from tests.quant.checkpoint.gguf.written import Array, as_type, write_gguf

_EXPERTS, _WIDTH, _LAYERS = 6, 32, 3
_CONFIG = Qwen3MoeConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=_LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    num_experts=_EXPERTS,
    num_experts_per_tok=2,
    moe_intermediate_size=_WIDTH,
    norm_topk_prob=True,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("original")


@pytest.fixture
def model(folder: Path) -> Any:
    return save_tiny(folder, _CONFIG)


def _round(model: Any, kind: gguf.GGMLQuantizationType) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(rounded))


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_experts_come_back_one_by_one(kind: str, model: Any, folder: Path, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    file = write_gguf(model, tmp_path / "tiny.gguf", as_type(number))
    assert checked_shape(file).fingerprint() == checked_shape(folder).fingerprint()
    _round(model, number)
    model.save_pretrained(tmp_path / "rounded")
    found, wanted = Checkpoint(file), Checkpoint(tmp_path / "rounded")
    assert found.names() == wanted.names()
    for name in wanted.names():
        assert torch.equal(found.read(name).float(), wanted.read(name)), name
    experts = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    up = found.read("model.layers.1.mlp.experts.4.up_proj.weight")
    assert torch.equal(up.float(), experts[4, _WIDTH:])

    prompts = random_prompts((5, 11, 1))
    stages = stages_of(resolve(file), (0, 2, _LAYERS), len(prompts), 20)
    expected = references(model, prompts, 8)
    assert generate(stages, prompts, 8, prefill=2, decode=2) == expected


def test_experts_that_do_not_fit_are_named_as_in_the_file(model: Any, tmp_path: Path) -> None:
    def said(name: str, value: Array | None) -> str:
        def change(tensors: dict[str, Array]) -> None:
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value

        with pytest.raises(CheckpointError) as caught:
            checked_shape(write_gguf(model, tmp_path / "tiny.gguf", change=change))
        return str(caught.value)

    up, down = "blk.1.ffn_up_exps.weight", "blk.2.ffn_down_exps.weight"
    assert f"has no tensor {up} (expert 0) among" in said(up, None)
    fewer = said(down, np.zeros((_EXPERTS - 1, 64, _WIDTH), np.float32))
    assert f"has no tensor {down} (expert {_EXPERTS - 1}) among" in fewer
    assert f"({_EXPERTS - 1} of {_EXPERTS} experts" in fewer
    narrow = said(down, np.zeros((_EXPERTS, 64, _WIDTH // 2), np.float32))
    assert f"tensor {down} (expert 0) is [64, 16] but its metadata asks for [64, 32]" in narrow
    more = said(up, np.zeros((_EXPERTS + 1, _WIDTH, 64), np.float32))
    assert "answers would be wrong" in more
    bias = said("blk.0.ffn_gate_exps.bias", np.zeros((_EXPERTS, _WIDTH), np.float32))
    assert "answers would be wrong" in bias
    assert "no tensor blk.0.ffn_gate_inp.weight" in said("blk.0.ffn_gate_inp.weight", None)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_count", None, "qwen3moe.expert_count is missing"),
        ("expert_used_count", 7, "at most 6"),
        ("expert_feed_forward_length", 0, "expert_feed_forward_length is 0"),
        ("expert_weights_scale", 2.5, "qwen3moe.expert_weights_scale is 2.5"),
    ],
)
def test_metadata_of_experts(key: str, value: Any, words: str, model: Any, tmp_path: Path) -> None:
    file = write_gguf(model, tmp_path / "tiny.gguf", metadata={f"qwen3moe.{key}": value})
    with pytest.raises(LlmpqError) as caught:
        checked_shape(file)
    assert isinstance(caught.value, SpecError)
    assert words in str(caught.value)
