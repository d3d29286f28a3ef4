"""Transformers' configurations: which heads are tied, and what no model can be built of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from actors.stage.model_config import check_transformers_builds, read_config
from planner.model.finding import model_shape
from quant.common.errors import CheckpointError
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of


def put_head(folder: Path, differs: bool) -> None:
    """Store an LM head beside the embedding that the configuration ties it to."""
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if differs:
        head[-1] += 10  # in its last row alone
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("differs", [False, True])
def test_a_stored_head_is_tied_where_transformers_ties_it(differs: bool, tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama-tied"])
    put_head(tmp_path, differs)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not differs
    assert read_config(tmp_path).tie_word_embeddings is not differs
    assert model_shape(tmp_path).tied_embeddings is not differs
    prompts = random_prompts((5, 9))
    expected = references(model, prompts, 6)
    for bounds in ((0, LAYERS), (0, 2, LAYERS)):
        stages = stages_of(tmp_path, bounds, 2, 20)
        assert generate(stages, prompts, 6, prefill=2, decode=2) == expected


def test_types_may_be_written_as_torch_shows_them(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"dtype": None}
    path.write_text(json.dumps(values | {"torch_dtype": "torch.bfloat16"}))
    assert read_config(tmp_path).dtype == torch.bfloat16
    check_transformers_builds(tmp_path)


def test_what_no_model_can_be_built_of_is_refused_in_our_words(tmp_path: Path) -> None:
    save_tiny(tmp_path, CONFIGS["llama"])
    check_transformers_builds(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for entry in ({"id2label": [1]}, {"use_cache": None}, {"layer_types": ["x"]}):
        path.write_text(json.dumps(values | entry))
        with pytest.raises(CheckpointError, match=r"config\.json: transformers cannot build"):
            check_transformers_builds(tmp_path)
