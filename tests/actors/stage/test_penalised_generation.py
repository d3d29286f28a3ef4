"""Stages against transformers' `generate` with penalties, rows with and without them in a batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Request, Sampling
from tests.actors.configs import CONFIGS, LAYERS
from tests.actors.models import (
    generate,
    random_prompts,
    reference,
    references,
    save_tiny,
    stages_of,
)
from tests.actors.recovery.test_replay import run

LENGTHS = (5, 11, 1, 8, 17, 2, 11)
NEW_TOKENS = 14
TOKENS = {3: 2.0, 9: -100.0, 77: 6.0}
SETTINGS: tuple[tuple[Sampling, dict[str, Any]], ...] = (
    (Sampling(repetition_penalty=9.0), {"repetition_penalty": 9.0}),
    (Sampling(), {}),
    (
        Sampling(temperature=1.5, top_k=1, min_p=0.2, repetition_penalty=0.8),
        {
            "do_sample": True,
            "temperature": 1.5,
            "top_k": 1,
            "min_p": 0.2,
            "repetition_penalty": 0.8,
        },
    ),
    (
        Sampling(logit_bias=TOKENS, repetition_penalty=20.0),
        {
            "sequence_bias": [[[token], bias] for token, bias in TOKENS.items()],
            "repetition_penalty": 20.0,
        },
    ),
)
"""Ours, and what transformers calls it. A single token's sequence bias is added to its logit."""


@pytest.mark.parametrize("name", ["llama", "opt", "bloom"])
def test_tokens_equal_generate(name: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, CONFIGS[name])
    prompts = random_prompts(LENGTHS)
    settings = [SETTINGS[i % len(SETTINGS)] for i in range(len(prompts))]
    expected = [
        reference(model, prompt, NEW_TOKENS, **options)
        for prompt, (_, options) in zip(prompts, settings, strict=True)
    ]
    plain = references(model, prompts, NEW_TOKENS)
    assert sum(a != b for a, b in zip(expected, plain, strict=True)) >= 3, "nothing is tested"
    for head_on_first, bounds in ((False, (0, LAYERS)), (True, (0, 2, LAYERS))):
        stages = stages_of(
            tmp_path, bounds, 4, max(LENGTHS) + NEW_TOKENS, head_on_first=head_on_first
        )
        sampling = [ours for ours, _ in settings]
        tokens = generate(stages, prompts, NEW_TOKENS, prefill=2, decode=3, sampling=sampling)
        assert tokens == expected, (bounds, head_on_first)


def test_requests_that_go_on_from_the_tokens_they_had(tmp_path: Path) -> None:
    """Cut after any number of tokens and replayed, as after the loss of a stage."""
    save_tiny(tmp_path, CONFIGS["llama"])
    stages = stages_of(tmp_path, (0, 2, LAYERS), 4, max(LENGTHS) + NEW_TOKENS)
    counting = Sampling(frequency_penalty=1.5, presence_penalty=-0.5, temperature=0.8, seed=2)
    kinds = [SETTINGS[0][0], counting, replace(counting, temperature=0.0)]
    requests = [
        Request(str(i), prompt, NEW_TOKENS, kinds[i % len(kinds)])
        for i, prompt in enumerate(random_prompts(LENGTHS))
    ]
    whole = run(stages, requests)
    for shift in range(3):
        again = [
            replace(r, generated=done[: (shift + 4 * int(i)) % len(done)])
            for i, r in enumerate(requests)
            for done in [whole[r.custom_id].token_ids]
        ]
        assert run(stages, again) == whole
