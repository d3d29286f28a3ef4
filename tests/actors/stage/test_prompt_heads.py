"""Prompts that share heads: tokens are those of `generate`, under every policy, and each head is
computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from transformers import MistralConfig

from actors.messages import MicroBatch, Request, Sampled, Sampling, TokenIds
from actors.schedule.driver import PipelineDriver
from actors.schedule.heads import PromptHeads
from actors.schedule.scheduler import QueueSizes
from actors.schedule.table import make_scheduler
from actors.stage_figures import SharedPrompts
from planner.scheduling import RequestSchedule
from tests.actors.configs import CONFIGS, LAYERS, STATE_CONFIGS
from tests.actors.driving import run_dry
from tests.actors.local_pipeline import LocalPipeline
from tests.actors.models import random_prompts, references, save_tiny, specs_of, stages_of
from tests.actors.thread_ranks import divided

BOUNDS = (0, 2, LAYERS)
NEW_TOKENS = 6
LONGEST = 128
SLOTS = 4
KV_TOKENS = SLOTS * LONGEST
HEADS = random_prompts((70, 100))
"""Of 64 and 96 tokens in whole blocks."""

TAILS = random_prompts((5, 9, 1, 13, 3, 7, 20, 2, 15, 64), seed=1)
PROMPTS = [HEADS[i % 2][: 64 + 32 * (i % 2)] + tail for i, tail in enumerate(TAILS[:-2])]
PROMPTS += TAILS[-2:]
SHARED = SharedPrompts(2, 64 + 96, 8, 4 * (64 + 96), sum(map(len, PROMPTS)))

SCHEDULE = RequestSchedule("rra", 2, SLOTS, 2, 1, 2, 90)
SIZES = {
    "static": QueueSizes(SLOTS, 2, 2, LONGEST),
    "orca": QueueSizes(
        SLOTS, 1, 2, LONGEST, "orca", KV_TOKENS, max_batch_size=2, prefill_chunk_tokens=40
    ),
    "s3": QueueSizes(
        SLOTS,
        1,
        2,
        LONGEST,
        "s3",
        KV_TOKENS,
        n_slots=250,
        max_batch_size=2,
        park_tokens_from=100,
        parked_tokens=10**6,
    ),
    "exegpt": QueueSizes(SLOTS, 2, 2, LONGEST, "exegpt", KV_TOKENS, schedule=SCHEDULE),
}
_WAA = replace(
    SIZES["exegpt"], schedule=replace(SCHEDULE, kind="waa-c", decode_steps=1), role="decode"
)
SIZES |= {"decode": _WAA, "prefill": replace(_WAA, role="prefill")}

Tiny = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A checkpoint of each family, and what `generate` adds to the prompts."""

    @cache
    def made(name: str) -> tuple[Path, list[list[int]]]:
        folder = tmp_path_factory.mktemp(name)
        config = (CONFIGS | STATE_CONFIGS)[name]
        if name == "mistral-sliding":  # small enough for rooms
            config = MistralConfig(**config.to_dict() | {"sliding_window": 7})
        model = save_tiny(folder, config)
        return folder, references(model, PROMPTS, NEW_TOKENS, ignore_eos=True)

    return made


class CountingPipeline(LocalPipeline):
    """Counts the tokens of prompts that are computed."""

    prompt_tokens = 0

    def submit(self, batch: MicroBatch, token_ids: TokenIds) -> Sampled:
        self.prompt_tokens += int(batch.counts[~batch.decode_rows].sum())
        return super().submit(batch, token_ids)


def run(pipeline: LocalPipeline, policy: str, heads: PromptHeads, new: int) -> list[list[int]]:
    greedy, expected = Sampling(ignore_eos=True), 1 if policy == "s3" else None
    requests = [
        Request(str(i), prompt, new, greedy, expected_tokens=expected)
        for i, prompt in enumerate(PROMPTS)
    ]
    driver = PipelineDriver(make_scheduler(SIZES[policy], 2), pipeline, heads=heads)
    driver.add(requests)
    found = {each.custom_id: list(each.token_ids) for some in run_dry(driver) for each in some}
    return [found[each.custom_id] for each in requests]


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *(("llama", policy) for policy in SIZES),
        ("mistral-sliding", "static"),
        ("qwen3_next", "orca"),
    ],
)
def test_tokens_are_those_of_generate(name: str, policy: str, tiny: Tiny) -> None:
    folder, expected = tiny(name)
    stages = stages_of(folder, BOUNDS, SLOTS, LONGEST, parked_tokens=2 * KV_TOKENS)
    assert any(stage._cache._windows for stage in stages) == (name == "mistral-sliding")
    new = 1 if policy == "prefill" else NEW_TOKENS
    pipeline, heads = CountingPipeline(stages), PromptHeads(KV_TOKENS)
    assert run(pipeline, policy, heads, new) == [tokens[:new] for tokens in expected]
    assert heads.counts == SHARED
    again = 5 if policy == "s3" else 0  # tails that were preempted
    assert pipeline.prompt_tokens <= SHARED.prompt_tokens - SHARED.saved_tokens + again
    assert all(stage._cache.parked.tokens == 64 + 96 for stage in stages)


def test_codes_of_keys_are_those_of_prompts_computed_whole(tiny: Tiny) -> None:
    folder, _ = tiny("llama")
    options = {"kv_bits": 8, "parked_tokens": KV_TOKENS}
    pipeline = LocalPipeline(stages_of(folder, BOUNDS, SLOTS, LONGEST, **options))
    whole = run(pipeline, "orca", PromptHeads(0), NEW_TOKENS)
    assert run(pipeline, "orca", PromptHeads(KV_TOKENS), NEW_TOKENS) == whole


@pytest.mark.rare
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3_next"])
def test_ranks_keep_what_they_hold_of_heads(name: str, tiny: Tiny) -> None:
    folder, expected = tiny(name)
    specs = specs_of(BOUNDS, SLOTS, LONGEST, parked_tokens=KV_TOKENS)
    with divided(specs, (2, 2), folder) as stages:
        found = run(LocalPipeline(stages), "static", PromptHeads(KV_TOKENS), NEW_TOKENS)
    assert found == expected
