"""Weights of GGUF files against the models that were written, and blocks against the package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Phi3Config, PretrainedConfig, Qwen3Config, SmolLM3Config

from actors.stage.model_config import read_config
from llmpq.model_check import checked_shape
from planner.model.finding import shape_from_config
from quant.checkpoint.model_reference import resolve
from quant.checkpoint.reader import Checkpoint
from quant.common.errors import SpecError
from tests.actors.configs import CONFIGS, EVERY_CONFIG, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of
from tests.quant.checkpoint.gguf.written import Array, as_type, permuted, write_gguf

_ROPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
}


def with_entries(config: Any, **entries: Any) -> Any:
    return type(config).from_dict(config.to_dict() | entries)


MODELS: dict[str, PretrainedConfig] = {
    **{name: CONFIGS[name] for name in CONFIGS if "opt" not in name and name != "qwen2-sliding"},
    "llama-biases": LlamaConfig(**_ROPE, attention_bias=True, mlp_bias=True),
    "llama-wide-heads": LlamaConfig(**_ROPE, head_dim=16),
    "qwen3-biases": Qwen3Config(**_ROPE, head_dim=16, attention_bias=True),
    "qwen3-tied": Qwen3Config(**_ROPE, head_dim=16, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**_ROPE, **_ENDS, tie_word_embeddings=True),
    **{name: EVERY_CONFIG[name] for name in ("granite", "phi3", "glm4", "olmo2", "ministral3")},
    **{
        name: with_entries(EVERY_CONFIG[name], query_pre_attn_scalar=EVERY_CONFIG[name].head_dim)
        for name in ("gemma2", "gemma3")
    },
    "phi3-long": Phi3Config(
        **_ROPE, **_ENDS, original_max_position_embeddings=64, rope_parameters=_LONG
    ),
}
RUN = ("llama", "bloom", "gemma3", "phi3-long")
BLOCKS = (64, 256)
"""Hidden and intermediate size of models whose rows are whole blocks of some type."""


def small_llama(folder: Path, hidden: int = 64, **settings: Any) -> Any:
    config = LlamaConfig(
        **_ROPE | {"hidden_size": hidden, "intermediate_size": 256, "num_attention_heads": 4},
        **settings,
    )
    return save_tiny(folder, config)


@pytest.mark.parametrize("name", MODELS)
def test_the_model_that_was_written_comes_back(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "original", MODELS[name])
    file = write_gguf(model, tmp_path / "tiny.gguf")
    wanted = shape_from_config("tiny", json.loads(MODELS[name].to_json_string()))
    if name == "mistral":  # without a window it is a llama, and stored as one
        wanted = replace(wanted, model_type="llama")
    assert checked_shape(file).fingerprint() == wanted.fingerprint()

    checkpoint = Checkpoint(file)
    tensors = model.state_dict()
    if wanted.tied_embeddings:
        del tensors["lm_head.weight"]
    assert checkpoint.names() == sorted(tensors)
    for each, tensor in tensors.items():
        is_shifted = "gemma" in name and "norm" in each  # stored with one added
        atol = 1.2e-7 if is_shifted else 0.0
        torch.testing.assert_close(checkpoint.read(each), tensor, rtol=0, atol=atol)


@pytest.mark.parametrize(
    "name",
    [
        *RUN,
        *(pytest.param(n, marks=pytest.mark.rare) for n in MODELS if n not in RUN),
    ],
)
def test_tokens_are_those_of_generate(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "original", MODELS[name])
    file = write_gguf(model, tmp_path / "tiny.gguf")
    prompts = random_prompts((5, 11, 1))
    stages = stages_of(resolve(file), (0, 2, LAYERS), len(prompts), 20)
    expected = references(model, prompts, 8)
    assert generate(stages, prompts, 8, prefill=2, decode=2) == expected


def test_both_factors_of_longrope_come_back(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "original", MODELS["phi3-long"])
    found = read_config(resolve(write_gguf(model, tmp_path / "tiny.gguf")))
    assert found.rope_parameters == model.config.rope_parameters
    cut = tmp_path / "cut.gguf"
    write_gguf(model, cut, change=lambda tensors: tensors.pop("rope_factors_long.weight"))
    with pytest.raises(SpecError, match=r"cut.gguf has no rope_factors_long.weight; download"):
        resolve(cut)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_types_that_the_package_writes(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    model = small_llama(tmp_path / "original")
    file = write_gguf(model, tmp_path / "tiny.gguf", as_type(number))
    checked_shape(file)
    checkpoint = Checkpoint(file)
    for name, tensor in model.state_dict().items():
        found = checkpoint.read(name)
        if tensor.dim() == 1:
            assert torch.equal(found, tensor)
        else:
            rounded = gguf.dequantize(gguf.quantize(tensor.numpy(), number), number)
            assert torch.equal(found.float(), torch.from_numpy(rounded))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_that_the_package_only_reads(kind: str, tmp_path: Path) -> None:
    """Blocks of any bytes: queries come back in transformers' order, the others as they are."""
    number = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(0)
    written: dict[str, Array] = {}

    def encode(name: str, weights: Array) -> tuple[Array, gguf.GGMLQuantizationType]:
        if weights.ndim == 1:
            return weights, gguf.GGMLQuantizationType.F32
        row_bytes = weights.shape[1] // block * block_bytes
        written[name] = rng.integers(0, 256, (weights.shape[0], row_bytes), np.uint8)
        return written[name], number

    model = small_llama(tmp_path / "original", hidden=256)
    checkpoint = Checkpoint(write_gguf(model, tmp_path / "tiny.gguf", encode))
    with np.errstate(all="ignore"):
        wanted = {name: gguf.dequantize(blocks, number) for name, blocks in written.items()}
        up = checkpoint.read("model.layers.1.mlp.up_proj.weight").numpy()
        queries = checkpoint.read("model.layers.1.self_attn.q_proj.weight").numpy()
    assert np.array_equal(up, wanted["blk.1.ffn_up.weight"], equal_nan=True)
    assert np.array_equal(permuted(queries, 4), wanted["blk.1.attn_q.weight"], equal_nan=True)


def test_rotary_factors_of_llama_3_become_its_parameters(tmp_path: Path) -> None:
    """Also parameters that no model has: whatever gives the same factors."""
    for low, high in ((1.0, 4.0), (0.6, 2.5)):
        settings = _LLAMA3 | {"low_freq_factor": low, "high_freq_factor": high}
        model = small_llama(tmp_path / "original", hidden=256, rope_parameters=settings)
        plain = 10000.0 ** -(np.arange(0, 64, 2) / 64)
        factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        file = write_gguf(
            model,
            tmp_path / f"{low}.gguf",
            change=lambda tensors, given=factors: tensors.update({"rope_freqs.weight": given}),
        )
        checked_shape(file)
        prompts = random_prompts((60, 11))
        stages = stages_of(resolve(file), (0, 2, LAYERS), len(prompts), 80)
        expected = references(model, prompts, 8)
        assert generate(stages, prompts, 8, prefill=1, decode=2) == expected


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
    ],
)
def test_scaled_positions(
    metadata: dict[str, Any], scaling: dict[str, Any], tmp_path: Path
) -> None:
    settings = scaling | {"rope_theta": 10000.0}
    model = small_llama(tmp_path / "original", rope_parameters=settings)
    file = write_gguf(model, tmp_path / "tiny.gguf", metadata=metadata)
    prompts = random_prompts((60, 11))
    stages = stages_of(resolve(file), (0, 2, LAYERS), len(prompts), 80)
    expected = references(model, prompts, 8)
    assert generate(stages, prompts, 8, prefill=1, decode=2) == expected


def test_a_split_file_is_one_model_whichever_part_is_named(tmp_path: Path) -> None:
    model = small_llama(tmp_path / "original")
    (tmp_path / "split").mkdir()
    write_gguf(model, tmp_path / "split" / "tiny.gguf", part_bytes=300_000)
    parts = sorted((tmp_path / "split").iterdir())
    assert len(parts) > 2
    tensors = model.state_dict()
    for named in (tmp_path / "split", parts[0], parts[-1]):
        checkpoint = Checkpoint(named)
        assert checkpoint.names() == sorted(tensors)
        assert all(torch.equal(checkpoint.read(each), tensors[each]) for each in tensors)
        assert checked_shape(named).name == "tiny"


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    for seed in (0, 1):
        model = save_tiny(tmp_path / "original", MODELS["llama"], seed)
        write_gguf(model, file)
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(Checkpoint(file).read(name), model.state_dict()[name])
