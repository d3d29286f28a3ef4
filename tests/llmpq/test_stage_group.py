"""Feeding the first stage's actor: any number of requests, taken in as they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.messages import Request, Sampling
from actors.stage_group import CHUNKS_AHEAD, LEAST_CHUNK_REQUESTS, StageGroup
from llmpq import Plan
from tests.actors.models import random_prompts, reference
from tests.llmpq.conftest import NEW_TOKENS

pytestmark = pytest.mark.usefixtures("local_ray")

COUNT = 3 * LEAST_CHUNK_REQUESTS + 5


class Source:
    """Requests one by one; knows how many were taken."""

    def __init__(self, prompts: list[tuple[int, ...]]) -> None:
        self.taken = 0
        self._prompts = prompts

    def __iter__(self) -> Iterator[Request]:
        for i, prompt in enumerate(self._prompts):
            self.taken += 1
            yield Request(str(i), prompt, 1 + i % NEW_TOKENS, Sampling())


def test_a_long_queue_is_taken_in_as_needed_and_each_request_ends_once(
    tiny: tuple[Path, Any], plan: Plan
) -> None:
    prompts = random_prompts([1 + i % 16 for i in range(COUNT)])
    source = Source(prompts)
    ended: dict[str, tuple[int, ...]] = {}
    with StageGroup(plan.data, str(tiny[0])) as group:
        for finished in group.generate(source):
            for each in finished:
                assert each.custom_id not in ended
                ended[each.custom_id] = each.token_ids
            chunks_used = len(ended) // LEAST_CHUNK_REQUESTS
            assert source.taken <= (chunks_used + 1 + CHUNKS_AHEAD) * LEAST_CHUNK_REQUESTS
        assert sum(stage.decode_tokens for stage in group.stats()) > 0
    assert len(ended) == COUNT
    for i in range(0, COUNT, 7):
        assert list(ended[str(i)]) == reference(tiny[1], prompts[i], 1 + i % NEW_TOKENS)


def test_a_run_that_was_left_does_not_disturb_the_next(tiny: tuple[Path, Any], plan: Plan) -> None:
    prompts = random_prompts([5] * COUNT)
    with StageGroup(plan.data, str(tiny[0])) as group:
        left = group.generate(Source(prompts))
        next(left)
        left.close()
        assert list(group.generate([])) == []
        ended = [f for batch in group.generate(Source(prompts[:7])) for f in batch]
    assert sorted(f.custom_id for f in ended) == [str(i) for i in range(7)]
    for each in ended:
        i = int(each.custom_id)
        assert list(each.token_ids) == reference(tiny[1], prompts[i], 1 + i % NEW_TOKENS)
