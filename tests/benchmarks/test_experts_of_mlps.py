"""Models whose MLPs have become experts: stages compute what `generate` does with dense ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quantization.experts import with_experts
from planner.model.finding import model_shape
from planner.model.weight_check import check_weights
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import generate, random_prompts, references, save_tiny, stages_of

NEW_TOKENS = 9


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("llama-tied", True),
        ("qwen3", False),
        pytest.param("llama", False, marks=pytest.mark.rare),
        pytest.param("qwen3", True, marks=pytest.mark.rare),
    ],
)
def test_tokens_are_those_of_the_dense_model(name: str, split: bool, tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "dense", CONFIGS[name])
    folder = tmp_path / "experts"
    with_experts(tmp_path / "dense", folder, experts=5, asked=2, split=split)
    assert check_weights(folder, model_shape(folder)) is None
    prompts = random_prompts((7, 12, 1))
    expected = references(model, prompts, NEW_TOKENS)
    stages = stages_of(folder, (0, 2, LAYERS), len(prompts), 12 + NEW_TOKENS)
    assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=2) == expected
