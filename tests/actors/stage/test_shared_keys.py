"""Layers that read the keys and values of earlier ones, and what each layer adds for a token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

from llmpq.model_check import checked_shape, left_out_note
from quant.common.errors import SpecError
from tests.actors.configs import LAYERS, SHARED_CONFIGS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of

LENGTHS, NEW_TOKENS = (5, 11, 1, 8), 9
SLIDING, FULL = "sliding_attention", "full_attention"


def test_layers_of_both_types_share_on_one_stage(tmp_path: Path) -> None:
    """Saved as part of a model for images, without any: the last layers of both types read."""
    values = SHARED_CONFIGS["gemma4-shared"].to_dict()
    del values["per_layer_config"]
    types = [SLIDING, SLIDING, FULL, SLIDING, FULL]
    text = Gemma4TextConfig.from_dict(
        values | {"layer_types": types, "num_kv_shared_layers": 2, "global_head_dim": 20}
    )
    torch.manual_seed(1)
    model = Gemma4ForConditionalGeneration(Gemma4Config(text_config=text)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    own, reading = (f"model.language_model.layers.{layer}.self_attn.k_" for layer in (2, 4))
    for part in ("proj.weight", "norm.weight"):  # as published files have them
        tensors[f"{reading}{part}"] = torch.full_like(tensors[f"{own}{part}"], torch.nan)
    save_file(tensors, file)
    shape = checked_shape(tmp_path)
    assert shape.joined == (2, 3, 4)
    assert left_out_note(tmp_path) is not None
    prompts = random_prompts(LENGTHS)
    expected = references(model, prompts, NEW_TOKENS)
    for bounds in ((0, LAYERS), (0, 1, LAYERS)):
        stages = stages_of(tmp_path, bounds, len(prompts), max(LENGTHS) + NEW_TOKENS)
        assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
        kept = sum(stage._cache.nbytes for stage in stages)
        tokens = len(prompts) * (max(LENGTHS) + NEW_TOKENS)
        rooms = len(prompts) * 12  # of a window of 6
        slots = rooms * (12 + 12) + tokens * 20
        assert kept == slots * 4 * 2 * 2, "three layers hold keys of two heads"


def test_cuts_between_owners_and_readers_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, SHARED_CONFIGS["gemma4-shared"])
    assert checked_shape(tmp_path).joined == (LAYERS - 1,)
    with pytest.raises(SpecError, match="layer 4 reads the keys and values of layer 3, which is"):
        stages_of(tmp_path, (0, LAYERS - 1, LAYERS), 2, 20)
