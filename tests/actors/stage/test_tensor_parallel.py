"""Stages that are divided among ranks: their tokens are those of `generate`, their codes those of
the stage that is not divided.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.actors.models import (
    CONFIGS,
    LAYERS,
    generate,
    random_prompts,
    reference,
    save_tiny,
    specs_of,
)
from tests.actors.thread_ranks import divided

LENGTHS = (5, 11, 1, 8)
NEW_TOKENS = 6
BOUNDS = (0, 1, 3, LAYERS)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("degrees", "head_on_first"),
    [
        ((4, 1, 2), False),
        ((2, 4, 1), True),
        pytest.param((1, 2, 4), False, marks=pytest.mark.rare),
        pytest.param((4, 4, 4), True, marks=pytest.mark.rare),
    ],
)
def test_greedy_tokens_equal_generate(
    name: str, degrees: tuple[int, ...], head_on_first: bool, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, CONFIGS[name], shard="60KB")
    prompts = random_prompts(LENGTHS)
    expected = [reference(model, prompt, NEW_TOKENS) for prompt in prompts]
    specs = specs_of(BOUNDS, len(prompts), max(LENGTHS) + NEW_TOKENS, head_on_first=head_on_first)
    with divided(specs, degrees, tmp_path) as stages:
        assert generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3) == expected
