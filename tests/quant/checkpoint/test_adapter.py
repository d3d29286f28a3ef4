"""Folders of LoRA adapters: what is added to which weight, and what is refused by its name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quant.checkpoint.adapter import Adapter
from quant.checkpoint.reader import Checkpoint
from quant.checkpoint.stored_tensors import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SINGLE_FILE
from quant.common.errors import CheckpointError
from tests.quant.adapters import save_adapter

QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
WEIGHTS = {
    f"{QUERY}.weight": torch.randn(6, 8),
    f"{DOWN}.weight": torch.randn(8, 12).bfloat16(),
    "model.embed_tokens.weight": torch.randn(20, 8),
}


def pair(module: str, rank: int = 2) -> dict[str, Tensor]:
    rows, columns = WEIGHTS[f"{module}.weight"].shape
    place = f"base_model.model.{module}"
    return {
        f"{place}.lora_A.weight": torch.randn(rank, columns),
        f"{place}.lora_B.weight": torch.randn(rows, rank),
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(WEIGHTS, folder / SINGLE_FILE)
    return folder


@pytest.mark.parametrize("rslora", [False, True])
def test_the_product_is_added_in_float32(base: Path, tmp_path: Path, rslora: bool) -> None:
    tensors = pair(QUERY) | pair(DOWN, 4)
    patterns: dict[str, Any] = {"rank_pattern": {"down_proj": 4}, "alpha_pattern": {"mlp.*": 3}}
    folder = save_adapter(tmp_path / "adapter", tensors, 2, 16, use_rslora=rslora, **patterns)
    merged, before = Checkpoint(base, folder), Checkpoint(base)
    merged.check_files()
    for module, rank, alpha in ((QUERY, 2, 16), (DOWN, 4, 3)):
        up, down = (tensors[f"base_model.model.{module}.lora_{part}.weight"] for part in "BA")
        scale = alpha / (math.sqrt(rank) if rslora else rank)
        wanted = WEIGHTS[f"{module}.weight"].double() + scale * up.double() @ down.double()
        found = merged.read(f"{module}.weight")
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        kept = merged.read_as_stored(f"{module}.weight")
        assert torch.equal(kept, found.to(before.read(f"{module}.weight").dtype))
    embedding = merged.read("model.embed_tokens.weight")
    assert torch.equal(embedding, WEIGHTS["model.embed_tokens.weight"])


def test_a_layer_is_another_one_with_the_adapter(base: Path, tmp_path: Path) -> None:
    """So that packed layers of the base model are not taken from the cache, nor those of before."""
    folder = save_adapter(tmp_path / "adapter", pair(QUERY), 2)
    merged = Checkpoint(base, folder)
    found = {Checkpoint(base).fingerprint("model.layers.0"), merged.fingerprint("model.layers.0")}
    assert merged.is_unchanged("model.layers.0")
    save_adapter(folder, pair(QUERY), 2, alpha=1)
    assert not merged.is_unchanged("model.layers.0")
    found.add(Checkpoint(base, folder).fingerprint("model.layers.0"))
    assert len(found) == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [1]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("r", 0),
        ("r", "2"),
        ("lora_alpha", "high"),
        ("use_rslora", "no"),
        ("rank_pattern", [2]),
        ("rank_pattern", {"(": 2}),
        ("alpha_pattern", {"q_proj": None}),
    ],
)
def test_fields_that_are_not_taken_are_named(field: str, value: object, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path, pair(QUERY), 2)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, field: value}))
    with pytest.raises(CheckpointError, match=f"{ADAPTER_CONFIG}: field {field}"):
        Adapter(folder)


def changed(what: str) -> dict[str, Tensor]:
    tensors, (first, second) = pair(QUERY), sorted(pair(QUERY))
    if what == "no lora_B":
        del tensors[second]
    elif what == "is no lora_A":
        tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.ones(2, 20)
    elif what == "two adapters":
        tensors[first] = torch.ones(3, 8)
    elif what == "must be a matrix":
        tensors[first] = torch.ones(2, 8, dtype=torch.int32)
    elif what == "no weight of that name":
        tensors = {name.replace("q_proj", "qkv_proj"): own for name, own in tensors.items()}
    elif what == r"but .* is \[6, 8\]":
        tensors[second] = torch.ones(9, 2)
    elif what == "of layers alone":
        tensors = pair("model.embed_tokens")
    elif what == "NaN or infinity":
        tensors[first][1, 1] = torch.inf
    return tensors


@pytest.mark.parametrize(
    "what",
    [
        "no lora_B",
        "is no lora_A",
        "two adapters",
        "must be a matrix",
        "no weight of that name",
        r"but .* is \[6, 8\]",
        "of layers alone",
        "NaN or infinity",
    ],
)
def test_tensors_that_do_not_fit_are_named(what: str, base: Path, tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "adapter", changed(what), 2)
    with pytest.raises(CheckpointError, match=what):
        Checkpoint(base, folder).check_files()


def test_folders_that_hold_none_say_what_helps(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder here"):
        Adapter(tmp_path / "none")
    with pytest.raises(CheckpointError, match=f"holds no {ADAPTER_CONFIG}"):
        Adapter(tmp_path)
    folder = save_adapter(tmp_path, pair(QUERY), 2)
    whole = (folder / ADAPTER_WEIGHTS).read_bytes()
    (folder / ADAPTER_WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Adapter(folder)
    (folder / ADAPTER_WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="save it as safetensors"):
        Adapter(folder)


def test_names_of_text_models_within_others(tmp_path: Path, base: Path) -> None:
    tensors = pair(QUERY)
    named = {name.replace("model.layers", "model.language_model.layers"): own
             for name, own in tensors.items()}  # fmt: skip
    beside = {name.replace("language_model.layers", "visual.blocks"): own.clone()
              for name, own in named.items()}  # fmt: skip
    folder = save_adapter(tmp_path / "adapter", named | beside, 2)
    plain = save_adapter(tmp_path / "plain", tensors, 2)
    weight = f"{QUERY}.weight"
    assert torch.equal(Checkpoint(base, folder).read(weight), Checkpoint(base, plain).read(weight))
